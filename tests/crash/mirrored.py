"""Histories of one mirror: several writers and readers on a store whose requests land when they
like, by a seed. An oracle that sees every object holds them to what was told.

No byte of a tensor is moved: the content of a file says here of which version it is.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from portus.engine.format.checksum import digest
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError, TransportError
from portus.reach.mirror.log import MirrorLog, SupersededError, fold
from portus.reach.mirror.model_objects import ModelObjects
from portus.reach.mirror.objects import (
    LOG,
    Added,
    FileObject,
    Seal,
    State,
    entry_number,
)
from portus.reach.mirror.writer import Writer
from tests.simulation.model_store import ModelStore, Odds, Unsure, Work

MODEL = "gpt"
SEAL = Seal()
FILES = ("a", "b")
MakeWriter = Callable[[ModelObjects, Seal], Writer]


class BrokenError(AssertionError):
    """What was promised does not hold."""


@dataclass(frozen=True)
class Version:
    """A version of a pool."""

    info: VersionInfo
    pool: bytes


def contents(version: Version, number: int) -> bytes:
    """What is in a file of a version."""
    return version.info.token + FILES[number].encode()


@dataclass
class Pool:
    """A pool that is trained on, and its commits."""

    uuid: bytes
    commit: int = 0
    versions: list[Version] = field(default_factory=list)

    def save(self, chance: random.Random) -> Version:
        self.commit += 1
        token, step = chance.randbytes(16), chance.randrange(100)
        info = VersionInfo(MODEL, self.commit, self.commit, step, token, 0, 2 * (16 + 1))
        self.versions.append(Version(info, self.uuid))
        return self.versions[-1]


class Oracle:
    """Sees each change of the bucket, and knows what was told."""

    def __init__(self, bucket: ModelStore) -> None:
        self.bucket = bucket
        self.state = State()
        self.told: dict[bytes, Version] = {}
        self.may_be_removed: set[bytes] = set()
        self.truth: dict[bytes, Version] = {}
        self._seen: dict[str, tuple[bytes, float]] = {}

    def look(self) -> None:
        """After each request that had an effect."""
        there, before = self.bucket.objects, self._seen
        added = sorted((n for n in there.keys() - before.keys() if n.startswith(LOG)), reverse=True)
        changed = [n for n in before if n in there and there[n][0] != before[n][0]]
        lost = before.keys() - there.keys()
        self._seen = dict(there)
        if changed or any(name.startswith(LOG) for name in lost):
            raise BrokenError(f"changed: {changed}, lost: {lost}")
        for name in lost & self.state.sizes.keys():
            raise BrokenError(f"{name} was deleted, and it counts")
        for name in added:
            self._take_in(name, there[name][0])
        self.hold()

    def hold(self) -> None:
        """What was told is there."""
        there = {each.token for each in self.state.added}
        for token in self.told.keys() - there - self.may_be_removed:
            raise BrokenError(f"step {self.told[token].info.step} was told, and is not there")

    def _take_in(self, name: str, data: bytes) -> None:
        number = entry_number(name)
        assert number == self.state.number + 1
        before, entry = self.state, SEAL.read_entry(number, data, MODEL)
        self.state = fold(before, number, entry)
        for fact in entry.facts:
            if isinstance(fact, Added) and fact in self.state.added:
                loaded(self.bucket, fact, self.truth)
        self._newest_goes_on(before)

    def _newest_goes_on(self, before: State) -> None:
        tokens = {each.token for each in self.state.added}
        then, now = before.newest, self.state.newest
        if now is not None:
            truly = [self.truth[token] for token in tokens]
            newest = self.truth[now.token]
            if any(v.pool == newest.pool and v.info.commit > newest.info.commit for v in truly):
                raise BrokenError("the newest version is not that of the last commit")
        if then is None or then.token not in tokens:
            return
        assert now is not None
        if (now.term, now.commit) < (then.term, then.commit):
            raise BrokenError("the newest version went back")


def loaded(bucket: ModelStore, added: Added, truth: dict[bytes, Version]) -> None:
    """Load a version, as a reader who meets no trouble does."""
    for name in State(added=(added,)).sizes:
        if name not in bucket.objects:
            raise BrokenError(f"{name} is not there, and step {added.step} needs it")
    for number, each in enumerate(added.files.values()):
        check(each, bucket.objects[each.name][0], contents(truth[added.token], number))


def check(each: FileObject, data: bytes, expected: bytes) -> None:
    if data != expected or digest(data) != each.digest:
        raise BrokenError(f"{each.name} has other bytes")


class Session:
    """A process that trains and mirrors, until it is killed or superseded."""

    def __init__(self, history: History, pool: Pool, *, passing: bool = False) -> None:
        self._history = history
        self._pool = pool
        self._passing = passing
        self._writer = history.make(history.store, SEAL)
        self._writer._random = history.chance.randbytes  # type: ignore[assignment, method-assign]
        self._work: Generator[None, None, None] | None = None
        self.over = False

    @property
    def pool(self) -> Pool:
        return self._pool

    def step(self) -> None:
        """One request, and what follows from its answer."""
        if self._work is None:
            self._work = self._next()
        try:
            next(self._work)
        except StopIteration:
            self._work = None
        except SupersededError as error:
            self._work = None
            self.over = self._passing or not error.passing
        except TransportError:
            self._work = None

    def kill(self) -> None:
        """End what is under way, wherever it is."""
        if self._work is not None:
            self._work.close()

    def _next(self) -> Generator[None, None, None]:
        chance, writer = self._history.chance, self._writer
        if not writer.is_claimed:
            pool, commit, passing = self._pool.uuid, self._pool.commit, self._passing
            return perform(lambda: writer.claim("a", pool, commit, passing=passing))
        what = chance.random()
        if self._passing:
            if what < 0.5:
                return self._remove()
            self.over = what > 0.9
            return self._sweep()
        if what < 0.2:
            return self._sweep()
        if what < 0.4:
            return self._remove()
        if what < 0.6 or not self._pool.versions:
            version = self._pool.save(chance)
            self._history.oracle.truth[version.info.token] = version
            return self._mirror(version)
        return self._mirror(chance.choice(self._pool.versions[-2:]))

    def _sweep(self) -> Generator[None, None, None]:
        """To its end, or until the run has ended; what it does later it begins anew."""
        chance = self._history.chance
        stopped = chance.random() < 0.2
        return perform(self._writer.sweep, chance.randrange(20) if stopped else None)

    def _mirror(self, version: Version) -> Generator[None, None, None]:
        """Mirror a version; or mend it, whatever seems to be damaged."""
        history, token = self._history, version.info.token
        if token in history.oracle.may_be_removed:
            return

        def put(number: int, name: str) -> FileObject:
            return history.store.put_object(name, contents(version, number))

        added = self._writer.state.version(token)
        if added is None:
            add = partial(self._writer.add, version.info, version.pool, "/runs", FILES, put)
            there: list[Added] = []
            # A save that needs the room ends an upload; the same version may come later.
            turns = history.chance.randrange(6) if history.chance.random() < 0.5 else None
            yield from perform(lambda: there.append(add()), turns)
            if there:
                history.tell(version)
        else:
            names = [each.name for each in added.files.values()]
            damaged = [number for number in range(len(names)) if history.chance.random() < 0.5]
            mend = partial(history.store.for_each, lambda n: put(n, names[n]), damaged)
            yield from perform(mend)

    def _remove(self) -> Generator[None, None, None]:
        versions = self._writer.state.added
        if len(versions) > 1:
            old = self._history.chance.choice(versions)
            self._history.oracle.may_be_removed.add(old.token)
            yield from perform(lambda: self._writer.remove([old.token]))


class Reader:
    """A fresh node that loads the newest version."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._work = self._load()

    def step(self) -> bool:
        """True when it is through."""
        try:
            next(self._work)
        except StopIteration:
            return True
        except TransportError:
            self._work = self._load()
        return False

    def kill(self) -> None:
        """End what is under way, wherever it is."""
        self._work.close()

    def _load(self) -> Generator[None, None, None]:
        history = self._history
        # Every other one reads on from where one before it was.
        log = history.log if history.loads % 2 else MirrorLog(history.store, SEAL)
        floor = history.oracle.state.newest
        states: list[State] = []
        yield from perform(lambda: states.append(log.read()))
        history.log, newest = log, states[0].newest
        if newest is None:
            return
        if floor is not None and floor.token not in history.oracle.may_be_removed:
            assert (newest.term, newest.commit) >= (floor.term, floor.commit), "it went back"

        def read() -> None:
            for number, each in enumerate(newest.files.values()):
                data = history.store.get(each.name)
                if data is None:
                    raise CorruptionError(f"{each.name} is missing")
                check(each, data, contents(history.oracle.truth[newest.token], number))

        try:
            yield from perform(read)
        except CorruptionError as error:
            if newest.token not in history.oracle.may_be_removed:
                raise BrokenError(f"a reader does not find what it needs: {error}") from error
            return  # it starts over
        history.loads += 1


def perform(call: Callable[[], object], turns: int | None = None) -> Generator[None, None, None]:
    """One request at each turn; others have theirs between. turns: it is killed after so many."""
    with contextlib.closing(Work(call)) as work:
        yield from islice(work, turns)


class History:
    """One history, by a seed. ``make``: the writer of each session."""

    def __init__(self, seed: int, make: MakeWriter = Writer) -> None:
        self.chance = random.Random(seed)
        self.make = make
        self.bucket = ModelStore()
        self.oracle = Oracle(self.bucket)
        odds = self.chance.choice([Odds(), Odds(*[0.03] * 5), Odds(*[0.15] * 5), Odds(twice=0.4)])
        self.store = Unsure(self.bucket, MODEL, self.chance, odds, self.oracle.look)
        self.loads = 0
        """Versions that readers loaded whole."""
        self.log = MirrorLog(self.store, SEAL)
        """That of the reader who read it last."""
        self._sessions: list[Session] = []
        self._readers: list[Reader] = []
        self._pools: list[Pool] = []

    def run(self, events: int) -> None:
        try:
            for _ in range(events):
                self._event()
            self._end()
        finally:
            for session in self._sessions:
                session.kill()
            for reader in self._readers:
                reader.kill()

    @property
    def deleted(self) -> int:
        """Requests to delete an object that reached the store."""
        return self.bucket.counts["delete"]

    def tell(self, version: Version) -> None:
        """The user is told that it is mirrored."""
        self.oracle.told[version.info.token] = version
        self.oracle.hold()

    def _event(self) -> None:
        chance = self.chance
        what = chance.random()
        if what < 0.01 or not self._sessions:
            self._begin()
        elif what < 0.02:
            self._sessions.append(Session(self, self._new_pool(), passing=True))
        elif what < 0.03:
            self._sessions.pop(chance.randrange(len(self._sessions))).kill()
        elif what < 0.05:
            self._readers.append(Reader(self))
        elif what < 0.15:
            self.bucket.now += chance.choice([1.0, 50_000.0, 90_000.0, 90_000.0])
        elif what < 0.18 and self.store.under_way:
            self.store.land()
        elif what < 0.5 and self._readers:
            reader = chance.choice(self._readers)
            if reader.step():
                self._readers.remove(reader)
        else:
            session = chance.choice(self._sessions)
            session.step()
            if session.over:
                self._sessions.remove(session)
                session.kill()

    def _begin(self) -> None:
        """A fresh node; or the process of before, which is dead, again."""
        if not self._pools or self.chance.random() < 0.3:
            pool = self._new_pool()
        else:
            pool = self.chance.choice(self._pools)
            for each in [each for each in self._sessions if each.pool is pool]:
                self._sessions.remove(each)
                each.kill()
        if pool not in self._pools:
            self._pools.append(pool)
        self._sessions.append(Session(self, pool))

    def _new_pool(self) -> Pool:
        return Pool(self.chance.randbytes(16))

    def _end(self) -> None:
        """All that was under way lands; then what was told loads, by the reader's own way."""
        while self.store.under_way:
            self.store.land()
        self.store.odds = Odds()
        states: list[State] = []
        for _ in perform(lambda: states.append(MirrorLog(self.store, SEAL).read())):
            pass
        if states[0] != self.oracle.state:
            raise BrokenError("a reader sees another state than there is")
        there = {each.token: each for each in states[0].added}
        for token in self.oracle.told.keys() - self.oracle.may_be_removed:
            loaded(self.bucket, there[token], self.oracle.truth)
