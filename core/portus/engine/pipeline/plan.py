"""The parts of one save, and their places, before a byte moves. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from portus.engine.copying.segments import Digests
from portus.engine.settings.keep import Keep

Column = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Memory of a device: its number, and the address there. ``owner``: the object that keeps the
    memory alive."""

    device: int
    address: int
    owner: object


class Feed(Protocol):
    """A storage that has no address here (it is on a device), fetched a unit at a time."""

    @property
    def there(self) -> OnDevice:
        """The place where a network card finds it, after ``await_device``."""

    def await_device(self) -> None:
        """Return when the device has done the work that the storage's bytes depend on."""

    def units(self) -> AbstractContextManager[Iterator[tuple[int, int]]]:
        """Yield (address, length) of each unit (16 MiB, the last one shorter) in host memory.

        A unit is valid until the next one is taken. After the last one, the device's memory is not
        read any more.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state at the call of save, as the pipeline sees it.

    ``address`` and ``length``: of each storage, in this process, in bytes (address 0 if empty or
    fed). ``late``: the storage does not change until the fence opens, so it may be copied late; the
    others are copied before the save returns. ``steady``: it probably equals that of the version
    before, so it is hashed before anything is copied. ``guarded``: the data pointers of the late
    ones, by which a fence knows them. ``feeds``: by index, those on a device. ``owners``: for each
    storage what keeps its memory alive; empty: unknown. They and the feeds are held until
    nothing is read any more, so that no address is reused. ``changes``: a count for each storage,
    which grows with the writes to it that are counted. ``exposed``: the indices of those in memory
    that other processes may have too; none of them is late. ``metrics``, ``keep``: of the version,
    see ``Labels``.
    """

    address: Column
    length: Column
    late: Flags
    steady: Flags
    model: str = ""
    step: int = 0
    token: bytes = b""
    guarded: frozenset[int] = frozenset()
    feeds: Mapping[int, Feed] = field(default_factory=dict)
    changes: Callable[[], Column] | None = None
    owners: Sequence[object] = ()
    exposed: Column = field(default_factory=lambda: np.empty(0, np.int64))
    metrics: Mapping[str, float] = field(default_factory=dict)
    keep: Keep | None = None


class Previous(Protocol):
    """The newest committed version of the same model, as far as a save compares its storages. Only
    pools have such versions, and the engine does not import them."""

    @property
    def length(self) -> Column:
        """The bytes of each storage."""

    @property
    def may_share(self) -> Flags:
        """True for each storage that another version may share."""

    def digests(self, indices: Column) -> Digests:
        """Return the digests of the units of some storages."""
