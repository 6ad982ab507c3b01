"""``kill -9`` of either of two storage hosts that keep a model, while it is saved with durable=2.
``PORTUS_TEST_KILLS=100`` kills as many times."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.errors import PortusError
from portus.reach.versions.host import HostPool
from tests.hosts import Host, connect_again_at_once
from tests.same import assert_same

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "4"))
KEEP = 3
DELAY_S_MAX = 0.3
TRIES = 200
"""Of a save, while a host is started again, a moment apart."""


def state(step: int) -> dict[str, Any]:
    random_ = torch.Generator().manual_seed(step)
    return {
        "frozen": torch.arange(100_000),
        "model": torch.randn(300_000, generator=random_),
        "step": step,
    }


class Told:
    """What was told to be committed; saves go on, whatever is killed."""

    def __init__(self) -> None:
        self.step = 0
        self.newest = 0

    def save(self, saver: portus.PoolCheckpointer) -> portus.SaveHandle:
        """Ask for the next step."""
        self.step += 1
        return saver.save(state(self.step), self.step)

    def hear(self, handle: portus.SaveHandle) -> bool:
        """True if it was told."""
        try:
            info = handle.wait()
        except PortusError:
            return False
        self.newest = info.step
        return True

    def until_saved(self, saver: portus.PoolCheckpointer) -> None:
        """Save, until a save is told."""
        for _ in range(TRIES):
            if self.hear(self.save(saver)):
                return
            time.sleep(0.05)
        raise AssertionError("no save was told")

    def check(self, saver: portus.PoolCheckpointer) -> None:
        """What is loaded is a state that was saved, and none that is older than what was told."""
        for _ in range(TRIES):
            with contextlib.suppress(PortusError):
                found = saver.load()
                assert isinstance(found, dict)
                assert_same(found, state(found["step"]))
                assert self.newest <= found["step"] <= self.step
                return
            time.sleep(0.05)
        raise AssertionError("nothing could be loaded")


@pytest.mark.long
@pytest.mark.timeout(120 + 15 * KILLS)
def test_what_both_hosts_had_outlives_either(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host is killed in a save, and the training goes on at the second one; there that is
    killed, too, or it was killed while the first one led, and is back. Then the first one leads
    again."""
    monkeypatch.chdir(tmp_path)
    connect_again_at_once(monkeypatch)
    random_, told, kills = random.Random(seed), Told(), 0
    with (
        Host(tmp_path / "second") as second,
        Host(tmp_path / "first", "--replica", second.url) as first,
    ):
        both = f"{first.url}+127.0.0.1:{second.port}"
        while kills < KILLS:
            with portus.PoolCheckpointer(both, "net", keep=KEEP, durable=2) as saver:
                for _ in range(random_.randint(1, 3)):
                    told.until_saved(saver)
                doomed = [first, *random_.choice([[], [second]])]
                if random_.random() < 0.4:
                    doomed.insert(0, second)  # while the first one leads
                for host in doomed:
                    handle = told.save(saver)
                    time.sleep(random_.uniform(0, DELAY_S_MAX))
                    host.kill()
                    kills += 1
                    told.hear(handle)
                    if host is second:
                        assert not told.hear(told.save(saver)) or host.process.poll() is None
                        host.start()
                    told.check(saver)
                    told.until_saved(saver)
                    told.check(saver)
            first.start()
            with contextlib.closing(HostPool(first.url)) as pool:  # as an operator would
                pool.let_go([each.info.token for each in pool.catalogue().entries()])
            with portus.open(first.url) as pool:
                assert not pool.versions()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_host_that_hangs_is_left_and_learns_of_it_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It believes that it leads: what it is asked to commit then is told to nobody."""
    monkeypatch.chdir(tmp_path)
    told = Told()
    with (
        Host(tmp_path / "second") as second,
        Host(tmp_path / "first", "--replica", second.url) as first,
    ):
        both = f"{first.url}+127.0.0.1:{second.port}"
        with portus.PoolCheckpointer(first.url, "net", keep=KEEP, durable=2) as other:
            told.until_saved(other)
            first.pause()
            with portus.PoolCheckpointer(both, "net", keep=KEEP, durable=2) as saver:
                told.check(saver)
                told.until_saved(saver)
                first.resume()
                newest = told.newest
                for _ in range(3):
                    assert not told.hear(told.save(other))
                told.newest = newest
                told.until_saved(saver)
                assert_same(saver.load(), state(told.newest))
        with portus.PoolCheckpointer(both, "net", durable=2) as saver:
            assert_same(saver.load(), state(told.newest))
