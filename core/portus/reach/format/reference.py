"""The pointer: a small file that torch can load, and that refers to a version in a pool.

It is a real torch file (a zip archive, nothing compressed, about 1.5 KiB)::

    archive/data.pkl     a pickle of one call: GLOBAL, one string, TUPLE1, REDUCE, STOP
    archive/version      "3", which torch asks for
    archive/byteorder    "little"
    archive/README.txt   what a human should do with the file

The string is 32 hex digits (xxh3_128 of the rest) and then one JSON object. Every other byte
follows from the string. So nothing is ever unpickled here: a file is a pointer if it equals, byte
for byte, what ``encode`` makes of the fields found in it. A file with the mark of a pointer that is
not equal is damaged (``CorruptionError``); a file without a mark is no pointer.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from dataclasses import dataclass, fields
from typing import Final

from portus.engine.format.checksum import DIGEST_SIZE, digest
from portus.engine.format.nesting import refuse_deep
from portus.engine.format.pointer_marks import HEAD_MARK, POINTER_MAX, README, is_pointer
from portus.errors import CorruptionError, UsageError

TEXT_MAX: Final = 4096
"""Characters of a path, and of the name of a model."""

FORMAT: Final = 4
"""The newest format. Formats 1 to 3 were never released."""

_HEX: Final = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The contents of a pointer.

    ``token`` (32 lower-case hex digits) names the version that it refers to, and ``files`` is the
    number of files of that. ``pool`` is the pool's identity (32 digits), ``pool_path`` its absolute
    path, or its address. ``written_path`` is the absolute path where the pointer was put, whose
    last name is that of the file in the version.

    Raises ``UsageError`` for fields that cannot be stored.
    """

    token: str
    pool: str
    pool_path: str
    model: str
    step: int
    written_path: str
    files: int

    def __post_init__(self) -> None:
        for name in ("token", "pool"):
            value = getattr(self, name)
            if not isinstance(value, str) or not _HEX.fullmatch(value):
                raise UsageError(
                    f"reference: {name} must be 32 lower-case hex digits, found {value!r}"
                )
        for name in ("pool_path", "written_path", "model"):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= TEXT_MAX or "\0" in value:
                raise UsageError(
                    f"reference: {name} must be 1 to {TEXT_MAX} characters, no NUL: {value!r:.80}"
                )
        for name in ("step", "files"):
            value = getattr(self, name)
            if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
                raise UsageError(f"reference: {name} must be a 64-bit integer, found {value!r:.80}")

    @property
    def part(self) -> str:
        """The name of the file in the version."""
        return self.written_path.rpartition("/")[2]


def encode(reference: Reference) -> bytes:
    """Return the bytes of the pointer file for ``reference``; equal references give equal bytes."""
    body = _body(reference)
    data = _archive(digest(body.encode()).hex() + body)
    assert len(data) <= POINTER_MAX  # the limits of the fields ensure it
    return data


def decode(data: bytes) -> Reference | None:
    """Return the reference of a file with the bytes ``data`` (all of them), or None if it is no
    pointer.

    Raises ``CorruptionError`` for a damaged pointer and ``UsageError`` for one that a newer
    Portus wrote.
    """
    if not is_pointer(data):
        return None
    text = _find_text(data)
    reference = decode_text(text)
    if _archive(text) != data:
        raise CorruptionError("pointer: damaged outside its text")
    return reference


def decode_text(text: str) -> Reference:
    """Return the reference of the string in a pointer. Raise as ``decode``."""
    body = text[2 * DIGEST_SIZE :]
    if not body.isascii() or digest(body.encode()).hex() != text[: 2 * DIGEST_SIZE]:
        raise CorruptionError("pointer: the checksum of its text does not match")
    try:
        refuse_deep(body.encode())
        said = json.loads(body)
    except ValueError as error:
        raise CorruptionError(f"pointer: its text is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise CorruptionError("pointer: its text is not a JSON object")
    number = said.pop("portus", None)
    if type(number) is not int or number < FORMAT:
        raise CorruptionError(f"pointer: format number {number!r}, expected {FORMAT}")
    if number > FORMAT:
        raise UsageError(
            f"pointer: format {number}, this Portus reads up to {FORMAT}: upgrade portus-checkpoint"
        )
    try:
        reference = Reference(**said)  # __post_init__ checks each
    except (TypeError, UsageError) as error:
        raise CorruptionError(f"pointer: fields out of range: {error}") from error
    if _body(reference) != body:
        raise CorruptionError("pointer: its text is not in canonical form")
    return reference


def _body(reference: Reference) -> str:
    said: dict[str, object] = {"portus": FORMAT}
    said |= {field.name: getattr(reference, field.name) for field in fields(reference)}
    # Pure ASCII, so a path that is not UTF-8 (surrogates) goes there and back unchanged.
    return json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


_CALL: Final = b"\x85R."
"""TUPLE1, REDUCE, STOP."""


def _find_text(data: bytes) -> str:
    """Return the string in the file. A comparison of the file checks the bytes around it."""
    start = data.find(HEAD_MARK) + len(HEAD_MARK) + 5
    length = int.from_bytes(data[start - 4 : start], "little")
    raw = data[start : start + length]
    if len(raw) != length or not raw.isascii():
        raise CorruptionError(
            f"pointer: expected a text of {length} bytes at byte {start}, found "
            f"{len(raw)} bytes, or not ASCII"
        )
    return raw.decode("ascii")


def _archive(text: str) -> bytes:
    raw = text.encode("ascii")
    # PROTO 2, GLOBAL, BINUNICODE, the call.
    call = b"\x80\x02" + HEAD_MARK + b"X" + len(raw).to_bytes(4, "little") + raw + _CALL
    entries = {"data.pkl": call, "version": b"3\n", "byteorder": b"little", "README.txt": README}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in entries.items():
            entry = zipfile.ZipInfo(f"archive/{name}")  # of 1 January 1980
            entry.create_system = 0  # the same on each system
            archive.writestr(entry, content)
            entry.external_attr = 0  # the directory is written at the end
    return made.getvalue()
