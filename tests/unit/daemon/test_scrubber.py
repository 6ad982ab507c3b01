"""A host that reads its pools again and again."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from portus.reach.daemon.counters import Counters
from portus.reach.daemon.pools import Pools
from portus.reach.daemon.scrubber import Scrubber
from portus.reach.format.layout import SLOT_OFFSETS
from tests.hosts import Host, free_port
from tests.unit.cli.scene import Run
from tests.unit.daemon.test_main import scraped


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_host_tells_of_rot_by_itself(run: Run) -> None:
    run.damage(10, "weight")
    port = free_port()
    with Host(run.pool, "--scrub", "1G/s", "--metrics", str(port)) as host:
        while host.log.count('"scrubbed"') < 2:
            host.until('"scrubbed"')
        found = scraped(port)
        assert host.stop() == 0
    events = [json.loads(line) for line in host.log.splitlines()]
    [rot] = [event for event in events if event["event"] == "rot"]
    assert (rot["level"], rot["tenant"]) == ("error", "net"), "though no client asked for it"
    assert "step 10" in rot["place"]
    scrubbed = {each["tenant"]: each for each in events if each["event"] == "scrubbed"}
    assert {name: each["damaged"] for name, each in scrubbed.items()} == {"net": 1, "other": 0}
    assert scrubbed["net"]["bytes"] > 8000
    assert found['portus_rot{tenant="net"}'] == 1
    assert found['portus_rot{tenant="other"}'] == 0
    assert found["portus_scrubbed_bytes_total"] > 8000


def test_a_host_that_is_told_to_end_does_not_finish_its_scrub(run: Run) -> None:
    with Host(run.pool, "--scrub", "1/s") as host:
        assert host.stop() == 0


def test_a_host_does_not_scrub_unless_it_is_told_to(run: Run) -> None:
    with Host(run.net) as host:
        assert host.stop() == 0
    events = {json.loads(line)["event"] for line in host.log.splitlines()}
    assert events == {"serving", "ending"}


def test_a_pool_in_memory_is_read_too() -> None:
    pools, counters = Pools("memory:4M"), Counters()
    hosted = pools.of("a")
    try:
        Scrubber(pools, counters, 1 << 40)._pass()
        assert counters.now().rot == {"a": 0}
        for offset in SLOT_OFFSETS:
            hosted.writer.medium.store(offset, b"x")
        Scrubber(pools, counters, 1 << 40)._pass()
        assert counters.now().rot["a"] > 0
    finally:
        pools.close()


def test_what_cannot_be_read_is_told_and_the_next_pool_is_read(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    (run.pool / "a.portus").mkdir()
    (run.pool / "b.portus").write_bytes(b"")
    pools, counters = Pools(str(run.pool)), Counters()
    with caplog.at_level(logging.INFO, "portus.daemon"):
        Scrubber(pools, counters, 1 << 40)._pass()
    assert counters.now().rot.keys() >= {"net", "other"}
    assert any("b" in each.message for each in caplog.records if "not" in each.message), caplog.text
