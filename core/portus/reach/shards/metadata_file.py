"""``.metadata`` of ``torch.distributed.checkpoint``: torch's pickle, followed by a digest, which
``pickle.load`` ignores."""

from __future__ import annotations

from typing import Final

from portus.engine.format.checksum import DIGEST_SIZE, digest
from portus.engine.format.record import Field, Record
from portus.engine.image.image import Read, exactly
from portus.errors import CorruptionError

NAME: Final = ".metadata"
MAGIC: Final = b"PORTUSMD"

END: Final = Record(
    "end of .metadata",
    16,
    (
        Field("magic", "8s", '`"PORTUSMD"`'),
        Field("pickle", "Q", "bytes of the pickle in front of it"),
    ),
)
"""The record before the xxh3_128 of the pickle and of this record, which ends the file."""


def metadata_file(pickle: bytes) -> bytes:
    """Return the bytes of the file with ``pickle``."""
    data = pickle + END.row(MAGIC, len(pickle))
    return data + digest(data)


def read_pickle(read: Read, size: int, name: str) -> tuple[bytes, bool]:
    """Return the pickle in the file ``name`` of ``size`` bytes, and whether it was verified: stock
    torch's has no digest. Raises ``CorruptionError``."""
    data = exactly(read, 0, size, name)
    at = size - END.size - DIGEST_SIZE
    end = END.unpack(data[at : at + END.size]) if at >= 0 else {}
    # Either will do: a file of Portus with one damaged byte here does not pass for stock's.
    if end.get("magic") != MAGIC and end.get("pickle") != at:
        if not data.endswith(b"."):
            raise CorruptionError(f"{name}: {size} bytes, no whole pickle: cut off, or damaged")
        return data, False
    if digest(data[:-DIGEST_SIZE]) != data[-DIGEST_SIZE:]:
        raise CorruptionError(f"{name} does not match its digest")
    return data[:at], True
