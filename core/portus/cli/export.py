"""``portus export MODEL[@STEP] OUT``: a version, or a group of a sharded job, for others."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from portus.cli import files
from portus.cli.consolidate import (
    Box,
    Part,
    directory_in_place,
    prefix_of,
    sync_directory,
    whole_spec,
    write_directory,
    write_files,
)
from portus.cli.grouped import FoundGroup, cuts_of, find_groups, newest_complete, opened_part
from portus.cli.output import Json, Output, count_text, size_text
from portus.cli.pools import FoundVersion, aimed, newest, open_pools, version_document
from portus.cli.progress import bar
from portus.cli.tables import batches_of
from portus.client.leaving import safetensors
from portus.client.loading.contents import Storages
from portus.client.state.tree import (
    ELSEWHERE,
    decode,
    distinct,
    leaf_nodes,
    object_paths,
    objects_of,
    tensor_index,
)
from portus.errors import CorruptionError, MediumError, UsageError
from portus.format.arrays import read_shape
from portus.format.layout import RecordKind
from portus.image.safetensors import DTYPES, SUFFIX
from portus.index.log import logged
from portus.index.place import Place, local_path
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry, VersionRecord, decode_layout
from portus.media.names import hidden
from portus.spec import TensorSpec

if TYPE_CHECKING:
    from portus.client.leaving.whole import LocatedTable
    from portus.client.shards.cuts import Cut

TORCH_SUFFIXES: Final = (".pt", ".pth", ".ckpt")

Tensor = TypeVar("Tensor")

_NAMED_MAX: Final = 5
"""Names that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What to export. ``names``: shell patterns of key paths; none means all. ``strip``: taken off
    the front of names (safetensors only). ``force``: put it in place of what is at ``out``.
    ``limit``: bytes of the tensors of a file, where ``out`` is a directory. ``tables_pool``: where
    the pool of protected tables is now, if it was moved."""

    target: str
    out: str
    names: Sequence[str] = ()
    strip: str = ""
    force: bool = False
    limit: int = 5_000_000_000
    tables_pool: str | None = None

    @property
    def is_directory(self) -> bool:
        """True if ``out`` is a directory to make, in the layout of Hugging Face."""
        return not os.path.splitext(self.out.rstrip(os.sep))[1] or self.out.endswith(os.sep)


@dataclass(slots=True)
class ExportResult:
    """What was exported, and what was not."""

    size: int = 0
    tensors: int = 0
    shared: list[list[str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    no_weights: list[str] = field(default_factory=list)
    batches: dict[str, int] = field(default_factory=dict)
    """The batch up to which each part of protected tables is."""


@dataclass(slots=True)
class Job:
    """What is to be written. ``title``: for people; ``about``: for machines. ``tensors``: by the
    name they get. ``parts``: where their pieces are."""

    title: str
    about: dict[str, Json]
    metadata: dict[str, str]
    tensors: dict[str, TensorSpec]
    parts: list[Part]
    done: ExportResult


def run(options: ExportOptions, pool: str | None, output: Output) -> int:
    """Export; the exit code."""
    local_path(options.out, "OUT")  # raises for a URL
    suffix = os.path.splitext(options.out)[1].lower()
    if not options.is_directory and suffix not in (*TORCH_SUFFIXES, SUFFIX):
        known = ", ".join((SUFFIX, *TORCH_SUFFIXES))
        raise UsageError(
            f"{options.out}: expected a directory, or a name that ends in one of {known}"
        )
    if not options.is_directory and os.path.lexists(options.out) and not options.force:
        raise UsageError(f"{options.out} already exists; --force replaces it")
    path = files.meant(options.target, pool)
    if path is not None:
        return _run_file(path, options, output)
    target, pool = aimed(options.target, pool)
    options = replace(options, target=target)
    with (
        open_pools(pool, options.target, mirrors=True) as pools,
        contextlib.ExitStack() as stack,
    ):
        groups = find_groups(pools, options.target)
        if groups:
            job = _group_job(newest_complete(groups, options.target), options)
        else:
            found = newest(pools.select(options.target))
            if suffix in TORCH_SUFFIXES and not options.is_directory:
                return _run_torch(found, options, output)
            job = _version_job(found, options, stack)
        _write(job, options)
    _say(job.title, options, job.done, output)
    output.document(
        {
            **job.about,
            "out": os.path.abspath(options.out),
            "size": job.done.size,
            "tensors": job.done.tensors,
            "shared": [list(names) for names in job.done.shared],
            "left_out": list(job.done.left_out),
            "no_weights": list(job.done.no_weights),
            "batches": dict(job.done.batches),
        }
    )
    return 0


def _run_file(path: str, options: ExportOptions, output: Output) -> int:
    """Export what ``names`` say of a torch file, or all of it."""
    if os.path.isdir(path):
        raise UsageError(f"{path}: expected a torch file, found a directory; name one of its files")
    from portus.client.leaving import from_file  # and torch with it

    is_directory = options.is_directory
    made = partial(directory_in_place, force=options.force) if is_directory else _in_place
    with _kept(options, path), made(options.out.rstrip(os.sep)) as temporary:
        done = from_file.write(
            path,
            temporary,
            names=options.names,
            strip=options.strip,
            is_torch=not is_directory and not options.out.lower().endswith(SUFFIX),
            limit=options.limit if is_directory else None,
            weights_of=partial(_weights, options=options),
        )
    result = ExportResult(done.size, done.tensors, done.shared, done.left_out, done.no_weights)
    _say(path, options, result, output)
    output.document(
        {
            "file": os.path.abspath(path),
            "out": os.path.abspath(options.out),
            "size": done.size,
            "tensors": done.tensors,
            "shared": [list(names) for names in done.shared],
            "left_out": list(done.left_out),
            "no_weights": list(done.no_weights),
        }
    )
    return 0


def size_of(text: str) -> int:
    """Bytes, of a text like ``5GB``, ``500MB`` or ``1GiB``. Raises ``UsageError``."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"--shard-size: expected a size such as 5GB, found {text!r}")
    base = 1024 if match[3] else 1000
    return int(match[1]) * int(base ** ("kmgt".index(match[2].lower()) + 1 if match[2] else 0))


def _run_torch(found: FoundVersion, options: ExportOptions, output: Output) -> int:
    with _kept(options, _title(found)), _in_place(options.out) as temporary:
        done = _write_torch(found, options, temporary)
    _say(_title(found), options, done, output)
    output.document(
        {
            **version_document(found.info),
            "pool": found.path,
            "out": os.path.abspath(options.out),
            "size": done.size,
            "tensors": done.tensors,
            "shared": [],
            "left_out": [],
            "no_weights": [],
            "batches": dict(done.batches),
        }
    )
    return 0


@contextlib.contextmanager
def _kept(options: ExportOptions, title: str) -> Iterator[None]:
    try:
        yield
    except CorruptionError as error:
        raise CorruptionError(
            f"{title} was not exported, {options.out} is as it was: {error}"
        ) from error


def _title(found: FoundVersion) -> str:
    return f"{found.info.model}@{found.info.step}"


def _write(job: Job, options: ExportOptions) -> None:
    """The tensors, streamed: neither they nor the files are in memory at once."""
    out = options.out.rstrip(os.sep)
    placed = safetensors.place(job.tensors)
    _check_room(out, sum(each.size for each in placed))
    job.done.tensors = len(placed)
    with _kept(options, job.title), bar(os.path.basename(out)) as advanced:
        if options.is_directory:
            with directory_in_place(out, force=options.force) as temporary:
                job.done.size = write_directory(
                    temporary, job.tensors, job.parts, job.metadata, options.limit, advanced
                )
        else:
            with _in_place(out) as temporary:
                files = [(temporary, placed)]
                job.done.size = write_files(files, job.parts, job.metadata, advanced)


def _version_job(found: FoundVersion, options: ExportOptions, stack: contextlib.ExitStack) -> Job:
    """stack: lets go of the versions that the tables are in."""
    with found.reader.pinned(found.entry.info.id) as entry:
        record = found.reader.record(entry)
        tensors, left_out = _tensors(found, record, options)
        batches = _batches(found, record)
        tables = {}
        if objects_of(_tree(found, record), ELSEWHERE):
            tables = _tables(found, options, stack)
    _add_tables(tensors, tables, options, first=len(record.storages))
    if not tensors:
        raise UsageError(f"{options.target} has no tensor of such a name; portus show lists them")
    tensors, no_weights = _weights(tensors, options)
    own = {name: spec for name, spec in tensors.items() if spec.name not in tables}
    parts = [Part("", found, _boxes_of(own)), *_table_parts(tensors, tables)]

    return Job(
        title=_title(found),
        about={**version_document(found.info), "pool": found.path},
        metadata=_metadata(found),
        tensors=tensors,
        parts=parts,
        done=ExportResult(
            shared=safetensors.shared(tensors),
            left_out=left_out,
            no_weights=no_weights,
            batches=batches,
        ),
    )


def _boxes_of(
    specs: dict[str, TensorSpec],
) -> Callable[[FoundVersion], contextlib.AbstractContextManager[tuple[VersionRecord, list[Box]]]]:
    """Return the boxes of a part that has these tensors whole."""

    @contextlib.contextmanager
    def boxes(part: FoundVersion) -> Iterator[tuple[VersionRecord, list[Box]]]:
        with part.reader.pinned(part.entry.info.id) as entry:
            yield (
                part.reader.record(entry),
                [Box(n, (0,) * len(t.shape), t.shape, t) for n, t in specs.items()],
            )

    return boxes


def _tables(
    found: FoundVersion, options: ExportOptions, stack: contextlib.ExitStack
) -> dict[str, LocatedTable]:
    """The protected tables to write, by key path. stack: lets go of the versions that they are in.
    Raises ``UsageError``, ``MediumError`` or ``CorruptionError`` for one that is not there."""
    from portus.client.leaving.whole import located

    def is_wanted(path: str) -> bool:
        return _is_wanted(path, options.names)

    return located(found.reader, found.entry, is_wanted, stack, options.tables_pool)


def _add_tables(
    tensors: dict[str, TensorSpec],
    tables: dict[str, LocatedTable],
    options: ExportOptions,
    *,
    first: int,
) -> None:
    """first: what stands for the first of their storages, which are no others'."""
    indices: dict[tuple[bytes, int], int] = {}
    for path, table in tables.items():
        name = path.removeprefix(options.strip) or "tensor"
        if name in tensors:
            raise UsageError(f"two tensors would be called {name}; strip less")
        spec = table.spec
        key = table.entry.info.token, spec.storage
        index = indices.setdefault(key, first + len(indices))
        tensors[name] = whole_spec(path, spec.dtype, spec.shape, index)


def _table_parts(tensors: dict[str, TensorSpec], tables: dict[str, LocatedTable]) -> Iterator[Part]:
    """What the versions contribute that the tables are in; ``tensors`` says what each is called."""
    by_version: dict[bytes, dict[str, LocatedTable]] = {}
    for name, spec in tensors.items():
        if table := tables.get(spec.name):
            by_version.setdefault(table.entry.info.token, {})[name] = table
    for named in by_version.values():
        table = next(iter(named.values()))
        opened = table.pool, table.entry
        place = Place.named(table.pool.medium.info.name)
        found = FoundVersion(place, table.entry.info, partial(_same, opened), list)
        yield Part(
            f"{place}: ", found, _boxes_of({name: each.spec for name, each in named.items()})
        )


def _same(opened: tuple[PoolReader, VersionEntry]) -> tuple[PoolReader, VersionEntry]:
    return opened


def _group_job(found: FoundGroup, options: ExportOptions) -> Job:
    group = found.group
    if os.path.splitext(options.out)[1].lower() in TORCH_SUFFIXES and not options.is_directory:
        raise UsageError(
            f"{options.target} is sharded over {group.count} ranks: export it to a .safetensors "
            "file, or to a directory"
        )
    for part in found.parts.values():
        with opened_part(part) as (record, _):
            tables = objects_of(_tree(part, record), ELSEWHERE)
        if tables:
            raise UsageError(
                f"{options.target} is sharded, and has protected tables, which cannot be exported "
                "with it: portus materialize its directory, which fills them in"
            )
    cuts, left_out = cuts_of(found)
    names = [name for name in cuts if _is_wanted(name, options.names)]
    if not names:
        raise UsageError(f"{options.target} has no tensor of such a name; portus show lists them")
    tensors: dict[str, TensorSpec] = {}
    source: dict[str, str] = {}
    for index, name in enumerate(names):
        short = name.removeprefix(options.strip) or "tensor"
        if short in tensors:
            raise UsageError(f"two tensors would be called {short}; strip less")
        tensors[short] = whole_spec(name, cuts[name].dtype, cuts[name].shape, index)
        source[short] = name
    tensors, no_weights = _weights(tensors, options)

    @contextlib.contextmanager
    def boxes(part: FoundVersion) -> Iterator[tuple[VersionRecord, list[Box]]]:
        rank = next(rank for rank, each in found.parts.items() if each is part)
        with opened_part(part) as (record, shards):
            yield record, list(_boxes(rank, tensors, cuts, shards))

    return Job(
        title=f"{group.model}@{group.step} of {group.count} ranks",
        about={"model": group.model, "step": group.step, "ranks": group.count},
        metadata={
            "format": "pt",
            "portus": json.dumps(
                {"model": group.model, "step": group.step, "group": group.id.hex()}
            ),
        },
        tensors=tensors,
        parts=[Part(f"rank {rank}: ", part, boxes) for rank, part in found.parts.items()],
        done=ExportResult(left_out=left_out if not options.names else [], no_weights=no_weights),
    )


def _boxes(
    rank: int, tensors: dict[str, TensorSpec], cuts: dict[str, Cut], shards: dict[str, TensorSpec]
) -> Iterator[Box]:
    """The pieces that a rank has of tensors; their specs have the names from before stripping."""
    for name, whole in tensors.items():
        for piece in cuts[whole.name].pieces:
            if piece.at.rank != rank:
                continue
            spec = shards.get(piece.at.key)
            if spec is None or spec.shape != piece.sizes or spec.dtype != whole.dtype:
                raise CorruptionError(f"rank {rank} has no {piece.sizes} piece of {whole.name}")
            yield Box(name, piece.offsets, piece.sizes, spec)


def _weights(
    tensors: dict[str, Tensor], options: ExportOptions
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights, by the names that a model has for them, and the names of the rest; for
    anything but a directory of which nobody said more, all tensors."""
    if not options.is_directory or options.names or options.strip:
        return tensors, []
    prefix = prefix_of(list(tensors))
    rest = [name for name in tensors if not name.startswith(prefix)]
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, rest


def _say(title: str, options: ExportOptions, done: ExportResult, output: Output) -> None:
    for names in done.shared:
        listed = _listed(names)
        output.note(f"note: these share memory, and are written separately: {listed}")
    if len({*done.batches.values()}) > 1:
        parts = ", ".join(f"the {name} at batch {number}" for name, number in done.batches.items())
        output.note(f"note: this is of several batches, as relaxed mode leaves it: {parts}")
    if done.left_out:
        count = count_text(len(done.left_out), "value")
        output.note(
            f"note: left out {count} that safetensors cannot hold: {_listed(done.left_out)}"
        )
    if done.no_weights:
        count = count_text(len(done.no_weights), "tensor")
        output.note(
            f"note: left out {count} that are not weights of the model: "
            f"{_listed(done.no_weights)}; use --names for others"
        )
    output.line(
        f"{options.out}: {title}, {count_text(done.tensors, 'tensor')}, "
        f"{size_text(done.size)}, verified"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more


@contextlib.contextmanager
def _in_place(out: str) -> Iterator[str]:
    """A path beside ``out``; what is there at the end is synced by then, and becomes ``out``."""
    directory = os.path.dirname(os.path.abspath(out))
    temporary = os.path.join(directory, hidden(os.path.basename(out), f".{os.getpid()}.portus"))
    try:
        yield temporary
        os.replace(temporary, out)
        sync_directory(directory)
    except MediumError:
        raise
    except OSError as error:
        raise MediumError(error.errno, f"cannot write {out}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _write_torch(found: FoundVersion, options: ExportOptions, temporary: str) -> ExportResult:
    """The state, as ``torch.save`` writes it. What of it is no tensor is in memory."""
    from portus.client.leaving import torch_file
    from portus.client.loading.patterns import matcher
    from portus.client.loading.restore import named

    if options.strip:
        raise UsageError("--strip is for .safetensors files")
    keep = matcher(list(options.names) or None)
    _check_room(options.out, 0)  # before the temporary file, which lies beside it
    with open(temporary, "wb") as file:
        torch_file.write(
            found.reader,
            found.entry,
            file,
            keep=keep,
            tables_pool=options.tables_pool,
            fits=lambda size: _check_room(options.out, size),
        )
        file.flush()
        os.fsync(file.fileno())
    if keep is not None:
        keep.complain(named(found.info))
    with found.reader.pinned(found.entry.info.id) as entry:
        record = found.reader.record(entry)
        tensors = _layout(found, record)
        batches = _batches(found, record)
    count = sum(_is_wanted(spec.name, options.names) for spec in tensors)
    return ExportResult(os.stat(temporary).st_size, count, batches=batches)


def _tensors(
    found: FoundVersion, record: VersionRecord, options: ExportOptions
) -> tuple[dict[str, TensorSpec], list[str]]:
    """The tensors to write by the name they get, and the key paths of what is left out; protected
    tables, which are in another pool, are neither."""
    specs = _layout(found, record)
    tree = _tree(found, record)
    tables, owners = objects_of(tree, ELSEWHERE), object_paths(tree)
    leaves = list(leaf_nodes(decode(tree)))
    tensors: dict[str, TensorSpec] = {}
    left_out = []
    for path, (_, node) in zip(distinct([path for path, _ in leaves]), leaves, strict=True):
        if not _is_wanted(path, options.names) or owners.get(path) in tables:
            continue
        spec = _tensor_of(node, specs, arrays=record.log is not None)
        if spec is None:
            left_out.append(path)
            continue
        name = path.removeprefix(options.strip) or "tensor"
        if name in tensors:
            raise UsageError(f"two tensors would be called {name}; strip less")
        tensors[name] = spec
    return tensors, left_out


def _tensor_of(node: object, specs: Sequence[TensorSpec], *, arrays: bool) -> TensorSpec | None:
    """The tensor of a leaf, if it is one. arrays: one of numpy is one too, if it has a storage, and
    a dtype and an order that tensors have: a shelf has little else."""
    index = tensor_index(node)
    if index is None or not isinstance(node, dict) or specs[index].storage < 0:
        return None
    if "$tensor" in node:
        return specs[index]
    if not arrays or "$array" not in node:
        return None
    _, dtype, sizes, fortran = node["$array"]
    shape = read_shape(dtype, sizes, fortran)
    offset, gap = divmod(specs[index].offset, shape.dtype.itemsize or 1)
    is_plain = shape.dtype.name in DTYPES and shape.dtype.isnative
    if not is_plain or shape.fortran or gap:
        return None
    own = specs[index]
    made = whole_spec(own.name, shape.dtype.name, shape.shape, own.storage)
    return msgspec.structs.replace(made, offset=offset)


def _tree(found: FoundVersion, record: VersionRecord) -> bytes:
    return bytes(found.reader.payload(record.tree, RecordKind.TREE))


def _batches(found: FoundVersion, record: VersionRecord) -> dict[str, int]:
    medium = found.reader.medium
    storages = Storages(found.reader, record, logged(medium, record))
    return batches_of(_layout(found, record), storages)


def _layout(found: FoundVersion, record: VersionRecord) -> tuple[TensorSpec, ...]:
    return decode_layout(found.reader.payload(record.layout, RecordKind.LAYOUT))


def _is_wanted(path: str, names: Sequence[str]) -> bool:
    """Return whether ``path`` is wanted, by the rule of ``names`` in ``Checkpointer.load``."""
    return not names or any(
        fnmatch.fnmatchcase(path, name) or path.startswith(name + ".") for name in names
    )


def _metadata(found: FoundVersion) -> dict[str, str]:
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
