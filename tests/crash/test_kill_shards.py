"""A sharded job of four ranks is killed: one rank, all, its storage host, one of two, the first of
two that keep the same (V2, V8).

What is loaded then, at any number of ranks, is bit for bit what was saved, and not older than what
all ranks had told to be committed. ``PORTUS_TEST_KILLS=100`` makes that many kills.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import portus
from tests.crash.sharded_job import KEEP
from tests.hosts import Host
from tests.nursery import Child
from tests.unit.cli.scene import portus as command
from tests.warm import Warm

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "6"))

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.timeout(300 + 60 * KILLS),
    pytest.mark.long,
]

RANKS = 4
LOADS = (1, 2, 3, 4, 8)
DELAY_S_MAX = 0.1
SURPLUS_MAX = 5
"""Complete checkpoints beyond those that are kept: a kill may come before they are removed."""

LEFT_MAX = 3 * RANKS
"""Versions without a pointer that one kill may leave: those of the saves in flight, and of what was
about to be removed."""


@dataclass
class History:
    """What a run told, over all its restarts. ``saved``: by step, the digest."""

    root: Path
    hosts: list[Host]
    replica: Host | None = None
    saved: dict[int, str] = field(default_factory=dict)
    committed: dict[int, set[int]] = field(default_factory=dict)
    processes: dict[int, int] = field(default_factory=dict)
    loaded: list[int] = field(default_factory=list)

    @property
    def pool(self) -> str:
        second = f"+127.0.0.1:{self.replica.port}" if self.replica else ""
        return ",".join(host.url + second for host in self.hosts)

    @property
    def newest(self) -> int:
        """The newest step that all ranks told to be committed."""
        whole = (step for step, ranks in self.committed.items() if len(ranks) == RANKS)
        return max(whole, default=0)

    def hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "process":
            rank, process = map(int, rest.split())
            self.processes[rank] = process
        elif word == "committed":
            step, rank = map(int, rest.split())
            self.committed.setdefault(step, set()).add(rank)
        elif word == "saved":
            step_text, digest = rest.split()
            self.saved[int(step_text)] = digest
        elif word == "loaded":
            self.check(*rest.split())

    def check(self, step: str, digest: str) -> None:
        """That step was loaded, as that."""
        assert self.newest <= int(step), f"step {step} instead of {self.newest}"
        assert self.saved[int(step)] == digest, f"step {step} is not what was saved"
        self.loaded.append(int(step))


def trained_and_killed(history: History, what: str, random_: random.Random) -> None:
    """Let four ranks train until they committed, and kill ``what``; a launcher ends the rest."""
    history.root.mkdir(exist_ok=True)
    history.processes.clear()
    first = max(history.saved, default=0) + 1
    with (
        tempfile.NamedTemporaryFile() as errors,
        Warm("tests.crash.sharded_job").start(
            "run",
            str(history.root),
            [f"train_for_ever:{RANKS}:{first}"],
            history.pool,
            errors.name,
        ) as child,
    ):
        until = first + random_.randrange(3)
        try:
            while history.newest < until:
                history.hear(child.line())
            time.sleep(random_.uniform(0, DELAY_S_MAX))
            if what == "rank":
                os.kill(history.processes[random_.randrange(RANKS)], signal.SIGKILL)
                child.wait()
            elif what == "first":
                history.hosts[0].kill()
                until = max(history.saved) + 1
                while history.newest < until:  # at the second one
                    history.hear(child.line())
            elif what == "host":
                host = random_.choice(history.hosts)
                host.kill()
                hear_some(history, child, random_.randrange(4))
                host.start()
        except AssertionError as error:
            said = Path(errors.name).read_text(errors="replace")
            raise AssertionError(f"{error}\n{said[-4000:]}") from error
        for line in ended(history, child):
            history.hear(line)


def hear_some(history: History, child: Child, saves: int) -> None:
    """Let the job go on without a host, for some saves."""
    while saves:
        line = child.line()
        history.hear(line)
        saves -= line.startswith("saved")


def ended(history: History, child: Child) -> list[str]:
    """Kill all at once; what they had still said before."""
    lines = child.kill()
    for process in history.processes.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return lines + child.rest()


def looked(history: History, count: int, pool: str) -> None:
    """A job of so many ranks loads what there is."""
    with (
        tempfile.NamedTemporaryFile() as errors,
        Warm("tests.crash.sharded_job").start(
            "run", str(history.root), [f"look:{count}"], pool, errors.name
        ) as child,
    ):
        printed = child.rest()
        assert child.wait() == 0, errors.read().decode(errors="replace")[-4000:]
    history.hear(printed[-1])


def versions(history: History) -> int:
    """How many there are on all hosts."""
    found = 0
    for host in history.hosts:
        with portus.open(host.url) as pool:
            found += len(pool.versions())
    return found


def collect(history: History) -> None:
    """What no pointer leads to is found and removed; what is there stays few."""
    before = versions(history)
    for host in history.hosts:
        assert command("gc", host.url, "--missing", history.root, "--yes").code == 0
    after = versions(history)
    checkpoints = history.root / "ckpt"
    assert after <= len(list(checkpoints.glob("step_*/*"))), "a version without a pointer stays"
    # Of those that are not complete each kill leaves some, which nobody removes.
    complete = len(list(checkpoints.glob("step_*/.metadata")))
    assert complete <= KEEP + SURPLUS_MAX, f"{complete} complete checkpoints stay"
    assert before - after <= LEFT_MAX, f"a kill left {before - after} versions"


def test_what_a_killed_job_goes_on_from_is_what_it_saved(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.places.pool.YOUNG_S", 0.0)
    random_ = random.Random(seed)
    with Host(tmp_path / "a") as a, Host(tmp_path / "b") as b, Host(tmp_path / "c") as c:
        one, two = History(tmp_path / "one", [a]), History(tmp_path / "two", [b, c])
        cases = [(one, "rank"), (one, "host"), (two, "host"), (one, "all"), (two, "rank")]
        tried = 0
        while tried < KILLS:
            history, what = cases[tried % len(cases)]
            trained_and_killed(history, what, random_)
            count = LOADS[(tried + tried // len(cases)) % len(LOADS)]
            looked(history, count, history.pool)
            collect(history)
            looked(history, RANKS, history.pool)
            tried += 1
        saves = [len(history.saved) for history in (one, two)]
        print(f"{tried} kills, {saves} saves, {len(one.loaded) + len(two.loaded)} loads")


def test_what_both_hosts_of_a_pair_had_outlives_the_first(tmp_path: Path, seed: int) -> None:
    """It is killed while four ranks save with durable=2: they go on at the second host, and so does
    whoever loads from there alone."""
    random_ = random.Random(seed)
    with (
        Host(tmp_path / "second") as second,
        Host(tmp_path / "first", "--replica", second.url) as first,
    ):
        pair = History(tmp_path / "run", [first], second)
        trained_and_killed(pair, "first", random_)
        for place, count in ((pair.pool, 3), (second.url, 1)):
            looked(pair, count, place)
