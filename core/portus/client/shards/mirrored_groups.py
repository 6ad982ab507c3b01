"""The groups of a sharded run in its mirror: which there are, and parts to be read from there.

A group is complete there when the parts of all its ranks are, as in pools (``index.groups``): each
part has a log of its own. One rank looks, and tells the others.
"""

from __future__ import annotations

import contextlib
import logging
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from portus.errors import CorruptionError
from portus.index.groups import (
    COUNT_MAX,
    ID_SIZE,
    Group,
    groups_of,
    part_model,
    part_of,
    part_token,
)
from portus.index.place import Place, PlaceKind
from portus.index.reader import PoolReader
from portus.mirror.address import StoreAddress, parse
from portus.mirror.fetching import place_of
from portus.mirror.mirror import Mirror, models
from portus.mirror.objects import Added, State, entry_number, first_parts_prefix
from portus.mirror.opening import configured_key, open_store
from portus.mirror.store import Store
from portus.spec import VersionInfo
from portus.transport.abreast import abreast

_log: Final = logging.getLogger("portus")

_READ_ABREAST: Final = 16
"""Logs that are read at once."""

_AFTER_SLASH: Final = chr(ord("/") + 1)


@dataclass(frozen=True, slots=True)
class MirrorPlace(Place):
    """A part in a mirror, whose address is ``path``."""

    added: Added


@dataclass(frozen=True, slots=True)
class MirroredRun:
    """What a mirror has of a run. groups: newest last, complete or not, of any number of ranks.
    states: what the log of each part says, by rank and number of ranks; of a number of ranks whose
    first part has no versions, only that of the first."""

    groups: list[Group] = field(default_factory=list)
    states: Mapping[tuple[int, int], State] = field(default_factory=dict)

    @property
    def complete(self) -> list[Group]:
        """Those that can be loaded, newest last."""
        return [group for group in self.groups if group.is_complete]

    @property
    def referred(self) -> set[bytes]:
        """Ids of the groups that reference files led to."""
        return {each.token[:ID_SIZE] for state in self.states.values() for each in state.references}


class GroupMirror:
    """The mirror of the sharded run ``model``. Opens the store for each call."""

    def __init__(self, address: StoreAddress, model: str) -> None:
        self.address: Final = address
        self.model: Final = model

    def look(self) -> MirroredRun:
        """What is there now: for each part a page of a list and up to 17 small reads, and a list to
        see that there are no more numbers of ranks. A log that cannot be read at all is none, with
        an error in the log of Python. Raises what the store raises."""
        with opened(self.address) as store:
            states = {
                (0, count): self._read(store, 0, count, newest)
                for count, newest in self._first_parts(store).items()
            }
            counts = [count for (_, count), state in states.items() if state.versions]
            parts = [(rank, count) for count in counts for rank in range(1, count)]
            with contextlib.closing(
                abreast(lambda part: self._read(store, *part), parts, _READ_ABREAST)
            ) as read:
                states |= dict(zip(parts, read, strict=True))
        infos = [pair for part, state in states.items() for pair in self._infos(*part, state)]
        return MirroredRun(groups_of(infos, self.model), states)

    def part(self, group: Group, rank: int) -> tuple[Place, VersionInfo] | None:
        """A rank's part of a group, if it is there. Raises what the store raises."""
        with opened(self.address) as store:
            state = self._read(store, rank, group.count)
        token = part_token(group.id, rank)
        return next(
            (each for each in self._infos(rank, group.count, state) if each[1].token == token), None
        )

    def _first_parts(self, store: Store) -> dict[int, int]:
        """The numbers of ranks that the run has, or had, ascending, and the newest entry of the log
        of each first rank's part. A list for each, and one more."""
        start = first_parts_prefix(self.model)
        if start is None:
            named = [
                (part_of(each), newest)
                for each, newest in models(store, key=configured_key()).items()
            ]
            return {
                part[2]: newest for part, newest in named if part and part[:2] == (self.model, 0)
            }
        found, after = {}, start
        while (first := next(iter(store.list("", after)), None)) is not None:
            prefix, _, name = first.name.partition("/")
            if not prefix.startswith(start):
                break
            newest = entry_number(name)  # the log comes first, and its newest entry
            if newest is not None and prefix[len(start) :].isdecimal():
                found[int(prefix[len(start) :])] = newest
            after = prefix + _AFTER_SLASH
        return {count: found[count] for count in sorted(found) if 0 < count <= COUNT_MAX}

    def _read(self, store: Store, rank: int, count: int, newest: int | None = None) -> State:
        model = part_model(self.model, rank, count)
        try:
            return mirror_in(store, self.address, model, newest).read()
        except CorruptionError as error:
            _log.error("portus: %s: %s", self.address, error)
            return State()

    def _infos(self, rank: int, count: int, state: State) -> Iterator[tuple[Place, VersionInfo]]:
        """The parts of a rank; their commits are in the order of the history."""
        for number, added in enumerate(sorted(state.versions, key=place_of), 1):
            info = added.info(part_model(self.model, rank, count), number, number)
            yield MirrorPlace(PlaceKind.MIRROR, str(self.address), added), info


def mirror_in(store: Store, address: StoreAddress, model: str, newest: int | None = None) -> Mirror:
    """The mirror of a model in a store, with the key that is configured. newest: as of
    ``Mirror``."""
    return Mirror(store, model, key=configured_key(), name=str(address), newest=newest)


@contextlib.contextmanager
def opened(address: StoreAddress) -> Iterator[Store]:
    """The store at ``address``, until the block ends. Raises ``UsageError``."""
    store = open_store(address)
    try:
        yield store
    finally:
        store.close()


# Parts that are read from there.


@contextlib.contextmanager
def opened_part(place: MirrorPlace, model: str) -> Iterator[PoolReader]:
    """The part at ``place``, as a pool of one version. Raises what the store raises."""
    address = parse(place.path)
    with (
        opened(address) as store,
        contextlib.closing(mirror_in(store, address, model).open([place.added])) as reader,
    ):
        yield reader


def read_from(part: tuple[Place, VersionInfo], group: Group, rank: int) -> None:
    """From now on the part of ``rank`` is read from there."""
    group.parts = ChainMap({rank: part}, group.parts)  # type: ignore[arg-type]
