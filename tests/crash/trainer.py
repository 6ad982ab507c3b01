"""A process that saves, on a simulated disk: the engine's own pool, files of images, no thread.

What a pool holds is a ``State``: for each model the steps of its versions, in commit order; None
if there is no pool. A ``Ledger`` tells the explorer before and after each change what a crash may
leave from now on, so that ``verify`` needs nothing but the last ``Fact``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np

from portus.engine.copying.segments import Stop
from portus.engine.format.checksum import digest
from portus.engine.image.image import Crcs, Digests, Image, Literal
from portus.engine.media.base import Medium
from portus.engine.pipeline.draft import CommittedVersion, Labels
from portus.engine.pipeline.plan import Flags, Previous, Snapshot
from portus.engine.pipeline.run import Save, SaveOwner
from portus.engine.settings.keep import Keep
from portus.engine.spec import PAGE
from portus.errors import MediumError
from portus.reach.format.layout import RecordKind
from portus.reach.index.catalogue import read_catalogue
from portus.reach.index.check import Severity, check
from portus.reach.index.commit_records import Change
from portus.reach.index.directory import create_pool, open_writer
from portus.reach.index.file_table import FileTable, PackedFile
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry, VersionRecord, read_whole
from portus.reach.index.roots import read_roots
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.pool import Locks
from portus.reach.pools.image_draft import CommittedImages, ImageDraft, lengths_of
from portus.reach.versions.open_version import OpenVersion, VersionFile
from portus.reach.versions.pool_draft import PoolDraft
from tests.simulation.crash import CrashFiles, Faults

POOL = "/pools/run.portus"
SMALL = 28 * PAGE
"""Bytes of a pool that has to use its space again after a few saves."""

State = tuple[tuple[str, tuple[int, ...]], ...] | None


@dataclass(frozen=True, slots=True)
class Fact:
    """What a crash may leave: one of the states ``pool``."""

    pool: tuple[State, ...]


NO_POOL = Fact((None,))


def disk(faults: Faults | None = None) -> CrashFiles:
    """An empty disk with the directories of a run."""
    return CrashFiles(["/pools"], faults=faults or Faults())


# --- what is saved --------------------------------------------------------------------------

LENGTHS = (5000, PAGE + 300, 700, 0, 40)
FROZEN = (1, 4)
"""These storages are the same at every step."""

FILES: Final = {"model.pt": (0, 1, 2), "rest.pt": (3, 4)}
"""The files of a version, and which storages are in each."""

HEAD: Final = 60
"""Bytes before the storages of a file; as many are between two of them, and zero."""


@functools.cache
def content(model: str, step: int, index: int) -> bytes:
    """The bytes of one storage."""
    moment = "frozen" if index in FROZEN else step
    return random.Random(f"{model} {index} {moment}").randbytes(LENGTHS[index])


def image_of(model: str, step: int, name: str) -> Image:
    """A file with a head, its storages, and what they add up to behind them."""
    length = np.array([LENGTHS[index] for index in FILES[name]], np.int64)
    offset = HEAD + np.cumsum(length + HEAD) - length - HEAD
    end = int(offset[-1] + length[-1])

    def literals(digests: Digests, crcs: Crcs) -> Sequence[Literal]:
        head = f"{model}@{step}: {name}".ljust(HEAD).encode()
        return [Literal(0, head), Literal(end, digests.tobytes() + crcs.tobytes())]

    size = end + len(length) * 20
    return Image(size=size, offset=offset, length=length, literals=literals)


@functools.cache
def file_of(model: str, step: int, name: str) -> bytes:
    """Every byte of a file."""
    image = image_of(model, step, name)
    stored = [content(model, step, index) for index in FILES[name]]
    digests = np.frombuffer(b"".join(map(digest, stored)), np.uint8).reshape(-1, 16)
    crcs = np.array([zlib.crc32(each) for each in stored], np.uint32)
    made = bytearray(image.size)
    for begin, data in zip(image.offset.tolist(), stored, strict=True):
        made[begin : begin + len(data)] = data
    for literal in image.literals(digests, crcs):
        made[literal.offset : literal.end] = literal.data
    return bytes(made)


def images(model: str, step: int) -> list[Image]:
    return [image_of(model, step, name) for name in FILES]


def table(model: str, step: int) -> FileTable:
    of_files = zip(FILES, images(model, step), strict=True)
    return FileTable([PackedFile.of(name, image) for name, image in of_files])


def snapshot(model: str, step: int) -> Snapshot:
    """The state of ``model`` at ``step``, in memory; half of it is copied late. As ``TrainingPool``
    makes it: what is around the storages of files is copied at the commit."""
    arrays = [
        np.frombuffer(bytearray(content(model, step, index)), np.uint8)
        for index in range(len(LENGTHS))
    ]
    address = [each.ctypes.data if each.size else 0 for each in arrays]
    late = [index % 2 == 0 for index in range(len(LENGTHS))]
    steady = [index in FROZEN for index in range(len(LENGTHS))]
    return Snapshot(
        model=model,
        step=step,
        token=os.urandom(16),
        address=np.array(address, np.int64),
        length=np.array(LENGTHS, np.int64),
        late=np.array(late),
        steady=np.array(steady),
        owners=arrays,
    )


# --- what a pool holds ----------------------------------------------------------------------


def state_of(pool: PoolReader) -> State:
    """The versions of every model, each of their bytes compared with what was saved."""
    models = pool.catalogue().models
    return tuple(
        (name, tuple(verified(pool, entry) for entry in models[name])) for name in sorted(models)
    )


def verified(pool: PoolReader, entry: VersionEntry) -> int:
    """The step of a version all of whose records and bytes are right."""
    record = pool.record(entry)
    model, step = entry.info.model, entry.info.step
    there = OpenVersion(pool, record).files
    assert list(there) == list(FILES)
    for name, file in there.items():
        data = loaded(file)
        assert data == file_of(model, step, name), f"{name} of step {step}"
    for index, row in enumerate(record.units[: len(LENGTHS)]):
        assert bytes(row["digest"]) == digest(content(model, step, index)), f"digest {index}"
    return step


def loaded(file: VersionFile) -> bytes:
    data = bytearray(file.size)
    file.load(0, memoryview(data))
    return bytes(data)


def changed(state: State, model: str, add: Sequence[int] = (), drop: Collection[int] = ()) -> State:
    """``state`` with steps of one model added at the end and dropped."""
    models = dict(state or ())
    kept = [step for step in models.get(model, ()) if step not in drop]
    models[model] = (*kept, *add)
    return tuple((name, models[name]) for name in sorted(models) if models[name])


def pool_file(files: CrashFiles) -> Medium | None:
    """The medium of the pool, if there is one."""
    return files.open(POOL, writable=True) if files.status(POOL) is not None else None


def verify(
    files: CrashFiles,
    facts: Sequence[Fact],
    find: Callable[[CrashFiles], Medium | None] = pool_file,
) -> None:
    """The pool is in a state that the last fact allows, and stays in it when it is recovered;
    what only the older root reaches is whole too (V1).

    One pool in ten, chosen by its digest, is walked by ``check`` besides.
    """
    fact = facts[-1] if facts else NO_POOL
    pool, state, medium = None, None, find(files)
    if medium is not None:
        pool = PoolReader(medium, ProcessLocks())
        state = state_of(pool)
        verify_older(pool)
        verify_copies(pool)
    assert state in fact.pool, f"found {state}, expected {' or '.join(map(str, fact.pool))}"
    if pool is not None and medium is not None:
        if files.disk.digest()[0] < 26:
            verify_rules(pool)
        writer = PoolWriter(medium, ProcessLocks())
        assert pool.catalogue().models == writer.catalogue().models


def verify_older(pool: PoolReader) -> None:
    """Versions that only the older root reaches: if the newer one rots, they are what is left."""
    newest = pool.catalogue().ids()
    for root in read_roots(pool.medium, pool.uuid)[1:]:
        for entry in read_catalogue(pool.medium, root).entries():
            if entry.info.id not in newest:
                verified(pool, entry)


def verify_copies(pool: PoolReader) -> None:
    """No record is whole only thanks to its copy, nor any copy useless."""
    catalogue = pool.catalogue()
    kinds = {entry.pointer: RecordKind.VERSION for entry in catalogue.entries()}
    kinds[catalogue.root.catalogue] = RecordKind.CATALOGUE
    for pointer, kind in kinds.items():
        for place in pointer.extents:
            read_whole(pool.medium, pointer, kind, place.offset)


def verify_rules(pool: PoolReader) -> None:
    """No rule of the format is broken, whether it has hurt already or not. But padding (F2) may be
    noise: that of the page that says who writes is the only one which is stored to twice."""
    errors = [each for each in check(pool) if each.severity is Severity.ERROR]
    broken = [str(each) for each in errors if each.invariant != "F2"]
    assert not broken, broken


# --- a process that saves -------------------------------------------------------------------


class Ledger:
    """Reports what a crash may leave, before and after each change."""

    def __init__(self, report: Callable[[Fact], None]) -> None:
        self._report = report
        self.state: State = None

    def found(self, state: State) -> None:
        """Somebody was told so: it may not change by itself any more."""
        self.state = state
        self._tell(state)

    @contextlib.contextmanager
    def change(self, after: State) -> Iterator[None]:
        """Inside, the pool goes from one state to another. Nothing is sure if it is left by an
        error."""
        self._tell(self.state, after)
        yield
        self.found(after)

    def _tell(self, *pool: State) -> None:
        self._report(Fact(tuple(dict.fromkeys(pool))))


class AskedDraft(PoolDraft):
    """The draft of a client whose commit is made together with others, and what that asks for."""

    change_asked: Change

    def commit(self, labels: Labels) -> VersionRecord:
        self.change_asked = self.change(self.rows(), labels)
        return cast(VersionRecord, None)  # nobody looks at it before it is one


class SharingDraft(ImageDraft):
    """A draft that may share what is ``known``."""

    known: CommittedImages | None = None

    def before(self) -> CommittedImages | None:
        return self.known


class Trainer:
    """One process. Wrong engines override one of its parts."""

    max_bytes: int | None = SMALL

    def __init__(self, files: CrashFiles, ledger: Ledger) -> None:
        self.files = files
        self.ledger = ledger
        self.before: dict[str, CommittedImages] = {}
        self.open()

    def open(self) -> None:
        """Make the pool if there is none, open it, and tell what is in it."""
        if not self.is_there():
            with self.ledger.change(()):
                self.create()
        self.writer = self.open_pool()
        for name, model in self.writer.catalogue().models.items():
            record = self.writer.record(model[-1])
            self.before[name] = CommittedImages(record, len(FILES), None)
        self.look()

    def is_there(self) -> bool:
        return self.files.status(POOL) is not None

    def create(self) -> None:
        create_pool(POOL, self.files)

    def open_pool(self) -> PoolWriter:
        return open_writer(POOL, self.files, locks=self.locks(), max_bytes=self.max_bytes)

    def locks(self) -> Locks:
        return ProcessLocks()

    def reopen(self, max_bytes: int | None = None) -> None:
        """Go on after an error, or with another limit, in the same boot."""
        self.writer.close()
        self.max_bytes = max_bytes or self.max_bytes
        self.open()

    def look(self) -> None:
        """Tell which versions there are: they may not go by themselves any more."""
        self.ledger.found(state_of(self.writer))

    def steps(self, model: str = "a") -> tuple[int, ...]:
        return dict(self.ledger.state or ()).get(model, ())

    def next_step(self, model: str = "a") -> int:
        return max(self.steps(model), default=0) + 1

    def save(self, model: str = "a", *, keep: int | None = None) -> None:
        """Save the next step. The same commit retires all but the newest ``keep``."""
        step, surplus = self.next_step(model), self.surplus(model, keep)
        with self.ledger.change(changed(self.ledger.state, model, [step], surplus)):
            self.write(model, step, keep)

    def save_together(self, models: Sequence[str], *, keep: int) -> None:
        """The next step of each model, as commits that waited for each other are made; each retires
        all but the newest ``keep``. All of them are there after a crash, or none."""
        after, drafts = self.ledger.state, []
        for model in models:
            step, surplus = self.next_step(model), self.surplus(model, keep)
            after = changed(after, model, [step], surplus)
            state, made = snapshot(model, step), images(model, step)
            asked = AskedDraft(self.writer, lengths_of(made))
            draft = ImageDraft(asked, model, table(model, step), made)
            draft.copy(np.arange(len(LENGTHS)), state.address, Stop())
            labels = Labels(model=model, step=step, token=state.token, keep=Keep(last=keep))
            draft.commit(labels)
            drafts.append(asked)
        with self.ledger.change(after):
            self.writer.commit_together([each.change_asked for each in drafts])
        for asked in drafts:
            asked.release()

    def surplus(self, model: str, keep: int | None) -> tuple[int, ...]:
        steps = self.steps(model)
        return () if keep is None else steps[: max(0, len(steps) - (keep - 1))]

    def write(self, model: str, step: int, keep: int | None) -> None:
        """One save through the pipeline, as the client has it done. Raises what made it fail."""
        state = replace(snapshot(model, step), keep=Keep.of(keep))
        made, known = images(model, step), self.before.get(model)
        pool = PoolDraft(self.writer, lengths_of(made))
        draft = SharingDraft(pool, model, table(model, step), made)
        draft.known = known
        save = Save(state, draft, _Owner(self, model, known))
        save.copy_now()
        save.run()
        save.result(0)

    def retire(self, steps: Collection[int], model: str = "a") -> None:
        """Let go of versions in a commit of their own."""
        with self.ledger.change(changed(self.ledger.state, model, drop=steps)):
            self.writer.retire(self.ids(model, steps))

    def ids(self, model: str, steps: Collection[int]) -> list[int]:
        found = self.writer.catalogue().models.get(model)
        entries = found if found else ()
        return [entry.info.id for entry in entries if entry.info.step in steps]


@dataclass(frozen=True)
class _Owner(SaveOwner):
    """A trainer, as the owner of one save. known: the newest version of the model."""

    trainer: Trainer
    model: str
    known: CommittedImages | None

    def before(self) -> Previous | None:
        return self.known.storages if self.known else None

    def note_commit(self, save: Save, version: CommittedVersion, steady: Flags) -> None:
        assert isinstance(save.draft, ImageDraft)
        assert save.draft.committed is not None
        self.trainer.before[self.model] = save.draft.committed


class Roomy(Trainer):
    """One that has room for what a process before left."""

    max_bytes = 64 * PAGE


# --- what processes do ----------------------------------------------------------------------

Plan = Callable[[Trainer], None]


def save_three(trainer: Trainer) -> None:
    """Two models, three saves; what is frozen is shared."""
    for model in ("a", "b", "a"):
        trainer.save(model)


def save_together(trainer: Trainer) -> None:
    """Commits of two and of three clients as one, in a pool that uses its space again."""
    trainer.reopen(40 * PAGE)
    for models in ("ab", "abc", "ab"):
        trainer.save_together(models, keep=1)


def save_and_retire(trainer: Trainer) -> None:
    """Keeps one version in a pool that is soon full: space is used again."""
    for _ in range(5):
        trainer.save(keep=1)


def retire_by_itself(trainer: Trainer) -> None:
    """Removes versions from the middle and from the end, and saves in between."""
    for _ in range(2):
        trainer.save()
        trainer.save("b")
        trainer.retire(trainer.steps()[:1])
    trainer.retire(trainer.steps())
    trainer.save()


def grow(trainer: Trainer) -> None:
    """A pool that is too small for each next save."""
    for _ in range(3):
        trainer.reopen(trainer.writer.medium.size + 6 * PAGE)
        trainer.save()


ALL = 1 << 30
"""Bytes to give back. Unless it is said how many, room for records is left, and these pools are no
larger than that."""


def give_back(trainer: Trainer) -> None:
    """Space of retired versions, some just now, goes back; then the pool is opened anew, and
    takes it again."""
    for _ in range(3):
        trainer.save(keep=1)
    trainer.writer.give_back(ALL)
    trainer.reopen()
    trainer.save(keep=1)


def give_back_and_go_on(trainer: Trainer) -> None:
    """The same in a run: what went back, all of it or a page, is taken again."""
    for step in range(5):
        trainer.save(keep=1)
        trainer.writer.give_back(ALL if step % 2 else PAGE)


def save_one(trainer: Trainer) -> None:
    """What a process does that follows another."""
    trainer.save(keep=1)


def process(
    plan: Plan, trainer: type[Trainer] = Trainer
) -> Callable[[CrashFiles, Callable[[Fact], None]], None]:
    """``plan`` as a scenario for the explorer. After an error of the medium it is begun again, on
    the pool opened anew, in the same boot."""

    def scenario(files: CrashFiles, report: Callable[[Fact], None]) -> None:
        ledger = Ledger(report)
        for _ in range(2):
            try:
                plan(trainer(files, ledger))
                return
            except MediumError as error:
                if "simulated" not in str(error):
                    raise

    return scenario
