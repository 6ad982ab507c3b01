"""``portus materialize PATH``: real torch files in place of reference files."""

from __future__ import annotations

import os

from portus.cli.output import Output, count_text, error_document, exit_code, said, size_text
from portus.errors import PortusError
from portus.index.place import Place


def run(path: str, pool: str | None, output: Output, *, tables_pool: str | None = None) -> int:
    """Materialise; the exit code, that of the first file of which it could not be done."""
    from portus.client.leaving.materialize import materialize_all
    from portus.client.loading.resolve import POOLS

    if pool is not None:
        POOLS.allow(Place.named(pool, "--pool"))
    failed: list[PortusError] = []
    done = materialize_all(path, failed.append, tables_pool=tables_pool)
    for each in done:
        output.line(f"{each}: {size_text(os.stat(each).st_size)}")
    output.line(f"{count_text(len(done), 'file')} materialised")
    output.document({"materialized": list(done), "failed": list(map(error_document, failed))})
    for error in failed:
        output.note(f"portus: {said(error)}")
    return exit_code(failed[0]) if failed else 0
