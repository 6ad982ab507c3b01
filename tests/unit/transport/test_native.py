"""The helper is used only where it does what xxhash does; a build never fails because of it."""

from __future__ import annotations

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

from portus.transport import native
from portus.transport.base import Segments, Stop, StoppedError
from portus.transport.local import PurePython, best_engine

Compile = Callable[[str], Path]


def test_the_helper_of_this_source_is_accepted(compiled: Compile, native_text: str) -> None:
    assert native.load(str(compiled(native_text))) is not None


def test_the_version_is_the_same_on_both_sides(native_text: str) -> None:
    assert f"#define ABI {native.ABI} " in native_text


MUTANTS = {
    "another version": ("#define ABI ", "#define ABI 1"),
    "another order of bytes": ("hash.high >> (56 - 8 * i)", "hash.high >> (8 * i)"),
    "halves swapped": ("target[8 + i]", "target[15 - i]"),
    "bytes that are not hashed": ("list->hash->update(state, source, (size_t)step);", ""),
    "units not kept apart": ("if (first) list->hash", "if (!i) list->hash"),
    "pieces not copied": ("copy(target, source, (size_t)step);", ""),
    "single pieces not copied": ("if (list->target) copy(", "if (0) copy("),
    "pieces of one place": ("target += step;", ""),
    "the head not copied": ("memcpy(target, source, head);", ""),
    "lines in the wrong order": ("(__m128i *)target + 1, b", "(__m128i *)target + 1, c"),
    "everything equal": ("if (memcmp(", "if (0 && memcmp("),
    "no move": ("int64_t portus_move(", "int64_t portus_shift("),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_helper_that_differs_is_refused(compiled: Compile, native_text: str, mutant: str) -> None:
    right, wrong = MUTANTS[mutant]
    assert native_text.count(right) == 1
    assert native.load(str(compiled(native_text.replace(right, wrong)))) is None


def test_a_file_that_is_no_helper_is_refused(tmp_path: Path, compiled: Compile) -> None:
    assert native.load(str(tmp_path / "absent.so")) is None
    (tmp_path / "text.so").write_text("no library")
    assert native.load(str(tmp_path / "text.so")) is None
    assert native.load(str(compiled("int portus_nothing;"))) is None


def test_without_a_helper_pure_python_does_the_work() -> None:
    assert isinstance(best_engine(), native.Helper if native.available() else PurePython)


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
    assert target.data["force_include"] == {str(elsewhere): "portus/transport/_native.so"}
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


def _threads() -> int:
    """Python's and others."""
    return len(os.listdir("/proc/self/task"))


def _soon(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of /proc")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: no second thread")
def test_a_second_thread_comes_once_somebody_waits() -> None:
    helper = native.helper()
    if helper is None:
        pytest.skip("no helper")
    memory = np.zeros(16 << 30, np.uint8)  # never touched: it takes no memory
    starts = np.arange(0, len(memory), 1 << 20)
    segments = Segments(
        address=memory.ctypes.data + starts,
        offset=starts,
        length=np.full(len(starts), 1 << 20),
        row=np.arange(len(starts)),
    )
    stop = Stop(awaited=False)

    def run() -> None:
        with pytest.raises(StoppedError):
            helper.move(segments, None, np.zeros((len(starts), 16), np.uint8), stop)

    thread = threading.Thread(target=run)
    before = _threads()  # less, if one of an earlier test is about to end
    thread.start()
    _soon(lambda: stop.done > 64 << 20)
    alone = _threads()
    assert alone <= before + 1
    stop.awaited = True
    _soon(lambda: _threads() > alone)
    stop.set()
    thread.join()
    _soon(lambda: _threads() < alone)
