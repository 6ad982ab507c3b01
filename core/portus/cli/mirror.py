"""``portus mirror status|repair``: a mirror compared with its pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from functools import partial
from typing import Final

from portus.cli import words
from portus.cli.options import POOL, Text, argument, group, option
from portus.cli.output import FOUND, Json, Output, Row, counter
from portus.cli.pools import nearest, open_places
from portus.engine.copying.segments import Stop
from portus.engine.loading.open_file import OpenFile, open_file, reads
from portus.errors import (
    CorruptionError,
    PortusError,
    StaleError,
    UsageError,
    printable,
)
from portus.reach.index.place import Place, local_path
from portus.reach.mirror.address import MIRROR_VARIABLE, StoreAddress, parse
from portus.reach.mirror.files import MirroredFiles
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.mirrors import RUN_LOST, Mirrors
from portus.reach.mirror.objects import DIGEST_SUFFIX, VERSIONS, Added, FileObject
from portus.reach.places.base import StoredCheckpoint
from portus.reach.places.mirror import UNCOUNTED, claim, retry, term_of
from portus.reach.versions.take_files import digest_of

_Versions = dict[bytes, StoredCheckpoint]
"""Versions in the pools of this machine, by their tokens."""

_MIRROR: Final = argument("[MIRROR]", "the mirror; default: $PORTUS_MIRROR", None)


def status(output: Output, url: Text = _MIRROR, pool: Text = POOL) -> None:
    """Show what is mirrored, by which writer, and what is missing."""
    address = _address(url)
    documents: list[Json] = []
    rows: list[Row] = []
    with Mirrors(address) as mirrors, _local(pool) as local:
        models = mirrors.models()
        if not models:
            mirrors.require_log()
        for model, advice in mirrors.find_lost().items():
            output.code = FOUND
            output.line(f"{address}: {model}: {advice}")
        for model in models:
            state = mirrors.of(model).read()
            own = [each.info for each in local.values() if each.info.model == model]
            behind = [info.step for info in own if state.version(info.token) is None]
            newest, files = state.newest, [each for each in state.added if each.path]
            step, time_ns = (newest.step, newest.time_ns) if newest else (None, None)
            age = None if time_ns is None else words.age(time_ns)
            count, size = len(state.added), sum(each.size for each in state.added)  # or less
            lacks = "everything is mirrored" if own else ""
            if behind:
                lacks = f"{words.count(len(behind), 'version')} not mirrored"
                lacks += f", the newest of step {behind[-1]}"
            writer = state.term, state.who
            rows.append((model, step, age, count, words.size(size), *writer, lacks))
            documents.append(
                {
                    "name": model,
                    "newest": step,
                    "time_ns": time_ns,
                    "versions": len(state.added) - len(files),
                    "files": len(files),
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


def repair(
    output: Output,
    url: Text = _MIRROR,
    pool: Text = POOL,
    directory: Text = option("--files DIR", "where the run saves its files; default: here"),
) -> None:
    """Verify a mirror, and replace what is damaged or missing.

    It reads every byte. It sends versions again from the pool, and files of runs from the directory
    that they were mirrored from, if they are intact there. It also restores what the log of the
    mirror lost: versions that the pool has, and files that are in both places; if entries of the
    log are damaged, or all of it is lost, every file with its digest beside it. Exit code 1 if
    damage remains.
    """
    address = _address(url)
    root = local_path(directory or os.curdir, "--files")
    documents: list[Json] = []
    counts = {"version": 0, "file": 0, "log": 0, "object": 0}
    with Mirrors(address) as mirrors, _local(pool) as local:
        lost, own = mirrors.find_lost(), {each.info.model for each in local.values()}
        able = {model for model, advice in lost.items() if advice == RUN_LOST or model in own}
        models = sorted([*mirrors.models(), *able])
        if not models:
            mirrors.require_log()
            raise UsageError(
                f"{address}: there is no mirror to repair; what mirrors there sends all of it when "
                "it starts the next time"
            )
        for model in lost.keys() - able:
            output.code = FOUND
            output.line(f"{address}: {model}: {lost[model]}")
            documents.append({"model": model, "log": True, "result": "damaged"})
        for model in models:
            for kind, result, named, about in _results(mirrors, model, local, root):
                counts[kind] += result not in ("counted", "sent")  # these are read afterwards
                documents.append({"model": model, **about, "result": result})
                if result == "damaged":
                    output.code = FOUND
                if result != "whole":
                    output.line(f"{address}: {named} {_RESULTS[kind][result]}")
    damaged = sum(isinstance(each, dict) and each["result"] == "damaged" for each in documents)
    read = [
        words.count(counts[kind], kind)
        for kind in ("version", "file")
        if counts[kind] or kind == "version"
    ]
    output.line(f"{address}: {' and '.join(read)} read, {damaged} damaged")
    output.document({"mirror": str(address), "versions": documents})


def _results(
    mirrors: Mirrors, model: str, local: _Versions, root: str
) -> Iterator[tuple[str, str, str, dict[str, Json]]]:
    """Yield the result for each version of a model, and for each file of a run: its kind, the
    result, its name, and more fields for the document."""
    mirror = mirrors.of(model)
    mirror.read()
    has_lost = bool(mirror.damage) or not mirror.state.number
    if mirror.damage:
        retry(partial(claim, mirror, "mirror repair"))  # the claim writes all known facts again
        yield "log", "mended", f"{model}: its log", {"log": True}
    yield from _count_again(mirror, root, has_lost)
    state = mirror.read()
    for token, found in local.items():
        if found.info.model == model and state.version(token) is None:
            retry(partial(_send, mirror, found))
            yield "version", "sent", f"{model}@{found.info.step}", {"step": found.info.step}
    checkpoints = state.checkpoints
    with counter(model, sum(each.size for each in checkpoints)) as add:
        for added in checkpoints:
            kind, result, named = "version", "whole", f"{model}@{added.step}"
            about: dict[str, Json] = {"step": added.step}
            if added.path:
                kind, named = "file", f"{model}: {printable(added.path)}"
                about["file"] = added.path
            damaged: Collection[str] = ()
            try:
                damaged = mirror.find_damage(added, lambda _: None)
            except StaleError:
                result = "removed"
            if damaged and not added.path:
                result = _mend_version(mirror, added, local.get(added.token), damaged)
            elif damaged:
                result = _mend_files(mirror, added, root, damaged)
            add(added.size)
            yield kind, result, named, about


_RESULTS: Final = {
    "version": {
        "mended": "was damaged, and is repaired from the pool",
        "damaged": "is DAMAGED, and the pool has no intact copy of it; portus rm removes it",
        "sent": "was not there, and is sent from the pool",
        "removed": "was removed meanwhile",
    },
    "file": {
        "mended": "was damaged, and is repaired from the directory of the run",
        "damaged": "is DAMAGED, and the directory of the run (--files) has no intact copy of it; "
        "portus rm removes it",
        "counted": "had no entry of the log, and counts again",
        "removed": "was removed or replaced meanwhile",
    },
    "log": {
        "mended": "was DAMAGED, and was rewritten with what is known; the rest is lost",
        "restored": "was LOST, and was made anew from the digests beside its files",
    },
    "object": {"uncounted": UNCOUNTED, "damaged": UNCOUNTED},
}


def _mend_version(
    mirror: Mirror, added: Added, found: StoredCheckpoint | None, damaged: Collection[str]
) -> str:
    with contextlib.suppress(CorruptionError):
        if found is not None:
            with found.open() as opened:
                assert opened.version is not None
                reader, number = opened.version.reader, opened.version.record.info.id
                mirror.mend(added, damaged, reader, number, Stop())
            return "mended"
    return "damaged"


def _mend_files(mirror: MirroredFiles, added: Added, root: str, damaged: Collection[str]) -> str:
    results = set()
    for path, each in added.paths.items():
        if each.name in damaged and _time_here(path, each, root) is None:
            results.add("damaged")
        elif each.name in damaged:
            with open_file(os.path.join(root, path), as_torch=False) as file:
                results.add(retry(partial(_send_file, mirror, added, path, file)))
    return min(results)  # "damaged" before "mended" before "removed"


def _send_file(mirror: MirroredFiles, added: Added, path: str, file: OpenFile) -> str:
    claim(mirror, "mirror repair")
    return "mended" if mirror.mend_file(added, path, file) else "removed"


def _count_again(
    mirrored: MirroredFiles, root: str, has_lost: bool
) -> Iterator[tuple[str, str, str, dict[str, Json]]]:
    """Make objects count that lost their entry of the log, if they are files of the run; and if the
    log ``has_lost`` entries, all that have a digest beside them. Yields as ``_results``."""
    is_new = not mirrored.read().number
    lost, saved_ns = [], dict[str, int]()
    for each in mirrored.find_lost():
        times = {path: _time_here(path, file, root) for path, file in each.paths.items()}
        known = {path: time_ns for path, time_ns in times.items() if time_ns is not None}
        saved_ns |= known
        if has_lost or len(known) == len(times):
            lost.append(each)

    def restore() -> None:
        claim(mirrored, "mirror repair")
        mirrored.restore(lost, saved_ns)

    if lost:
        retry(restore)
    if is_new and lost:
        yield (
            "log",
            "restored",
            f"{mirrored.model}: its log",
            {"log": True, "files": sum(len(each.files) for each in lost)},
        )
    for each in lost:
        path = f"{mirrored.model}: {printable(each.path)}"
        yield "file", "counted", path, {"step": each.step, "file": each.path}
    for name in [each.name for each in mirrored.objects_without_entry()]:
        if not name.endswith(DIGEST_SUFFIX):
            # What a version was is known to the pool alone, from which it is sent.
            is_lost = has_lost and not name.startswith(VERSIONS)
            result = "damaged" if is_lost else "uncounted"
            yield "object", result, f"{mirrored.model}: {printable(name)}", {"object": name}


def _time_here(path: str, file: FileObject, root: str) -> int | None:
    """Return when a file of the mirror was changed in the directory of the run; None if it is not
    there, or has other bytes."""
    path = os.path.join(root, path)
    with (
        contextlib.suppress(OSError, PortusError),
        open_file(path, as_torch=False) as opened,
    ):
        if opened.size == file.size and digest_of(reads(opened), 0, file.size) == file.digest:
            return os.stat(path).st_mtime_ns
    return None


def _send(mirror: Mirror, found: StoredCheckpoint) -> None:
    """Send a version from the pool."""
    # Entries of the log count only for the holder of the term (decision 0141).
    claim(mirror, "mirror repair")
    with found.open() as opened:
        assert opened.version is not None
        mirror.copy(opened.version.reader, opened.version.record.info.id, Stop())


def _address(url: str | None) -> StoreAddress:
    said = url or os.environ.get(MIRROR_VARIABLE)
    if not said:
        raise UsageError(f"no mirror given: pass its address or set ${MIRROR_VARIABLE}")
    return parse(said, "MIRROR")


@contextlib.contextmanager
def _local(pool: str | None) -> Iterator[_Versions]:
    """Yield the versions in the pools here; none, if no pool was named and none is nearby."""
    if pool is None and Place.by_variable() is None and nearest(os.getcwd()) is None:
        yield {}
        return
    with open_places(pool, mirrors=False) as places:
        yield {each.info.token: each for each in places.list()}


commands: Final = group("Compare a mirror with its pool, or repair the mirror.", status, repair)
