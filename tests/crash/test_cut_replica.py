"""The network to the first of two storage hosts is cut in the middle of a save with durable=2; both
hosts go on. ``PORTUS_TEST_CUTS=50`` cuts as many times in each way."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import portus
from portus.errors import BusyError, PortusError, StaleError, TransportError
from portus.reach.daemon.leads import Lead
from portus.reach.daemon.server import Server
from portus.reach.versions.host import HostPool
from tests.crash.test_kill_replica import KEEP, Told, state
from tests.hosts import connect_again_at_once, serving, url
from tests.moments import until
from tests.same import assert_same
from tests.simulation.lossy import LossyLink

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

CUTS = int(os.environ.get("PORTUS_TEST_CUTS", "1"))
SAVE_BYTES = 1_000_000
"""Fewer than a save sends."""

SILENCE_S = 5.0
"""The longest that a client waits for a host that says nothing."""

STALL_S = 0.9 * SILENCE_S
"""What is a wait for a host, and not for a busy machine."""


class Far:
    """Two hosts. ``front`` is between clients and the first one, ``between`` is between hosts."""

    def __init__(self, first: Server, second: Server, front: LossyLink, between: LossyLink) -> None:
        self.first = first
        self.second = second
        self.front = front
        self.between = between
        self.both = f"portus://127.0.0.1:{front.port}+127.0.0.1:{second.listeners[0].port}"

    def cut(self, how: str, *, whole: bool) -> None:
        """Clients do not reach the first host any more: connections are reset and refused, or are
        made, and nobody answers. whole: nor does the first host reach the second one."""
        for link in (self.front, self.between) if whole else (self.front,):
            if how == "reset":
                link.cut_after = link.relayed
                link.cut()
            else:
                link.stalled = True

    def heal(self) -> None:
        """Bytes that got stuck arrive now."""
        for link in (self.front, self.between):
            link.cut_after, link.stalled = None, False

    def lead(self) -> Lead:
        """Who leads the model."""
        return self.second.house.pools.of("default").leads.of("net")


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    monkeypatch.chdir(tmp_path)
    connect_again_at_once(monkeypatch)
    monkeypatch.setattr("portus.reach.transport.host.SILENCE_S", SILENCE_S)
    monkeypatch.setattr("portus.reach.transport.host.ANSWER_S", SILENCE_S)
    monkeypatch.setattr("portus.reach.daemon.leader.PAUSE_MAX_S", 0.05)
    monkeypatch.setattr("portus.reach.daemon.leader.ANSWER_S", SILENCE_S / 4)
    with (
        serving(tmp_path / "second") as second,
        LossyLink("127.0.0.1", second.listeners[0].port) as between,
        serving(tmp_path / "first", replica=f"portus://127.0.0.1:{between.port}") as first,
        LossyLink("127.0.0.1", first.listeners[0].port) as front,
    ):
        yield Far(first, second, front, between)


@pytest.mark.long
@pytest.mark.timeout(120 * (1 + CUTS))
@pytest.mark.parametrize("whole", [False, True], ids=["clients", "all"])
@pytest.mark.parametrize("how", ["reset", "silent"])
def test_a_host_that_is_cut_off_is_left_once_and_leads_no_more(
    far: Far, tmp_path: Path, seed: int, how: str, whole: bool
) -> None:
    """What was told loads from the second host, one call of training waits at most, and once the
    first host is reached again nothing that it commits counts."""
    random_, told = random.Random(seed), Told()
    pools = [each.house.pools.of("default") for each in (far.first, far.second)]
    for round_ in range(CUTS):
        with portus.PoolCheckpointer(far.both, "net", keep=KEEP, durable=2) as saver:
            for _ in range(random_.randint(1, 3)):
                told.until_saved(saver)
            assert far.lead().pool == pools[0].writer.uuid
            far.front.bytes_s = 4_000_000
            begun, length = far.front.relayed, random_.randrange(SAVE_BYTES)
            handle = told.save(saver)
            until(lambda begun=begun, length=length: far.front.relayed > begun + length)  # type: ignore[misc]
            far.cut(how, whole=whole)
            far.front.bytes_s = None
            handles, stalls = [handle], []
            for _ in range(4):
                begun_s = time.monotonic()
                with contextlib.suppress(PortusError):  # that of a save before
                    handles.append(told.save(saver))
                stalls.append(time.monotonic() - begun_s)
            for each in handles:
                told.hear(each)
            told.check(saver)
            told.until_saved(saver)
            assert sum(each > STALL_S for each in stalls) <= 1, stalls
            newest, term = told.newest, far.lead().term
            assert far.lead().pool == pools[1].writer.uuid
            far.heal()
            until(lambda: is_refused(url(far.first)))
            for _ in range(2):
                told.until_saved(saver)
            told.check(saver)
            assert told.newest > newest
            assert far.lead().term == term, "the first host took no term"
        with portus.PoolCheckpointer(url(far.second), "net", durable=2) as resumed:
            assert_same(resumed.load(), state(told.newest))
        if round_ + 1 < CUTS:  # as an operator would, so that the first one leads again
            with contextlib.closing(HostPool(url(far.first))) as pool:
                pool.let_go([each.info.token for each in pool.catalogue().entries()])


def is_refused(first: str) -> bool:
    """True if the first host says that the model went on elsewhere; False if it says nothing in
    time: the claim of the connection that was cut off may have to end first."""
    try:
        portus.PoolCheckpointer(first, "net", durable=2).close()
    except (BusyError, StaleError) as error:
        return re.search("continued elsewhere|continues there", str(error)) is not None
    except TransportError:
        return False
    raise AssertionError("both hosts lead")
