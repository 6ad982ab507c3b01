"""``portus doctor [PLACE...]``: what this machine has, how fast it is, and what to do about it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import numpy as np

from portus.cli import loopback
from portus.cli.machine import Found, Machine
from portus.cli.output import Json, Output, said, size_text
from portus.errors import PortusError, UsageError
from portus.index.place import Place, PlaceKind
from portus.media.base import Medium
from portus.media.local import LocalFiles
from portus.spec import Extent
from portus.transport.local import Source, Stop, copy

SIZE: Final = 128 << 20
"""Bytes that are copied to measure a place."""

ROUNDS: Final = 3

ADAPTERS: Final = "portus.doctor"
"""The entry points by which adapters add to what is found."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one place, in bytes per second; medians. ``save``: copy, hash and persist, into space
    used before; ``load``: back. ``memory``: a plain copy in memory, in the same moments."""

    place: str
    medium: str
    granularity: int
    volatile: bool
    save: int
    load: int
    memory: int


def run(places: Sequence[str], output: Output, *, size: int = SIZE) -> int:
    """Look and measure; the exit code, 0 even if there is something to do."""
    found = [*Machine().found(), *loopback.found(), *adapters(entry_points(group=ADAPTERS))]
    for each in found:
        output.line(f"{each.topic:17} {each.name:16} {each.text}")
    measured, failed = [], {}
    for place in places or _usual_places():
        try:
            measured.append(measure(place, size))
        except PortusError as error:
            failed[place] = said(error)
            output.line(f"{'place':17} {place}: cannot be measured: {failed[place]}")
        else:
            output.line(_speed_text(measured[-1]))
    advice = [*_advice(found), *(text for each in measured for text in _advice_of(each))]
    output.line("")
    for line in advice or ["nothing to do"]:
        output.line(f"- {line}" if advice else line)
    output.document(_document(found, measured, failed, advice))
    return 0


def measure(place: str, size: int) -> Speeds:
    """Save ``size`` bytes into a new file in the directory ``place``, and load them back.

    Of a device only the load is measured: nothing is written there. Raises ``UsageError`` for
    what is neither, ``MediumError``.
    """
    with _opened(os.path.abspath(place), size) as medium:
        size = min(size, medium.size)
        source = np.ones(size, np.uint8)
        target = np.zeros(size, np.uint8)
        extent = Extent(0, size)
        info = medium.info

        def save() -> None:
            copy(medium, [Source(source.ctypes.data, size, (extent,))], Stop())
            medium.persist([extent])

        def load() -> None:
            medium.load(0, target.data)

        def move() -> None:
            ctypes.memmove(target.ctypes.data, source.ctypes.data, size)

        calls: list[Callable[[], None]] = [load, move]
        if info.writable:
            calls.append(save)
        for call in calls:
            call()  # the first touch of everything is another question
        took_s: dict[Callable[[], None], list[float]] = {call: [] for call in calls}
        for _ in range(ROUNDS):
            for call in calls:
                took_s[call].append(_timed(call))
        speed = {call: int(size / statistics.median(took_s[call])) for call in calls}
        return Speeds(
            place=place,
            medium=info.kind.value,
            granularity=info.granularity,
            volatile=info.volatile,
            save=speed.get(save, 0),
            load=speed[load],
            memory=speed[move],
        )


@contextlib.contextmanager
def _opened(place: str, size: int) -> Iterator[Medium]:
    files = LocalFiles()
    if Place.named(place).kind is PlaceKind.DEVICE:
        medium: Medium = files.open(place, writable=False)
        with contextlib.closing(medium):
            yield medium
        return
    if not os.path.isdir(place):
        raise UsageError(f"{place}: expected a directory, or a DAX device")
    try:
        folder = tempfile.TemporaryDirectory(prefix=".portus-doctor-", dir=place)
    except OSError as error:
        raise UsageError(f"{place}: nothing can be written there: {error.strerror}") from error
    with folder, contextlib.closing(files.create(os.path.join(folder.name, "file"), size)) as made:
        yield made


def adapters(points: Iterable[EntryPoint]) -> Iterator[Found]:
    """What adapters say of themselves. Each point is a function that returns triples of name, text
    and advice."""
    for point in points:
        try:
            found = [Found(point.name, *each) for each in point.load()()]
        except Exception as error:  # an adapter that is broken is something to tell
            advice = "install portus-checkpoint again"
            found = [Found(point.name, "-", f"cannot be asked: {error!r}", advice)]
        yield from found


def _usual_places() -> list[str]:
    """Where pools are by default (or would be), and memory."""
    pools = Place.named(None)
    place = os.getcwd() if pools.is_host else pools.path
    while not os.path.exists(place):
        place = os.path.dirname(place)
    if os.path.isfile(place):
        place = os.path.dirname(place)
    return list(dict.fromkeys([place, *(["/dev/shm"] if os.path.isdir("/dev/shm") else [])]))


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _speed_text(speeds: Speeds) -> str:
    volatile = ", VOLATILE" if speeds.volatile else ""
    save = f"save {size_text(speeds.save)}/s, " if speeds.save else ""
    return (
        f"{'place':17} {speeds.place:16} {speeds.medium}, torn at {speeds.granularity} bytes"
        f"{volatile}; {save}load {size_text(speeds.load)}/s; memory {size_text(speeds.memory)}/s"
    )


def _advice(found: Sequence[Found]) -> list[str]:
    return [f"{each.topic} {each.name}: {each.advice}" for each in found if each.advice]


def _advice_of(speeds: Speeds) -> list[str]:
    if speeds.volatile:
        return [f"{speeds.place}: a pool there survives its process, and not a loss of power"]
    return []


def _document(
    found: Sequence[Found], measured: Sequence[Speeds], failed: dict[str, str], advice: list[str]
) -> dict[str, Json]:
    return {
        "found": [dict(asdict(each)) for each in found],
        "places": [dict(asdict(each)) for each in measured],
        "not_measured": dict(failed),
        "advice": list(advice),
    }
