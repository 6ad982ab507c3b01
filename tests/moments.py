"""Something else happens at one moment of a call, or once another thread is there: no sleep that is
hoped to be long enough, and nothing of ours is replaced."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType
from typing import Any, Literal

import portus

WAIT_S_MAX = 30.0

_CORE = os.path.dirname(portus.__file__) + os.sep


@contextlib.contextmanager
def at(
    moment: Literal["call", "return"],
    function: Callable[..., Any] | CodeType,
    act: Callable[[], object],
) -> Iterator[None]:
    """``act`` runs once, on this thread, when it first calls ``function`` inside the block, or
    when that first returns. It is an error if it never does."""
    code = function if isinstance(function, CodeType) else function.__code__
    over = False

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal over
        if event == moment and frame.f_code is code and not over:
            over = True
            act()

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert over, f"{code.co_name} was not called"


def elsewhere(act: Callable[[], object]) -> Callable[[], None]:
    """``act`` on another thread, which is over when this returns. What calls Portus on the thread
    that it interrupts is a signal handler."""

    def run() -> None:
        with ThreadPoolExecutor(1) as other:
            other.submit(act).result()

    return run


def is_in(thread: threading.Thread, function: str) -> bool:
    """True if ``thread`` is inside a function of that name now."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


def until(condition: Callable[[], bool], within_s: float = WAIT_S_MAX) -> None:
    """Return when it holds; ``AssertionError`` if it never does."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


class Lines:
    """Counts the lines of the core that this thread runs inside a ``with``. ``act`` runs before
    line ``number`` of them, and may give another number."""

    def __init__(self, number: int = -1, act: Callable[[], object] = lambda: None) -> None:
        self.number = number
        self.count = 0
        self._act = act

    def __enter__(self) -> Lines:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        return self._ran if frame.f_code.co_filename.startswith(_CORE) else None

    def _ran(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count - 1 == self.number:
                self._act()
        return self._ran
