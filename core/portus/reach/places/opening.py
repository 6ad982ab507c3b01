"""The places that a user names, opened."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from portus.errors import PortusError, UsageError
from portus.reach.index.directory import pools_at
from portus.reach.index.place import SUFFIX, Place, PlaceKind, load_class
from portus.reach.media.dax import is_device
from portus.reach.mirror.address import is_store, parse
from portus.reach.mirror.mirrors import resolve
from portus.reach.places.base import OpenPlace, StoredCheckpoint
from portus.reach.protocol.address import is_address

Found = TypeVar("Found")

_STEPS_MAX: Final = 20
"""Steps and models that an error lists."""


def place_named(text: str, what: str, *, mirrors: bool = True) -> Place:
    """Return the place that a user names. what: where it was named. mirrors: whether a mirror is
    allowed. Raises ``UsageError``."""
    if not is_store(text):
        return Place.parse(text, what)
    address = parse(text, what)
    if not mirrors:
        raise UsageError(
            f"{address} is the address of a mirror, and this command takes pools; portus pull "
            f"{address} makes pools from the mirror, and portus mirror status {address} compares "
            "it with its pool"
        )
    return Place(PlaceKind.MIRROR, str(address))


def open_place(place: Place) -> OpenPlace:
    """Return a place, which opens files and connections at their first use."""
    opened: OpenPlace = load_class(place.classes.opened)(place)
    return opened


def places_at(place: Place) -> list[OpenPlace]:
    """Return the places within a place: the pools of a directory, each of several storage hosts, or
    the place itself. Raise ``UsageError`` if there is nothing of that name."""
    found = [place] if place.kind is PlaceKind.MIRROR else pools_at(place)
    return [open_place(each) for each in found]


def journals_of(place: Place, links: str | None) -> list[str]:
    """Return the directories that may have journals of runs that saved to a place. links: see
    ``OpenPlace.journals``."""
    found: list[str] = []
    for each in place.hosts or [place]:
        with open_place(each) as opened:
            found += opened.journals(links)
    return found


class Places(contextlib.ExitStack):
    """Open places. ``target``: ``MODEL`` or ``MODEL@STEP`` to look for; None: everything.
    ``failed``: places that could not be read, with their errors."""

    def __init__(
        self, place: Place, places: Sequence[OpenPlace], target: str | None = None
    ) -> None:
        """place: contains all ``places``."""
        super().__init__()
        self.place: Final = place
        self.target: Final = target
        self.failed: Final[dict[OpenPlace, PortusError]] = {}
        self._places: Final = [self.enter_context(each) for each in places]

    def all(self) -> Sequence[OpenPlace]:
        """Return all places, unreadable ones included."""
        return list(self._places)

    def list(self, model: str | None = None) -> Sequence[StoredCheckpoint]:
        """Return the checkpoints, place by place, oldest commit first."""
        return self._of_each(lambda place: place.list(model))

    def select(self) -> Sequence[StoredCheckpoint]:
        """Return the checkpoints that match ``target``: all of a model, or those of one step.

        A step may have several, after a rollback. Raises ``UsageError`` if there are none, or the
        error of a place that could not be read.
        """
        target = self.target or ""
        models = sorted({*self._of_each(lambda place: place.models())})
        if target in models and (own := self.list(target)):
            return own
        model, at, step = target.rpartition("@")
        named = self.list(model or target) if (model or target) in models else []
        if at and step.removeprefix("-").isdecimal() and step.isascii():
            found = [each for each in named if each.info.step == int(step) and not each.leads_to]
            if found:
                return found
        for error in self.failed.values():
            raise error
        if os.path.isfile(target):
            raise UsageError(f"{target} is a file, but no checkpoint")
        if os.path.isdir(target) and not named:
            raise UsageError(
                f"{target}: there are no checkpoints in this directory, and no model of this name "
                f"in {self.place}: {_choices(model, named, models)}"
            )
        raise UsageError(f"there is no {target} in {self.place}: {_choices(model, named, models)}")

    def by_place(
        self, found: Sequence[StoredCheckpoint]
    ) -> dict[OpenPlace, Sequence[StoredCheckpoint]]:
        """Return the checkpoints of each place that has some."""
        own = {place: [e for e in found if e.place == place.place] for place in self._places}
        return {place: chosen for place, chosen in own.items() if chosen}

    def _of_each(self, read: Callable[[OpenPlace], Sequence[Found]]) -> Sequence[Found]:
        """Return what ``read`` returns for each place that can be read."""
        found: Sequence[Found] = ()
        for each in self._places:
            if each not in self.failed:
                try:
                    found = [*found, *read(each)]
                except PortusError as error:
                    self.failed[each] = error
        return found


def _choices(model: str, named: Sequence[StoredCheckpoint], models: Sequence[str]) -> str:
    steps = [str(each.info.step) for each in named]
    if steps:
        more = "... " if len(steps) > _STEPS_MAX else ""
        return f"model {model!r} has steps {more}{', '.join(steps[-_STEPS_MAX:])}"
    if models:
        return f"it holds the models {', '.join(map(repr, models[:_STEPS_MAX]))}"
    return "it holds no versions"


def place_and_target(
    target: str, pool: str | None, *, whole: bool = False
) -> tuple[str | None, str | None]:
    """Return the place, as ``--pool`` names it, and the target there: the URL of a version in a
    mirror contains both. whole: a place is allowed, for all checkpoints in it; then the target is
    None. Raises ``UsageError``."""
    if is_address(target):
        if whole and pool is None:
            return target, None
        raise UsageError(f"{target} is a storage host: name a model, and pass --pool {target}")
    if whole and pool is None and _has_pools(target):
        return target, None
    if pool is not None or not is_store(target):
        return pool, target
    if whole:
        with open_place(place_named(target, "mirror")) as place:
            if place.models():
                return target, None
    found = resolve(target, "mirror")
    step = "" if found.step is None else f"@{found.step}"
    return str(found.address), found.model + step


def _has_pools(path: str) -> bool:
    if os.path.isdir(path):
        return bool(pools_at(Place.parse(path)))
    return is_device(path) or (path.endswith(SUFFIX) and os.path.isfile(path))


def newest(found: Sequence[StoredCheckpoint]) -> StoredCheckpoint:
    """Return the checkpoint that was committed last; across places, by time. Raise ``UsageError``
    if there are only links."""
    last = {each.place: each for each in found if not each.leads_to}  # the last in order of commits
    if not last:
        raise UsageError(f"{found[0].name} is a link to {found[0].leads_to}, which is not there")
    return max(last.values(), key=lambda each: each.info.time_ns)
