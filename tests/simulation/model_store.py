"""An object store as a model: a dict with a clock, and requests that land when they like.

``ModelStore`` is an honest ``Store`` in memory. ``Unsure`` makes requests of one as a store may
answer them that keeps to the letter of ``portus.reach.mirror.store``: a request takes effect or
not, at once or later, once or twice, and its answer arrives or does not. What is to land later
lands when the test says so, in any order. ``Work`` runs a call, one request at a time.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from portus.engine.format.checksum import digest
from portus.errors import StaleError, TransportError, UsageError
from portus.reach.mirror.model_objects import ModelObjects
from portus.reach.mirror.objects import DIGEST_SUFFIX, FileObject, digest_line
from portus.reach.mirror.store import (
    ListedObject,
    MissingError,
    Part,
    check_name,
    check_prefix,
    short,
)

Objects = dict[str, tuple[bytes, float]]
_WHERE: Final = "a model of a store"

_Item = TypeVar("_Item")


class ModelStore:
    """A ``Store`` in memory. ``now``: its clock, in seconds; a test moves it. ``counts``: how many
    requests of each kind there were."""

    def __init__(self, objects: Objects | None = None) -> None:
        """objects: of another one, which has the same from then on."""
        self.now = 1.8e9
        self.counts: Final[Counter[str]] = Counter()
        self.objects: Final[Objects] = {} if objects is None else objects
        """What there is: bytes, and when they were stored."""
        self._guard: Final = threading.Lock()
        self._is_closed = False

    def put(self, name: str, data: bytes) -> None:
        self._asked("put", name)
        with self._guard:
            self.objects[name] = data, self.now

    def create(self, name: str, data: bytes) -> bool:
        self._asked("create", name)
        with self._guard:
            if name in self.objects:
                return False
            self.objects[name] = data, self.now
            return True

    def get(self, name: str) -> bytes:
        self._asked("get", name)
        return self._object(name)

    def get_range(self, name: str, start: int, length: int) -> Part:
        self._asked("get_range", name)
        found = self._object(name)[start : start + length]
        if len(found) != length:
            raise short(name, start, length, len(found))
        return found

    def list(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        self._asked("list")
        check_prefix(prefix, _WHERE)
        with self._guard:
            names = sorted(n for n in self.objects if n.startswith(prefix) and n > after)
            entries = [ListedObject(n, len(self.objects[n][0]), self.objects[n][1]) for n in names]
        return iter(entries)

    def put_stream(self, name: str, parts: Iterable[Part], size: int, *, unless: str = "") -> None:
        data = b"".join(parts)
        if unless and unless in self.objects:
            raise StaleError(f"{unless} is there by now")
        self.put(name, data)

    def copy(self, name: str, target: str, size: int) -> bool:
        self._asked("copy", name, target)
        self.objects[target] = self._object(name), self.now
        return True

    def delete(self, names: Sequence[str]) -> None:
        self._asked("delete", *names)
        with self._guard:
            for name in names:
                self.objects.pop(name, None)

    def close(self) -> None:
        self._is_closed = True

    def _object(self, name: str) -> bytes:
        found = self.objects.get(name)
        if found is None:
            raise MissingError(f"no object {name!r}")
        return found[0]

    def _asked(self, kind: str, *names: str) -> None:
        if self._is_closed:
            raise UsageError(f"{_WHERE} is closed")
        for name in names:
            check_name(name, _WHERE)
        with self._guard:
            self.counts[kind] += 1


@dataclass(frozen=True, slots=True)
class Odds:
    """How often what happens to a request, out of one; the rest takes effect once, and is told.

    lost: no effect. unheard: it takes effect, and the answer is lost. late: it takes effect later,
    and there is no answer. twice: it takes effect, and once more later. stale: a list lacks the
    newest objects.
    """

    lost: float = 0.0
    unheard: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    stale: float = 0.0


class Unsure(ModelObjects):
    """Makes requests of a bucket, by chance, each in a turn of the ``Work`` that makes it.
    ``landed``: called after each change of it."""

    def __init__(
        self,
        bucket: ModelStore,
        model: str,
        chance: random.Random,
        odds: Odds,
        landed: Callable[[], None],
    ) -> None:
        super().__init__(bucket, model)
        self.bucket: Final = bucket
        self.odds = odds
        self._chance: Final = chance
        self._landed: Final = landed
        self._later: Final[list[Callable[[], object]]] = []

    @property
    def under_way(self) -> int:
        """Requests that are still to land."""
        return len(self._later)

    def land(self) -> None:
        """One of those that are under way takes effect, whichever."""
        self._later.pop(self._chance.randrange(len(self._later)))()
        self._landed()

    def get(self, name: str) -> bytes | None:
        self._ask()
        return self._there(name)

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        self._ask()
        return [self._there(name) for name in names]

    def create(self, name: str, data: bytes) -> bool:
        wait_for_turn()
        made = self._change(lambda: self.bucket.create(name, data))
        # Repeated below, since its first answer was lost, it met what it made.
        return bool(made) and not self._happens(self.odds.twice)

    def put(self, name: str, data: bytes) -> None:
        wait_for_turn()
        self._put(name, data)

    def put_object(self, name: str, data: bytes) -> FileObject:
        """Put a file of a version, and what is beside it, in the turn of ``for_each``."""
        self._put(name, data)
        there = FileObject(name, len(data), digest(data))
        self._put(name + DIGEST_SUFFIX, digest_line(name, there.digest))
        return there

    def list(self, folder: str, after: str = "") -> Iterator[ListedObject]:
        self._ask()
        entries = [*self.bucket.list(folder, after)]
        if self._happens(self.odds.stale):
            entries = entries[self._chance.randrange(3) :]  # of a log, the newest
        return iter(entries)

    def delete(self, names: Sequence[str]) -> None:
        wait_for_turn()
        for each in names:  # a store deletes them one by one, and stops anywhere
            self._delete(each)

    def for_each(self, request: Callable[[_Item], object], items: Sequence[_Item]) -> None:
        wait_for_turn()
        for each in self._chance.sample(items, len(items)):
            request(each)

    def _there(self, name: str) -> bytes | None:
        found = self.bucket.objects.get(name)
        return None if found is None else found[0]

    def _ask(self) -> None:
        wait_for_turn()
        if self._happens(self.odds.lost):
            raise TransportError("no answer")

    def _put(self, name: str, data: bytes) -> None:
        self._change(lambda: self.bucket.put(name, data))

    def _delete(self, name: str) -> None:
        self._change(lambda: self.bucket.delete([name]))

    def _change(self, effect: Callable[[], bool | None]) -> bool | None:
        if self._happens(self.odds.lost):
            raise TransportError("no answer")
        if self._happens(self.odds.late):
            self._later.append(effect)
            raise TransportError("no answer")
        result = effect()
        self._landed()
        if self._happens(self.odds.twice):
            self._later.append(effect)
        if self._happens(self.odds.unheard):
            raise TransportError("no answer")
        return result

    def _happens(self, odds: float) -> bool:
        return self._chance.random() < odds


class KilledError(BaseException):
    """A call ends here, for its process was killed."""


class Work(Iterator[None]):
    """A call on a thread of its own, which waits for its turn before each request: each ``next``
    makes one. It raises what the call raises. Close it: who waits for a turn then is killed."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Final = call
        self._turn: Final = threading.Semaphore(0)
        self._back: Final = threading.Semaphore(0)
        self._thread: Final = threading.Thread(target=self._run, daemon=True)
        self._error: BaseException | None = None
        self._is_over = self._is_killed = False

    def __next__(self) -> None:
        if self._is_over:
            raise StopIteration
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()
        if self._is_over:
            raise self._error or StopIteration

    def close(self) -> None:
        if self._thread.ident is not None and not self._is_over:
            self._is_killed = True
            self._turn.release()
            self._back.acquire()

    def wait(self) -> None:
        """Give the turn back, and wait for the next one, on the thread."""
        self._back.release()
        self._turn.acquire()
        if self._is_killed:
            raise KilledError

    def _run(self) -> None:
        _current.work = self
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._back.release()


_current: Final = threading.local()


def wait_for_turn() -> None:
    """Wait, on the thread of a ``Work``, until it has its next turn."""
    _current.work.wait()
