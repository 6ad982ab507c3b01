"""Commands on the mirrors at an address: ``ls``, ``rm`` and ``gc``."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from portus.cli.output import (
    Json,
    Output,
    Row,
    age_text,
    count_text,
    fields,
    newest_rows,
    size_text,
)
from portus.cli.pools import FoundVersion, version_document
from portus.errors import PortusError
from portus.index.place import Place
from portus.mirror.address import parse
from portus.mirror.fetching import missing
from portus.mirror.log import SupersededError
from portus.mirror.mirror import Mirror
from portus.mirror.mirrors import Mirrors
from portus.mirror.objects import FACTS_MAX, Filed, Removed, State
from portus.mirror.writer import Freed

Result = TypeVar("Result")

_NO_POOL: Final = bytes(16)
"""The pool of a command, which has none."""

_TRIES: Final = 20
"""Times that a command takes the term from a run that takes it back, until it gives up."""


def claim(mirror: Mirror, command: str) -> State:
    """Take the term for what a command does; a run that mirrors there takes it back."""
    who = f"portus {command}: pid {os.getpid()} on {platform.node()}"
    return mirror.claim(who, _NO_POOL, 0, passing=True)


def retried(act: Callable[[], Result]) -> Result:
    """Return what ``act`` returns; call it again where a run took the term back meanwhile. Raises
    ``BusyError`` where a run does so each time."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(SupersededError):
            return act()
    return act()


def rm(place: Place, found: Sequence[FoundVersion]) -> None:
    """Remove versions from the mirrors at ``place``. Raises ``SupersededError``."""
    with Mirrors(parse(place.path)) as mirrors:
        for model in dict.fromkeys(each.info.model for each in found):
            tokens = [each.info.token for each in found if each.info.model == model]
            retried(partial(_remove, mirrors.of(model), tokens))


def _remove(mirror: Mirror, tokens: Sequence[bytes]) -> None:
    there = {each.token for each in claim(mirror, "rm").versions}
    gone = [token for token in tokens if token in there]
    for start in range(0, len(gone), FACTS_MAX):
        mirror.note([Removed(token) for token in gone[start : start + FACTS_MAX]])


def ls(place: Place, most: int | None, output: Output) -> None:
    """List what is there. most: of each model, the newest; None: all."""
    documents: list[Json] = []
    sizes: list[int] = []
    rows: list[Row] = []
    file_rows: list[Row] = []
    files: list[Filed] = []
    with Mirrors(parse(place.path)) as mirrors:
        for model in mirrors.models():
            try:
                state = mirrors.of(model).read()
            except PortusError as error:
                documents.append({"name": model, "error": output.skip(error, f"{model}: ")})
                continue
            infos = [each.info(model, 0, each.commit) for each in missing(state, ())]
            sizes += [info.size for info in infos]
            shown = [
                (model, str(info.step), age_text(info.time_ns), size_text(info.size))
                for info in infos
            ]
            rows += newest_rows(shown, most, model, "...")
            files += state.files
            ordered = sorted(state.files, key=lambda each: (each.term, each.time_ns))
            file_rows += newest_rows([_file_row(model, each) for each in ordered], most, model)
            documents.append(
                {
                    "name": model,
                    "versions": [version_document(info) for info in infos],
                    "files": [_file_document(each) for each in state.files],
                    **term_document(state),
                }
            )
    if sizes or not files:
        total = size_text(sum(sizes))
        output.line(f"{place}: {count_text(len(sizes), 'version')}, {total} or less")
    if rows:
        output.table(("MODEL", ">STEP", "SAVED", ">SIZE"), rows)
    if files:
        total = size_text(sum(each.size for each in files))
        output.line(f"{place}: {count_text(len(files), 'file')}, {total}")
        output.table(("RUN", "FILE", ">STEP", "SAVED", ">SIZE"), file_rows)
    output.document({"pools": [{"path": place.path, "models": documents}]})


def _file_row(run: str, file: Filed) -> Row:
    if file.link:
        return run, file.path, "", "", f"leads to {file.link}"
    return run, file.path, str(file.step), age_text(file.time_ns), size_text(file.size)


def _file_document(file: Filed) -> Json:
    own = fields(file, "path", "size", "step", "time_ns")
    others = {"object": file.name, "digest": file.digest.hex(), "link": file.link or None}
    return {**own, **others}


def gc(place: Place, *, dry_run: bool, output: Output) -> None:
    """Delete the objects that nobody needs any more."""
    documents: list[Json] = []
    would = "would be " if dry_run else ""
    with Mirrors(parse(place.path)) as mirrors:
        for model in mirrors.models():
            mirror = mirrors.of(model)
            try:
                freed = mirror.unneeded()
                if freed.objects and not dry_run:
                    freed = retried(partial(_collected, mirror))
            except PortusError as error:
                documents.append({"name": model, "error": output.skip(error, f"{model}: ")})
                continue
            documents.append({"name": model, "objects": freed.objects, "size": freed.size})
            what = f"{count_text(freed.objects, 'object')}, {size_text(freed.size)}, {would}deleted"
            output.line(f"{place}: {model}: {what if freed.objects else 'nothing to do'}")
    if not documents:
        output.line(f"{place}: no mirrors")
    output.document({"dry_run": dry_run, "mirrors": documents})


def _collected(mirror: Mirror) -> Freed:
    claim(mirror, "gc")
    return mirror.collect()


def term_document(state: State) -> dict[str, Json]:
    """Return the fields that say, in a JSON document, who writes a mirror."""
    return {"term": state.term, "writer": state.who or None, "passing": state.passing}
