"""``MirrorPlace``: the mirrors at an address: versions of the models of storage hosts, and files of
runs, as objects."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Final, TypeVar

from portus.engine.copying.segments import Stop
from portus.engine.pipeline.draft import Labels
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError, PortusError, UsageError, printable
from portus.reach.index.place import Place
from portus.reach.mirror.address import StoreKind, parse
from portus.reach.mirror.background_copier import who
from portus.reach.mirror.log import SupersededError
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.mirrors import Mirrors
from portus.reach.mirror.objects import DIGEST_SUFFIX, Added, State
from portus.reach.mirror.store import ListedObject
from portus.reach.places.base import (
    Abilities,
    Check,
    CheckPace,
    Collection,
    Commit,
    CopyOptions,
    Files,
    Garbage,
    GarbageOptions,
    OpenCheckpoint,
    OpenPlace,
    Progress,
    Removal,
    StoredCheckpoint,
    Verdict,
    adding,
    copy_files,
)

Result = TypeVar("Result")

_NO_POOL: Final = bytes(16)
"""The pool of a command, which has none."""

UNCOUNTED: Final = (
    "is in no entry of the log: an upload that is under way or was cut off, its entry is lost, or "
    "it is not of Portus"
)
"""The description of an object without an entry in the log."""

_REPAIR: Final = "portus mirror repair sends again what is known here"

_TRIES: Final = 20
"""Times that a change takes the term from a run that takes it back, at most."""


def claim(mirror: Mirror, command: str) -> State:
    """Take the term for a command; a run that mirrors there takes it back."""
    # `passing`: the run may take the term back, or a command would end its mirroring.
    return mirror.claim(f"portus {command}: {who()}", _NO_POOL, passing=True)


def retry(act: Callable[[], Result]) -> Result:
    """Return the result of ``act``, calling it again if a run took the term back meanwhile. Raise
    ``BusyError`` if a run does so each time."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(SupersededError):
            return act()
    return act()


class MirroredCheckpoint(StoredCheckpoint):
    """A version of a model of a storage host; or a file or directory of a run, or a link to one.
    The id is the number in the list."""

    def __init__(self, place: Place, info: VersionInfo, mirror: Mirror, added: Added) -> None:
        self._mirror: Final = mirror
        self.added: Final = added
        super().__init__(place, info, added.path)

    @property
    def leads_to(self) -> str:
        return self.added.link

    @property
    def details(self) -> Mapping[str, str]:
        own = self.added.files.get(b"")
        return {} if own is None else {"object": own.name, "digest": own.digest.hex()}

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenCheckpoint]:
        with self._mirror.open(self.added) as files:
            yield OpenCheckpoint(files)

    def check(self, verdict: Verdict, progress: Progress) -> None:
        """Read every byte of its objects."""
        self._mirror.check(self.added, adding(progress, self.info.size))
        verdict.versions = 1


class MirrorPlace(OpenPlace):
    """A mirror as a place of checkpoints. If a checkpoint is removed here and still exists at its
    origin, it is mirrored again."""

    parts, piece = "mirrors", "object"
    after_removal = "their objects are deleted"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._states: Final[dict[str, State]] = {}
        self._damage: Final[dict[str, Sequence[PortusError]]] = {}
        """Why entries of the log of each model could not be read."""

    @cached_property
    def mirrors(self) -> Mirrors:
        """The mirrors at the address."""
        return Mirrors(parse(self.place.path))

    @property
    def abilities(self) -> Abilities:
        kind = self.mirrors.address.kind
        return Abilities(volatile=kind is StoreKind.MEMORY, durable=1, addressable=False)

    def models(self) -> Sequence[str]:
        return self.mirrors.models()

    def list(
        self, model: str | None = None, skipped: dict[str, PortusError] | None = None
    ) -> list[StoredCheckpoint]:
        """Return the checkpoints, see ``OpenPlace``. Ids of versions are counted here; commits are
        those of the pools in which they were committed."""
        found: list[StoredCheckpoint] = []
        for each in self.models() if model is None else [model]:
            mirror = self.mirrors.of(each)
            try:
                self._states[each] = state = mirror.read()
                self._damage[each] = mirror.damage
            except PortusError as error:
                if skipped is None:
                    raise
                skipped[each] = error
                continue
            # By term first: a late upload of an old run counts as old (decision 0141).
            every = sorted(state.added, key=lambda added: (not added.retired, added.place))
            for number, added in enumerate(every, len(found) + 1):
                info = added.info(each, number)
                found.append(MirroredCheckpoint(self.place, info, mirror, added))
        return found

    @contextlib.contextmanager
    def draft(self, labels: Labels, files: Files, options: CopyOptions) -> Iterator[Commit]:
        """Yield the commit, see ``OpenPlace``: ``labels.model`` is the run. Raises ``BusyError`` if
        a run that mirrors there takes the mirror back meanwhile."""
        mirror, now = self.mirrors.of(labels.model), time.time_ns()
        with copy_files(files, options) as copied:
            mirror.read()
            mirror.require_whole()
            claim(mirror, "copy")
            try:
                sent = {
                    path: mirror.upload(path, file, Stop(), time_ns=options.times.get(path, now))
                    for path, file in copied.items()
                }
                yield lambda: mirror.count(mirror.checkpoints(sent, labels.step))
            finally:
                mirror.count([])  # deletes what does not count

    @contextlib.contextmanager
    def removal(self, chosen: Sequence[StoredCheckpoint]) -> Iterator[Removal]:
        """Yield the removal, see ``OpenPlace``. Without a lock, missing objects are left out."""

        def act() -> int:
            for model in dict.fromkeys(each.info.model for each in chosen):
                tokens = [each.info.token for each in chosen if each.info.model == model]
                retry(partial(_remove, self.mirrors.of(model), tokens))
            return 0

        yield act

    def checks(self, chosen: Sequence[StoredCheckpoint] | None, pace: CheckPace) -> Iterator[Check]:
        """Yield checks, see ``OpenPlace``."""
        if pace.bytes_per_s is not None:
            raise UsageError(f"{self.place}: --rate is for files and pools, not for a mirror")
        found = self.list() if chosen is None else chosen
        lost = self.mirrors.find_lost() if chosen is None else {}
        for model, why in lost.items():
            yield Check(self.place.path, model, partial(_fail, f"{self.place}: {model}: {why}"))
        for model, damage in self._damage.items():
            if damage:
                why = f"{'; '.join(map(str, damage))}; what the log said there is lost. {_REPAIR}"
                yield Check(self.place.path, model, partial(_fail, f"{self.place}: {model}: {why}"))
            if chosen is None:
                for alone in self.mirrors.of(model).objects_without_entry():
                    if not alone.name.endswith(DIGEST_SUFFIX):
                        name = printable(alone.name)
                        pace.tell(f"{self.place}: {model}: {name} {UNCOUNTED}")
        for each in found:
            assert isinstance(each, MirroredCheckpoint)
            if not each.leads_to:
                run = f"{each.info.model}: " if each.path else ""
                yield Check(f"{self.place}: {run}{each.name}", each.name, each.check)

    def details(self, model: str) -> Mapping[str, str | int | bool | None]:
        return term_of(self._states[model])

    def collections(self, options: GarbageOptions) -> Iterator[Collection]:
        """Yield the unneeded objects of each model, see ``OpenPlace``."""
        if options.missing or options.empty:
            raise UsageError(f"{self.place}: --missing and --empty are for pools")
        for model in self.models():
            mirror = self.mirrors.of(model)
            yield Collection(
                self.place.path,
                model,
                lambda mirror=mirror: _garbage(mirror.find_unneeded()),  # type: ignore[misc]
                partial(_collect, mirror),
            )

    def close(self) -> None:
        self.mirrors.close()


def _fail(why: str, verdict: Verdict, progress: Progress) -> None:
    raise CorruptionError(why)


def term_of(state: State) -> dict[str, str | int | bool | None]:
    """Return the writer of a mirror, for JSON documents."""
    return {"term": state.term, "writer": state.who or None, "passing": state.passing}


def _garbage(found: Sequence[ListedObject]) -> Garbage:
    return Garbage(pieces=len(found), freed=sum(each.size for each in found))


def _collect(mirror: Mirror, found: Garbage) -> Garbage:
    def collect() -> Garbage:
        # Only the holder of the term may delete (decision 0141).
        claim(mirror, "gc")
        return _garbage(mirror.sweep())

    return retry(collect) if found.pieces else found


def _remove(mirror: Mirror, tokens: Sequence[bytes]) -> None:
    mirror.read()
    mirror.require_whole()
    # Those that exist at the claim: a run may have removed some since they were listed.
    claim(mirror, "rm")
    mirror.remove(tokens)
