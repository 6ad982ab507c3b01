"""The heartbeat: one page with a session's last step, whenever the session is killed.

The page is mapped, and stored to after each step; a kill leaves what was stored by then. Two places
take turns, so one of them is whole: the count of steps, the time at which the last one ended, the
time that all took, and a check. Four more take turns for the newest requested saves. The rest is
the line ``begun`` of the session, as in its journal, so the page alone identifies its session.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

from portus.companions.journal.lines import (
    Head,
    Saved,
    SaveRequested,
    SessionBegun,
    SessionEnded,
    decode,
    encode,
)
from portus.engine.format.record import Field, Record
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC: Final = b"PORTUS HEARTBEAT"
FORMAT: Final = 1

HEAD: Final = Record(
    "heartbeat",
    24,
    (
        Field("magic", "16s", "`PORTUS HEARTBEAT`"),
        Field("format", "I", "1"),
        Field("length", "I", "bytes of the line `begun`, which is at byte 1024"),
    ),
)

BEAT: Final = Record(
    "beat",
    32,
    (
        Field("steps", "Q", "steps of the optimizer that this session has done"),
        Field("at_ns", "Q", "when the last one ended, ns since the boot"),
        Field("work_ns", "Q", "what they take without saves, ns"),
        Field("check", "Q", "the three, and `PORTBEAT` as a number, combined by exclusive or"),
    ),
)
"""Places at bytes 64 and 128: step n is in place n modulo 2."""

ASKED: Final = Record(
    "save asked for",
    48,
    (
        Field("number", "Q", "of the save in this session, from 1 on; 0: none"),
        Field("steps", "Q", "done when it was asked for"),
        Field("step", "q", "the training's step number"),
        Field("token", "16s", "of the version"),
        Field("check", "Q", "crc32 of the 40 bytes before"),
    ),
)
"""Places from byte 256 on, 64 bytes each: save n is in place n modulo 4."""

BEATS: Final = (64, 128)
SAVES: Final = (256, 320, 384, 448)
LINE: Final = 1024

_SALT: Final = int.from_bytes(b"PORTBEAT", "little")
_BEAT: Final = struct.Struct("<QQQQ")
_ASKED: Final = struct.Struct("<QQq16sQ")
_CHECKED: Final = 40


def page(begun: SessionBegun) -> bytes:
    """Return the page of a session that has not done any step yet."""
    line = encode(begun)
    assert len(line) <= PAGE - LINE, f"{len(line)} bytes of a session's line"
    head = HEAD.pack(magic=MAGIC, format=FORMAT, length=len(line))
    return (head.ljust(LINE, b"\0") + line).ljust(PAGE, b"\0")


def beat(into: Buffer, steps: int, at_ns: int, work_ns: int) -> None:
    """Record the end of a step. Runs at each step, so it has to be fast."""
    # A kill may come between the stores: the check reveals it.
    check = steps ^ at_ns ^ work_ns ^ _SALT
    _BEAT.pack_into(into, BEATS[steps & 1], steps, at_ns, work_ns, check)


def ask(into: Buffer, number: int, asked: SaveRequested | Saved) -> None:
    """Record the request of save ``number`` of this session, from 1 on."""
    values = number, asked.steps, asked.step, bytes.fromhex(asked.token)
    check = zlib.crc32(ASKED.row(*values, 0)[:_CHECKED])
    _ASKED.pack_into(into, SAVES[number & 3], *values, check)


def read(data: bytes, name: str) -> tuple[SessionBegun, SessionEnded]:
    """Return the session that a page belongs to, and its end. ``name``: of the file, for errors.

    Raises ``UsageError`` for a newer format, ``CorruptionError`` for other bytes.
    """
    if len(data) != PAGE or data[:16] != MAGIC:
        raise CorruptionError(f"{name}: expected a heartbeat, found something else")
    head = HEAD.unpack(data)
    found, length = head["format"], head["length"]
    assert isinstance(found, int)
    assert isinstance(length, int)
    if found != FORMAT:
        raise UsageError(
            f"{name}: a heartbeat of format {found}, and this Portus knows {FORMAT}: it "
            "was written by a newer one. Upgrade Portus here"
        )
    begun = _session_of(data[LINE : LINE + length], name)
    steps, at_ns, work_ns = max(_beat_at(data, offset) for offset in BEATS)
    saves = sorted(each for offset in SAVES if (each := _save_request(data, offset)) is not None)
    ended = SessionEnded(
        session=begun.session,
        closed=False,
        steps=steps,
        at_s=at_ns / 1e9 if steps else begun.at_s,
        work_s=work_ns / 1e9,
        asked=tuple(
            SaveRequested(token=token, step=step, steps=done) for _, done, step, token in saves
        ),
    )
    return begun, ended


def _session_of(line: bytes, name: str) -> SessionBegun:
    found = decode(encode(Head(format=1, model="")) + line, name)
    if len(found.lines) != 1 or not isinstance(found.lines[0], SessionBegun):
        raise CorruptionError(f"{name}: expected the line of a session, found none that is whole")
    return found.lines[0]


def _beat_at(data: bytes, offset: int) -> tuple[int, int, int]:
    steps, at_ns, work_ns, check = _BEAT.unpack_from(data, offset)
    return (steps, at_ns, work_ns) if check == steps ^ at_ns ^ work_ns ^ _SALT else (0, 0, 0)


def _save_request(data: bytes, offset: int) -> tuple[int, int, int, str] | None:
    number, steps, step, token, check = _ASKED.unpack_from(data, offset)
    if not number or check != zlib.crc32(data[offset : offset + _CHECKED]):
        return None
    return number, steps, step, token.hex()
