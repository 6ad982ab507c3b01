"""``portus verify``."""

from __future__ import annotations

from pathlib import Path

import pytest

from portus.reach.format.layout import SLOT_OFFSETS
from tests.unit.cli.scene import Run, portus, portus_json


def test_a_healthy_pool_is_said_to_be(run: Run) -> None:
    said = portus("verify")
    assert said.code == 0
    assert [line.split(": ")[1].split(";")[0] for line in said.out.splitlines()] == [
        "healthy",
        "healthy",
    ]
    document = portus_json("verify")
    assert document["healthy"] is True
    assert [pool["versions"] for pool in document["pools"]] == [2, 1]
    assert document["pools"][0]["size"] > 8000


def test_it_says_why_it_counts_versions_that_ls_does_not_list(run: Run) -> None:
    with run.trainer(keep=1) as trainer:
        for step in (30, 40):
            trainer.save(run.states[20], step).wait()
        [listed] = portus_json("ls", run.net)["pools"][0]["models"]
        [verified] = portus_json("verify", "--pool", run.net)["pools"]
        assert verified["removed"] > 0
        assert verified["versions"] == len(listed["versions"]) + verified["removed"]
        said = portus("verify", "--pool", run.net).out
        assert f"({verified['removed']} of them removed by the newest commit" in said
    assert portus_json("verify", "--pool", run.net)["pools"][0]["removed"] == 0, "it was settled"


def test_damage_is_named_with_exit_code_1(run: Run) -> None:
    run.damage(20, "weight")
    said = portus("verify")
    assert said.code == 1
    assert "error V4: version 2 of 'net' (step 20), storage" in said.out
    assert f"{run.net}: DAMAGED" in said.out
    document = portus_json("verify", code=1)
    assert document["healthy"] is False
    [finding] = document["pools"][0]["findings"]
    assert finding["invariant"] == "V4"
    assert finding["severity"] == "error"
    assert finding["rule"].endswith("when they were saved.")


@pytest.mark.parametrize(
    ("target", "code"), [("net@10", 0), ("net@20", 1), ("net", 1), ("other", 0)]
)
def test_only_what_is_asked_for_is_read(run: Run, target: str, code: int) -> None:
    run.damage(20, "weight")
    assert portus("verify", target).code == code


def test_what_a_pointer_leads_to_can_be_verified(run: Run) -> None:
    first, _ = run.point(1, 2)
    assert portus("verify", first).code == 0
    assert "healthy by the checksums of Portus" in portus("verify", first, "--rate", "1G/s").out
    run.damage(1, "weight", run.led)
    assert portus("verify", first).code == 1
    assert portus("verify", first, "--rate", "1G/s").code == 1
    found = portus_json("verify", first.parent, code=1)
    assert [each["healthy"] for each in found["files"]] == [False, True]


def test_a_slot_torn_in_both_places_is_a_warning_and_exit_code_0(run: Run) -> None:
    data = bytearray(run.net.read_bytes())
    for offset in SLOT_OFFSETS[::2]:  # of the commit before
        data[offset + 50] ^= 1
    run.net.write_bytes(data)
    said = portus("verify")
    assert said.code == 0
    assert "warning F1" in said.out
    assert portus_json("verify")["pools"][0]["findings"][0]["severity"] == "warning"


def test_a_slot_that_is_damaged_is_said_with_an_exit_code_of_its_own(run: Run) -> None:
    data = bytearray(run.net.read_bytes())
    data[SLOT_OFFSETS[1] + 50] ^= 1
    run.net.write_bytes(data)
    said = portus("verify")
    assert said.code == 3
    assert "mend F1: root slot 1 at byte 4096: expected a whole one" in said.out
    assert f"{run.net}: NEEDS REPAIR; 2 versions" in said.out
    assert portus_json("verify", code=3)["healthy"] is False
    assert "20" in portus("ls", run.net).out
    run.trainer().close()
    assert portus("verify").code == 0


def test_a_pool_without_a_root_slot_is_damaged(run: Run) -> None:
    data = bytearray(run.net.read_bytes())
    for offset in SLOT_OFFSETS:
        data[offset + 50] ^= 1
    run.net.write_bytes(data)
    said = portus("verify")
    assert said.code == 1
    assert said.out.count("error F1") == 4
    assert "other.portus: healthy" in said.out


def test_it_works_while_a_trainer_writes(run: Run) -> None:
    with run.trainer() as trainer:
        for step in range(30, 36):
            trainer.save(run.states[20], step)
            assert portus("verify").code == 0
        trainer.wait()
    assert portus("verify").code == 0


def test_damage_is_named_for_every_version_that_shares_the_bytes(run: Run) -> None:
    run.damage(20, "half")
    findings = portus_json("verify", code=1)["pools"][0]["findings"]
    assert [each["where"].split(",")[0] for each in findings] == [
        "version 1 of 'net' (step 10)",
        "version 2 of 'net' (step 20)",
    ]


def test_where_there_is_no_pool_nothing_is_called_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".portus").mkdir()
    said = portus("verify")
    assert said.code == 2
    assert "there is no pool to verify" in said.err
