"""A process that saves, on a simulated disk: the engine's own pool and pipeline, no thread.

What a pool holds is a ``State``: for each model the steps of its versions, in commit order; None
if there is no pool. A ``Ledger`` tells the explorer before and after each change what a crash may
leave from now on, so that ``verify`` needs nothing but the last ``Fact``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from portus.client.files import fate
from portus.client.files.fate import Fate
from portus.client.files.keeper import Keeper
from portus.errors import MediumError
from portus.format.checksum import digest
from portus.format.layout import RecordKind
from portus.format.reference import Reference, decode
from portus.index.catalogue import read_catalogue
from portus.index.check import Severity, check
from portus.index.directory import create_pool, links_directory, open_writer
from portus.index.pool import PoolWriter
from portus.index.reader import PoolReader
from portus.index.records import (
    NOWHERE,
    VersionEntry,
    VersionRecord,
    decode_copies,
    encode_layout,
    read,
)
from portus.index.roots import read_roots
from portus.media.base import Locks, Medium
from portus.media.lock import ProcessLocks
from portus.pipeline.draft import CommittedVersion, Labels, PoolDraft
from portus.pipeline.plan import Before, Snapshot
from portus.pipeline.run import Policy, Save
from portus.spec import PAGE, TensorSpec
from portus.testing.crash import CrashFiles, Faults
from portus.transport.base import Stop

POOL = "/pools/run.portus"
LINKS = links_directory(POOL)
CHECKPOINTS = "/checkpoints"
SMALL = 26 * PAGE
"""Bytes of a pool that has to use its space again after a few saves."""

State = tuple[tuple[str, tuple[int, ...]], ...] | None

ALIVE, DELETED = Fate.ALIVE, Fate.DELETED

PENDING = -1
"""Where a reference leads whose version was not committed, and that has nothing to fall back to."""

Leads = tuple[tuple[str, frozenset[int | None]], ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """What a crash may leave: one of the states ``pool``; and for each path of ``leads`` a
    reference to one of the steps (None: no file; ``PENDING``)."""

    pool: tuple[State, ...]
    leads: Leads = ()


NO_POOL = Fact((None,))


def disk(faults: Faults | None = None) -> CrashFiles:
    """An empty disk with the directories of a run."""
    return CrashFiles(["/pools", LINKS, CHECKPOINTS], faults=faults or Faults())


# --- what is saved --------------------------------------------------------------------------

LENGTHS = (5000, PAGE + 300, 700, 0, 40)
FROZEN = (1, 4)
"""These storages are the same at every step."""

LAYOUT = encode_layout(
    [TensorSpec(f"t{i}", "uint8", (n,), (1,), i, 0) for i, n in enumerate(LENGTHS)]
)


def tree(step: int) -> bytes:
    tensors = [{"$tensor": index} for index in range(len(LENGTHS))]
    return json.dumps({"step": step, "tensors": tensors}, separators=(",", ":")).encode()


@functools.cache
def content(model: str, step: int, index: int) -> bytes:
    """The bytes of one storage."""
    moment = "frozen" if index in FROZEN else step
    return random.Random(f"{model} {index} {moment}").randbytes(LENGTHS[index])


def snapshot(model: str, step: int) -> Snapshot:
    """The state of ``model`` at ``step``, in memory; half of it is copied late."""
    arrays = [
        np.frombuffer(bytearray(content(model, step, index)), np.uint8)
        for index in range(len(LENGTHS))
    ]
    return Snapshot(
        model=model,
        step=step,
        token=os.urandom(16),
        tree=tree(step),
        layout=LAYOUT,
        address=np.array([each.ctypes.data if each.size else 0 for each in arrays], np.int64),
        length=np.array(LENGTHS, np.int64),
        late=np.array([index % 2 == 0 for index in range(len(LENGTHS))]),
        steady=np.array([index in FROZEN for index in range(len(LENGTHS))]),
        alive=arrays,
    )


# --- what a pool holds ----------------------------------------------------------------------


def state_of(pool: PoolReader) -> State:
    """The versions of every model, each of their bytes compared with what was saved."""
    models = pool.catalogue().models
    return tuple(
        (name, tuple(verified(pool, entry) for entry in models[name].versions))
        for name in sorted(models)
    )


def verified(pool: PoolReader, entry: VersionEntry) -> int:
    """The step of a version all of whose records and bytes are right."""
    record = pool.record(entry)
    step = entry.info.step
    assert bytes(read(pool.medium, record.layout, RecordKind.LAYOUT)) == LAYOUT
    assert bytes(read(pool.medium, record.tree, RecordKind.TREE)) == tree(step)
    assert record.storages["length"].tolist() == list(LENGTHS)
    for index in range(len(LENGTHS)):
        data = loaded(pool, record, index)
        assert data == content(entry.info.model, step, index), f"storage {index} of step {step}"
        assert bytes(record.units[index]["digest"]) == digest(data)
    return step


def loaded(pool: PoolReader, record: VersionRecord, index: int) -> bytes:
    data = bytearray(LENGTHS[index])
    start = 0
    for extent in record.storage_extents(index):
        pool.medium.load(extent.offset, memoryview(data)[start : start + extent.length])
        start += extent.length
    return bytes(data)


def changed(state: State, model: str, add: Sequence[int] = (), drop: Collection[int] = ()) -> State:
    """``state`` with steps of one model added at the end and dropped."""
    models = dict(state or ())
    kept = [step for step in models.get(model, ()) if step not in drop]
    models[model] = (*kept, *add)
    return tuple((name, models[name]) for name in sorted(models) if models[name])


def steps_of(pool: PoolReader | None) -> dict[str, int]:
    """The step of each version, by its token."""
    entries = pool.catalogue().entries() if pool is not None else ()
    return {entry.info.token.hex(): entry.info.step for entry in entries}


def lead(files: CrashFiles, path: str, steps: Mapping[str, int]) -> int | None:
    """The step that the reference at ``path`` leads to, in a pool that has ``steps``; it must not
    look deleted."""
    reference = read_reference(files, path)
    if reference is None:
        return None
    if reference.token in steps:
        found = fate.state_of(reference, LINKS, files)
        assert found is ALIVE, f"{path} is there, and looks {found.value}"
        return steps[reference.token]
    token = reference.leads_to(steps)
    if token is not None:
        return steps[token]
    links = fate.links(LINKS, files, adopt=False)
    is_linked = any(each.reference.id == reference.id for each in links)
    # Without a durable link its version was never committed, and it holds nothing.
    assert reference.fallback is None or not is_linked, f"{path} leads nowhere, fallback too"
    return PENDING


def read_reference(files: CrashFiles, path: str) -> Reference | None:
    if files.status(path) is None:
        return None
    medium = files.open(path, writable=False)
    data = bytearray(medium.size)
    medium.load(0, memoryview(data))
    found = decode(bytes(data))
    assert found is not None, f"{path} is no reference"
    return found


def pool_file(files: CrashFiles) -> Medium | None:
    """The medium of the pool, if there is one."""
    return files.open(POOL, writable=True) if files.status(POOL) is not None else None


def verify(
    files: CrashFiles,
    facts: Sequence[Fact],
    find: Callable[[CrashFiles], Medium | None] = pool_file,
) -> None:
    """The pool is in a state that the last fact allows, and stays in it when it is recovered;
    what only the older root reaches is whole too (V1); every reference leads where it may.

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
    there = steps_of(pool) if fact.leads else {}
    for path, steps in fact.leads:
        step = lead(files, path, there)
        assert step in steps, f"{path} leads to {step}, expected one of {set(steps)}"
    if pool is not None and medium is not None:
        if files.disk.digest()[0] < 26:
            verify_rules(pool)
        writer = PoolWriter(medium, ProcessLocks())
        assert pool.catalogue().models == writer.catalogue().models


def verify_older(pool: PoolReader) -> None:
    """Versions that only the older root reaches: if the newer one rots, they are what is left."""
    newest = pool.catalogue().ids()
    for root in read_roots(pool.medium, pool.superblock.uuid)[1:]:
        for entry in read_catalogue(pool.medium, root).entries():
            if entry.info.id not in newest:
                verified(pool, entry)


def verify_copies(pool: PoolReader) -> None:
    """No record is whole only thanks to its copy, nor any copy useless."""
    catalogue = pool.catalogue()
    root = catalogue.root
    if root.table != NOWHERE:
        read(pool.medium, root.table, RecordKind.MODEL_TABLE)
    for model in catalogue.models.values():
        read(pool.medium, model.pointer, RecordKind.MODEL_INDEX)
    if root.copies != NOWHERE:
        for copy in decode_copies(read(pool.medium, root.copies, RecordKind.COPIES)):
            read(pool.medium, copy.pointer, copy.kind)


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
        self.leads: dict[str, frozenset[int | None]] = {}

    def found(self, state: State, leads: dict[str, frozenset[int | None]]) -> None:
        """Somebody was told so: it may not change by itself any more."""
        self.state, self.leads = state, leads
        self._tell((state,), leads)

    @contextlib.contextmanager
    def change(
        self, after: State, *between: State, leads: Mapping[str, int | None] | None = None
    ) -> Iterator[None]:
        """Inside, the pool goes from one state to another, maybe through some ``between``, and
        paths come to lead elsewhere. Nothing is sure if it is left by an error."""
        new = {path: frozenset({step}) for path, step in (leads or {}).items()}
        maybe = {path: steps | self._until(path) for path, steps in new.items()}
        self._tell((self.state, *between, after), {**self.leads, **maybe})
        yield
        self.state, self.leads = after, {**self.leads, **new}
        self._tell((after,), self.leads)

    def forget(self, path: str) -> None:
        """Somebody else removes the file at ``path``; nobody promised that it is gone."""
        self.leads[path] = self.leads[path] | {None}
        self._tell((self.state,), self.leads)

    def _until(self, path: str) -> frozenset[int | None]:
        """Where ``path`` may lead until a change of it is done: a new file comes before its
        version, and falls back to the newest."""
        before = self.leads.get(path, frozenset({None}))
        if None not in before:
            return before
        newest = [steps[-1] for _, steps in self.state or ()]
        return before | frozenset(newest or [PENDING])

    def _tell(self, pool: tuple[State, ...], leads: dict[str, frozenset[int | None]]) -> None:
        self._report(Fact(tuple(dict.fromkeys(pool)), tuple(sorted(leads.items()))))


class CrashKeeper(Keeper):
    """The keeper of reference files, on a disk whose directories are always there."""

    def _make_directories(self, path: str) -> None:
        pass


class Trainer:
    """One process. Wrong engines override one of its parts."""

    max_bytes: int | None = SMALL

    def __init__(self, files: CrashFiles, ledger: Ledger) -> None:
        self.files = files
        self.ledger = ledger
        self.before: dict[str, Before] = {}
        self.open()

    def open(self) -> None:
        """Make the pool if there is none, open it, and tell what is in it."""
        if not self.is_there():
            with self.ledger.change(()):
                self.create()
        self.writer = self.open_pool()
        self.keeper = self.open_keeper()
        self.writer.deleted = self.keeper.deleted
        for name, model in self.writer.catalogue().models.items():
            record = self.writer.record(model.versions[-1])
            self.before[name] = Before(record, LAYOUT, tree(record.info.step))
        self.look()

    def is_there(self) -> bool:
        return self.files.status(POOL) is not None

    def create(self) -> None:
        create_pool(POOL, self.files)

    def open_pool(self) -> PoolWriter:
        return open_writer(POOL, self.files, locks=self.locks(), max_bytes=self.max_bytes)

    def open_keeper(self) -> Keeper:
        return CrashKeeper(POOL, self.writer, self.files)

    def locks(self) -> Locks:
        return ProcessLocks()

    def reopen(self, max_bytes: int | None = None) -> None:
        """Go on after an error, or with another limit, in the same boot."""
        self.writer.close()
        self.max_bytes = max_bytes or self.max_bytes
        self.open()

    def look(self) -> None:
        """Tell which versions there are: they may not go by themselves any more. A file that is
        found may be in caches only. Then the older one comes back at a power loss, or none if
        its version was not committed yet; but no file ever leads to a version that is gone."""
        state = state_of(self.writer)
        steps = frozenset(step for _, each in state or () for step in each)
        tokens = {entry.info.token.hex() for entry in self.writer.catalogue().entries()}
        leads = {path: steps | {None} for path, steps in self.ledger.leads.items()}
        for path in self.paths():
            reference = read_reference(self.files, path)
            committed = reference is not None and reference.token in tokens
            leads[path] = leads.get(path, steps) | steps | {PENDING}
            if not committed:
                leads[path] |= {None}
        self.ledger.found(state, leads)

    def paths(self) -> list[str]:
        return [f"{CHECKPOINTS}/{name}" for name in self.files.entries(CHECKPOINTS)]

    def steps(self, model: str = "a") -> tuple[int, ...]:
        return dict(self.ledger.state or ()).get(model, ())

    def next_step(self, model: str = "a") -> int:
        return max(self.steps(model), default=0) + 1

    def save(self, model: str = "a", *, keep: int | None = None, path: str | None = None) -> None:
        """Save the next step. The same commit retires all but the newest ``keep`` without a file;
        what a file at ``path`` led to goes in a commit of its own. Versions whose files were
        deleted may go before that, for space."""
        step = self.next_step(model)
        surplus = self.surplus(model, keep)
        deleted = self.deleted_steps(model)
        added = changed(self.ledger.state, model, [step], surplus)
        after = changed(added, model, drop=self.led_to(path))
        newest = self.steps(model)[-1:]  # what a file that is placed falls back to, and holds
        drops = [deleted] + ([[each for each in deleted if each not in newest]] if path else [])
        between = [added] + [
            changed(each, model, drop=drop)
            for each in (self.ledger.state, added, after)
            for drop in drops
        ]
        leads = None if path is None else {path: step}
        with self.ledger.change(after, *between, leads=leads):
            self.write(model, step, self.ids(model, surplus), path)
        if deleted:
            self.ledger.found(state_of(self.writer), self.ledger.leads)

    def save_together(self, models: Sequence[str], *, keep: int) -> None:
        """The next step of each model, as commits that waited for each other are made; each retires
        all but the newest ``keep``. All of them are there after a crash, or none."""
        after = self.ledger.state
        drafts, changes = [], []
        for model in models:
            step, surplus = self.next_step(model), self.surplus(model, keep)
            after = changed(after, model, [step], surplus)
            state = snapshot(model, step)
            drafts.append(PoolDraft(self.writer, state.length))
            drafts[-1].copy(np.arange(len(LENGTHS)), state.address, Stop())
            labels = Labels(model=model, step=step, token=state.token, layout=LAYOUT, tree=b"")
            rows = drafts[-1].rows()
            changes.append(
                drafts[-1].change(rows, labels, LAYOUT, tree(step), self.ids(model, surplus))
            )
        with self.ledger.change(after):
            self.writer.commit_together(changes)
        for draft in drafts:
            draft.release()

    def surplus(self, model: str, keep: int | None) -> list[int]:
        if keep is None:
            return []
        held = self.keeper.held(self.writer.catalogue())
        free = [
            step for step in self.steps(model) if not held.intersection(self.ids(model, [step]))
        ]
        return free[: max(0, len(free) - (keep - 1))]

    def deleted_steps(self, model: str) -> list[int]:
        """Steps whose files were all removed behind the keeper's back, and that no file whose own
        version was never committed falls back to."""
        links = fate.links(LINKS, self.files)
        gone = {each.reference.token for each in links if each.state is DELETED}
        there = {entry.info.token.hex() for entry in self.writer.catalogue().entries()}
        gone -= {each.reference.leads_to(there) for each in links if each.state is not DELETED}
        found = self.writer.catalogue().models.get(model)
        entries = found.versions if found else ()
        return [entry.info.step for entry in entries if entry.info.token.hex() in gone]

    def led_to(self, path: str | None) -> list[int]:
        """The step of the version that the file at ``path`` names, if it was committed, and if no
        other file leads to it."""
        steps = {e.info.token.hex(): e.info.step for e in self.writer.catalogue().entries()}
        references = {each: read_reference(self.files, each) for each in self.paths()}
        named = references.pop(path, None) if path is not None else None
        others = [each for each in references.values() if each is not None]
        led = {each.leads_to(steps) for each in others}
        return [steps[named.token]] if named and named.token in steps.keys() - led else []

    def write(self, model: str, step: int, retire: Collection[int], path: str | None) -> None:
        """One save through the pipeline, as the client has it done. Raises what made it fail."""
        is_new = path is not None and self.keeper.is_new(path)
        state = snapshot(model, step)
        save = Save(
            state,
            PoolDraft(self.writer, state.length),
            lambda: self.before.get(model),
            Policy(
                retire=lambda: retire,
                publishing=lambda: self.publish(path) if is_new and path else None,
                committed=lambda version, steady: self.committed(version, None if is_new else path),
            ),
        )
        save.copy_now()
        if is_new and path is not None:
            self.keeper.place(path, state.token, step, model)
        save.run()
        save.result(0)

    def publish(self, path: str) -> None:
        self.keeper.make_durable([path])

    def committed(self, version: CommittedVersion, path: str | None) -> None:
        assert isinstance(version, Before)
        info = version.record.info
        self.before[info.model] = version
        if path is not None:
            self.keeper.replace(path, info)

    def remove_file(self, path: str, model: str = "a") -> None:
        """Remove a reference file, and then the version that it alone led to."""
        after = changed(self.ledger.state, model, drop=self.led_to(path))
        with self.ledger.change(after, leads={path: None}):
            self.keeper.remove(path)

    def user_removes(self, path: str) -> None:
        """Somebody else removes a reference file, and syncs nothing."""
        self.ledger.forget(path)
        self.files.remove(path)

    def retire(self, steps: Collection[int], model: str = "a") -> None:
        """Let go of versions in a commit of their own."""
        with self.ledger.change(changed(self.ledger.state, model, drop=steps)):
            self.writer.retire(self.ids(model, steps))

    def ids(self, model: str, steps: Collection[int]) -> list[int]:
        found = self.writer.catalogue().models.get(model)
        entries = found.versions if found else ()
        return [entry.info.id for entry in entries if entry.info.step in steps]


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


def collect(trainer: Trainer) -> None:
    """Versions whose files were deleted go when their space is needed."""
    for _ in range(7):
        trainer.save(path=f"{CHECKPOINTS}/{trainer.next_step()}.ckpt")
        if len(trainer.steps()) > 1:
            trainer.user_removes(trainer.paths()[0])


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


def refer(trainer: Trainer) -> None:
    """New reference files, one that is replaced, one that is removed. Each has a version to fall
    back to."""
    trainer.save()
    last, best = f"{CHECKPOINTS}/last.ckpt", f"{CHECKPOINTS}/best.ckpt"
    for path in (last, best, last):
        trainer.save(path=path)
    trainer.remove_file(best)


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
