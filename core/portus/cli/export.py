"""``portus export TARGET OUT``: a checkpoint in a pool as its original files, or any checkpoint as
a file of another kind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from portus.cli import files, words
from portus.cli.in_place import check_room, in_place
from portus.cli.options import POOL_OR_MIRROR, TARGET, Text, Texts, argument, flag, option
from portus.cli.output import Json, Output, counter
from portus.cli.pools import open_places, version_document
from portus.engine.directory.folder import FOLDER
from portus.engine.loading.open_file import OpenFile
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError, UsageError
from portus.reach.files.reference import read_reference
from portus.reach.format.reference import Reference
from portus.reach.formats.safetensors import SUFFIX
from portus.reach.index.place import local_path
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.leaving.options import TORCH_SUFFIXES, ExportOptions, WrittenExport
from portus.reach.media.local import LocalFiles
from portus.reach.places.base import CheckpointFile, OpenCheckpoint
from portus.reach.places.opening import newest
from portus.reach.pools.resolve import use_reference
from portus.reach.versions.open_version import open_version

_NAMED_MAX: Final = 5
"""Names that a message lists."""


def command(
    output: Output,
    target: str = TARGET,
    out: str = argument("OUT", "a .safetensors or .pt file, or a directory"),
    pool: Text = POOL_OR_MIRROR,
    file: Text = option("--file NAME", "the one file to take, if it has several"),
    names: Texts = option("--names -n PATTERN", "only matching names, such as 'model.*'"),
    strip: str = option("--strip PREFIX", "remove this prefix from names", ""),
    force: bool = flag("--force -f", "replace OUT if it exists"),
    shard_size: str = option(
        "--shard-size SIZE", "the most bytes of each file, if OUT is a directory", "5GB"
    ),
) -> None:
    """Write a version, verified, as its own file, byte for byte; or a version or a file as
    safetensors or as a torch file.

    MODEL may be a pointer, or a directory of pointers: OUT gets the files they refer to. Without a
    step: the newest version of the model. If there are several files, OUT is a directory for all.

    With --names, or an OUT of another kind, the file is converted, without running any code that it
    names. Safetensors hold only contiguous tensors: other values are left out, and tensors that
    share memory are written separately. The numpy arrays of a shelf become tensors. A directory
    gets the weights as model.safetensors, or as files of at most --shard-size and an index.
    """
    options = ExportOptions(
        out=out,
        file=file,
        names=names or (),
        strip=strip,
        force=force,
        limit=size_of(shard_size),
    )
    local_path(out, "OUT")  # raises for a URL
    path = files.find_files(target, pool)
    if os.path.isdir(target) and _has_pointers(target):
        path = target
    title = target
    try:
        if path is None:
            with open_places(pool, target) as places:
                found = newest(places.select())
                title = found.name
                about: dict[str, Json] = {**version_document(found.info), "pool": found.place.path}
                with found.open() as opened:
                    done = _write_version(opened, found.info, title, options)
        else:
            about = {"file": os.path.abspath(path)}
            done = (_write_directory if os.path.isdir(path) else _write_file)(path, options)
    except CorruptionError as error:
        text = f"{title} was not exported, {out} is as it was: {error}"
        raise CorruptionError(text) from error
    below = [os.path.join(at, name) for at, _, names_at in os.walk(out) for name in names_at]
    done.size = sum(map(os.path.getsize, below or [out]))
    _show(title, about, done, options, output)


def size_of(text: str) -> int:
    """Return the bytes of a text like ``5GB``, ``500MB`` or ``1GiB``. Raises ``UsageError``."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"--shard-size: expected a size such as 5GB, found {text!r}")
    base = 1024 if match[3] else 1000
    return int(match[1]) * int(base ** ("kmgt".index(match[2].lower()) + 1 if match[2] else 0))


def _write(file: CheckpointFile, name: str, path: str) -> None:
    """Write a file of a checkpoint to ``path``, verified."""
    with counter(name, file.size) as add, open(path, "w+b") as out:
        file.write(out.fileno(), path, add)


def _write_version(
    opened: OpenCheckpoint, info: VersionInfo, title: str, options: ExportOptions
) -> WrittenExport:
    """Write all files of a checkpoint, or the one that the options name; or its state, if it has no
    files, as a shelf and tables."""
    names = list(opened.files)
    if not names:
        return _write_state(opened, info, title, options)
    if len(names) > 1 and options.file is None:
        if options.names or options.strip:
            raise UsageError(f"{title} has several files, and --names is for one of them: --file")
        size = sum(each.size for each in opened.files.values())
        made = {name.partition("/")[0] for name in names}.__contains__
        with in_place(options.out, force=options.force, made=made, size=size) as directory:
            for name, file in opened.files.items():
                path = os.path.join(directory, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _write(file, name, path)
        return WrittenExport(exact=True)
    name = options.file or names[0]
    if name not in names:
        raise UsageError(f"there is no file {name!r} in {title}; it has {names!r:.500}")
    file = opened.files[name]
    if options.is_exact(name):
        with in_place(options.out, force=options.force, size=file.size) as out:
            _write(file, name, out)
        return WrittenExport(exact=True)
    return _convert(file, title, options, file.size)


def _write_state(
    opened: OpenCheckpoint, info: VersionInfo, title: str, options: ExportOptions
) -> WrittenExport:
    from portus.reach.pools.state_file import StateFile  # and torch with it

    if options.is_directory or options.file is not None:
        raise UsageError(
            f"{title} has no files: export it to a {SUFFIX} or {TORCH_SUFFIXES[0]} file"
        )
    assert opened.version is not None, "all others have files"
    about = {"model": info.model, "step": info.step, "token": info.token.hex()}
    size = 0 if options.names else info.size
    return _convert(StateFile(opened.version), title, options, size, about)


def _write_file(path: str, options: ExportOptions) -> WrittenExport:
    """Write a file, or the one that a pointer refers to."""
    said = read_reference(path)
    if said is None or not options.is_exact(said.part):
        from portus.engine.loading.checkpoint_file import use_file  # and torch with it

        return use_file(path, lambda file: _convert(file, path, options), as_torch=False)
    with in_place(options.out, force=options.force) as out:
        _copy(path, options.out, out)
    return WrittenExport(exact=True)


def _write_directory(path: str, options: ExportOptions) -> WrittenExport:
    """Write a directory of pointers: the files that they refer to, and the other files in it."""
    if not _has_pointers(path):
        raise UsageError(f"{path}: expected a torch file, found a directory; name one of its files")
    if options.names or options.strip or options.file:
        raise UsageError(f"{path} is a directory, and --names, --strip and --file are for a file")
    # The folder of Portus holds drafts and spares, which are no part of a checkpoint.
    names = {*os.listdir(path)} - {FOLDER}
    with in_place(options.out, force=options.force, made=names.__contains__) as made:
        shutil.copytree(
            path,
            made,
            ignore=shutil.ignore_patterns(FOLDER),
            copy_function=lambda source, target: _copy(source, options.out, target),
            dirs_exist_ok=True,
        )
    return WrittenExport(exact=True)


def _has_pointers(directory: str) -> bool:
    """Return whether there are pointers in a directory, not below. Raises ``MediumError``."""
    paths = [os.path.join(directory, name) for name in LocalFiles().entries(directory)]
    return any(read_reference(path) is not None for path in paths)


def _copy(path: str, out: str, target: str) -> None:
    """Copy a file, or the one that a pointer refers to."""
    if read_reference(path) is None:
        shutil.copyfile(path, target)
        return

    def write(reader: PoolReader, entry: VersionEntry, said: Reference) -> None:
        with open_version(reader, entry) as opened:
            file = opened.file(said.part)
            check_room(out, file.size)
            _write(file, said.part, target)

    use_reference(path, write)


@contextlib.contextmanager
def _open_out(options: ExportOptions, size: int = 0) -> Iterator[str]:
    """Yield the path at which to write what becomes OUT. size: bytes to come. Raises ``UsageError``
    for an OUT to which nothing can be converted."""
    if not options.is_directory and options.suffix not in (*TORCH_SUFFIXES, SUFFIX):
        known = ", ".join((SUFFIX, *TORCH_SUFFIXES))
        raise UsageError(
            f"{options.out}: expected a directory, or a name that ends in one of {known}"
        )
    if options.is_torch and options.strip:
        raise UsageError("--strip is for .safetensors files")
    made = re.compile(r"model.*\.safetensors(\.index\.json)?").fullmatch
    with in_place(
        options.out, force=options.force, made=made if options.is_directory else None, size=size
    ) as out:
        yield out


def _convert(
    file: OpenFile,
    title: str,
    options: ExportOptions,
    size: int = 0,
    about: Mapping[str, object] | None = None,
) -> WrittenExport:
    """Write the values that ``names`` select, or all, as a file of another kind. size: bytes to
    come. about: of a version, for its metadata."""
    from portus.reach.leaving.export import write  # and torch with it

    with (
        _open_out(options, size) as out,
        counter(os.path.basename(options.out), size or file.size) as add,
    ):
        return write(file, title, out, options, advance=add, about=about)


def _show(
    title: str,
    about: dict[str, Json],
    done: WrittenExport,
    options: ExportOptions,
    output: Output,
) -> None:
    notes = [f"these share memory, and are written separately: {_list(n)}" for n in done.shared]
    if len({*done.batches.values()}) > 1:
        parts = ", ".join(f"the {name} at batch {number}" for name, number in done.batches.items())
        notes.append(f"this is of several batches, as relaxed mode leaves it: {parts}")
    if done.left_out:
        text = f"{words.count(len(done.left_out), 'value')} that safetensors cannot hold"
        notes.append(f"left out {text}: {_list(done.left_out)}")
    if done.no_weights:
        text = f"{words.count(len(done.no_weights), 'tensor')} that are not weights of the model"
        notes.append(f"left out {text}: {_list(done.no_weights)}; use --names for others")
    for each in notes:
        output.note(f"note: {each}")
    what = "as it was saved" if done.exact else words.count(done.tensors, "tensor")
    output.line(f"{options.out}: {title}, {what}, {words.size(done.size)}, verified")
    output.document({**about, "out": os.path.abspath(options.out), **asdict(done)})


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more
