"""Something else happens at one moment of a call: no sleep, and nothing of ours is replaced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Literal


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
