"""A progress bar for a terminal, on a line that is cleared when the wait has ended."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Final

_WIDTH: Final = 16
_LINE: Final = "\r\x1b[K"
"""Moves to the start of the line, and clears it."""

Show = Callable[[int, int, str], None]
"""Called with the number done, the total, and further text."""


@contextlib.contextmanager
def bar(title: str) -> Iterator[Show | None]:
    """Yield the function that draws a bar on stderr, if that is a terminal; else None."""
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield None
        return

    def show(done: int, total: int, more: str) -> None:
        full = _WIDTH * done // total if total else _WIDTH
        text = f"{title} [{'#' * full}{'.' * (_WIDTH - full)}] {done} of {total}{more}"
        stream.write(_LINE + text[: shutil.get_terminal_size().columns - 1])
        stream.flush()

    try:
        yield show
    finally:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            stream.write(_LINE)
            stream.flush()
