"""Sharded jobs with a mirror on a real S3 server: each request of theirs fails, the server is
killed, and then all machines are lost."""

from __future__ import annotations

import itertools
import os
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from portus.testing.proxy import ConnectionCut, Request, RequestFault, RequestProxy
from tests.crash.lost_jobs import Jobs
from tests.s3.server import Server

pytestmark = [
    pytest.mark.s3,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized"),
]

FAULTS = {
    "500": RequestFault(status=500, code="InternalError"),
    "503": RequestFault(status=503, code="SlowDown"),
    "403": RequestFault(status=403, code="AccessDenied"),
    "404": RequestFault(status=404, code="NoSuchBucket"),
    **{f"cut {cut.name}": RequestFault(cut=cut) for cut in ConnectionCut},
}
WAYS = len(FAULTS) if os.environ.get("PORTUS_TEST_REQUESTS") == "each" else 3
"""In which each fails, by the seed."""

KILLED = "killed"
KINDS = ("packs", "manifests", "log")
"""Of the objects that each rank puts in each save."""

_OBJECT = re.compile(r"rank-(\d)-of-2[^/]*/(packs|manifests|log)/")


class Faults:
    """Each kind of PUT of each of two ranks fails in several ways, and the server is killed before
    one of each kind. That of one object fails once at most, and the claim at the start of a rank
    never: there a refusal is an error."""

    def __init__(self, chance: random.Random, kill: Callable[[], None]) -> None:
        """kill: the server."""
        each = itertools.product("01", KINDS)
        self.left = [(*what, way) for what in each for way in chance.sample(sorted(FAULTS), WAYS)]
        self.left += [(chance.choice("01"), kind, KILLED) for kind in KINDS]
        chance.shuffle(self.left)
        self.done = threading.Event()
        self.has_killed = threading.Event()
        self._kill = kill
        self._failed: set[str] = set()
        self._begun: set[str] = set()
        self._guard = threading.Lock()

    def __call__(self, request: Request) -> RequestFault | None:
        found = _OBJECT.search(request.target)
        if request.method != "PUT" or found is None:
            return None
        rank, kind = found.groups()
        with self._guard:
            if kind == "log" and rank not in self._begun:
                self._begun.add(rank)
                return None
            is_dead = self.has_killed.is_set()
            mine = [
                each
                for each in self.left
                if each[:2] == found.groups() and not (is_dead and each[2] == KILLED)
            ]
            if not mine or request.target in self._failed:
                return None
            self._failed.add(request.target)
            self.left.remove(mine[0])
            name = mine[0][2]
            if name == KILLED:
                self._kill()
                self.has_killed.set()
            if not self.left:
                self.done.set()
        return RequestFault(cut=ConnectionCut.BEFORE) if name == KILLED else FAULTS[name]


def test_each_request_of_a_save_fails_the_server_is_killed_and_then_all_machines_are_lost(
    tmp_path: Path, url: str, server: Server, proxy: RequestProxy, seed: int
) -> None:
    """Training goes on, and the mirror catches up; a job of another number of ranks goes on from
    the bucket alone, bit for bit."""
    faults = Faults(random.Random(seed), server.kill_gateway)
    proxy.fault = faults
    jobs = Jobs(tmp_path, url, server.environment(proxy.endpoint))
    with jobs.running(2) as child:
        while not faults.done.is_set():  # saves go on, whatever fails
            jobs.hear(child.line())
            if faults.has_killed.is_set():
                server.start()
                faults.has_killed.clear()
        newest = jobs.newest
        while max((each.step for each in jobs.mirrored().complete), default=0) < newest:
            jobs.hear(child.line())
        jobs.kill(child)
    assert not faults.left
    with jobs.running(3, saves=1) as child:
        for line in child.rest():
            jobs.hear(line)
        assert child.wait() == 0
    found = jobs.mirrored().complete[-1]
    assert (found.step, found.count) == (jobs.newest, 3)
