"""The reference file: a small file that torch can load, and that leads to a version in a pool.

It is a real torch file (a zip archive, nothing compressed, about 1.5 KiB)::

    archive/data.pkl     a pickle of one call: GLOBAL, one string, TUPLE1, REDUCE, STOP
    archive/version      "3", which torch asks for
    archive/byteorder    "little"
    archive/README.txt   what a human should do with the file

The string is 32 hex digits (xxh3_128 of the rest) and then one JSON object. Every other byte
follows from the string. So nothing is ever unpickled here: a file is a reference if it is, byte
for byte, what ``encode`` makes of the fields found in it. One that carries a mark of a reference
and is not is damaged (``CorruptionError``); one that carries none is somebody else's file.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Container
from dataclasses import dataclass, fields
from typing import Final

from portus.errors import CorruptionError, UsageError
from portus.format.checksum import DIGEST_SIZE, digest
from portus.spec import VersionInfo

GLOBAL_MODULE: Final = "portus"
GLOBAL_NAME: Final = "this_is_a_reference_run_portus_materialize"
"""What torch calls with the string; the name is what a machine without Portus prints."""

SIZE_MAX: Final = 128 << 10
"""Bytes. A longer file is no reference."""

HEAD_SIZE: Final = 256
"""Bytes; a reference is longer, and says within them that it is one."""

_PIN_PATH: Final = "/portus-pin/"
"""Where the file of a pin would be: nowhere."""

_PIN_NAME: Final = re.compile(r"[0-9a-f]{32}")
_PIN_POOL: Final = "portus://pin"
"""The way from there to the pool: none."""

PATH_MAX: Final = 4096
NAME_MAX: Final = 4096
FORMAT: Final = 3
"""The newest. A reference has the lowest format that can say what it says: 1, or 2 with a part, or
3 with a version in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a reference file says.

    ``id``, ``token``, ``in_flight``, ``fallback`` and ``pool`` are 32 lower-case hex digits. ``id``
    is the reference's own, and names its hard link. ``token`` names the version it leads to, which
    may not be committed yet; ``fallback`` the version to use if it never is, with its step (None:
    there was none). ``in_flight`` names a version that was still being saved then, with its step:
    if it was committed, it is to be used before ``fallback``, which its commit may have retired.
    ``pool`` is the pool's identity, ``pool_path`` its absolute path and
    ``pool_relative`` its path from the directory of the reference (POSIX slashes). ``written_path``
    is where the reference was first put, absolute; ``written_ns`` is Unix time in nanoseconds.
    ``part`` is the key of the state, a dict, whose value the reference leads to (None: all of it).

    Raises ``UsageError`` for fields that cannot be stored.
    """

    id: str
    token: str
    pool: str
    pool_path: str
    pool_relative: str
    model: str
    step: int
    written_path: str
    written_ns: int
    fallback: str | None = None
    fallback_step: int | None = None
    in_flight: str | None = None
    in_flight_step: int | None = None
    part: str | None = None

    def __post_init__(self) -> None:
        for name in ("id", "token", "pool"):
            _check_hex(name, getattr(self, name))
        for name in ("pool_path", "pool_relative", "written_path"):
            _check_text(name, getattr(self, name), PATH_MAX)
        _check_text("model", self.model, NAME_MAX)
        if self.part is not None:
            _check_text("part", self.part, NAME_MAX)
        for name in ("step", "written_ns"):
            _check_integer(name, getattr(self, name))
        for name in ("fallback", "in_flight"):
            token, step = getattr(self, name), getattr(self, f"{name}_step")
            if (token is None) != (step is None):
                raise UsageError(f"reference: {name} and {name}_step go together")
            if token is not None:
                _check_hex(name, token)
                _check_integer(f"{name}_step", step)

    @property
    def is_pin(self) -> bool:
        """True if it stands for no file: a person wants the version to stay."""
        return self.written_path.startswith(_PIN_PATH)

    @property
    def instead(self) -> list[tuple[str, int]]:
        """Versions to use if ``token`` was never committed, best first: token and step."""
        pairs = ((self.in_flight, self.in_flight_step), (self.fallback, self.fallback_step))
        return [(token, step) for token, step in pairs if token is not None and step is not None]

    def leads_to(self, there: Container[str]) -> str | None:
        """The token of the version that it leads to, of those that are ``there``."""
        tokens = (self.token, *(token for token, _ in self.instead))
        return next((token for token in tokens if token in there), None)


def pin_of(info: VersionInfo, pool: bytes, pool_path: str, name: str, now_ns: int) -> Reference:
    """A pin of a version of the pool of that identity. To a Portus that knows no pins it is a
    reference whose file is not where it was: it holds what it leads to. name: its id. now_ns: Unix
    time in nanoseconds."""
    return Reference(
        id=name,
        token=info.token.hex(),
        pool=pool.hex(),
        pool_path=pool_path,
        pool_relative=_PIN_POOL,
        model=info.model,
        step=info.step,
        written_path=_PIN_PATH + name,
        written_ns=now_ns,
    )


def pin_at(path: str) -> str | None:
    """The name of the pin of which that is the ``written_path``; None for all other paths."""
    name = path.removeprefix(_PIN_PATH)
    return name if name != path and _PIN_NAME.fullmatch(name) else None


def encode(reference: Reference) -> bytes:
    """The bytes of the file that says ``reference``; equal references give equal bytes."""
    data = _archive(_text(reference))
    assert len(data) <= SIZE_MAX  # the limits of the fields see to it
    return data


def may_begin(head: bytes) -> bool:
    """False if ``head``, ``HEAD_SIZE`` bytes, is not how a reference begins."""
    return _HEAD_MARK in head


def decode(data: bytes) -> Reference | None:
    """What the file with the bytes ``data`` (all of them) says; None if it is no reference.

    Raises ``CorruptionError`` for a damaged reference and ``UsageError`` for one that a newer
    Portus wrote.
    """
    if len(data) > SIZE_MAX or not (may_begin(data[:HEAD_SIZE]) or _TAIL_MARK in data):
        return None
    text = _find_text(data)
    reference = decode_text(text)
    if _archive(text) != data:
        raise CorruptionError("reference file: damaged outside its text")
    return reference


def decode_text(text: str) -> Reference:
    """What the string in a reference file says. Raises as ``decode`` does."""
    body = text[2 * DIGEST_SIZE :]
    if not body.isascii() or digest(body.encode()).hex() != text[: 2 * DIGEST_SIZE]:
        raise CorruptionError("reference file: the checksum of its text does not match")
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"reference file: its text is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise CorruptionError("reference file: its text is not a JSON object")
    return _from_fields(said, body)


def _from_fields(said: dict[str, object], body: str) -> Reference:
    number = said.pop("portus", None)
    if type(number) is not int or number < 1:
        raise CorruptionError(f"reference file: format number {number!r}, expected 1 to {FORMAT}")
    if number > FORMAT:
        raise UsageError(
            f"reference file: format {number}, this Portus reads up to {FORMAT}: "
            "upgrade portus-checkpoint"
        )
    try:
        reference = Reference(**said)  # type: ignore[arg-type]  # __post_init__ checks each
    except (TypeError, UsageError) as error:
        raise CorruptionError(f"reference file: fields out of range: {error}") from error
    if _body(reference) != body:
        raise CorruptionError("reference file: its text is not in canonical form")
    return reference


def _text(reference: Reference) -> str:
    body = _body(reference)
    return digest(body.encode()).hex() + body


def _body(reference: Reference) -> str:
    said: dict[str, object] = {"portus": 1}
    said |= {field.name: getattr(reference, field.name) for field in fields(reference)}
    if reference.part is None:
        del said["part"]
    else:
        said["portus"] = 2
    if reference.in_flight is None:
        del said["in_flight"], said["in_flight_step"]
    else:
        said["portus"] = 3
    # Pure ASCII, so a path that is not UTF-8 (surrogates) goes there and back unchanged.
    return json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _check_hex(name: str, value: object) -> None:
    good = isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef")
    if not good:
        raise UsageError(f"reference: {name} must be 32 lower-case hex digits, found {value!r}")


def _check_text(name: str, value: object, length_max: int) -> None:
    if not isinstance(value, str) or not value or len(value) > length_max or "\0" in value:
        raise UsageError(
            f"reference: {name} must be 1 to {length_max} characters, no NUL: {value!r:.80}"
        )


def _check_integer(name: str, value: object) -> None:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise UsageError(f"reference: {name} must be a 64-bit integer, found {value!r:.80}")


# The archive. Fields of zip records as in APPNOTE 6.3; what is not named here is zero.

_LOCAL: Final = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
"""The five fields before the last are two lengths, the disk and two kinds of attributes."""
_END: Final = struct.Struct("<4sHHHHIIH")
_ZIP_VERSION: Final = 20
_DATE: Final = 0x21
"""1 January 1980, the zero of zip's calendar."""

_PROTO: Final = b"\x80\x02"
_HEAD_MARK: Final = f"c{GLOBAL_MODULE}\n{GLOBAL_NAME}\n".encode()
_UNICODE: Final = b"X"
_CALL: Final = b"\x85R."
"""TUPLE1, REDUCE, STOP."""

_README: Final = (
    b"This file is a Portus reference: the checkpoint itself is in the pool named in data.pkl.\n"
    b"torch.load reads it through Portus (pip install portus-checkpoint).\n"
    b"To put a real torch file in its place: portus materialize PATH\n"
)
_TAIL_MARK: Final = _README[:64]
_PICKLE_NAME: Final = b"archive/data.pkl"
_PICKLE_START: Final = _LOCAL.size + len(_PICKLE_NAME)
_TEXT_START: Final = _PICKLE_START + len(_PROTO) + len(_HEAD_MARK) + len(_UNICODE) + 4


def _find_text(data: bytes) -> str:
    """The string in the file; what is around it is checked by comparing the whole file."""
    (length,) = struct.unpack_from("<I", data.ljust(_TEXT_START, b"\0"), _TEXT_START - 4)
    raw = data[_TEXT_START : _TEXT_START + length]
    if len(raw) != length or not raw.isascii():
        raise CorruptionError(
            f"reference file: expected a text of {length} bytes at byte {_TEXT_START}, found "
            f"{len(raw)} bytes, or not ASCII"
        )
    return raw.decode("ascii")


def _archive(text: str) -> bytes:
    raw = text.encode("ascii")
    call = _PROTO + _HEAD_MARK + _UNICODE + struct.pack("<I", len(raw)) + raw + _CALL
    entries = (
        (_PICKLE_NAME, call),
        (b"archive/version", b"3\n"),
        (b"archive/byteorder", b"little"),
        (b"archive/README.txt", _README),
    )
    body, directory = b"", b""
    for name, content in entries:
        directory += _central(name, content, len(body)) + name
        body += _local(name, content) + name + content
    count = len(entries)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), len(body), 0)
    return body + directory + end


def _local(name: bytes, content: bytes) -> bytes:
    crc, size = zlib.crc32(content), len(content)
    return _LOCAL.pack(b"PK\3\4", _ZIP_VERSION, 0, 0, 0, _DATE, crc, size, size, len(name), 0)


def _central(name: bytes, content: bytes, offset: int) -> bytes:
    crc, size = zlib.crc32(content), len(content)
    made_by = needed = _ZIP_VERSION
    return _CENTRAL.pack(
        b"PK\1\2", made_by, needed, 0, 0, 0, _DATE, crc, size, size, len(name), *bytes(5), offset
    )
