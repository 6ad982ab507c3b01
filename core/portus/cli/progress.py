"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from portus.errors import printable

Progress = Callable[[int, int], None]
"""Takes the bytes that are done, and the bytes to do in all."""


@contextlib.contextmanager
def bar(title: str) -> Iterator[Progress]:
    """Show bytes done of bytes to do; nothing where nobody watches."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(printable(title), total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def adding(progress: Progress, total: int) -> Callable[[int], None]:
    """Return a function that takes the bytes of each piece, and shows their sum."""
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    return add
