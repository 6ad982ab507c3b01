"""The lines of a journal: the history of a run, one fact a line.

A line is the crc32 of the text after the space, 8 hex digits, and one JSON object: its ``kind``,
and fields by name. Lines are only added. Readers skip an incomplete line at the end, which was
being written, and damaged lines, which they count. A line before each session has the format;
readers refuse a journal of a newer format.

Moments ``at_s`` are seconds of the machine's clock since its boot, sleep included: that clock
cannot be set. ``time_ns`` is the wall clock, read once for each session; it places sessions of
different boots, and nothing else depends on it.

A heartbeat is one page of such lines: a session's ``begun``, and its ``ended`` as of the last step,
in two places in turn. The session writes it as it runs, whenever it is killed: the file is mapped,
so the kernel keeps a store after the process is gone. A kill in the middle of a store leaves one
place damaged, and the other one as it was a store before.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from portus.companions.cadence.bound import Decision
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

FORMAT: Final = 1

LINE_MAX: Final = 4096
"""The most bytes of a line; a longer one is damage."""

TEXT_MAX: Final = 240
"""The characters of a name or a reason that are kept."""

REQUESTED: Final = 4
"""The newest requested saves that a heartbeat has."""

PLACES: Final = 2048, 3072
"""The bytes of a heartbeat at which it has its line ``ended``, in turn."""

_PLACE: Final = struct.Struct(f"{PAGE // 4}s")

FILE_MAX: Final = 1024
"""The most bytes of a file's path; a longer one is omitted."""

STATS: Final = "blocked_s", "copy_s", "commit_s", "total_s", "copied_bytes", "shared_bytes"
"""The fields of ``portus.SaveStats`` that a line of a save has."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Head(msgspec.Struct, frozen=True, kw_only=True, tag="journal", tag_field="kind"):
    """The line before each session: the format, and the model of the journal."""

    format: int
    model: str


class SessionBegun(msgspec.Struct, frozen=True, kw_only=True, tag="begun", tag_field="kind"):
    """The start of a session: a process that trains, from when it opened the run. ``resumed``: the
    token of the version that it loaded before its first step; ``resumed_step``: its step."""

    session: str
    at_s: Seconds
    time_ns: Count
    boot: str
    process: Count
    resumed: str | None = None
    resumed_step: int | None = None


class Saved(
    msgspec.Struct, frozen=True, kw_only=True, tag="saved", tag_field="kind", omit_defaults=True
):
    """A version. The last line with a session's ``number`` counts: the cost of a save is known a
    little after its commit. ``step``: the training's number. ``steps``: of the optimizer, done in
    this session at the call; ``work_s``: their time without saves. ``cost_s``: the time that the
    saves since the line before added to training; None if unknown. ``file``: its path from the
    directory of the journal; "" without one. Other times and sizes as in ``portus.SaveStats``.
    ``saves``: how many saves the line stands for; its times and sizes are their sums."""

    session: str
    number: Count
    step: int
    steps: Count
    at_s: Seconds
    token: str
    work_s: Seconds
    file: str = ""
    cost_s: float | None = None
    blocked_s: Seconds = 0.0
    copy_s: Seconds = 0.0
    commit_s: Seconds = 0.0
    total_s: Seconds = 0.0
    copied_bytes: Count = 0
    shared_bytes: Count = 0
    saves: Count = 1


class Failed(
    msgspec.Struct, frozen=True, kw_only=True, tag="failed", tag_field="kind", omit_defaults=True
):
    """A save that became no version, with the reason; of several, the newest one's."""

    session: str
    step: int
    steps: Count
    at_s: Seconds
    why: str
    saves: Count = 1


class IntervalDecided(msgspec.Struct, frozen=True, kw_only=True, tag="decided", tag_field="kind"):
    """A decision on the interval from here on, see ``portus.Cadence``."""

    session: str
    steps: Count
    at_s: Seconds
    decision: Decision


class SessionEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended", tag_field="kind"):
    """The end of a session. ``closed``: the session closed the run; else it was killed, and the
    rest is from its heartbeat: ``at_s`` is the last sign of life. ``steps``: done in all;
    ``work_s``: their time without saves. ``asked``: the newest requested saves, whatever became of
    them: the steps done by then, by token."""

    session: str
    closed: bool
    steps: Count
    at_s: Seconds
    work_s: Seconds = 0.0
    asked: dict[str, Count] = {}


Line = SessionBegun | Saved | Failed | IntervalDecided | SessionEnded

_DECODER: Final[msgspec.json.Decoder[Head | Line]] = msgspec.json.Decoder(Head | Line)


@dataclass(frozen=True, slots=True)
class JournalContents:
    """The contents of a journal. ``damaged``: the number of skipped lines."""

    head: Head
    lines: tuple[Line, ...]
    damaged: int = 0


def encode(line: Head | Line) -> bytes:
    """Return the bytes of a line, with its end."""
    text = msgspec.json.encode(line)
    made = b"%08x %s\n" % (zlib.crc32(text), text)
    assert len(made) <= LINE_MAX, f"a line of {len(made)} bytes"
    return made


def decode(data: bytes, name: str) -> JournalContents:
    """Return the contents of a journal's bytes. ``name``: of the file, for errors.

    Raises ``UsageError`` for a journal of a newer format, ``CorruptionError`` without a format.
    """
    *whole, _ = data.split(b"\n")
    found = [_decode_line(line) for line in whole if line]
    known = [each for each in found if each is not None]
    heads = [each for each in known if isinstance(each, Head)]
    newest = max((each.format for each in heads), default=0)
    if newest > FORMAT:
        raise UsageError(
            f"{name}: a journal of format {newest}, and this Portus knows up to {FORMAT}: "
            "it was written by a newer one. Upgrade Portus here"
        )
    if not heads:
        raise CorruptionError(f"{name}: expected a journal, found no line that says its format")
    lines = tuple(each for each in known if not isinstance(each, Head))
    return JournalContents(heads[0], lines, damaged=len(found) - len(known))


def first_page(begun: SessionBegun) -> bytes:
    """Return the heartbeat of a session that has not done any step yet."""
    return (encode(Head(format=FORMAT, model="")) + encode(begun)).ljust(PAGE, b"\n")


def beat(into: Buffer, count: int, ended: SessionEnded) -> None:
    """Write a session's end, if it were killed now, into its heartbeat. ``count``: of the writes to
    this heartbeat."""
    line = encode(ended).ljust(_PLACE.size, b"\n")
    assert len(line) == _PLACE.size, f"{len(line)} bytes of a session's end"
    _PLACE.pack_into(into, PLACES[count & 1], line)


def read_beat(data: bytes, name: str) -> tuple[SessionBegun, SessionEnded]:
    """Return the session that a heartbeat belongs to, and its end. ``name``: of the file, for
    errors. Raises as ``decode``, and ``CorruptionError`` for other bytes."""
    lines = decode(data, name).lines
    begun = next((each for each in lines if isinstance(each, SessionBegun)), None)
    if len(data) != PAGE or begun is None:
        raise CorruptionError(f"{name}: expected a heartbeat, found something else")
    none = SessionEnded(session=begun.session, closed=False, steps=0, at_s=begun.at_s)
    ends = [none, *(each for each in lines if isinstance(each, SessionEnded))]
    return begun, max(ends, key=lambda each: (each.steps, each.at_s))


def _decode_line(line: bytes) -> Head | Line | None:
    """Return the content of a line; None for a damaged one."""
    mark, text = line[:8], line[9:]
    if len(line) >= LINE_MAX or line[8:9] != b" " or b"%08x" % zlib.crc32(text) != mark:
        return None
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def shorten(head: Head, lines: Iterable[Line], size: int) -> bytes:
    """Return the same journal in at most ``size`` bytes. In its older half, neighbouring saves
    become one line, and so do failures, and decisions; saves that a session resumed from stay. If
    that is too much, the oldest sessions go."""
    rest = _newest(lines)
    while len(made := _join_lines(head, rest)) > size:
        fewer = _join_neighbours(rest)
        if len(fewer) == len(rest):
            sessions = list(dict.fromkeys(each.session for each in rest))
            if len(sessions) == 1:
                break
            fewer = [each for each in rest if each.session in sessions[len(sessions) // 2 :]]
        rest = fewer
    return made


def _join_neighbours(lines: Sequence[Line]) -> list[Line]:
    """Return ``lines``; in the older half two of a kind are one, in the place of the later one."""
    resumed = {each.resumed for each in lines if isinstance(each, SessionBegun)}
    found = dict(enumerate(lines))
    first: dict[tuple[object, str], int] = {}
    for position, each in enumerate(lines[: len(lines) // 2]):
        key = type(each), each.session
        if key in first:
            found[position] = _join(found.pop(first.pop(key)), each)
        elif isinstance(each, Failed | IntervalDecided) or (
            isinstance(each, Saved) and each.token not in resumed
        ):
            first[key] = position
    return list(found.values())


def _join(before: Line, line: Line) -> Line:
    """Return one line for two of a kind."""
    if isinstance(before, Saved) and isinstance(line, Saved):
        sums = {name: getattr(before, name) + getattr(line, name) for name in ("saves", *STATS)}
        return msgspec.structs.replace(line, cost_s=cost_of(before) + cost_of(line), **sums)
    if isinstance(before, Failed) and isinstance(line, Failed):
        return msgspec.structs.replace(line, saves=before.saves + line.saves)
    return line


def _join_lines(head: Head, lines: Iterable[Line]) -> bytes:
    return b"".join(map(encode, (head, *lines)))


def _newest(lines: Iterable[Line]) -> list[Line]:
    """Return ``lines`` without those that a later one replaces."""
    found = list(lines)
    last: dict[tuple[object, ...], int] = {}
    for position, each in enumerate(found):
        if isinstance(each, Saved):
            last[Saved, each.session, each.number] = position
        elif isinstance(each, SessionBegun | SessionEnded):
            last[type(each), each.session] = position
    single = Saved | SessionBegun | SessionEnded
    stays = set(last.values())
    return [e for position, e in enumerate(found) if position in stays or not isinstance(e, single)]


def cost_of(save: Saved) -> float:
    """Return the seconds that saves added to training: measured, or at least the blocked time."""
    return save.blocked_s if save.cost_s is None else save.cost_s
