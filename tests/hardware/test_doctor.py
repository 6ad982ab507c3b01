"""``portus doctor`` where there is something to find."""

from __future__ import annotations

import json

import pytest

from portus.cli import doctor
from portus.cli.output import Output
from tests.hardware.conftest import DEVDAX, EXPANDER, FSDAX

pytestmark = [pytest.mark.pmem, pytest.mark.rdma, pytest.mark.timeout(600)]


def test_devices_and_places_are_found_and_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ADAPTERS", "none")  # theirs imports torch: a minute in the lab
    monkeypatch.setattr(doctor, "SIZE", 8 << 20)  # nothing is fast in the lab
    doctor.command(Output(as_json=True), [DEVDAX, FSDAX])
    text = capsys.readouterr().out
    print(text)
    document = json.loads(text)
    devices = {e["name"]: e["text"] for e in document["found"] if e["topic"] == "DAX device"}
    assert "persistent" in devices[DEVDAX]
    assert "VOLATILE" in devices[EXPANDER]
    names = {each["topic"]: each for each in document["found"]}
    assert "memory_controller" in names["NVDIMM namespace"]["text"]
    assert "loaded" in names["libpmem"]["text"]
    rdma = {e["name"]: e["text"] for e in document["found"] if e["topic"] == "RDMA device"}
    assert "ACTIVE" in rdma["rxe_lo"]
    assert rdma["pyverbs"].startswith("loaded, with pyverbs.")
    limits = {e["name"]: e["text"] for e in document["found"] if e["topic"] == "RDMA limits"}
    assert limits["rxe_lo"].startswith("port 1 has 127.0.0.1; at most ")
    texts = {each["text"] for each in document["found"] if each["topic"] == "RDMA loopback"}
    assert "24 of 24 transfers arrived whole" in texts
    places = {each["place"]: each for each in document["places"]}
    assert places[DEVDAX]["medium"] == "DAX device"
    assert places[DEVDAX]["save"] == 0, "nothing is written to a device that may hold something"
    assert places[DEVDAX]["load"] > 0
    assert places[FSDAX]["medium"] == "file, DAX"
    assert places[FSDAX]["granularity"] == 8
    assert places[FSDAX]["save"] > 0
