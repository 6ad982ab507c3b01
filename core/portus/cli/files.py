"""Commands on checkpoints that are files: ``ls``, ``show``, ``verify``, ``scrub``, ``rm`` and
``gc`` of torch and safetensors files, of pointers to some, and of directories that have some."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from portus.cli.output import (
    FOUND,
    Json,
    Output,
    age_text,
    count_text,
    error_document,
    exit_code,
    fields,
    moment_text,
    newest_rows,
    path_text,
    said,
    size_text,
)
from portus.cli.pools import nearest
from portus.client.files.reference import read as pointer_at
from portus.client.formats.safetensors import LENGTH_SIZE, SUFFIX
from portus.client.formats.safetensors_reader import is_safetensors
from portus.client.shards.metadata_file import NAME as METADATA
from portus.client.shards.rank_file import DISTCP
from portus.directory.folder import FOLDER, HiddenFolder
from portus.directory.system import Linux
from portus.errors import CorruptionError, MediumError, PortusError, UsageError
from portus.format.reference import Reference
from portus.image.torch_zip import ZIP
from portus.index.directory import pools_at
from portus.index.place import DEFAULT_DIRECTORY, Place
from portus.media.local import LocalFiles
from portus.settings.keep import Keep

if TYPE_CHECKING:
    from portus.client.leaving.outline import FileOutline

_SUFFIXES: Final = (".ckpt", ".pt", ".pth", ".bin", ".pkl", SUFFIX, DISTCP, METADATA)
_END: Final = b"PK\x05\x06"
_END_SIZE: Final = 22
"""The first bytes of the last record of a zip file, and its size."""
_STEP: Final = re.compile(r"step[=_-]?(\d+)")

_CHECKS: Final = {
    "digests": "checksums of Portus",
    "crc32": "CRC32s of the zip",
    "structure": "structure alone: it has no checksums",
}
"""What a file is verified by, in words."""

NEWEST: Final = 20
"""Files of a directory that are listed, unless all are asked for."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A checkpoint file. ``time_ns``: of its last change. ``pointer``: what it says, if it is a
    pointer; then ``size`` is its own."""

    path: str
    size: int
    time_ns: int
    pointer: Reference | None

    @property
    def step(self) -> int | None:
        """Return the step that the pointer or the name says; None if it says none."""
        if self.pointer is not None:
            return self.pointer.step
        found = _STEP.search(os.path.basename(self.path))
        return None if found is None else int(found[1])

    @property
    def leads_to(self) -> str | None:
        """The version that the pointer leads to; None if the file is none."""
        its = self.pointer
        return None if its is None else f"{its.model}@{its.step} in {its.pool_path}"

    @property
    def document(self) -> dict[str, Json]:
        """The file for machines."""
        own = fields(self, "path", "step", "size", "time_ns", "leads_to")
        return {**own, "time": moment_text(self.time_ns)}


def find_files(target: str | None, pool: str | None) -> str | None:
    """Return the file, or the directory of files, that a command's target is; None if that is a
    pool, or something in one. With a pool it is a pointer, or nothing. Without a target: what is
    around the nearest ``.portus``, if no pool is in it."""
    if pool is not None:
        is_pointer = target and os.path.isfile(target) and pointer_at(target) is not None
        return target if is_pointer else None
    if target is None:
        hidden = nearest(os.getcwd())
        if hidden is None or Place.by_variable() is not None or pools_at(Place.named(hidden)):
            return None
        target = os.path.dirname(hidden)
        return None if next(found_below(target), None) is None else target
    if os.path.isfile(target):
        return target if _is_checkpoint(target) else None
    is_hidden = os.path.basename(os.path.abspath(target)) == DEFAULT_DIRECTORY
    if not os.path.isdir(target) or is_hidden or pools_at(Place.named(target)):
        return None
    has_any = next(found_below(target), None) or next(_hidden_below(target), None)
    return None if has_any is None else target


def found_below(path: str) -> Iterator[FoundFile]:
    """Yield the checkpoint files in a directory and those below it, hidden ones excepted; or the
    one at ``path``. Links are not followed. Raises ``MediumError``."""
    if not os.path.isdir(path):
        yield _found(path)
        return
    for directory, names, files in os.walk(path, onerror=_raise):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            each = os.path.join(directory, name)
            if name.endswith(_SUFFIXES) and not os.path.islink(each) and _is_checkpoint(each):
                yield _found(each)


def ls(path: str, every: bool, output: Output) -> list[Json]:
    """List the files of each directory; return them for machines."""
    by_directory: dict[str, list[FoundFile]] = {}
    for each in found_below(path):
        by_directory.setdefault(os.path.dirname(each.path), []).append(each)
    documents: list[Json] = []
    for directory, files in by_directory.items():
        files.sort(key=lambda each: (each.time_ns, each.path))
        total = size_text(sum(each.size for each in files))
        if documents:
            output.line()
        output.line(f"{path_text(directory)}: {count_text(len(files), 'checkpoint')}, {total}")
        rows = [
            (
                os.path.basename(each.path),
                "" if each.step is None else str(each.step),
                age_text(each.time_ns),
                size_text(each.size),
                f"leads to {each.leads_to}" if each.leads_to else "",
            )
            for each in files
        ]
        most = None if every else NEWEST
        output.table(("FILE", ">STEP", "SAVED", ">SIZE", ""), newest_rows(rows, most))
        documents.append({"path": directory, "files": [each.document for each in files]})
    return documents


def verify(path: str, output: Output, *, bytes_per_s: int | None = None) -> None:
    """Read every byte of each file. bytes_per_s: from the disk, and no faster."""
    from portus.client.loading.checkpoint_file import has_digests, verify_file  # and torch with it

    documents: list[Json] = []
    codes = []
    for each in found_below(path):
        document, start, by = each.document, time.monotonic(), ""
        try:
            by = _CHECKS[verified_by(each.path, has_digests(each.path))]
            pace = None if bytes_per_s is None else _Pace(bytes_per_s)
            size = verify_file(each.path, pace)
        except PortusError as error:
            codes.append(exit_code(error))
            document.update(healthy=False, error=error_document(error))
            output.line(f"{path_text(each.path)}: DAMAGED: {said(error)}")
        else:
            passed_s = time.monotonic() - start
            codes.append(0)
            document.update(healthy=True, seconds=round(passed_s, 3), by=by, error=None)
            output.line(
                f"{path_text(each.path)}: healthy by the {by}; {size_text(size)} read in "
                f"{passed_s:.1f} s ({size_text(size / max(passed_s, 1e-9))}/s)"
            )
        documents.append(document)
    if not codes:
        raise UsageError(f"{path}: there is no checkpoint file to verify")
    damaged = sum(map(bool, codes))
    if len(codes) > 1:
        result = f"{damaged} DAMAGED" if damaged else "all are healthy"
        output.line(f"{count_text(len(codes), 'file')}: {result}")
    output.document({"healthy": not damaged, "files": documents})
    output.code = FOUND if FOUND in codes else max(codes)


def verified_by(path: str, has_digests: bool) -> str:
    """Return what a file is verified by: a key of ``_CHECKS``."""
    if has_digests:
        return "digests"
    with open(path, "rb") as file:
        return "structure" if is_safetensors(file.read(LENGTH_SIZE + 1)) else "crc32"


class _Pace:
    """Wait where more was read than ``bytes_per_s`` allow."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s: Final = bytes_per_s
        self._due_s = time.monotonic()

    def __call__(self, count: int) -> None:
        self._due_s += count / self._bytes_per_s
        time.sleep(max(0.0, self._due_s - time.monotonic()))


def rm(path: str, output: Output, *, force: bool, keep: Keep | None) -> list[Json]:
    """Remove one file, durably, or those of a ``Checkpointer``'s directory that ``keep`` does not
    keep; return them for machines. Raises ``UsageError`` for a file that a link beside it leads to,
    unless ``force``."""
    if os.path.isdir(path) and keep is None:
        raise UsageError(f"{path}: expected a file, or --keep to say which of them stay")
    if not os.path.isdir(path) and keep is not None:
        raise UsageError(f"{path}: expected a directory for --keep, found a file")
    found = [_found(each) for each in ([path] if keep is None else _surplus(path, keep))]
    for each in found if not force else ():
        _check_unlinked(each.path)
    files = LocalFiles()
    for each in found:
        files.remove(os.path.abspath(each.path))
        files.sync(os.path.dirname(os.path.abspath(each.path)))
        output.line(f"{path_text(each.path)}: removed, {size_text(each.size)}")
    if keep is not None:
        size = size_text(sum(each.size for each in found))
        output.line(f"{count_text(len(found), 'file')} removed, {size}")
    return [each.document for each in found]


def _surplus(directory: str, keep: Keep) -> list[str]:
    """Return the files of a ``Checkpointer`` that do not stay."""
    from portus.client.paths.step_files import StepFiles  # and torch with it

    files = StepFiles(os.path.abspath(directory))
    if not files.found():
        raise UsageError(
            f"{directory}: expected the files of a Checkpointer, such as step-00000100.pt, found "
            "none; other frameworks remove their checkpoints themselves"
        )
    return files.surplus(keep)


def _check_unlinked(path: str) -> None:
    real = os.path.realpath(path)
    with os.scandir(os.path.dirname(os.path.abspath(path))) as entries:
        found = [e.name for e in entries if e.is_symlink() and os.path.realpath(e.path) == real]
    if found:
        raise UsageError(f"{path}: {', '.join(sorted(found))} leads to it; --force removes it")


def show(path: str, output: Output) -> None:
    """Show the tensors of one file."""
    from portus.client.leaving.outline import outline_of  # and torch with it

    found, outline = _found(path), outline_of(path)
    by = verified_by(path, outline.has_digests)
    age = age_text(found.time_ns)
    output.line(f"{path_text(path)}: {size_text(found.size)}, saved {age}, {_CHECKS[by]}")
    if found.leads_to:
        output.line(f"leads to {found.leads_to}")
    output.document({**found.document, "verified_by": by, **show_outline(outline, output)})


def show_outline(outline: FileOutline, output: Output) -> dict[str, Json]:
    """Show what is in a file; return it for machines."""
    if outline.note:
        output.line(f"noted: {outline.note}")
    rows = [
        (each.name, each.dtype, f"[{', '.join(map(str, each.shape))}]", f"{each.size:,}")
        for each in outline.tensors
    ]
    output.table(("NAME", "TYPE", "SHAPE", ">BYTES"), rows)
    if outline.others:
        output.line()
        output.table(("NAME", "VALUE"), outline.others)
    tensors: list[Json] = [fields(e, "name", "dtype", "shape", "size") for e in outline.tensors]
    return {"tensors": tensors, "others": dict(outline.others)}


def gc(path: str, output: Output, *, dry_run: bool) -> None:
    """Remove what processes that ended left beside checkpoints. A checkpoint that was removed
    before its replacement was there is put back."""
    documents: list[Json] = []
    has_any = False
    would = "would be " if dry_run else ""
    for directory in _hidden_below(path):
        left = _abandoned_in(directory)
        documents.append({"path": directory, "files": len(left), "freed": sum(left)})
        if not left:
            continue
        has_any = True
        if not dry_run:
            from portus.client.paths.saver import recover  # and torch with it

            recover(directory)
        output.line(
            f"{path_text(directory)}: {count_text(len(left), 'file')} of saves that were cut off, "
            f"{size_text(sum(left))}, {would}removed"
        )
    if not has_any:
        output.line(f"{path_text(path)}: nothing to do")
    output.document({"dry_run": dry_run, "directories": documents})


def _hidden_below(path: str) -> Iterator[str]:
    """Yield the directories that have a hidden folder of ours."""
    for directory, names, _ in os.walk(path, onerror=_raise):
        if FOLDER in names:
            yield os.path.realpath(directory)
        names[:] = sorted(name for name in names if not name.startswith("."))


def _abandoned_in(directory: str) -> list[int]:
    """Return the sizes of the files that processes that ended left there."""
    folder = HiddenFolder(Linux(), directory)
    try:
        left = [name for names in folder.abandoned() for name in names]
        paths = [os.path.join(directory, FOLDER, name) for name in left]
        return [os.lstat(path).st_size for path in paths if os.path.lexists(path)]
    finally:
        folder.forget()
        folder.system.close(folder.base)


def _found(path: str) -> FoundFile:
    try:
        status = os.stat(path)
    except OSError as error:
        _raise(error)
    pointer = None
    with contextlib.suppress(CorruptionError):
        pointer = pointer_at(path)
    return FoundFile(path, status.st_size, status.st_mtime_ns, pointer)


def _is_checkpoint(path: str) -> bool:
    """Return whether a file is one of safetensors or ``torch.save``, or a pointer; by its first
    bytes, or its end or its name where those are damaged."""
    if path.endswith(SUFFIX):
        return True
    try:
        with open(path, "rb") as file:
            begin = file.read(LENGTH_SIZE + 1)
            file.seek(-min(_END_SIZE, os.path.getsize(path)), os.SEEK_END)
            end = file.read(len(_END))
    except OSError:
        return False
    return is_safetensors(begin) or begin.startswith(ZIP) or end == _END


def _raise(error: OSError) -> NoReturn:
    raise MediumError(error.errno, f"{error.filename}: {error.strerror}") from error
