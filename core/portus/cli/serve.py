"""``portus serve``: this machine as a storage host."""

from __future__ import annotations

from portus.cli.output import Output
from portus.daemon.events import log_to_stderr
from portus.daemon.main import ServeOptions, serve


def run(options: ServeOptions, output: Output) -> int:
    """Serve until told to end; the exit code."""
    log_to_stderr()
    return 0 if serve(options) else 3
