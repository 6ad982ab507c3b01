"""The helper is used only where it does what xxhash does; a build never fails because of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from portus.engine.copying import native
from portus.engine.copying.local import PurePython, best_engine
from portus.engine.copying.segments import Segments, Stop, StoppedError
from portus.engine.format.checksum import digest

Compile = Callable[[str], Path]

PATIENT, SECOND = 10, 9
"""How much lower the priority of the helper's threads is, as in ``native.c``: of the one that works
while nobody waits, and of the second one."""


def test_the_helper_of_this_source_is_accepted(compiled: Compile, native_text: str) -> None:
    assert native.load(str(compiled(native_text))) is not None


def test_the_version_is_the_same_on_both_sides(native_text: str) -> None:
    assert f"#define ABI {native.ABI} " in native_text


MUTANTS = {
    "another version": ("#define ABI ", "#define ABI 1"),
    "another order of bytes": ("hash.high >> (56 - 8 * i)", "hash.high >> (8 * i)"),
    "halves swapped": ("target[8 + i]", "target[15 - i]"),
    "bytes that are not hashed": ("list->hash->update(place->state, moved, (size_t)step);", ""),
    # The first unit of the list is one piece: it takes no state, so the second one starts it.
    "units not kept apart": ("if (first && !place->moved)", "if (i == 1 && !place->moved)"),
    "nothing copied": ("if (!list->target) return source;", "if (1) return source;"),
    "pieces of one place": ("list->target ? target + place->moved : NULL", "target"),
    "the head not copied": ("copy_twice(target, buffer, source, head);", ""),
    "lines in the wrong order": ("(__m128i *)target + 1, b", "(__m128i *)target + 1, c"),
    "no move": ("int64_t portus_move(", "int64_t portus_shift("),
}


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_helper_that_differs_is_refused(compiled: Compile, native_text: str, mutant: str) -> None:
    right, wrong = MUTANTS[mutant]
    assert native_text.count(right) == 1
    assert native.load(str(compiled(native_text.replace(right, wrong)))) is None


def test_a_file_that_is_no_helper_is_refused_aloud(
    tmp_path: Path, compiled: Compile, caplog: pytest.LogCaptureFixture
) -> None:
    assert native.load(str(tmp_path / "absent.so")) is None
    assert not caplog.messages
    (tmp_path / "text.so").write_text("no library")
    assert native.load(str(tmp_path / "text.so")) is None
    assert "text.so" in caplog.messages[0]
    assert "build_native.py" in caplog.messages[0]
    assert native.load(str(compiled("int portus_nothing;"))) is None
    assert "portus_abi" in caplog.messages[1]


def test_the_helper_beside_its_source_was_compiled_from_it() -> None:
    if not os.path.exists(native.PATH):
        pytest.skip("there is none; without a C compiler none can be")
    assert native.helper() is not None, "python core/build_native.py compiles it anew"


def test_without_a_helper_pure_python_does_the_work() -> None:
    assert isinstance(best_engine(), native.Helper if native.helper() is not None else PurePython)


# The build.


class Target:
    """What hatchling hands to a hook, as far as ours looks."""

    def __init__(self, build: ModuleType, kind: str) -> None:
        self.warnings: list[str] = []
        self.data: dict[str, Any] = {"pure_python": True, "force_include": {}}
        self._hook = build.NativeHelperHook("", {}, None, None, "", kind, self)

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)

    def initialize(self, version: str) -> None:
        self._hook.initialize(version, self.data)


@pytest.fixture
def elsewhere(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build in a copy of the tree, so that the helper in use is not replaced."""
    pytest.importorskip("hatchling")
    place = tmp_path / "_native.so"
    shutil.copy(build.SOURCE, tmp_path)
    monkeypatch.setattr(build, "SOURCE", tmp_path / "native.c")
    monkeypatch.setattr(build, "TARGET", place)
    return place


def test_a_wheel_holds_the_helper_and_says_for_which_platform(
    build: ModuleType, compiled: Compile, native_text: str, elsewhere: Path
) -> None:
    compiled(native_text)  # or skip
    target = Target(build, "wheel")
    target.initialize("standard")
    assert target.warnings == []
    assert target.data["pure_python"] is False
    assert target.data["tag"].startswith("py3-none-linux_")
    assert target.data["force_include"] == {str(elsewhere): "portus/engine/copying/_native.so"}
    assert native.load(str(elsewhere)) is not None


def test_an_editable_wheel_finds_the_helper_in_the_tree(
    build: ModuleType, compiled: Compile, native_text: str, elsewhere: Path
) -> None:
    compiled(native_text)  # or skip
    target = Target(build, "wheel")
    target.initialize("editable")
    assert elsewhere.exists()
    assert target.data == {"pure_python": True, "force_include": {}}


@pytest.mark.parametrize("cause", ["no compiler", "no such compiler", "an error in the source"])
def test_a_wheel_without_the_helper_is_pure_and_says_why(
    build: ModuleType, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    if cause == "no compiler":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(elsewhere.parent))
    elif cause == "no such compiler":
        monkeypatch.setenv("CC", "no-such-compiler")
    else:
        build.SOURCE.write_text("#error on purpose")
    target = Target(build, "wheel")
    target.initialize("standard")
    assert target.data == {"pure_python": True, "force_include": {}}
    assert len(target.warnings) == 1
    assert [path.name for path in elsewhere.parent.iterdir()] == ["native.c"]


def test_a_source_archive_is_left_alone(build: ModuleType, elsewhere: Path) -> None:
    target = Target(build, "sdist")
    target.initialize("standard")
    assert target.data == {"pure_python": True, "force_include": {}}
    assert not elsewhere.exists()


def _soon(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def _started() -> list[int]:
    """The niceness of each thread that is not of Python, beyond that of this one."""
    python = {thread.native_id for thread in threading.enumerate()}
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = []
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if int(name) not in python:
                found.append(os.getpriority(os.PRIO_PROCESS, int(name)) - own)
    return found


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks at the threads in /proc")


@linux_only
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: no second thread")
def test_a_thread_of_low_priority_works_until_somebody_waits_then_two() -> None:
    helper = native.helper()
    if helper is None:
        pytest.skip("no helper")
    memory = np.zeros(64 << 20, np.uint8)
    starts = np.arange(0, 64 << 30, 1 << 20)  # the same memory over and over: work for long
    segments = Segments(
        address=memory.ctypes.data + starts % len(memory),
        offset=starts,
        length=np.full(len(starts), 1 << 20),
        row=np.arange(len(starts)),
    )
    stop = Stop(awaited=False)
    spent: list[float] = []

    def run() -> None:
        with pytest.raises(StoppedError):
            helper.move(segments, None, np.zeros((len(starts), 16), np.uint8), stop)
        spent.append(time.thread_time())

    before = sorted(_started())
    thread = threading.Thread(target=run)
    thread.start()
    _soon(lambda: stop.bytes_done > 64 << 20)
    patient = _started()
    assert len(patient) <= len(before) + 1  # less, if one of an earlier test has just ended
    assert min(PATIENT, 19 - os.getpriority(os.PRIO_PROCESS, 0)) in patient
    assert not spent
    stop.is_awaited = True
    _soon(lambda: SECOND in _started())
    stop.set()
    thread.join()
    _soon(lambda: len(_started()) <= len(before))


@pytest.mark.long
@linux_only
def test_who_waits_goes_on_in_the_middle_of_what_the_patient_thread_did(seed: int) -> None:
    helper = native.helper()
    if helper is None:
        pytest.skip("no helper")
    random_ = np.random.default_rng(seed)
    length = 40 << 20
    data = random_.integers(0, 256, length, np.uint8)
    for cuts in (12, 3000):
        starts = np.unique(np.append(random_.integers(1, length, cuts), 0))
        units = np.unique(np.append(starts[random_.random(len(starts)) < 0.3], 0))
        segments = Segments(
            address=data.ctypes.data + starts,
            offset=starts,
            length=np.diff(starts, append=length),
            row=np.searchsorted(units, starts, "right") - 1,
        )
        ends = np.append(units[1:], length)
        expected = [digest(data.data[a:b]) for a, b in zip(units, ends, strict=True)]
        handed_over = 0
        for _ in range(10):
            copied = np.zeros(length, np.uint8)
            digests = np.zeros((len(units), 16), np.uint8)
            stop = Stop(awaited=False)
            waiter = threading.Thread(target=_wait_from, args=[stop, random_.integers(length)])
            waiter.start()
            helper.move(segments, copied.ctypes.data + starts, digests, stop)
            handed_over += stop.is_awaited
            stop.is_awaited = True
            waiter.join()
            assert digests.tobytes() == b"".join(expected)
            assert np.array_equal(copied, data)
            assert stop.bytes_done == length
        assert handed_over > 2


def _wait_from(stop: Stop, done: int) -> None:
    while stop.bytes_done < done and not stop.is_awaited:
        time.sleep(1e-4)
    stop.is_awaited = True
