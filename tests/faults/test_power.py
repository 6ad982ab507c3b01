"""Power cuts on real file systems: what was told is there when the journal was recovered (V2, V3).

A process saves on a disk that logs what is written to it (``writelog``). Then the log is cut
anywhere; what had not been flushed is there whole, in part, or torn in any sector; the file system
recovers, and the pool is opened.
"""

from __future__ import annotations

import random
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

import portus
from portus.engine.paths import process
from portus.engine.paths.process import load
from portus.reach.index.check import check
from portus.reach.index.findings import Severity
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.crash.saver import Training
from tests.faults.writelog import MARK, Cut, logged_disk, why_not
from tests.nursery import nursery
from tests.same import assert_same

SAVES = 12
LONG_S = 25
LATE_MIN = 30
"""So many cuts come after something was told, however slow the machine is."""
KINDS = ("ext4", "xfs")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of file system that this machine can make."""
    reason = why_not(request.param)
    if reason:
        pytest.skip(reason)
    return str(request.param)


def verify(root: Path, told: int) -> bool:
    """All that was told up to step ``told`` is there; whether there was a pool."""
    path = root / "run.portus"
    if not path.exists():
        assert not told, f"step {told} was told, and there is no pool"
        return False
    process.recover_left(str(root / "ckpt"))  # as the first save or load of the next program does
    steps = {}
    for file in (root / "ckpt").glob("*.ckpt"):
        assert portus.is_reference(file)
        state = portus.load(file, weights_only=False)
        assert_same(state, Training(state["step"]).state())
        assert file.stem in ("last", str(state["step"])), f"{file.name}: step {state['step']}"
        steps[file.stem] = state["step"]
    if told:
        assert steps["last"] >= told, f"step {told} was told; there are {steps}"
        assert steps.keys() & {str(told), str(told + 1)}, f"step {told} was told; there are {steps}"
    errors = [each for each in check(path) if each.severity is Severity.ERROR]
    assert not errors, f"{len(errors)} broken rules, first {errors[0]}"
    with PoolCheckpointer(path, keep=1):  # it opens for saving
        return True


def verify_paths(root: Path, told: int) -> bool:
    """All that was told up to step ``told`` is there, in files that are whole; whether there are
    any."""
    process.recover_left(str(root / "ckpt"))  # as the first save or load of the next program does
    files = sorted((root / "ckpt").glob("*.pt"))
    steps = []
    for file in files:
        assert zipfile.ZipFile(file).testzip() is None, file.name
        state = load(file, weights_only=False)
        assert_same(state, Training(state["step"]).state())
        steps.append(state["step"])
        assert file.name in ("last.pt", f"step-{state['step']:08}.pt"), file.name
    assert max(steps, default=0) >= told, f"step {told} was told; there are {steps}"
    return bool(files)


@dataclass(frozen=True)
class Program:
    """A child that saves below a directory, and how what it leaves is verified."""

    module: str
    function: str
    arguments: Callable[[Path], tuple[str, ...]]
    verify: Callable[[Path, int], bool]


PROGRAMS: Final = {
    "pool": Program(
        "tests.crash.saver",
        "save_pointers_for_ever",
        lambda place: (str(place / "run.portus"), str(place / "ckpt")),
        verify,
    ),
    **{
        way: Program(
            "tests.crash.path_saver",
            "train_for_ever",
            lambda place, way=way: (str(place / "ckpt"), way),  # type: ignore[misc]
            verify_paths,
        )
        for way in ("keep 1", "overwrite")
    },
}


def searched(
    kind: str, program: Program, source: random.Random, cuts: int, seconds: float
) -> tuple[int, int]:
    """Save, and cut the power anywhere, ``cuts`` times or for so long; how many cuts there were,
    and how many of them after something was told."""
    tried = late = 0
    with logged_disk(kind) as disk:
        (disk.place / "ckpt").mkdir()
        children = nursery(program.module)
        with children.start(program.function, *program.arguments(disk.place)) as child:
            for _ in range(SAVES):
                disk.mark(int(child.until("saved").split()[1]))
        entries = disk.log()
        cut, until = Cut(disk, entries, source), time.monotonic() + seconds
        for end in sorted(source.choices(range(len(entries) + 1), k=cuts)):
            if time.monotonic() > until:
                break
            told = max((each.at for each in entries[:end] if each.kind == MARK), default=0)
            how = cut.at(end)
            try:
                with cut.mounted() as root:
                    late += program.verify(root, told) and told > 0
            except BaseException as error:
                error.args = (f"{kind}, cut before entry {end}, {how}: {error}",)
                raise
            tried += 1
    return tried, late


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("program", list(PROGRAMS))
@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(k, marks=pytest.mark.long) for k in KINDS[1:])], indirect=True
)
@pytest.mark.timeout(300)
def test_what_was_told_is_there_after_a_power_cut_on_a_real_file_system(
    kind: str, program: str, seed: int
) -> None:
    tried, late = searched(kind, PROGRAMS[program], random.Random(seed), 12, 60)
    assert tried
    assert late


@pytest.mark.parametrize("program", list(PROGRAMS))
@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_is_there_after_many_power_cuts_too(kind: str, program: str, seed: int) -> None:
    source = random.Random(seed)
    until, tried, late = time.monotonic() + LONG_S, 0, 0
    while late < LATE_MIN or time.monotonic() < until:
        more = searched(kind, PROGRAMS[program], source, 12, LONG_S)
        tried, late = tried + more[0], late + more[1]
    print(f"{kind}, {program}: {tried} power cuts, {late} of them after something was told")
    assert late >= LATE_MIN
