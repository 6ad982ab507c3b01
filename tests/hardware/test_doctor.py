"""``portus doctor`` where there is something to find."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.hardware.conftest import DEVDAX, EXPANDER, FSDAX

pytestmark = [pytest.mark.pmem, pytest.mark.rdma, pytest.mark.timeout(300)]


def test_devices_and_places_are_found_and_measured() -> None:
    command = [sys.executable, "-m", "portus.cli.main", "doctor", "--json", DEVDAX, FSDAX]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    document = json.loads(done.stdout)
    print(json.dumps(document, indent=1))
    devices = {e["name"]: e["text"] for e in document["found"] if e["topic"] == "DAX device"}
    assert "persistent" in devices[DEVDAX]
    assert "VOLATILE" in devices[EXPANDER]
    names = {each["topic"]: each for each in document["found"]}
    assert "memory_controller" in names["NVDIMM namespace"]["text"]
    assert "loaded" in names["libpmem"]["text"]
    rdma = {e["name"]: e["text"] for e in document["found"] if e["topic"] == "RDMA device"}
    assert "ACTIVE" in rdma["rxe_lo"]
    assert rdma["pyverbs"] == "can be imported"
    places = {each["place"]: each for each in document["places"]}
    assert places[DEVDAX]["medium"] == "DAX device"
    assert places[DEVDAX]["save"] == 0, "nothing is written to a device that may hold something"
    assert places[DEVDAX]["load"] > 0
    assert places[FSDAX]["medium"] == "file, DAX"
    assert places[FSDAX]["granularity"] == 8
    assert places[FSDAX]["save"] > 0
