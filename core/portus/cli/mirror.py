"""``portus mirror status|repair``: a mirror, beside the pool that it is of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from portus.cli.mirrored import claim, in_order, mirrors_at, retried, term_document
from portus.cli.output import FOUND, Json, Output, age_text, count_text, size_text
from portus.cli.pools import FoundVersion, PlacePools, find_pool, nearest
from portus.cli.progress import bar
from portus.errors import CorruptionError, StaleError, UsageError
from portus.index.place import Place
from portus.mirror.address import MIRROR_VARIABLE, parse
from portus.mirror.mirror import Mirror
from portus.mirror.objects import Added, State
from portus.transport.base import Stop

_Versions = dict[bytes, FoundVersion]
"""Those of the pools of this machine, by their tokens."""


def status(url: str | None, pool: str | None, output: Output) -> int:
    """Say what is mirrored, by whom, and what of the pool is not; the exit code."""
    place = _place(url)
    documents: list[Json] = []
    rows: list[tuple[str, ...]] = []
    with mirrors_at(place) as mirrors, _local(pool) as local:
        for model in mirrors.models():
            state = mirrors.of(model).read()
            behind = [
                each.info.step
                for each in local.values()
                if each.info.model == model and state.version(each.info.token) is None
            ]
            newest = state.newest or state.newest_file
            rows.append(
                (
                    model,
                    "" if newest is None else str(newest.step),
                    "" if newest is None else age_text(newest.time_ns),
                    str(len(state.versions) + len(state.files)),
                    size_text(_size(state)),
                    str(state.term),
                    state.who,
                    _behind_text(model, behind, local),
                )
            )
            documents.append(_document(model, state, behind))
    if rows:
        heads = ("MODEL", ">NEWEST", "SAVED", ">THERE", ">SIZE", ">TERM", "WRITER", "POOL")
        output.line(f"{place}:")
        output.table(heads, rows)
    else:
        output.line(f"{place}: no mirrors")
    output.document({"mirror": place.path, "models": documents})
    return 0


def repair(url: str | None, pool: str | None, output: Output) -> int:
    """Read every byte of a mirror, and send again from the pool what is damaged; the exit code."""
    place = _place(url)
    documents: list[Json] = []
    with mirrors_at(place) as mirrors, _local(pool) as local:
        for model in mirrors.models():
            mirror = mirrors.of(model)
            versions = in_order(mirror.read())
            total, done = sum(each.size for each in versions), 0
            with bar(model) as advanced:
                for added in versions:
                    result = _repaired(mirror, added, local)
                    done += added.size
                    advanced(done, total)
                    documents.append({"model": model, "step": added.step, "result": result})
                    if result != "whole":
                        output.line(f"{place}: {model}@{added.step} {_RESULTS[result]}")
    lost = sum(isinstance(each, dict) and each["result"] == "damaged" for each in documents)
    output.line(f"{place}: {count_text(len(documents), 'version')} read, {lost} damaged")
    output.document({"mirror": place.path, "versions": documents})
    return FOUND if lost else 0


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


def _mend(mirror: Mirror, added: Added, found: FoundVersion) -> None:
    claim(mirror, "mirror repair")
    mirror.mend(added, found.reader, found.entry.info.id, Stop())


def _place(url: str | None) -> Place:
    said = url or os.environ.get(MIRROR_VARIABLE)
    if not said:
        raise UsageError(f"no mirror given: pass its address or set ${MIRROR_VARIABLE}")
    parse(said, "MIRROR")  # raises for what is none
    return find_pool(said, mirrors=True)


@contextlib.contextmanager
def _local(pool: str | None) -> Iterator[_Versions]:
    """What the pools here have; nothing, if none was named and none is nearby."""
    if pool is None and Place.by_variable() is None and nearest(os.getcwd()) is None:
        yield {}
        return
    with PlacePools(find_pool(pool)) as pools:
        yield {each.info.token: each for each in pools.versions()}


def _behind_text(model: str, behind: Sequence[int], local: _Versions) -> str:
    if all(each.info.model != model for each in local.values()):
        return ""
    if not behind:
        return "everything is mirrored"
    return f"{count_text(len(behind), 'version')} not mirrored, the newest of step {behind[-1]}"


def _size(state: State) -> int:
    """Bytes of versions, or less, and of files."""
    return sum(each.size for each in state.versions) + sum(each.size for each in state.files)


def _document(model: str, state: State, behind: Sequence[int]) -> dict[str, Json]:
    newest = state.newest or state.newest_file
    return {
        "name": model,
        "newest": None if newest is None else newest.step,
        "time_ns": None if newest is None else newest.time_ns,
        "versions": len(state.versions),
        "files": len(state.files),
        "size": _size(state),
        "not_mirrored": list(behind),
        **term_document(state),
    }
