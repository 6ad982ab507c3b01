"""``portus doctor [PLACE...]``: what this machine has, how fast it is, and what to do about it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import numpy as np

from portus.cli import loopback, words
from portus.cli.machine import Machine, MachineFinding
from portus.cli.options import Texts, argument
from portus.cli.output import Output, error_line
from portus.cli.pools import nearest, refuse_pointer
from portus.engine.copying.local import copy
from portus.engine.copying.segments import Sources, Stop
from portus.engine.image.image import Image
from portus.engine.media.base import Medium
from portus.engine.spec import Extent
from portus.engine.writer.image_file import ImageFile
from portus.engine.writer.ring import StagingRing
from portus.engine.writer.ways import TRIES, Kind, Way, Ways
from portus.errors import PortusError, UsageError, mask
from portus.reach.index.directory import pools_at
from portus.reach.index.place import DEFAULT_DIRECTORY, Place
from portus.reach.media.dax import is_device
from portus.reach.media.local import LocalFiles
from portus.reach.places.base import OpenPlace
from portus.reach.places.opening import Places, place_named, places_at

SIZE: Final = 128 << 20
"""Bytes that are copied to measure a place."""

# The median of these counts.
ROUNDS: Final = 3

_MEMORY: Final = "/dev/shm"

ADAPTERS: Final = "portus.doctor"
"""The entry points by which adapters add findings."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of one place, in bytes per second; medians. ``save``: copy, hash and persist, into
    space used before; ``load``: back. ``memory``: a plain copy in memory, in the same moments.

    ``fresh`` and ``spare``: of durable checkpoint files, into fresh space and over a spare, by each
    way to write, the preferred one first; empty for devices.
    """

    place: str
    medium: str
    granularity: int
    volatile: bool
    save: int
    load: int
    memory: int
    fresh: dict[str, int]
    spare: dict[str, int]


def command(
    output: Output,
    places: Texts = argument(
        "[PLACE...]",
        "pools, directories, DAX devices or addresses of storage hosts to look at; "
        "default: $PORTUS_POOL, else the nearest .portus, and /dev/shm",
        None,
    ),
) -> None:
    """Check this machine: what to change, and how fast it is. The verdict comes first."""
    pools: dict[str, MachineFinding] = {}
    measured: dict[str, Speeds] = {}
    elsewhere: dict[str, str] = {}
    failed: dict[str, str] = {}
    for text in places or _default_places():
        name = mask(text, is_address="://" in text)
        try:
            pool, directory = _targets(text)
            if places or text != _MEMORY:  # others may have pools there
                pools.update((each.name, each) for each in pools_of(pool))
            if directory is None:
                elsewhere[pool.path] = _ELSEWHERE
            elif directory not in measured:
                name = directory
                measured[directory] = measure(directory, SIZE)
        except PortusError as error:
            failed[name] = error_line(error)
    frameworks = list(adapters(entry_points(group=ADAPTERS)))
    machine = [*Machine().findings(), *loopback.loopback_findings()]
    found = [*frameworks, *pools.values(), *machine]
    advice = [f"{each.topic} {each.name}: {each.advice}" for each in found if each.advice]
    advice += [
        f"{each.place}: a pool there survives its process, but not a power loss"
        for each in measured.values()
        if each.volatile
    ]
    advice += [f"place {each}: not measured: {why}" for each, why in failed.items()]
    output.line(f"{words.count(len(advice), 'thing')} to do:" if advice else "ready: nothing to do")
    for line in advice:
        output.line(f"- {line}")
    output.line()
    speeds = itertools.chain(*map(_speed_findings, measured.values()))
    for finding in (*frameworks, *speeds, *pools.values(), *machine):
        output.line(f"{finding.topic:17} {finding.name:16} {finding.text}")
    output.document(
        {
            "found": [asdict(each) for each in found],
            "places": [asdict(each) for each in measured.values()],
            "not_measured": {**elsewhere, **failed},
            "advice": advice,
        }
    )


_ELSEWHERE: Final = "on a storage host, not measured from here: run `portus doctor` on its machine"


def _default_places() -> list[str]:
    """Return ``$PORTUS_POOL``, else the nearest ``.portus``, else this directory; and memory."""
    named = Place.by_variable()
    place = named.path if named is not None else nearest(os.getcwd()) or os.getcwd()
    # The place may not exist before the first save.
    while (named is None or named.local_path is not None) and not os.path.exists(place):
        place = os.path.dirname(place)
    return [place, *filter(os.path.isdir, [_MEMORY])]


def _targets(text: str) -> tuple[Place, str | None]:
    """Return the pool to look at, and the directory or device to measure, or None if that is not on
    this machine. A pool file is measured in its directory, and a directory with ``.portus`` in
    there. Raises ``UsageError`` unless the text names a place of this machine, or a storage host.
    """
    pool, path = place_named(text, "PLACE", mirrors=False), os.path.expanduser(text)
    if pool.local_path is None:
        return pool, None
    if is_device(pool.path):
        return pool, path
    if os.path.isdir(path):
        inside = os.path.join(path, DEFAULT_DIRECTORY)
        is_run = os.path.isdir(inside) and not pools_at(pool)
        return (Place.parse(inside), inside) if is_run else (pool, path)
    refuse_pointer(pool)
    if not os.path.isfile(path):
        found = "something else" if os.path.exists(path) else "nothing"
        raise UsageError(
            f"expected a pool file, a directory, a DAX device or the address of a storage host, "
            f"found {found} of this name"
        )
    return pool, os.path.dirname(path) or os.curdir


def measure(place: str, size: int) -> Speeds:
    """Save ``size`` bytes into a new file in the directory ``place``, and load them back.

    On a device only the load is measured, and nothing is written. Raises ``UsageError`` if
    ``place`` is neither, and ``MediumError``.
    """
    files, fresh, spare = LocalFiles(), dict[str, int](), dict[str, int]()
    with contextlib.ExitStack() as stack:
        if is_device(os.path.abspath(place)):
            medium: Medium = files.open(os.path.abspath(place), writable=False)
        elif not os.path.isdir(place):
            raise UsageError(f"{place}: expected a directory, or a DAX device")
        else:
            try:
                made = tempfile.TemporaryDirectory(prefix=".portus-doctor-", dir=place)
            except OSError as error:
                text = f"{place}: nothing can be written there: {error.strerror}"
                raise UsageError(text) from error
            folder = os.path.abspath(stack.enter_context(made))
            fresh, spare = (_file_speeds(folder, size, is_spare) for is_spare in (False, True))
            medium = files.create(os.path.join(folder, "file"), size)
        stack.enter_context(contextlib.closing(medium))
        size = min(size, medium.size)
        source = np.ones(size, np.uint8)
        target = np.zeros(size, np.uint8)
        extent = Extent(0, size)
        info = medium.info

        def save() -> None:
            copy(medium, Sources.at([source.ctypes.data], [size], [extent]), Stop())
            medium.persist([extent])

        calls: dict[str, Callable[[], object]] = {
            "load": lambda: medium.load(0, target.data),
            "memory": lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, size),
            **({"save": save} if info.writable else {}),
        }
        took_s: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(1 + ROUNDS):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                took_s[name].append(time.perf_counter() - start)
    # The first round is left out: it touches all memory for the first time.
    speed = {name: int(size / statistics.median(each[1:])) for name, each in took_s.items()}
    return Speeds(
        place=place,
        medium=info.kind.name,
        granularity=info.granularity,
        volatile=info.volatile,
        save=speed.get("save", 0),
        load=speed["load"],
        memory=speed["memory"],
        fresh=fresh,
        spare=spare,
    )


def _file_speeds(folder: str, size: int, is_spare: bool) -> dict[str, int]:
    """Write checkpoint files of one storage as a training does, until each way is measured. Return
    nothing on systems where no such files are written."""
    if sys.platform != "linux":
        return {}
    source, ways = np.zeros(size, np.uint8), Ways()
    image = Image(
        size=size,
        offset=np.zeros(1, np.int64),
        length=np.array([size], np.int64),
        literals=lambda digests, crcs: (),
    )
    address = np.array([source.ctypes.data], np.int64)
    path = os.path.join(folder, "checkpoint")
    kind = Kind(os.stat(folder).st_dev, is_spare)
    with contextlib.closing(StagingRing(0)) as ring:
        for turn in range(len(Way) * TRIES):
            source += 1  # what a spare has already is not written
            if not is_spare and turn:
                os.remove(path)
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                with contextlib.closing(
                    ImageFile(number, path, image, is_spare=is_spare, ring=ring, ways=ways)
                ) as file:
                    file.copy(np.zeros(1, np.int64), address, Stop())
                    file.finish()
            finally:
                os.close(number)
    return {way.value: speed for way, speed in ways.speeds(kind).items()}


def adapters(points: Iterable[EntryPoint]) -> Iterator[MachineFinding]:
    """Yield the findings that adapters report about themselves. Each point is a function that
    returns triples of name, text and advice."""
    for point in points:
        try:
            found = [MachineFinding(point.name, *each) for each in point.load()()]
        except Exception as error:  # an adapter that is broken is a finding
            advice = "install portus-checkpoint again"
            found = [MachineFinding(point.name, "-", f"cannot be queried: {error!r}", advice)]
        yield from found


def pools_of(place: Place) -> Iterator[MachineFinding]:
    """Yield the pools of a place, except devices without a pool, which ``Machine`` reports."""
    if place.local_path is None:
        yield MachineFinding("pool", place.path, _ELSEWHERE)
        return
    try:
        with Places(place, places_at(place)) as places:
            for each in places.all():
                path = each.place.path
                try:
                    yield _pool(path, each)
                except PortusError as error:
                    if is_device(path):
                        continue
                    text = f"cannot be read: {error_line(error)}"
                    yield MachineFinding("pool", path, text, f"portus verify {path}")
    except PortusError as error:
        yield MachineFinding("pool", place.path, f"cannot be looked at: {error_line(error)}")


def _pool(path: str, pool: OpenPlace) -> MachineFinding:
    """Return the space that saves have in a pool and on its file system, and how many checkpoints
    of the newest one's size that is."""
    usage = pool.usage()
    free = 0 if usage is None else usage.free
    text = f"{words.size(free)} free in it"
    if not is_device(path):
        outside = shutil.disk_usage(path).free
        text += f", {words.size(outside)} on its file system"
        free += outside
    infos = [each.info for each in pool.list()]
    if not infos:
        return MachineFinding("pool", path, f"empty; {text}")
    size = max(infos, key=lambda info: info.commit).size
    fit = free // max(1, size)
    text += f": space for {fit} more checkpoints of {words.size(size)}, the size of the newest"
    advice = "free space, or keep fewer checkpoints: saves need space for two more"
    return MachineFinding("pool", path, text, "" if fit >= 2 else advice)


def _speed_findings(speeds: Speeds) -> Iterator[MachineFinding]:
    place = speeds.place
    for name, found in (("fresh space", speeds.fresh), ("a spare", speeds.spare)):
        if found:  # how checkpoint files are written there
            each = ", ".join(f"{way} {words.size(speed)}/s" for way, speed in found.items())
            yield MachineFinding("files", place, f"{name}: {each}; Portus takes the first")
    volatile = ", VOLATILE" if speeds.volatile else ""
    save = f"save {words.size(speeds.save)}/s, " if speeds.save else ""
    yield MachineFinding(
        "place",
        place,
        f"{speeds.medium}, torn at {speeds.granularity} bytes{volatile}; {save}"
        f"load {words.size(speeds.load)}/s; memory {words.size(speeds.memory)}/s",
    )
    if os.path.isdir(place):
        disk = shutil.disk_usage(place)
        text = f"{words.size(disk.free)} free of {words.size(disk.total)}"
        yield MachineFinding("space", place, text)
