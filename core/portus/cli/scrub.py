"""``portus scrub [POOL]``: verify everything from the disk, slowly."""

from __future__ import annotations

from portus.cli.files import find_files, open_files
from portus.cli.options import POOL, POOL_ARGUMENT, Text, option
from portus.cli.output import FOUND, ROT, Output
from portus.cli.pools import only_place, open_places
from portus.cli.verify import run_checks
from portus.reach.daemon.pools import parse_rate


def command(
    output: Output,
    place: Text = POOL_ARGUMENT,
    pool: Text = POOL,
    rate: str = option("--rate SIZE/s", "read at most this much per second", "50M/s"),
) -> None:
    """Read every byte as verify does, but slowly, and from the disk rather than the page cache.
    Exit code 4 if damage was found."""
    bytes_per_s, pool = parse_rate(rate), only_place(place, pool)
    path = find_files(pool, None)
    with open_places(pool) if path is None else open_files(path) as places:
        run_checks(places, output, bytes_per_s=bytes_per_s)
    output.code = ROT if output.code == FOUND else output.code
