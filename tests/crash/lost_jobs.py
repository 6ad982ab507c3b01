"""Sharded jobs of one run with a mirror, one after another, each of which loses all its disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from portus.client.shards.mirrored_groups import GroupMirror, MirroredRun
from portus.mirror.address import parse
from portus.testing.nursery import Child, nursery


class Jobs:
    """What they told."""

    def __init__(self, root: Path, address: str, environment: Mapping[str, str]) -> None:
        """address: of their mirror. environment: of their processes, besides."""
        self.saved: dict[int, str] = {}
        """The digest of each step."""
        self.loaded = 0
        """The step that the last one began with."""
        self._root = root
        self._address = address
        self._environment = {**environment, "SHARDED_MIRROR": address}
        self._ranks: list[int] = []

    @property
    def newest(self) -> int:
        """The newest step of all that were saved."""
        return max(self.saved, default=0)

    def mirrored(self) -> MirroredRun:
        return GroupMirror(parse(self._address), "run").look()

    @contextlib.contextmanager
    def running(self, count: int, saves: int = 0, slow: int = -1) -> Iterator[Child]:
        """A job of ``count`` ranks, which goes on from what the mirror has, and saves so many times
        (0: for ever). Its disks are gone afterwards. slow: a rank at a quarter of the speed."""
        before = self.mirrored().complete
        first = self.newest + 1 if before else 1
        self._ranks.clear()
        with (
            tempfile.NamedTemporaryFile() as errors,
            nursery("tests.unit.client.sharded").start(
                "tests.crash.mirrored_shards:run",
                str(self._root),
                [f"mirrored:{count}:{first}:{saves}:{slow}"],
                self._environment,
                errors.name,
            ) as child,
        ):
            try:
                yield child
            except AssertionError as error:
                said = Path(errors.name).read_text(errors="replace")
                raise AssertionError(f"{error}\n{said[-4000:]}") from error
        if before:
            # The store may have done after that look what those who were killed had asked for.
            assert self.loaded >= before[-1].step, "an older group than the newest complete one"
        shutil.rmtree(self._root / "run")

    def kill(self, child: Child) -> None:
        """kill -9 of all ranks."""
        lines = child.kill()
        for process in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for line in lines + child.rest():
            self.hear(line)

    def hear(self, line: str) -> None:
        """What a rank said."""
        word, first, second = line.split()
        if word == "process":
            self._ranks.append(int(second))
        elif word == "saved":
            self.saved[int(first)] = second
        elif word == "loaded":
            self.loaded = int(first)
            assert self.saved[self.loaded] == second, f"step {first} is not what was saved"
