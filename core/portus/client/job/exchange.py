"""What the ranks of a job tell each other, once in each save: how their saves before it ended.

Ranks commit in the background and hear of each other at the next save only, where they plan
together anyway. What a rank says is the same on all of them, so all of them do the same about it:
raise, or go on; and let go of parts of a group that another rank will never complete, or of those
older than a group that all of them have committed.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

from portus.client.job.settings import OnError
from portus.errors import AbandonedError, MediumError, PortusError, TransportError
from portus.format.checksum import DIGEST_SIZE, digest
from portus.index.groups import ID_SIZE
from portus.pipeline.handle import SaveHandle

_log: Final = logging.getLogger("portus")

_NAMED_MAX: Final = 8
"""Ranks that a message tells about."""

_GROUPS_MAX: Final = 8
"""Groups that a rank says it committed: more than saves are under way at once, so that what a slow
rank commits last is still said by the fast ones."""
UNPLANNED: Final = bytes(ID_SIZE)
"""In the place of the id of a planning."""

_WORD: Final = struct.Struct(f"<{ID_SIZE}s{DIGEST_SIZE}s{ID_SIZE}s???qB{_GROUPS_MAX * ID_SIZE}s")
"""A word in short: planning, digest of what is saved, an id for the group; whether that is all;
and news without failures: raises; whether anything was committed, and its step; groups."""

_TEXT_MAX: Final = 500
"""Characters of an error that other ranks hear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A save that is over on a rank, without a part. ``group``: its id; empty if nobody knows yet
    whether the part is there. ``errno``: what the system said, if it said something. ``given_up``:
    only its time ran out, see ``AbandonedError``. ``is_known``: the call of save raised it, on all
    ranks."""

    group: bytes
    step: int
    text: str
    errno: int | None
    given_up: bool
    is_known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What one rank says. ``committed``: the step of the last part that it committed, if any.
    ``groups``: ids of the last few of them. ``failures``: since it last said so. ``raises``: as
    ``on_error`` says there."""

    committed: int | None
    groups: tuple[bytes, ...]
    failures: tuple[Failure, ...]
    raises: bool

    @property
    def untold(self) -> list[Failure]:
        """What others have not heard of."""
        return [each for each in self.failures if not each.is_known]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What follows from the news of all ranks, ``count`` of them; the same on each.

    complete: ids of groups that every rank has committed; of the last few. lost: ids of groups of
    which a rank has no part, with the rank. error: what is to be told, if anything; ``raised``, and
    ends the training: as a ``Checkpointer`` does by itself.
    """

    count: int
    complete: frozenset[bytes]
    lost: tuple[tuple[bytes, int], ...]
    error: PortusError | None
    raised: bool

    @classmethod
    def of(cls, said: Sequence[News], model: str) -> Heard:
        """Out of what each rank said, by rank."""
        return cls(
            count=len(said),
            complete=frozenset.intersection(*(frozenset(news.groups) for news in said)),
            lost=tuple(
                (each.group, rank)
                for rank, news in enumerate(said)
                for each in news.failures
                if each.group
            ),
            error=_told(said, model),
            raised=_ends_training(said),
        )


@dataclass(slots=True)
class _Begun:
    """A part that this rank was to save. Without a handle its save never came to begin:
    ``refusal`` says why, if other ranks were not told."""

    group: bytes
    step: int
    handle: SaveHandle | None = None
    refusal: BaseException | None = None


@dataclass(slots=True)
class Outcomes:
    """How the parts of this rank ended."""

    on_error: OnError
    _begun: list[_Begun] = field(default_factory=list)
    _failed: list[_Begun] = field(default_factory=list)
    _committed: int | None = None
    _groups: deque[bytes] = field(default_factory=lambda: deque(maxlen=_GROUPS_MAX))

    def begin(self, group: bytes, step: int) -> None:
        """A save begins that all ranks take part in."""
        self._begun.append(_Begun(group, step))

    def began(self, handle: SaveHandle) -> None:
        """The part of the newest of them is under way."""
        self._begun[-1].handle = handle

    def refused(self, error: BaseException) -> None:
        """Record why the newest save failed before it began, which other ranks do not know."""
        self._begun[-1].refusal = error

    def news(self) -> News:
        """What ended since ``heard`` was called."""
        begun, self._begun = self._begun, []
        for each in begun:
            if each.handle is not None and not each.handle.done:
                self._begun.append(each)
            elif each.handle is not None and each.handle.committed:
                self._committed = each.step
                self._groups.append(each.group)
            else:
                self._failed.append(each)
        failures = tuple(map(_failure, self._failed))
        return News(
            committed=self._committed,
            groups=tuple(self._groups),
            failures=failures,
            raises=self.on_error == "raise",
        )

    def heard(self, *, raised: bool) -> None:
        """All ranks have the last news. raised: and raise it, so it is not raised once more."""
        failed, self._failed = self._failed, []
        for each in failed if raised else ():
            if each.handle is not None:
                with contextlib.suppress(PortusError):
                    each.handle.wait(0)


def _failure(begun: _Begun) -> Failure:
    save = begun.handle.of if begun.handle is not None else None
    error = save.error if save is not None else begun.refusal
    in_doubt = isinstance(error, TransportError) and getattr(save, "is_in_doubt", False)
    return Failure(
        group=b"" if in_doubt else begun.group,
        step=begun.step,
        text=str(error or "")[:_TEXT_MAX],
        errno=getattr(error, "errno", None),
        given_up=isinstance(error, AbandonedError),
        is_known=begun.handle is None and begun.refusal is None,
    )


def _ends_training(said: Sequence[News]) -> bool:
    failures = [each for news in said for each in news.untold]
    if not failures or any(news.raises for news in said):
        return bool(failures)
    none_complete = any(news.committed is None for news in said)
    return none_complete and not all(each.given_up for each in failures)


def _told(said: Sequence[News], model: str) -> PortusError | None:
    """Return an error that says which ranks failed, and why; None if none did."""
    ranks = [rank for rank, news in enumerate(said) if news.untold]
    if not ranks:
        return None
    lines = []
    for rank in ranks[:_NAMED_MAX]:
        news = said[rank]
        last = "nothing so far" if news.committed is None else f"step {news.committed}"
        steps = ", ".join(f"{each.step}" for each in news.untold[:_NAMED_MAX])
        lines.append(
            f"rank {rank} did not commit step {steps}; the last step that it committed is "
            f"{last}: {news.untold[-1].text}"
        )
    more = [f"and {len(ranks) - _NAMED_MAX} ranks more"] if len(ranks) > _NAMED_MAX else []
    text = (
        f"saves of model {model!r} are not complete: of {len(said)} ranks, {len(ranks)} failed. "
        f"{'; '.join(lines + more)}"
    )
    numbers = [each.errno for news in said for each in news.untold if each.errno is not None]
    return MediumError(numbers[0], text) if numbers else AbandonedError(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a rank says in a save that may be planned as the one before it was.

    named: what is saved, the same on all ranks; its ``repr`` is compared. id: of the save, if this
    is the first rank. planning: the id of the planning that it would go on with; ``UNPLANNED`` if
    it cannot. error: why it cannot save at all.
    """

    named: object
    id: bytes
    news: News
    planning: bytes = UNPLANNED
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What all ranks say. group: the first rank's id of the save, if all of them go on with the
    same planning and save the same; else None. news, errors: by rank."""

    group: bytes | None
    news: list[News]
    errors: list[BaseException]


def exchanged(word: Word, ranks: Any = None) -> Said:
    """Collective: once, and a second time if a rank has a failure or an error to tell."""
    said = [_WORD.unpack(each) for each in _gathered(_short(word), ranks)]
    is_same = word.planning != UNPLANNED and len({each[:2] for each in said}) == 1
    group: bytes | None = said[0][2] if is_same else None
    if all(each[3] for each in said):
        return Said(group=group, news=[_news(*each[4:]) for each in said], errors=[])
    words: list[Any] = [word] * len(said)
    if len(said) > 1:
        dist.all_gather_object(words, word, group=ranks)
    errors = [each.error for each in words if each.error is not None]
    return Said(group=group, news=[each.news for each in words], errors=errors)


def _short(word: Word) -> bytes:
    news = word.news
    named = digest(repr(word.named).encode())
    is_all = word.error is None and not news.failures
    committed = (news.committed is not None, news.committed or 0)
    groups = (len(news.groups), b"".join(news.groups))
    last = (news.raises, *committed, *groups)
    return _WORD.pack(word.planning, named, word.id, is_all, *last)


def _news(raises: bool, has_committed: bool, step: int, count: int, groups: bytes) -> News:
    ids = tuple(groups[ID_SIZE * n : ID_SIZE * (n + 1)] for n in range(count))
    return News(committed=step if has_committed else None, groups=ids, failures=(), raises=raises)


def _gathered(own: bytes, ranks: Any) -> list[bytes]:
    """The bytes of every rank, as many as these, by rank. To the first rank and back: where ranks
    share processors, gloo's ``all_gather`` passes them around one by one, and takes several times
    as long (docs/decisions/0103)."""
    rank, count = standing(ranks)
    if count == 1:
        return [own]
    if "cpu:gloo" not in dist.get_backend_config(ranks):
        found: list[Any] = [None] * count
        dist.all_gather_object(found, own, group=ranks)
        return found
    first = _first_of(ranks)
    every = torch.empty(count, len(own), dtype=torch.uint8, device="cpu")
    tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    dist.gather(tensor, list(every) if rank == 0 else None, dst=first, group=ranks)
    dist.broadcast(every, src=first, group=ranks)
    return [each.tobytes() for each in every.numpy()]


class Tally:
    """Counts who has committed a part of a group, in the store at which the ranks of the job met:
    at once, where an exchange tells in the next save. On the worker; it waits for the store alone.
    """

    def __init__(self) -> None:
        self.store: Any = None

    def begin(self) -> None:
        """The process group is the one of now."""
        self.store = None
        if dist.is_available() and dist.is_initialized():
            with contextlib.suppress(RuntimeError, ValueError):
                self.store = dist.distributed_c10d._get_default_store()

    def is_last(self, group: bytes, count: int) -> bool:
        """Count this rank. True if it is the last of ``count``. False also where nothing can be
        counted."""
        store, key = self.store, f"portus/{group.hex()}"
        try:
            is_last = store is not None and store.add(key, 1) == count
        except RuntimeError as error:  # those who met may be gone, or have no such store
            _log.debug("portus: parts of a group are not counted: %s", error)
            return False
        if is_last:
            with contextlib.suppress(RuntimeError):  # some stores keep what they have
                store.delete_key(key)
        return bool(is_last)


def told_by_first(value: Any, group: Any = None) -> Any:
    """What the first rank of the group said. Collective."""
    said = [value]
    dist.broadcast_object_list(said, src=_first_of(group), group=group)
    return said[0]


def _first_of(group: Any) -> int:
    """The number in the job of a group's first rank; None: the job's own group."""
    return 0 if group is None else dist.get_global_rank(group, 0)


def beside() -> Any:
    """Return the process group for exchanges in host memory: None if the job's own group can do
    them, else a new gloo group of all ranks. Collective."""
    if "cpu:" in dist.get_backend_config():
        return None
    return dist.new_group(backend=dist.Backend.GLOO)


def standing(group: Any = None) -> tuple[int, int]:
    """Return this process's rank in ``group`` and the group's size; (0, 1) if torch has no process
    groups."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1
