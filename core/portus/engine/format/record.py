"""A record is declared once, here in code; packing, numpy types and the document come from it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from portus.errors import CorruptionError

_NUMPY: Final = {"H": "<u2", "I": "<u4", "Q": "<u8", "q": "<i8"}

Value = int | bytes


@dataclass(frozen=True, slots=True)
class Field:
    """``code`` is that of ``struct``: H, I, Q, q or ``<n>s``. ``meaning`` is for the document."""

    name: str
    code: str
    meaning: str

    @property
    def size(self) -> int:
        return struct.calcsize("<" + self.code)


class Record:
    """A fixed run of little-endian fields without gaps, ``size`` bytes in all.

    Raises ``AssertionError`` when the fields do not add up to the size: that is our mistake.
    """

    def __init__(self, name: str, size: int, fields: tuple[Field, ...]) -> None:
        self.name: Final = name
        self.size: Final = size
        self.fields: Final = fields
        self._names: Final = tuple(field.name for field in fields)
        self._blank: Final[dict[str, Value]] = {
            field.name: b"" if field.code.endswith("s") else 0 for field in fields
        }
        self._struct: Final = struct.Struct("<" + "".join(field.code for field in fields))
        assert self._struct.size == size, f"{name}: {self._struct.size} bytes, not {size}"

    def pack(self, **values: Value) -> bytes:
        """Return the bytes; fields not given are zero."""
        row = self._blank | values
        assert len(row) == len(self._blank), f"{self.name} has no {row.keys() - self._names}"
        return self._struct.pack(*row.values())

    def row(self, *values: Value) -> bytes:
        """Return the bytes of all fields, given in order: several times as fast as ``pack``."""
        return self._struct.pack(*values)

    def unpack(self, data: bytes | memoryview, offset: int = 0) -> dict[str, Value]:
        """Return the fields by name. Raise ``CorruptionError`` when ``data`` is too short."""
        if len(data) - offset < self.size:
            raise CorruptionError(
                f"{self.name} at byte {offset}: expected {self.size} bytes, found "
                f"{max(0, len(data) - offset)}"
            )
        return dict(zip(self._names, self._struct.unpack_from(data, offset), strict=True))

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """Return the fields as a dtype, for arrays of this record."""
        return np.dtype(
            [(field.name, _NUMPY.get(field.code) or f"V{field.size}") for field in self.fields]
        )

    def array(self, data: bytes | memoryview, offset: int, count: int) -> npt.NDArray[np.void]:
        """Return ``count`` records from ``offset``, a read-only view of ``data``.

        Raises ``CorruptionError`` when ``data`` is too short for them.
        """
        if count * self.size > len(data) - offset:
            raise CorruptionError(
                f"{count} x {self.name} at byte {offset}: expected {count * self.size} bytes, "
                f"found {max(0, len(data) - offset)}"
            )
        return np.frombuffer(data, self.dtype, count, offset)

    def table(self) -> str:
        """Return the table of the document, in Markdown."""
        rows, offset = [], 0
        for field in self.fields:
            rows.append(f"| {offset} | {field.size} | {field.name} | {field.meaning} |")
            offset += field.size
        head = f"**{self.name}**, {self.size} bytes\n\n| offset | size | field | meaning |\n"
        return head + "|---|---|---|---|\n" + "\n".join(rows) + "\n"
