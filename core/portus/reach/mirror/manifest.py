"""``ReadManifest``: the files and digests of a mirrored version, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from portus.engine.copying.segments import Column, Digests
from portus.engine.format.checksum import DIGEST_SIZE, unit_counts
from portus.errors import CorruptionError
from portus.reach.index.file_table import PackedFile, decode_table
from portus.reach.mirror.objects import Manifest


def files_in(contents: bytes, lengths: Column, where: str) -> Sequence[PackedFile]:
    """Return the files of a version with storages of these lengths. Raise ``CorruptionError``,
    naming ``where``, unless the files have the storages of the version."""
    table = decode_table(contents)
    if table is None or table.lengths != lengths.tolist():
        raise CorruptionError(f"{where}: its files do not have the storages that it has")
    return table.files


@dataclass(frozen=True, slots=True)
class ReadManifest:
    """A manifest, read and checked. ``digests``: of each unit. ``files``: the places of its
    storages in its files."""

    manifest: Manifest
    lengths: Column
    digests: Digests
    files: Sequence[PackedFile]

    @classmethod
    def of(cls, manifest: Manifest) -> ReadManifest:
        """Check a manifest. Raise ``CorruptionError`` if its parts do not fit together."""
        where = f"the manifest of version {manifest.token.hex()} of model {manifest.model!r}"
        if len(manifest.lengths) % 8:
            raise CorruptionError(f"{where}: a column of {len(manifest.lengths)} bytes")
        lengths: Column = np.frombuffer(manifest.lengths, "<i8").astype(np.int64)
        if (lengths < 0).any() or float(lengths.sum(dtype=np.float64)) > _SUM_MAX:
            raise CorruptionError(f"{where}: lengths of storages are out of range")
        count = int(unit_counts(lengths).sum())
        if len(manifest.digests) != count * DIGEST_SIZE:
            raise CorruptionError(
                f"{where}: expected digests of {count} units, found {len(manifest.digests)} bytes"
            )
        digests = np.frombuffer(manifest.digests, np.uint8).reshape(-1, DIGEST_SIZE)
        files = files_in(manifest.contents, lengths, where)
        if [each.size for each in manifest.files] != [each.size for each in files]:
            raise CorruptionError(f"{where}: its objects are not as long as its files")
        return cls(manifest, lengths, digests, files)


_SUM_MAX: Final = float(1 << 62)
