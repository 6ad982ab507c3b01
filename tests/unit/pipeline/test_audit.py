"""Which audit a save gets, and what it costs."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from portus.engine.copying.segments import Stop
from portus.engine.media import linux, write_watch
from portus.engine.pipeline.audit import (
    AuditMethod,
    Auditor,
    Guard,
    LateStorages,
    ProbeAudit,
    StoredStorages,
)
from portus.engine.pipeline.draft import Draft

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def memory() -> np.ndarray:
    """In pages of its own: who else writes to a page is told as well."""
    made = np.frombuffer(mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE), np.uint8)
    made[:] = 1
    return made


def late_of(memory: np.ndarray, size: int) -> LateStorages:
    """``size`` bytes of late storages; all of them in the same memory."""
    count = -(-size // memory.nbytes)
    return LateStorages(
        np.full(count, memory.ctypes.data, np.int64),
        np.full(count, min(size, memory.nbytes), np.int64),
    )


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that tells nothing, as in most containers."""

    def refuse() -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(linux, "open_write_watch", refuse)
    # The descriptor of this process is put back in the end: with another one, no memory of which
    # the first has registered a part could be watched.
    monkeypatch.setattr(write_watch, "_opened", None)


def ways(guard: Guard, late: LateStorages, count: int = 2) -> list[AuditMethod]:
    auditor, found = Auditor(guard), []
    for _ in range(count):
        audit = auditor.begin(late, Stop())
        found.append(audit.way)
        audit.close()
        for _ in auditor.use_huge_pages():
            pass
    return found


def test_what_costs_little_is_exact_however_often_it_is_saved(
    memory: np.ndarray, refused: None
) -> None:
    assert ways("auto", late_of(memory, 1 << 20), 5) == [AuditMethod.HASH] * 5


def test_frequent_saves_of_much_get_probes(memory: np.ndarray, refused: None) -> None:
    assert ways("auto", late_of(memory, 1 << 30), 4) == [AuditMethod.PROBE] * 4


def test_the_guard_may_be_said(memory: np.ndarray, refused: None) -> None:
    late = late_of(memory, 1 << 30)
    assert ways("exact", late) == [AuditMethod.HASH] * 2
    assert ways("probe", late) == [AuditMethod.PROBE] * 2


@pytest.mark.parametrize("size", [1, 15, 64, 4000, 65_540, 270_001])
@pytest.mark.parametrize("stored_late", [1, 32])
def test_probes_see_a_whole_write_of_which_the_last_bytes_alone_were_stored(
    size: int, stored_late: int
) -> None:
    """A storage begins anywhere in a page, so any of its bytes may be the last to be stored."""
    source = np.ones(size, np.uint8)
    audit = ProbeAudit(LateStorages(column(source.ctypes.data), column(size)))
    assert not audit.torn(stored(source)).any()
    found = source.copy()
    found[-stored_late:] += 1
    assert audit.torn(stored(found)).all()


def stored(data: np.ndarray) -> StoredStorages:
    """What was stored of one storage."""

    def bytes_of(row: np.ndarray, offset: np.ndarray, length: np.ndarray) -> np.ndarray:
        pieces = zip(offset.tolist(), length.tolist(), strict=True)
        return np.concatenate([data[at : at + size] for at, size in pieces])

    draft = cast(Draft, SimpleNamespace(read_back=bytes_of))
    return StoredStorages(np.zeros(1, np.int64), np.zeros((0, 16), np.uint8), draft)


REFUSED = """
import numpy as np
from portus.engine.pipeline.audit import Auditor, LateStorages
from portus.engine.copying.segments import Stop
from tests.refused import refuse_userfaultfd

refuse_userfaultfd()
memory = np.ones(64 << 20, np.uint8)
late = LateStorages(np.array([memory.ctypes.data]), np.array([memory.nbytes]))
print(Auditor("exact").begin(late, Stop()).way.value)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is of Linux")
def test_where_seccomp_refuses_the_call_hashes_tell() -> None:
    """As in a container."""
    ran = subprocess.run(
        [sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (ran.stdout, ran.stderr) == ("hash\n", "")


# The kernel's way.


def column(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def watched(memory: np.ndarray) -> write_watch.WriteWatch | None:
    return write_watch.watch(column(memory.ctypes.data), column(memory.nbytes))


@pytest.fixture
def kernel(memory: np.ndarray) -> None:
    watch = watched(memory)
    if watch is None:
        pytest.skip("this kernel does not tell of writes")
    watch.close()


def test_every_page_that_is_written_is_told_and_no_other(
    kernel: None, memory: np.ndarray, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        watch = watched(memory)
        assert watch is not None
        touched = np.unique(rng.integers(0, memory.nbytes, rng.integers(1, 2000)))
        memory[touched] += 1
        told = {page for start, end in watch.written_runs().tolist() for page in pages(start, end)}
        assert told == set(((touched + memory.ctypes.data) // write_watch.PAGE).tolist())
        watch.close()


def pages(start: int, end: int) -> range:
    return range(start // write_watch.PAGE, end // write_watch.PAGE)


def test_what_is_too_dear_to_watch_gets_huge_pages_and_is_watched_then(kernel: None) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 128 << 20, mmap.MAP_PRIVATE), np.uint8)
    memory[:] = 1
    found = ways("auto", LateStorages(column(memory.ctypes.data), column(memory.nbytes)), 100)
    assert found[0] is AuditMethod.PROBE
    assert AuditMethod.KERNEL in found


def test_huge_pages_are_told_of_as_small_ones(kernel: None, memory: np.ndarray) -> None:
    place = column(memory.ctypes.data), column(memory.nbytes)
    assert [*write_watch.make_huge(*place)]
    test_every_page_that_is_written_is_told_and_no_other(None, memory, 1)


def test_who_stops_at_some_huge_pages_gets_all_of_them_later(
    memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(linux, "advise_pages", lambda page, size, what: asked.append(page))
    monkeypatch.setattr(write_watch, "can_watch", lambda: True)
    monkeypatch.setattr("portus.engine.pipeline.audit.HUGE_PAGES_S", 60.0)
    auditor = Auditor("auto")
    monkeypatch.setattr(auditor, "_watch_s_per_byte", 1.0)
    auditor.begin(late_of(memory, 1 << 30), Stop()).close()
    stopped = auditor.use_huge_pages()
    assert [next(stopped), next(stopped)] == [None, None]
    del stopped
    assert len(asked) == 1, "it is asked for behind the step"
    for _ in auditor.use_huge_pages():
        continue
    assert asked[1:] == sorted({*asked[1:]})
    assert len(asked[1:]) >= (memory.nbytes >> 21) - 1
    assert [*auditor.use_huge_pages()] == [], "once"


def test_memory_of_other_processes_is_not_watched(kernel: None, tmp_path: Path) -> None:
    with mmap.mmap(-1, 4 << 20) as shared:
        array = np.frombuffer(shared, np.uint8)
        assert watched(array) is None
        del array
    (tmp_path / "file").write_bytes(bytes(4 << 20))
    assert watched(np.memmap(tmp_path / "file", np.uint8, "r+")) is None


def test_a_forked_child_watches_its_own_memory_and_leaves_its_parents(
    kernel: None, memory: np.ndarray
) -> None:
    watch = watched(memory)
    assert watch is not None
    with contextlib.closing(watch):
        child = os.fork()
        if child == 0:
            left = 99
            try:
                own = np.frombuffer(mmap.mmap(-1, 4 << 20, mmap.MAP_PRIVATE), np.uint8)
                own[:] = 1  # pages of its own: those of malloc hold more than the array
                mine = watched(own)
                memory[:] += 1  # its own copy
                own[5] = 7
                left = 98 if mine is None else len(mine.written_runs())
            finally:
                os._exit(left)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 1, "runs of pages; 98 if the child could not watch, 99 if it raised"
        assert not len(watch.written_runs())
        memory[12345] += 1
        assert len(watch.written_runs()) == 1


def test_memory_that_was_unmapped_meanwhile_is_no_error(kernel: None) -> None:
    for _ in range(5):
        array = np.ones(64 << 20, np.uint8)
        watch = watched(array)
        assert watch is not None
        del array
        watch.close()
