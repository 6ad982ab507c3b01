"""``portus doctor [PLACE...]``: what this machine has, how fast it is, and what to do about it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import numpy as np

from portus.cli import loopback
from portus.cli.machine import Machine, MachineFinding
from portus.cli.output import Json, Output, count_text, said, size_text
from portus.cli.pools import PlacePools, find_pool, refuse_pointer
from portus.errors import PortusError, UsageError, masked
from portus.image.image import Image
from portus.index.catalogue import Catalogue
from portus.index.directory import pools_at
from portus.index.place import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE, Place, PlaceKind
from portus.index.reader import PoolReader
from portus.media.base import Medium
from portus.media.local import LocalFiles
from portus.mirror.address import is_store
from portus.spec import Extent
from portus.transport.local import Source, Stop, copy
from portus.writer.image_file import ImageFile
from portus.writer.ring import StagingRing
from portus.writer.ways import TRIES, Kind, Way, Ways

SIZE: Final = 128 << 20
"""Bytes that are copied to measure a place."""

ROUNDS: Final = 3

ADAPTERS: Final = "portus.doctor"
"""The entry points by which adapters add to what is found."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of one place, in bytes per second; medians. ``save``: copy, hash and persist, into
    space used before; ``load``: back. ``memory``: a plain copy in memory, in the same moments.

    ``fresh`` and ``spare``: of checkpoint files, durable, into fresh space and over a spare, by
    each way, the preferred one first; nothing for devices."""

    place: str
    medium: str
    granularity: int
    volatile: bool
    save: int
    load: int
    memory: int
    fresh: dict[str, int]
    spare: dict[str, int]


def run(places: Sequence[str], output: Output, *, size: int = SIZE) -> int:
    """Look and measure; the exit code, 0 even if there is something to do."""
    meant, failed = _all_meant(places)
    frameworks = list(adapters(entry_points(group=ADAPTERS)))
    pools = list(pools_here() if not places else _pools_of_all(meant))
    machine = [*Machine().found(), *loopback.found()]
    lines = [f"{'place':17} {place}: not measured: {why}" for place, why in failed.items()]
    measured = []
    for place in _places_of(meant) if places else _usual_places():
        try:
            measured.append(measure(place, size))
        except PortusError as error:
            failed[place] = said(error)
            lines.append(f"{'place':17} {place}: cannot be measured: {failed[place]}")
        else:
            lines += [*_file_texts(measured[-1]), _speed_text(measured[-1])]
            lines += _space_texts(place)
    found = [*frameworks, *pools, *machine]
    advice = [*_advice(found), *(text for each in measured for text in _advice_of(each))]
    output.line(f"{count_text(len(advice), 'thing')} to do:" if advice else "ready: nothing to do")
    for line in advice:
        output.line(f"- {line}")
    output.line("")
    for line in (*_lines(frameworks), *lines, *_lines(pools), *_lines(machine)):
        output.line(line)
    failed.update((each.pool.path, _ELSEWHERE) for each in meant if each.pool.is_host)
    output.document(_document(found, measured, failed, advice))
    return 0


@dataclass(frozen=True, slots=True)
class _Meant:
    """What a user means by a place. ``pool``: to look at; ``place``: a directory or a device to
    measure; None: what is there is not on this machine."""

    pool: Place
    place: str | None


_ELSEWHERE: Final = "on a storage host, not measured from here: run `portus doctor` on its machine"


def _all_meant(places: Sequence[str]) -> tuple[list[_Meant], dict[str, str]]:
    """What is meant by each; and why nothing, where that is so."""
    meant: dict[_Meant, None] = {}
    failed = {}
    for place in places:
        try:
            meant[_meant(place)] = None
        except PortusError as error:
            failed[masked(place, is_address="://" in place)] = said(error)
    return list(meant), failed


def _meant(text: str) -> _Meant:
    """A pool file is measured in its directory, and a directory with ``.portus`` in there. Raises
    ``UsageError`` for what is no place of this machine, nor a storage host."""
    if is_store(text):
        raise UsageError(f"it is a mirror. portus mirror status {text} compares it with its pool")
    pool = Place.named(text, "PLACE")
    if pool.is_host:
        return _Meant(pool, None)
    path = os.path.expanduser(text)
    if pool.kind is PlaceKind.DEVICE:
        return _Meant(pool, path)
    if os.path.isdir(path):
        inside = os.path.join(path, DEFAULT_DIRECTORY)
        is_run = os.path.isdir(inside) and not pools_at(pool)
        return _Meant(Place.named(inside), inside) if is_run else _Meant(pool, path)
    refuse_pointer(pool)
    if not os.path.isfile(path):
        found = "something else" if os.path.exists(path) else "nothing"
        raise UsageError(
            f"expected a pool file, a directory, a DAX device or the address of a storage host, "
            f"found {found} of this name"
        )
    return _Meant(pool, os.path.dirname(path) or os.curdir)


def _places_of(meant: Sequence[_Meant]) -> list[str]:
    """What is measured, once each."""
    return list(dict.fromkeys(each.place for each in meant if each.place is not None))


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
            fresh=_speeds_of_files(place, size, is_spare=False) if info.writable else {},
            spare=_speeds_of_files(place, size, is_spare=True) if info.writable else {},
        )


def _speeds_of_files(place: str, size: int, *, is_spare: bool) -> dict[str, int]:
    """Write checkpoint files of one storage as a training does, until each way was measured.
    Nothing where they are not written."""
    if sys.platform != "linux":
        return {}
    source, ways, ring = np.ones(size, np.uint8), Ways(), StagingRing(0)
    image = Image(
        size=size,
        offset=np.zeros(1, np.int64),
        length=np.array([size], np.int64),
        literals=lambda digests, crcs: (),
    )
    address = np.array([source.ctypes.data], np.int64)
    with (
        contextlib.closing(ring),
        tempfile.TemporaryDirectory(prefix=".portus-doctor-", dir=place) as folder,
    ):
        path = os.path.join(folder, "file")
        for turn in range(len(Way) * TRIES + is_spare):
            source[:] = turn  # what a spare has already is not written
            if not is_spare and os.path.exists(path):
                os.remove(path)
            overwritten = is_spare and os.path.exists(path)
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                with contextlib.closing(
                    ImageFile(number, path, image, is_spare=overwritten, ring=ring, ways=ways)
                ) as file:
                    file.copy(np.zeros(1, np.int64), address, Stop())
                    file.finish()
                kind = Kind(os.fstat(number).st_dev, is_spare)
            finally:
                os.close(number)
    return {way.value: speed for way, speed in ways.speeds(kind).items()}


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


def adapters(points: Iterable[EntryPoint]) -> Iterator[MachineFinding]:
    """What adapters say of themselves. Each point is a function that returns triples of name, text
    and advice."""
    for point in points:
        try:
            found = [MachineFinding(point.name, *each) for each in point.load()()]
        except Exception as error:  # an adapter that is broken is something to tell
            advice = "install portus-checkpoint again"
            found = [MachineFinding(point.name, "-", f"cannot be queried: {error!r}", advice)]
        yield from found


def pools_here() -> Iterator[MachineFinding]:
    """The pools that commands mean here."""
    try:
        place = find_pool(None)
    except UsageError:
        text = (
            f"no {DEFAULT_DIRECTORY} here or above, and ${DIRECTORY_VARIABLE} is not set; portus "
            "doctor POOL looks at another pool"
        )
        yield MachineFinding("pool", "-", text)
        return
    yield from _pools_of(place)


def _pools_of_all(meant: Sequence[_Meant]) -> Iterator[MachineFinding]:
    found = [finding for each in meant for finding in _pools_of(each.pool)]
    yield from {each.name: each for each in found}.values()


def _pools_of(place: Place) -> Iterator[MachineFinding]:
    """The pools of a place: the space that saves have, how many checkpoints of the newest one's
    size that is, and whether the checkpoint files are on their file system. Of a device without a
    pool the machine tells."""
    if place.is_host:
        yield MachineFinding("pool", place.path, _ELSEWHERE)
        return
    is_seen = place.kind is PlaceKind.DEVICE
    try:
        with PlacePools(place) as pools:
            for pool, reader, catalogue in pools.catalogues():
                is_seen = True
                yield _pool_text(pool, reader, catalogue)
            for pool, error in pools.failed.items():
                if pool.kind is not PlaceKind.DEVICE:
                    is_seen = True
                    advice = f"portus verify --pool {pool}"
                    text = f"cannot be read: {said(error)}"
                    yield MachineFinding("pool", pool.path, text, advice)
    except PortusError as error:
        yield MachineFinding("pool", place.path, f"cannot be looked at: {said(error)}")
        return
    if not is_seen:
        yield MachineFinding("pool", place.path, "no pool in it yet")


def _pool_text(pool: Place, reader: PoolReader, catalogue: Catalogue) -> MachineFinding:
    inside = max(0, reader.medium.size - reader.kept_bytes())
    is_device = pool.kind is PlaceKind.DEVICE
    outside = 0 if is_device else _free_on_disk(pool.path)
    text = f"{size_text(inside)} free in it"
    if not is_device:
        text += f", {size_text(outside)} on its file system"
    infos = [entry.info for entry in catalogue.entries()]
    if not infos:
        return MachineFinding("pool", pool.path, f"empty; {text}")
    size = max(infos, key=lambda info: info.commit).size
    fit = (inside + outside) // max(1, size)
    text += f": space for {fit} more checkpoints of {size_text(size)}, the size of the newest"
    advice = (
        "" if fit >= 2 else "free space, or keep fewer checkpoints: saves need space for two more"
    )
    return MachineFinding("pool", pool.path, text, "" if fit >= 2 else advice)


def _lines(found: Sequence[MachineFinding]) -> list[str]:
    return [f"{each.topic:17} {each.name:16} {each.text}" for each in found]


def _space_texts(place: str) -> Iterator[str]:
    if os.path.isdir(place):
        with contextlib.suppress(OSError):
            space = os.statvfs(place)
            free, whole = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
            yield f"{'space':17} {place:16} {size_text(free)} free of {size_text(whole)}"


def _free_on_disk(path: str) -> int:
    """Bytes that this user may still write there."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


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


def _file_texts(speeds: Speeds) -> Iterator[str]:
    """How checkpoint files are written there, by what was measured."""
    for name, found in (("fresh space", speeds.fresh), ("a spare", speeds.spare)):
        if found:
            each = ", ".join(f"{way} {size_text(speed)}/s" for way, speed in found.items())
            yield f"{'files':17} {speeds.place:16} {name}: {each}; Portus takes the first"


def _advice(found: Sequence[MachineFinding]) -> list[str]:
    return [f"{each.topic} {each.name}: {each.advice}" for each in found if each.advice]


def _advice_of(speeds: Speeds) -> list[str]:
    if speeds.volatile:
        return [f"{speeds.place}: a pool there survives its process, but not a power loss"]
    return []


def _document(
    found: Sequence[MachineFinding],
    measured: Sequence[Speeds],
    failed: dict[str, str],
    advice: list[str],
) -> dict[str, Json]:
    return {
        "found": [dict(asdict(each)) for each in found],
        "places": [dict(asdict(each)) for each in measured],
        "not_measured": dict(failed),
        "advice": list(advice),
    }
