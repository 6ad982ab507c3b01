"""``portus scrub [POOL]``: as ``portus verify``, at a bounded pace: for cron."""

from __future__ import annotations

from portus.cli import verify
from portus.cli.output import FOUND, ROT, Output
from portus.daemon.pools import parse_rate


def run(pool: str | None, rate: str, output: Output) -> int:
    """Scrub; the exit code."""
    code = verify.run(None, pool, output, bytes_per_s=parse_rate(rate))
    return ROT if code == FOUND else code
