"""A storage host for minutes: killed, restarted, drained, its secret changed, its
trainers killed (V2, V8).

Nothing that was reported is lost, every trainer goes on after each of these by itself, and what the
host holds of memory, files and threads does not grow. ``PORTUS_TEST_SOAK_S`` is for how long.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import portus
from portus.reach.index.check import check
from tests.crash import host_trainer
from tests.hosts import ROOT, Host
from tests.nursery import Child
from tests.same import assert_same
from tests.warm import Warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

SOAK_S = float(os.environ.get("PORTUS_TEST_SOAK_S", "240"))
QUIET_S = SOAK_S / 2
"""From then on it is one process, whose use of memory is looked at."""

GROWS_S = 90.0
"""The longest until a trainer has saved again."""

RSS_GROWTH_MAX = 48 << 20
PAUSE_S = 0.3
TENANTS = ("a", "b", "c")


class Trainer:
    """A training that saves at each step, of a tenant of its own. A thread reads what it says."""

    def __init__(self, tenant: str, host: Host, secret: Path) -> None:
        self.url = f"portus://{tenant}@127.0.0.1:{host.port}"
        self.reported = 0
        self._secret = secret
        self.start()

    def start(self) -> None:
        trainers = Warm("tests.crash.host_trainer")
        self.child = trainers.start("train_for_ever", self.url, str(self._secret), PAUSE_S)
        resumed = int(self.child.until("resumed").split()[1])
        assert resumed >= self.reported, f"{self.url}: {self.reported} was reported"
        self._thread = threading.Thread(target=self._listen, args=(self.child,))
        self._thread.start()

    def _listen(self, child: Child) -> None:
        try:
            while True:
                self._hear(child.line())
        except AssertionError:  # it was killed
            for line in child.rest():
                self._hear(line)

    def _hear(self, line: str) -> None:
        word, step, *_ = line.split()
        if word == "saved":
            self.reported = int(step)

    def kill(self) -> None:
        if self._thread.is_alive():
            self.child.send(signal.SIGKILL)
        self._thread.join()

    def goes_on(self) -> None:
        """It saves again, without help."""
        before, end = self.reported, time.monotonic() + GROWS_S
        while self.reported <= before:
            assert self._thread.is_alive(), f"{self.url}: it ended after step {before}"
            assert time.monotonic() < end, f"{self.url}: nothing is saved after step {before}"
            time.sleep(0.02)


class Soak:
    """The host, its trainers, and what happens to them."""

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.chance = chance
        self.here, self.there = root / "here", root / "there"
        self._number = 0
        self.is_quiet = False
        self.secret = self._next_secret()
        self._write(self.here, self.secret)
        self._write_secrets(self.secret)
        self.pools = root / "pools"
        self.desk = str(root / "desk")
        options = ("--secret-file", str(self.there), "--admin", self.desk)
        self.host = Host(self.pools, *options)
        self.trainers = [Trainer(tenant, self.host, self.here) for tenant in TENANTS]

    def _next_secret(self) -> str:
        self._number += 1
        return f"{self._number:032}"

    def _write(self, path: Path, text: str) -> None:
        """As an operator should: nobody sees half a file."""
        part = path.with_suffix(".part")
        part.touch(mode=0o600)
        part.write_text(text)
        part.rename(path)

    def _write_secrets(self, *secrets: str) -> None:
        lines = [f"{tenant} {secret}" for tenant in TENANTS for secret in secrets]
        self._write(self.there, "\n".join(lines))

    def kill(self) -> None:
        self.host.kill()
        time.sleep(self.chance.uniform(0, 1))
        self.host.start()

    def restart(self) -> None:
        assert self.host.stop() == 0
        self.host.start()

    def drain(self) -> None:
        """Nothing is under way then, so a restart costs nobody a save; or saves begin again."""
        self._admin("drain", self.desk)
        if self.chance.random() < 0.5 and not self.is_quiet:
            self.restart()
        else:
            self._admin("drain", self.desk, "--off")

    def _admin(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "portus.cli.main", "admin", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def rotate(self) -> None:
        """The secret is another one; both are good meanwhile."""
        new = self._next_secret()
        self._write_secrets(self.secret, new)
        self._read_again()
        self._write(self.here, new)
        for trainer in self.trainers:
            trainer.goes_on()
        self._write_secrets(new)
        self._read_again()
        self.secret = new

    def _read_again(self) -> None:
        self.host.process.send_signal(signal.SIGHUP)
        self.host.until("reloaded")

    def lose_a_trainer(self) -> None:
        trainer = self.chance.choice(self.trainers)
        trainer.kill()
        trainer.start()

    def cut(self) -> None:
        """The host stands still for a while."""
        self.host.pause()
        time.sleep(self.chance.uniform(0.2, 2))
        self.host.resume()

    def goes_on(self) -> None:
        for trainer in self.trainers:
            trainer.goes_on()

    def rounds_of(self, lives: list[Callable[[], None]], until: float) -> int:
        """Let each of ``lives`` happen once a round, in any order, until that moment has passed.
        How many rounds there were: one at least."""
        rounds = 0
        while rounds == 0 or time.monotonic() < until:
            for happens in self.chance.sample(lives, len(lives)):
                happens()
                self.goes_on()
            rounds += 1
        return rounds

    def held(self) -> tuple[int, int, int]:
        """Bytes of memory, open files and threads of the host."""
        process = Path("/proc", str(self.host.process.pid))
        status = (process / "status").read_text()
        rss, threads = (re.search(rf"{name}:\s+(\d+)", status) for name in ("VmRSS", "Threads"))
        assert rss is not None
        assert threads is not None
        return int(rss[1]) << 10, len(os.listdir(process / "fd")), int(threads[1])

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.kill()
        self.host.__exit__()


@pytest.fixture
def soak(tmp_path: Path, seed: int) -> Iterator[Soak]:
    made = Soak(tmp_path, random.Random(seed))
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.timeout(SOAK_S + 600)
def test_a_host_serves_for_minutes_whatever_happens_to_it(
    soak: Soak, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    lives = [soak.kill, soak.restart, soak.drain, soak.cut, soak.lose_a_trainer, soak.rotate]
    rounds = soak.rounds_of(lives, until=start + QUIET_S)
    soak.is_quiet = True
    soak.rotate()
    soak.goes_on()
    first = soak.held()
    quiet_rounds = soak.rounds_of(lives[2:], until=start + SOAK_S)
    last = soak.held()
    print(f"{rounds}, {quiet_rounds} rounds; memory, files, threads: {first}, {last}")
    assert last[0] - first[0] < RSS_GROWTH_MAX
    assert last[1] - first[1] <= len(TENANTS) * 4
    assert last[2] - first[2] <= len(TENANTS) * 4
    for trainer in soak.trainers:
        trainer.kill()
    monkeypatch.setenv("PORTUS_SECRET_FILE", str(soak.here))
    for trainer in soak.trainers:
        with portus.open(trainer.url) as pool:
            newest = pool.steps()[-1]
            assert newest >= trainer.reported > 0
            assert_same(pool.load(), host_trainer.after(newest))
    assert soak.host.stop() == 0
    errors = [line for line in soak.host.log.splitlines() if '"level": "error"' in line]
    assert [line for line in errors if "is draining this storage host" not in line] == []
    for tenant in TENANTS:
        assert check(soak.pools / f"{tenant}.portus") == []
