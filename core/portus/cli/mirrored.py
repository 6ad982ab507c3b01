"""Commands on the mirrors at an address: ``ls``, ``rm`` and ``gc``."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from portus.cli.output import (
    Json,
    Output,
    age_text,
    count_text,
    error_document,
    exit_code,
    said,
    size_text,
)
from portus.cli.pools import FoundVersion, version_document
from portus.errors import PortusError
from portus.index.place import Place
from portus.mirror.address import parse
from portus.mirror.log import SupersededError
from portus.mirror.mirror import Mirror
from portus.mirror.mirrors import Mirrors
from portus.mirror.objects import FACTS_MAX, Added, Filed, Removed, State
from portus.mirror.writer import Freed
from portus.spec import VersionInfo

Result = TypeVar("Result")

_NOBODY: Final = bytes(16)
"""Of which pool a command is."""

_TRIES: Final = 20
"""Times that a command takes the term from a run that takes it back, until it gives up."""


@contextlib.contextmanager
def mirrors_at(place: Place) -> Iterator[Mirrors]:
    """Yield the mirrors at ``place``, which is of that kind, and close them at the end."""
    with Mirrors(parse(place.path)) as mirrors:
        yield mirrors


def claim(mirror: Mirror, command: str) -> State:
    """Take the term for what a command does; a run that mirrors there takes it back."""
    who = f"portus {command}: pid {os.getpid()} on {platform.node()}"
    return mirror.claim(who, _NOBODY, 0, passing=True)


def let_go(place: Place, found: Sequence[FoundVersion]) -> None:
    """Remove versions from the mirrors at ``place``. Raises ``SupersededError``."""
    with mirrors_at(place) as mirrors:
        for model in dict.fromkeys(each.info.model for each in found):
            tokens = [each.info.token for each in found if each.info.model == model]
            retried(partial(_let_go, mirrors.of(model), tokens))


def _let_go(mirror: Mirror, tokens: Sequence[bytes]) -> None:
    state = claim(mirror, "rm")
    there = {each.token for each in state.versions}
    gone = [token for token in tokens if token in there]
    for start in range(0, len(gone), FACTS_MAX):
        mirror.note([Removed(token) for token in gone[start : start + FACTS_MAX]])


def ls(place: Place, every: bool, newest: int, output: Output) -> int:
    """List what is there; the exit code. newest: of each model, unless ``every`` one is wanted."""
    documents: list[Json] = []
    code = 0
    infos: list[VersionInfo] = []
    rows: list[tuple[str, ...]] = []
    kept: list[tuple[str, Filed]] = []
    with mirrors_at(place) as mirrors:
        for model in mirrors.models():
            try:
                state = mirrors.of(model).read()
            except PortusError as error:
                documents.append({"name": model, "error": error_document(error)})
                output.note(f"portus: {model}: {said(error)}")
                code = max(code, exit_code(error))
                continue
            found = [each.info(model, 0, each.commit) for each in in_order(state)]
            infos += found
            versions: list[Json] = []
            left_out = 0 if every else max(0, len(found) - newest)
            if left_out:
                rows.append((model, "...", f"{left_out} older: --all", ""))
            versions += [version_document(info) for info in found]
            rows += [
                (model, str(info.step), age_text(info.time_ns), size_text(info.size))
                for info in found[left_out:]
            ]
            kept += [(model, each) for each in state.files]
            documents.append(
                {
                    "name": model,
                    "versions": versions,
                    "files": [_file_document(each) for each in state.files],
                    **term_document(state),
                }
            )
    if infos or not kept:
        total = size_text(sum(info.size for info in infos))
        output.line(f"{place}: {count_text(len(infos), 'version')}, {total} or less")
    if rows:
        output.table(("MODEL", ">STEP", "SAVED", ">SIZE"), rows)
    if kept:
        _list_files(place, kept, every, newest, output)
    output.document({"pools": [{"path": place.path, "models": documents}]})
    return code


def _list_files(
    place: Place, kept: Sequence[tuple[str, Filed]], every: bool, newest: int, output: Output
) -> None:
    """Print the files of runs that save to directories, by run, oldest first."""
    total = size_text(sum(each.size for _, each in kept))
    output.line(f"{place}: {count_text(len(kept), 'file')}, {total}")
    ordered = sorted(kept, key=lambda of: (of[0], of[1].term, of[1].time_ns))
    rows = list[tuple[str, ...]]()
    for model, of_run in itertools.groupby(ordered, key=lambda of: of[0]):
        files = [each for _, each in of_run]
        left_out = 0 if every else max(0, len(files) - newest)
        if left_out:
            rows.append((model, f"{left_out} older: --all", "", "", ""))
        rows += [
            (model, each.path, "", "", f"leads to {each.link}")
            if each.link
            else (model, each.path, str(each.step), age_text(each.time_ns), size_text(each.size))
            for each in files[left_out:]
        ]
    output.table(("RUN", "FILE", ">STEP", "SAVED", ">SIZE"), rows)


def _file_document(said: Filed) -> Json:
    return {
        "path": said.path,
        "object": said.name,
        "digest": said.digest.hex(),
        "size": said.size,
        "step": said.step,
        "time_ns": said.time_ns,
        "link": said.link or None,
    }


def gc(place: Place, *, dry_run: bool, output: Output) -> int:
    """Delete the objects that nobody needs any more; the exit code."""
    documents: list[Json] = []
    code = 0
    with mirrors_at(place) as mirrors:
        for model in mirrors.models():
            mirror = mirrors.of(model)
            try:
                freed = mirror.unneeded()
                if freed.objects and not dry_run:
                    freed = retried(partial(_collected, mirror))
            except PortusError as error:
                documents.append({"name": model, "error": error_document(error)})
                output.note(f"portus: {model}: {said(error)}")
                code = max(code, exit_code(error))
                continue
            documents.append({"name": model, "objects": freed.objects, "size": freed.size})
            would = "would be " if dry_run else ""
            what = f"{count_text(freed.objects, 'object')}, {size_text(freed.size)}, {would}deleted"
            output.line(f"{place}: {model}: {what if freed.objects else 'nothing to do'}")
    if not documents:
        output.line(f"{place}: no mirrors")
    output.document({"dry_run": dry_run, "mirrors": documents})
    return code


def _collected(mirror: Mirror) -> Freed:
    claim(mirror, "gc")
    return mirror.collect()


def retried(act: Callable[[], Result]) -> Result:
    """What ``act`` gives; again, where a run took the term back meanwhile. Raises ``BusyError``
    where it does so each time."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(SupersededError):
            return act()
    return act()


def in_order(state: State) -> list[Added]:
    """The versions, oldest first."""
    return sorted(state.versions, key=lambda each: (each.term, each.commit))


def term_document(state: State) -> dict[str, Json]:
    """Return the fields that say, in a JSON document, who writes a mirror."""
    return {"term": state.term, "writer": state.who or None, "passing": state.passing}
