"""``portus scrub [POOL]``: verify everything from the disk, slowly."""

from __future__ import annotations

from portus.cli.options import AS_JSON, POOL, POOL_ARGUMENT, Text, option
from portus.cli.output import FOUND, ROT, reporting
from portus.cli.verify import run
from portus.reach.daemon.pools import parse_rate


def command(
    place: Text = POOL_ARGUMENT,
    pool: Text = POOL,
    rate: str = option("--rate SIZE/s", "read at most this much per second", "50M/s"),
    as_json: bool = AS_JSON,
) -> None:
    """Read every byte as verify does, but slowly, and from the disk rather than the page cache.
    Exit code 4 if damage was found."""
    with reporting(as_json) as output:
        run(None, place or pool, output, bytes_per_s=parse_rate(rate))
        output.code = ROT if output.code == FOUND else output.code
