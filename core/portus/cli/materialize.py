"""``portus materialize PATH``: real torch files in place of reference files."""

from __future__ import annotations

import os

from portus.cli.output import Output, count_text, size_text
from portus.index.place import Place


def run(path: str, pool: str | None, output: Output) -> int:
    """Materialise; the exit code."""
    from portus.client.materialize import materialize
    from portus.client.resolve import POOLS

    if pool is not None:
        POOLS.allow(Place.named(pool, "--pool"))
    done = materialize(path)
    for each in done:
        output.line(f"{each}: {size_text(os.stat(each).st_size)}")
    output.line(f"{count_text(len(done), 'file')} materialised")
    output.document({"materialized": list(done)})
    return 0
