"""F14 and F15: whether the contents of a version can be read, and whether its storages fit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.image.key_paths import storages_in
from portus.engine.spec import TensorSpec
from portus.errors import PortusError
from portus.reach.format import items
from portus.reach.index.file_table import decode_table
from portus.reach.index.findings import Findings
from portus.reach.index.records import Rows

_PICKLE: Final = b"\x80"
"""The first byte of the contents of protected tables."""

_SIZE_MAX: Final = (1 << 63) - 1
"""The largest size of a storage in bytes. Contents may state one that is too long to print."""

_KEY_MAX: Final = 18
"""Digits of the key of a storage in a pickle."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The parsed contents of a version. ``lengths``: of a table of files, the bytes of each
    storage; else None. ``storages``: those that the contents name. ``needed``: for each tensor its
    name, its storage, and the bytes of it that it needs. ``is_shelf``: each tensor must fill its
    storage exactly."""

    lengths: npt.NDArray[np.int64] | None = None
    storages: frozenset[int] = frozenset()
    needed: Sequence[tuple[str, int, int]] = ()
    is_shelf: bool = False


def read_contents(findings: Findings, where: str, payload: bytes) -> Contents | None:
    """Return parsed contents, or None if they break F14."""
    if payload.startswith(_PICKLE):
        return _read_pickle(findings, where, payload)
    try:
        payload.decode()  # a decoder of JSON may accept bytes that are not UTF-8
        table = decode_table(payload)
        if table is not None:
            return Contents(lengths=np.array(table.lengths, np.int64))
        arrays: list[items.StoredArray] = []
        items.decode(payload, arrays.append)
    except (PortusError, ValueError) as error:
        findings.error("F14", where, "a table of files, or a shelf", str(error))
        return None
    needed = [(each.name, each.storage, min(each.size, _SIZE_MAX)) for each in arrays]
    storages = frozenset(each.storage for each in arrays)
    return Contents(storages=storages, needed=needed, is_shelf=True)


def _read_pickle(findings: Findings, where: str, payload: bytes) -> Contents | None:
    found = storages_in(payload)
    if found is None or not all(key.isdecimal() and len(key) <= _KEY_MAX for key in found[0]):
        findings.error("F14", where, "a pickle of torch", "none")
        return None
    keys, tensors = found
    needed = [(spec.name, spec.storage, bytes_needed(spec)) for spec in tensors]
    return Contents(storages=frozenset(map(int, keys)), needed=needed)


def check_contents(findings: Findings, where: str, contents: Contents, storages: Rows) -> None:
    """Check F15: the contents fit these storages."""
    where, lengths = f"contents of {where}", storages["length"].tolist()
    if contents.lengths is not None:
        same = contents.lengths.tolist() == lengths
        findings.require(same, "F15", where, "the storages of its files", "others")
        return
    odd = sorted(contents.storages ^ {*range(len(lengths))})
    if odd:
        findings.error("F15", where, f"{len(lengths)} storages", f"otherwise for {odd!r:.100}")
        return
    if contents.is_shelf and len(contents.needed) > len(lengths):
        findings.error("F15", where, f"{len(lengths)} arrays", f"{len(contents.needed)}")
    for name, index, size in contents.needed:
        held = lengths[index]
        if not 0 <= size <= held or (contents.is_shelf and size != held):
            found = f"{held} bytes in storage {index}"
            findings.error("F15", where, f"{size} bytes for {name!r:.100}", found)


def bytes_needed(spec: TensorSpec) -> int:
    """Return bytes from the start of its storage to a tensor's end; -1 if numbers are wrong."""
    numbers = (*spec.shape, *spec.strides, spec.offset)
    if len(spec.shape) != len(spec.strides) or any(number < 0 for number in numbers):
        return -1
    if 0 in spec.shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(spec.shape, spec.strides, strict=True))
    return min((spec.offset + last + 1) * ITEM_SIZES[spec.dtype], _SIZE_MAX)
