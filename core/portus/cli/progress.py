"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from portus.errors import printable

Progress = Callable[[int, int], None]
"""Told bytes done, and bytes to do in all."""


@contextlib.contextmanager
def bar(title: str) -> Iterator[Progress]:
    """Bytes done of bytes to do; nothing is shown where nobody watches."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(printable(title), total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
