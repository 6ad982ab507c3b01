"""The options of an export, and its result."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from portus.reach.formats.safetensors import SUFFIX

TORCH_SUFFIXES: Final = (".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export. ``file``: the one to take of a version of several files. ``names``:
    shell patterns of key paths; none means all. ``strip``: removed from the beginning of names, in
    safetensors only. ``force``: replace what is at ``out``. ``limit``: bytes of the tensors of a
    file, if ``out`` is a directory of weights."""

    out: str
    file: str | None = None
    names: Sequence[str] = ()
    strip: str = ""
    force: bool = False
    limit: int = 5_000_000_000

    @property
    def is_directory(self) -> bool:
        """True if ``out`` is a directory to make."""
        is_named = not os.path.splitext(self.out.rstrip(os.sep))[1] or self.out.endswith(os.sep)
        return is_named and self.file is None

    @property
    def is_torch(self) -> bool:
        """True if ``out`` is a torch file to make, and no other kind."""
        return not self.is_directory and self.suffix != SUFFIX

    @property
    def suffix(self) -> str:
        """Return the suffix of ``out``, in lower case."""
        return os.path.splitext(self.out)[1].lower()

    def is_exact(self, name: str) -> bool:
        """Return whether ``out`` is to be the file ``name`` of a version, byte for byte."""
        is_same_kind = name.endswith(SUFFIX) == (self.suffix == SUFFIX)
        return not (self.names or self.strip or self.is_directory) and is_same_kind


@dataclass(slots=True)
class WrittenExport:
    """``size``: of the files, in bytes. ``exact``: every byte is as it was saved. ``shared``: names
    of tensors that share memory in the source, and are written separately. ``left_out``: of values
    that are no tensors. ``no_weights``: of tensors that are no weights. ``batches``: of protected
    tables, the last batch in each part."""

    size: int = 0
    tensors: int = 0
    exact: bool = False
    shared: list[list[str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    no_weights: list[str] = field(default_factory=list)
    batches: dict[str, int] = field(default_factory=dict)
