"""``portus export MODEL[@STEP] OUT``: a version as a file that others read."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from portus.cli import safetensors
from portus.cli.output import Output, count_text, size_text
from portus.cli.pools import Found, newest, open_pools, version_document
from portus.cli.progress import Progress, bar
from portus.cli.safetensors import Placed
from portus.cli.tensors import Storages, tensor_bytes
from portus.client.tree import decode, distinct, leaf_nodes, tensor_index
from portus.errors import CorruptionError, MediumError, UsageError
from portus.format.layout import Kind
from portus.index.records import VersionRecord, decode_layout
from portus.spec import TensorSpec

TORCH_SUFFIXES: Final = (".pt", ".pth", ".ckpt")
SAFETENSORS_SUFFIX: Final = ".safetensors"

_NAMED_MAX: Final = 5
"""Names that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to export. ``names``: shell patterns of key paths; none means all. ``strip``: taken off
    the front of names (safetensors only). ``force``: put it in place of what is at ``out``."""

    target: str
    out: str
    names: Sequence[str] = ()
    strip: str = ""
    force: bool = False


@dataclass(slots=True)
class Done:
    """What was exported, and what was not."""

    size: int = 0
    tensors: int = 0
    shared: list[list[str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def run(wish: Wish, pool: str | None, output: Output) -> int:
    """Export; the exit code."""
    suffix = os.path.splitext(wish.out)[1].lower()
    if suffix not in (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX):
        known = ", ".join((SAFETENSORS_SUFFIX, *TORCH_SUFFIXES))
        raise UsageError(f"{wish.out}: expected a name that ends in one of {known}")
    if os.path.lexists(wish.out) and not wish.force:
        raise UsageError(f"{wish.out} is there already; --force puts the export in its place")
    write = _write_safetensors if suffix == SAFETENSORS_SUFFIX else _write_torch
    with open_pools(pool, wish.target) as pools:
        found = newest(pools.select(wish.target))
        try:
            with _in_place(wish.out) as temporary:
                done = write(found, wish, temporary)
        except CorruptionError as error:
            info = found.info
            raise CorruptionError(
                f"{info.model}@{info.step} was not exported, {wish.out} is as it was: {error}"
            ) from error
    _say(found, wish, done, output)
    output.document(
        {
            **version_document(found.info),
            "pool": found.path,
            "out": os.path.abspath(wish.out),
            "size": done.size,
            "tensors": done.tensors,
            "shared": [list(names) for names in done.shared],
            "left_out": list(done.left_out),
        }
    )
    return 0


def _say(found: Found, wish: Wish, done: Done, output: Output) -> None:
    for names in done.shared:
        listed = _listed(names)
        output.note(
            f"note: these share memory in the version, and are written one by one: {listed}"
        )
    if done.left_out:
        count = count_text(len(done.left_out), "value")
        output.note(f"note: left out {count} that safetensors has not: {_listed(done.left_out)}")
    info = found.info
    output.line(
        f"{wish.out}: {info.model}@{info.step}, {count_text(done.tensors, 'tensor')}, "
        f"{size_text(done.size)}, verified"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more


@contextlib.contextmanager
def _in_place(out: str) -> Iterator[str]:
    """A path beside ``out``; what is there at the end is synced by then, and becomes ``out``."""
    directory = os.path.dirname(os.path.abspath(out))
    temporary = os.path.join(directory, f".{os.path.basename(out)}.{os.getpid()}.portus")
    try:
        yield temporary
        os.replace(temporary, out)
        _sync(directory)
    except MediumError:
        raise
    except OSError as error:
        raise MediumError(error.errno, f"cannot write {out}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _sync(directory: str) -> None:
    if os.name == "posix":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_torch(found: Found, wish: Wish, temporary: str) -> Done:
    """The state, as ``torch.save`` writes it. It is in memory once."""
    from portus.client import restore
    from portus.client.materialize import write_torch_file

    if wish.strip:
        raise UsageError("--strip is for .safetensors files")
    _check_room(wish.out, found.info.size)
    state = restore.load(found.reader, found.entry, list(wish.names) or None)
    write_torch_file(temporary, state)
    with found.reader.pinned(found.info.id) as entry:
        record = found.reader.record(entry)
        tensors = _layout(found, record)
    count = sum(_is_wanted(spec.name, wish.names) for spec in tensors)
    return Done(os.stat(temporary).st_size, count)


def _write_safetensors(found: Found, wish: Wish, temporary: str) -> Done:
    """The tensors, streamed: neither they nor the file are in memory at once."""
    reader = found.reader
    with reader.pinned(found.info.id) as entry:
        record = reader.record(entry)
        tensors, left_out = _tensors(found, record, wish)
        placed = safetensors.place(tensors)
        head = safetensors.header(placed, _metadata(found))
        size = len(head) + sum(each.size for each in placed)
        _check_room(wish.out, size)
        with bar(os.path.basename(wish.out)) as advanced, open(temporary, "wb") as file:
            file.write(head)
            for piece in _pieces(Storages(reader, record), placed, wish.out, advanced):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    if os.stat(temporary).st_size != size:
        raise CorruptionError(f"{wish.out}: the tensors do not have the sizes that the layout says")
    return Done(size, len(placed), safetensors.shared(tensors), left_out)


def _pieces(
    storages: Storages, placed: Sequence[Placed], out: str, advanced: Progress
) -> Iterator[memoryview]:
    near = os.path.dirname(os.path.abspath(out))
    done, total = 0, sum(each.size for each in placed)
    for each in placed:
        try:
            for piece in tensor_bytes(storages, each.spec, near):
                yield piece
                done += len(piece)
                advanced(done, total)
        except CorruptionError as error:
            raise CorruptionError(f"{each.spec.name}: {error}") from error


def _tensors(
    found: Found, record: VersionRecord, wish: Wish
) -> tuple[dict[str, TensorSpec], list[str]]:
    """The tensors to write by the name they get, and the key paths of what is left out."""
    specs = _layout(found, record)
    root = decode(bytes(found.reader.payload(record.tree, Kind.TREE)))
    leaves = list(leaf_nodes(root))
    tensors: dict[str, TensorSpec] = {}
    left_out = []
    for path, (_, node) in zip(distinct([path for path, _ in leaves]), leaves, strict=True):
        if not _is_wanted(path, wish.names):
            continue
        index = tensor_index(node)
        is_tensor = isinstance(node, dict) and "$tensor" in node
        if index is None or not is_tensor or specs[index].storage < 0:
            left_out.append(path)
            continue
        name = path.removeprefix(wish.strip) or "tensor"
        if name in tensors:
            raise UsageError(f"two tensors would be called {name}; strip less")
        tensors[name] = specs[index]
    if not tensors:
        raise UsageError(f"{wish.target} has no tensor of such a name; portus show lists them")
    return tensors, left_out


def _layout(found: Found, record: VersionRecord) -> tuple[TensorSpec, ...]:
    return decode_layout(found.reader.payload(record.layout, Kind.LAYOUT))


def _is_wanted(path: str, names: Sequence[str]) -> bool:
    """As in ``Checkpointer.load``."""
    return not names or any(
        fnmatch.fnmatchcase(path, name) or path.startswith(name + ".") for name in names
    )


def _metadata(found: Found) -> dict[str, str]:
    info = found.info
    about = {"model": info.model, "step": info.step, "token": info.token.hex()}
    return {"format": "pt", "portus": json.dumps(about)}


def _check_room(out: str, size: int) -> None:
    directory = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(directory):
        raise UsageError(f"{directory}: there is no such directory")
    free = shutil.disk_usage(directory).free
    if size > free:
        raise MediumError(
            28, f"{out}: {size_text(size)} are needed, but {directory} has {size_text(free)} free"
        )
