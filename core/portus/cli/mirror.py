"""``portus mirror status|repair``: a mirror, beside the pool that it is of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Final

from portus.cli.output import FOUND, Json, Output, Row, age_text, count_text, size_text
from portus.cli.pools import nearest, open_places
from portus.cli.progress import bar
from portus.engine.copying.segments import Stop
from portus.errors import CorruptionError, StaleError, UsageError
from portus.reach.index.place import Place
from portus.reach.mirror.address import MIRROR_VARIABLE, StoreAddress, parse
from portus.reach.mirror.fetching import missing
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.mirrors import Mirrors
from portus.reach.mirror.objects import Added
from portus.reach.places.base import StoredCheckpoint
from portus.reach.places.mirror import claim, retried, term_of
from portus.reach.places.version import OpenVersion

_Versions = dict[bytes, StoredCheckpoint]
"""Those of the pools of this machine, by their tokens."""


def status(url: str | None, pool: str | None, output: Output) -> None:
    """Show what is mirrored, by whom, and what of the pool is not."""
    address = _address(url)
    documents: list[Json] = []
    rows: list[Row] = []
    with Mirrors(address) as mirrors, _local(pool) as local:
        for model in mirrors.models():
            state = mirrors.of(model).read()
            own = [each.info for each in local.values() if each.info.model == model]
            behind = [info.step for info in own if state.version(info.token) is None]
            newest = state.newest or state.newest_file
            size = sum(each.size for each in state.versions)  # or less
            size += sum(each.size for each in state.files)
            lacks = ""
            if own:
                lacks = "everything is mirrored"
            if behind:
                count = count_text(len(behind), "version")
                lacks = f"{count} not mirrored, the newest of step {behind[-1]}"
            rows.append(
                (
                    model,
                    "" if newest is None else str(newest.step),
                    "" if newest is None else age_text(newest.time_ns),
                    str(len(state.versions) + len(state.files)),
                    size_text(size),
                    str(state.term),
                    state.who,
                    lacks,
                )
            )
            documents.append(
                {
                    "name": model,
                    "newest": None if newest is None else newest.step,
                    "time_ns": None if newest is None else newest.time_ns,
                    "versions": len(state.versions),
                    "files": len(state.files),
                    "size": size,
                    "not_mirrored": behind,
                    **term_of(state),
                }
            )
    if rows:
        heads = ("MODEL", ">NEWEST", "SAVED", ">THERE", ">SIZE", ">TERM", "WRITER", "POOL")
        output.line(f"{address}:")
        output.table(heads, rows)
    else:
        output.line(f"{address}: no mirrors")
    output.document({"mirror": str(address), "models": documents})


def repair(url: str | None, pool: str | None, output: Output) -> None:
    """Read every byte of a mirror, and send again from the pool what is damaged."""
    address = _address(url)
    documents: list[Json] = []
    with Mirrors(address) as mirrors, _local(pool) as local:
        for model in mirrors.models():
            mirror = mirrors.of(model)
            versions = missing(mirror.read(), ())
            total, done = sum(each.size for each in versions), 0
            with bar(model) as advanced:
                for added in versions:
                    result = _repaired(mirror, added, local)
                    done += added.size
                    advanced(done, total)
                    documents.append({"model": model, "step": added.step, "result": result})
                    if result == "damaged":
                        output.code = FOUND
                    if result != "whole":
                        output.line(f"{address}: {model}@{added.step} {_RESULTS[result]}")
    lost = sum(isinstance(each, dict) and each["result"] == "damaged" for each in documents)
    output.line(f"{address}: {count_text(len(documents), 'version')} read, {lost} damaged")
    output.document({"mirror": str(address), "versions": documents})


_RESULTS: Final = {
    "mended": "was damaged, and is repaired from the pool",
    "damaged": "is DAMAGED, and the pool has no intact copy of it",
    "removed": "was removed meanwhile",
}


def _repaired(mirror: Mirror, added: Added, local: _Versions) -> str:
    try:
        if not mirror.damaged(added, Stop()):
            return "whole"
    except StaleError:
        return "removed"
    except CorruptionError:
        pass  # its manifest
    found = local.get(added.token)
    if found is None:
        return "damaged"
    try:
        retried(partial(_mend, mirror, added, found))
    except CorruptionError:
        return "damaged"
    return "mended"


def _mend(mirror: Mirror, added: Added, found: StoredCheckpoint) -> None:
    claim(mirror, "mirror repair")
    with found.opened() as opened:
        assert isinstance(opened, OpenVersion)
        mirror.mend(added, opened.reader, opened.entry.info.id, Stop())


def _address(url: str | None) -> StoreAddress:
    said = url or os.environ.get(MIRROR_VARIABLE)
    if not said:
        raise UsageError(f"no mirror given: pass its address or set ${MIRROR_VARIABLE}")
    return parse(said, "MIRROR")


@contextlib.contextmanager
def _local(pool: str | None) -> Iterator[_Versions]:
    """Yield what the pools here have; nothing, if none was named and none is nearby."""
    if pool is None and Place.by_variable() is None and nearest(os.getcwd()) is None:
        yield {}
        return
    with open_places(pool, mirrors=False) as places:
        yield {each.info.token: each for each in places.list()}
