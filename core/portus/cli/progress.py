"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from portus.errors import printable
from portus.reach.places.base import Progress


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
