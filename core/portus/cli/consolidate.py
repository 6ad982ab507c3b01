"""Versions and groups as safetensors files, in the layout of Hugging Face: streamed.

A directory gets ``model.safetensors``; or, where that would be longer than a limit,
``model-00001-of-00003.safetensors`` and so on, and ``model.safetensors.index.json``. The parts of
a group are read one after another, each once, and each shard goes straight to its place. One unit
(16 MiB) of one part is in memory at a time, whatever the size of the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from portus.cli.boxes import Target, write_box
from portus.cli.pools import FoundVersion
from portus.cli.progress import Progress
from portus.client.leaving import safetensors
from portus.client.leaving.safetensors import PlacedTensor
from portus.client.loading.contents import Storages, tensor_bytes
from portus.errors import CorruptionError, MediumError, UsageError
from portus.format.dtypes import ITEM_SIZES
from portus.index.log import logged
from portus.index.records import VersionRecord
from portus.media.names import hidden
from portus.spec import TensorSpec

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

PREFIXES: Final = ("pytorch_model_fsdp_0.model.", "model.safetensors.", "state_dict.", "model.")
"""What stands before the names of weights: in checkpoints of Accelerate, of Lightning, and in
most others."""


@dataclass(frozen=True, slots=True)
class Box:
    """A piece of the tensor ``name``: where it begins, its shape, and how it lies in its part."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Part:
    """What one pool file contributes: pinned, and opened only while it is read."""

    label: str
    found: FoundVersion
    boxes: Callable[
        [FoundVersion], contextlib.AbstractContextManager[tuple[VersionRecord, list[Box]]]
    ]


def whole_spec(name: str, dtype: str, shape: tuple[int, ...], index: int) -> TensorSpec:
    """A tensor without gaps, as it is going to be in the file; ``index``: its storage, or what
    keeps the order of the files."""
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorSpec(name, dtype, shape, strides, index, 0)


def split(placed: Sequence[PlacedTensor], limit: int) -> list[list[PlacedTensor]]:
    """Tensors over files of at most ``limit`` bytes each; a tensor that is longer has its own."""
    files: list[list[PlacedTensor]] = [[]]
    size = 0
    for each in placed:
        if files[-1] and size + each.size > limit:
            files.append([])
            size = 0
        files[-1].append(each)
        size += each.size
    return files


def names_of(count: int) -> list[str]:
    """What the files are called."""
    if count == 1:
        return [WEIGHTS]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def write_directory(
    out: str,
    tensors: Mapping[str, TensorSpec],
    parts: Sequence[Part],
    metadata: Mapping[str, str],
    limit: int,
    advanced: Progress,
) -> int:
    """Fill the directory ``out``, which is empty; the bytes written. Raises ``CorruptionError``
    and ``MediumError``; then it holds files that are not whole."""
    files = split(safetensors.place(tensors), limit)
    names = names_of(len(files))
    paths = [os.path.join(out, name) for name in names]
    size = write_files(list(zip(paths, files, strict=True)), parts, metadata, advanced)
    if len(files) > 1:
        total = sum(each.size for placed in files for each in placed)
        weight_map = {
            each.name: name for name, placed in zip(names, files, strict=True) for each in placed
        }
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        with open(os.path.join(out, INDEX), "w", encoding="utf-8") as file:
            json.dump(index, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
    return size


def write_files(
    files: Sequence[tuple[str, Sequence[PlacedTensor]]],
    parts: Sequence[Part],
    metadata: Mapping[str, str],
    advanced: Progress,
) -> int:
    """Write safetensors files, synced; the bytes written. Every byte is written exactly once.

    Raises ``CorruptionError`` and ``MediumError``.
    """
    targets: dict[str, Target] = {}
    size = 0
    with contextlib.ExitStack() as stack:
        opened = []
        for path, placed in files:
            file = stack.enter_context(open(path, "wb"))
            head = safetensors.head_of(placed, metadata)
            file.write(head)
            file.flush()
            offset = len(head)
            for each in placed:
                item = ITEM_SIZES[each.spec.dtype]
                targets[each.name] = Target(file.fileno(), offset, each.spec.shape, item)
                offset += each.size
            os.truncate(file.fileno(), offset)
            size += offset
            opened.append(file)
        _fill(targets, parts, os.path.dirname(os.path.abspath(files[0][0])), advanced)
        for file in opened:
            os.fsync(file.fileno())
    return size


def _fill(
    targets: Mapping[str, Target], parts: Sequence[Part], near: str, advanced: Progress
) -> None:
    total = sum(prod(target.shape) * target.item for target in targets.values())
    left = {name: prod(target.shape) for name, target in targets.items()}
    done = 0
    for part in parts:
        with part.boxes(part.found) as (record, boxes):
            reader = part.found.reader
            storages = Storages(reader, record, logged(reader.medium, record))
            boxes.sort(key=lambda box: (box.spec.storage, box.spec.offset))
            for box in boxes:
                pieces = tensor_bytes(storages, box.spec, near)
                try:
                    for size in write_box(targets[box.name], box.offsets, box.sizes, pieces):
                        done += size
                        advanced(done, total)
                except CorruptionError as error:
                    raise CorruptionError(f"{part.label}{box.name}: {error}") from error
                left[box.name] -= prod(box.sizes)
    wrong = [name for name, count in left.items() if count]
    if wrong:
        raise CorruptionError(
            f"{wrong[0]}: its pieces do not make up the tensor, {left[wrong[0]]} elements are "
            f"missing ({len(wrong)} such tensors)"
        )


@contextlib.contextmanager
def directory_in_place(out: str, *, force: bool) -> Iterator[str]:
    """A directory beside ``out`` to fill; synced, and called ``out``, at the end.

    Raises ``MediumError``, and ``UsageError`` for something at ``out`` that is no export, or
    without ``force``; then ``out`` is as it was.
    """
    out = os.path.abspath(out)
    above, name = os.path.split(out)
    there = os.path.lexists(out)
    if there and not (force or (os.path.isdir(out) and not os.listdir(out))):
        raise UsageError(f"{out} already exists; --force replaces it")
    if there and not _is_export(out):
        raise UsageError(f"{out} holds more than an export of Portus; remove it yourself")
    temporary = os.path.join(above, hidden(name, f".{os.getpid()}.portus"))
    old = f"{temporary}.old"
    try:
        os.mkdir(temporary)
        yield temporary
        sync_directory(temporary)
        if there:
            os.rename(out, old)
        os.rename(temporary, out)
        sync_directory(above)
    except MediumError:
        raise
    except OSError as error:
        raise MediumError(error.errno, f"cannot write {out}: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if os.path.isdir(old) and not os.path.lexists(out):
            os.rename(old, out)
        shutil.rmtree(old, ignore_errors=True)


def sync_directory(path: str) -> None:
    """Return when the names in a directory survive power loss."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_export(path: str) -> bool:
    """True for a directory that holds nothing but what is made here."""
    if not os.path.isdir(path) or os.path.islink(path):
        return False
    made = (".safetensors", INDEX)
    return all(name.startswith("model") and name.endswith(made) for name in os.listdir(path))


def prefix_of(names: Sequence[str]) -> str:
    """What stands before the names of the weights; nothing if it cannot be told."""
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in names):
            return prefix
    return ""
