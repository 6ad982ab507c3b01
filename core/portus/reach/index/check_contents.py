"""F14: whether the contents of a version can be read, and whether its storages fit them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.image.key_paths import storages_in
from portus.engine.spec import TensorSpec
from portus.errors import CorruptionError
from portus.reach.format import items
from portus.reach.index.file_table import decode_table

_PICKLE: Final = b"\x80"
"""The first byte of the contents of protected tables."""

_SIZE_MAX: Final = (1 << 63) - 1
"""The largest size of a storage in bytes. Contents may state one that is too long to print."""

_KEY_MAX: Final = 18
"""Digits of the key of a storage in a pickle."""


class NamedTensor(NamedTuple):
    """A tensor in the contents of a version, and the bytes of its storage that it needs."""

    name: str
    storage: int
    size: int


def check_contents(contents: bytes, lengths: Sequence[int]) -> list[NamedTensor]:
    """Return the tensors that contents name; none for files. Raise ``CorruptionError`` or
    ``UsageError`` unless they fit storages of these lengths."""
    if contents.startswith(_PICKLE):
        found = storages_in(contents)
        if found is None or not all(key.isdecimal() and len(key) <= _KEY_MAX for key in found[0]):
            raise CorruptionError("not a pickle of torch")
        named = [NamedTensor(each.name, each.storage, _bytes_needed(each)) for each in found[1]]
        _require_each({int(key) for key in found[0]}, len(lengths))
        odd = [each for each in named if not 0 <= each.size <= lengths[each.storage]]
    else:
        try:
            contents.decode()  # a decoder of JSON may accept bytes that are not UTF-8
        except UnicodeDecodeError as error:
            raise CorruptionError(str(error)) from error
        table = decode_table(contents)
        if table is not None:
            if table.lengths != lengths:
                raise CorruptionError("expected files with the storages of the version")
            return []
        arrays: list[items.StoredArray] = []
        items.decode(contents, arrays.append)
        named = [NamedTensor(a.name, a.storage, min(a.size, _SIZE_MAX)) for a in arrays]
        _require_each({each.storage for each in named}, len(lengths))
        if len(named) > len(lengths):
            raise CorruptionError(f"{len(named)} arrays in {len(lengths)} storages")
        odd = [each for each in named if each.size != lengths[each.storage]]
    for each in odd[:1]:
        raise CorruptionError(
            f"{each.name!r:.100} needs {each.size} bytes, found {lengths[each.storage]} in storage "
            f"{each.storage}"
        )
    return named


def _require_each(storages: set[int], count: int) -> None:
    odd = sorted(storages ^ {*range(count)})
    if odd:
        raise CorruptionError(f"expected {count} storages, found otherwise for {odd!r:.100}")


def _bytes_needed(spec: TensorSpec) -> int:
    """Return bytes from the start of its storage to a tensor's end; -1 if numbers are wrong."""
    numbers = (*spec.shape, *spec.strides, spec.offset)
    if len(spec.shape) != len(spec.strides) or any(number < 0 for number in numbers):
        return -1
    if 0 in spec.shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(spec.shape, spec.strides, strict=True))
    return min((spec.offset + last + 1) * ITEM_SIZES[spec.dtype], _SIZE_MAX)
