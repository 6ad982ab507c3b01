"""A mirror of real versions, in a store in memory."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import portus
from portus.engine.copying.local import fetch
from portus.engine.copying.segments import Digests, Sources, Stop
from portus.engine.format.checksum import UNIT
from portus.engine.media.base import Medium
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, MediumError, StaleError, TransportError, UsageError
from portus.reach.format.layout import DATA_START
from portus.reach.index.directory import open_reader
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import VersionEntry
from portus.reach.index.roots import format_pool
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.space import Memory
from portus.reach.mirror.log import SupersededError
from portus.reach.mirror.mirror import Mirror, models
from portus.reach.mirror.objects import DIGEST_SUFFIX, STRIDE, Added, FileObject, Removed
from portus.reach.mirror.store import Part
from portus.reach.pools import restore
from portus.reach.pools.mirror_versions import load_version
from tests.simulation.model_store import ModelStore

MODEL = "gpt/rank-0-of-4"
POOL = bytes(16)


BIG = 4_300_000
"""Elements: more than one unit."""

SHARING = 3 << 18
"""Elements of what shares a pack with others."""


def state_of(step: int, size: int = 1_200_000) -> dict[str, object]:
    """95 % of it stays as it is."""
    frozen = torch.Generator().manual_seed(1)
    fresh = torch.Generator().manual_seed(step)
    return {
        "frozen": torch.rand(size, generator=frozen),
        "head": torch.rand(10_000, generator=fresh),
        "empty": torch.empty(0),
        "small": [torch.rand(n, generator=fresh if n % 5 == 0 else frozen) for n in range(50)],
        "step": step,
    }


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and all(same(left[k], right[k]) for k in left | right)
    if isinstance(left, list):
        return isinstance(right, list) and all(map(same, left, right))
    return left == right


class Run:
    """A pool with some versions, and the store that they are mirrored to."""

    def __init__(self, path: Path, states: Sequence[dict[str, object]]) -> None:
        with portus.PoolCheckpointer(path / "run.portus", model=MODEL, keep=None) as saver:
            for step, state in enumerate(states, 1):
                saver.save(state, step=step, metrics={"loss": step / 2}).wait()
        self.bucket = ModelStore()
        self.reader = open_reader(str(path / "run.portus"))
        self.mirror = Mirror(self.bucket, MODEL)

    @property
    def entries(self) -> list[VersionEntry]:
        return list(self.reader.catalogue().entries())

    def claim(self) -> None:
        self.mirror.claim("a test", self.reader.uuid, 0)

    def copy(self, index: int) -> Added:
        return self.mirror.copy(self.reader, self.entries[index].info.id, Stop())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, [state_of(step) for step in (1, 2, 3)])
    with contextlib.closing(made.reader):
        yield made


def test_what_is_mirrored_loads_straight_from_there(tmp_path: Path) -> None:
    states: list[dict[str, object]] = [state_of(1, BIG), state_of(2, 100), {"step": 3}, {}]
    run = Run(tmp_path, states)
    run.claim()
    for index in range(len(states)):
        run.copy(index)
    other = Mirror(run.bucket, MODEL)
    versions = other.read().added
    assert [each.step for each in versions] == [1, 2, 3, 4]
    for each in versions:
        read: list[int] = []
        other.check(each, read.append)
        assert sum(read) == each.size
    for each, state in zip(versions, states, strict=True):
        assert same(load_version(other, each), state)
    run.reader.close()


def test_a_fresh_node_s_own_pool_is_filled_from_the_mirror_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, [state_of(1, BIG), state_of(2, BIG)])
    run.claim()
    added = run.copy(1)
    run.reader.close()
    writer = new_pool()
    record = Mirror(run.bucket, MODEL).fetch(added, writer)
    assert record.info.token == added.token
    [entry] = writer.catalogue().entries()
    assert same(restore.load(writer, entry), state_of(2, BIG))
    assert entry.info.metrics == {"loss": 1.0}
    assert portus.check(writer) == []
    writer.close()


def test_each_byte_of_a_version_is_asked_for_once_by_few_requests(tmp_path: Path) -> None:
    mixed = {f"layer {n}": torch.rand(SHARING if n % 2 else 1 << 19) for n in range(5)}
    zeros = {f"zero {n}": torch.zeros(UNIT // 4) for n in range(2)}
    state: dict[str, object] = {**mixed, **zeros}
    run = Run(tmp_path, [state])
    run.claim()
    added = run.copy(0)
    run.reader.close()

    class Told(ModelStore):
        def get_range(self, name: str, start: int, length: int) -> Part:
            asked.append(length)
            return super().get_range(name, start, length)

    writer, store = new_pool(), Told(run.bucket.objects)
    advance: list[int] = []
    asked: list[int] = []
    Mirror(store, MODEL).fetch(added, writer, advance.append)
    assert sum(advance) == added.size
    assert sum(asked) <= added.size + (64 << 10) + 9, "begin and end, twice"
    assert len(asked) <= 2 + -(-added.size // UNIT)
    [entry] = writer.catalogue().entries()
    assert same(restore.load(writer, entry), state)
    writer.close()


def test_a_unit_goes_to_several_places_where_a_pool_has_no_room_in_one(run: Run) -> None:
    run.claim()
    added = run.copy(0)
    writer = new_pool()
    writer.release(writer.reserve(16 << 20))  # so large is it now
    taken = [writer.reserve(100 * PAGE, contiguous=True) for _ in range(40)]
    for extents in taken[::2]:
        writer.release(extents)
    size = writer.medium.size
    record = Mirror(run.bucket, MODEL).fetch(added, writer)
    assert len(record.extents) > int((record.storages["length"] > 0).sum()), "nothing is split"
    assert writer.medium.size == size
    [entry] = writer.catalogue().entries()
    assert same(restore.load(writer, entry), state_of(1))
    writer.close()


def test_a_damaged_unit_is_told_and_nothing_is_committed(run: Run) -> None:
    run.claim()
    added = run.copy(0)
    for name in version_files(run.bucket):
        data, modified = run.bucket.objects[name]
        damaged = bytes([data[0] ^ 1]) + data[1:]
        run.bucket.objects[name] = damaged, modified
        writer = new_pool()
        with pytest.raises(CorruptionError, match=r"step 1: .* expected the digest"):
            Mirror(run.bucket, MODEL).fetch(added, writer)
        assert not list(writer.catalogue().entries())
        assert writer.free_bytes() == writer.medium.size - DATA_START, "room is still held"
        writer.close()
        run.bucket.objects[name] = data, modified


def test_a_pool_that_cannot_grow_ends_the_fetching(run: Run) -> None:
    run.claim()
    added = run.copy(0)
    writer = new_pool()
    writer.max_bytes = writer.medium.size
    with pytest.raises(MediumError) as raised:
        Mirror(run.bucket, MODEL).fetch(added, writer)
    assert raised.value.errno == errno.ENOSPC
    assert not list(writer.catalogue().entries())
    writer.close()


def new_pool(medium: Memory | None = None) -> PoolWriter:
    medium = medium or Memory(DATA_START)
    format_pool(medium)
    return PoolWriter(medium, ProcessLocks())


def test_what_is_there_is_not_sent_again(run: Run) -> None:
    run.claim()
    run.bucket.counts.clear()
    version = run.entries[0].info.id
    run.mirror.copy(run.reader, version, Stop())
    # The file, and its digest.
    assert run.bucket.counts == {"put": 2, "create": 1}, "no list, and no read"
    run.mirror.copy(run.reader, version, Stop())
    assert run.bucket.counts == {"put": 2, "create": 1}


class Failing(ModelStore):
    """Takes so many objects, and no entry of the log afterwards."""

    puts_left = 2
    creates = True

    def put(self, name: str, data: bytes) -> None:
        if not self.puts_left:
            raise TransportError("the line is dead")
        self.puts_left -= 1
        super().put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        if not self.creates:
            raise TransportError("the line is dead")
        return super().create(name, data)


def test_what_arrived_before_a_failure_is_not_sent_again(run: Run) -> None:
    bucket = Failing()
    mirror = Mirror(bucket, MODEL)
    mirror.claim("a test", POOL, 0)
    version, bucket.creates = run.entries[0].info.id, False
    with pytest.raises(TransportError):
        mirror.copy(run.reader, version, Stop())
    assert mirror.read().added == ()
    bucket.creates = True
    mirror.copy(run.reader, version, Stop())
    assert not bucket.puts_left
    assert len(version_files(bucket)) == len(mirror.read().added) == 1


def version_files(bucket: ModelStore) -> list[str]:
    return [n for n in bucket.objects if "/versions/" in n and not n.endswith(DIGEST_SUFFIX)]


def test_a_damaged_unit_of_the_pool_is_not_mirrored(run: Run, tmp_path: Path) -> None:
    run.claim()
    entry = run.entries[0]
    offset = run.reader.record(entry).storage_extents(0)[0].offset
    with open(tmp_path / "run.portus", "r+b") as file:
        file.seek(offset + 5)
        file.write(b"\xff\xfe")
    with pytest.raises(CorruptionError, match=r"step 1 .*is damaged.*not mirrored"):
        run.copy(0)
    assert run.mirror.read().added == ()


def test_a_flipped_byte_of_any_object_is_never_handed_out(run: Run, seed: int) -> None:
    rng = random.Random(seed)
    run.claim()
    for index in range(2):
        run.copy(index)
    whole = dict(run.bucket.objects)
    outcomes = []
    for name in rng.choices([*sorted(whole), *3 * version_files(run.bucket)], k=40):
        data, modified = whole[name]
        at = rng.randrange(len(data))
        damaged = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        run.bucket.objects[name] = damaged, modified
        outcomes.append(outcome(run))
        run.bucket.objects[name] = data, modified
    assert outcomes.count("bit-identical") > 5
    assert outcomes.count("an error") > 3
    assert outcome(run) == "bit-identical"


@pytest.mark.parametrize("name", [b"../a.pt", b"/a.pt", b"..", b"a\0"])
def test_a_name_that_leads_out_of_a_directory_opens_nothing(run: Run, name: bytes) -> None:
    run.claim()
    files = {each: FileObject("x", 9, bytes(16)) for each in (b"a.pt", name)}
    added = replace(run.copy(0), files=files)
    with pytest.raises(CorruptionError, match="the name of a file"), run.mirror.open(added):
        pass


def outcome(run: Run) -> str:
    """Of a load of the newest version."""
    mirror = Mirror(run.bucket, MODEL)
    try:
        newest = mirror.read().newest
        if newest is None:
            return "an error"
        found = load_version(mirror, newest)
    except (CorruptionError, UsageError):
        return "an error"
    assert same(found, state_of(newest.step))
    return "bit-identical"


def test_only_the_ranges_of_what_is_asked_for_are_read(run: Run) -> None:
    run.claim()
    added = run.copy(0)
    run.bucket.counts.clear()
    found = load_version(run.mirror, added, "small*")
    assert same(found, {"small": state_of(1)["small"]})
    assert run.bucket.counts == {"get_range": 4}, "begin and end, and what is around, on both sides"


def test_a_key_is_needed_where_one_was_used_and_nothing_else_passes(run: Run) -> None:
    keyed = Mirror(run.bucket, MODEL, key=b"a secret")
    keyed.claim("a test", POOL, 0)
    added = keyed.copy(run.reader, run.entries[0].info.id, Stop())
    assert Mirror(run.bucket, MODEL, key=b"a secret").read().newest == added
    with pytest.raises(UsageError, match="PORTUS_MIRROR_KEY"):
        Mirror(run.bucket, MODEL).read()
    for key in (b"another", b""):
        with pytest.raises(UsageError, match=r"none of the 2 entries .* PORTUS_MIRROR_KEY"):
            Mirror(run.bucket, MODEL, key=key).claim("with a wrong key", POOL, 0)
    unkeyed = ModelStore()
    Mirror(unkeyed, MODEL).claim("without", POOL, 0)
    with pytest.raises(UsageError, match=r"none of the 1 entries .* unset it"):
        Mirror(unkeyed, MODEL, key=b"a secret").read()


def test_who_is_superseded_is_told_by_whom_and_may_go_on_after_who_was_passing(run: Run) -> None:
    run.claim()
    run.copy(0)
    passing = Mirror(run.bucket, MODEL)
    passing.claim("portus rm on another machine", POOL, 0, passing=True)
    with pytest.raises(SupersededError, match="portus rm on another machine was passing") as told:
        run.copy(1)
    assert told.value.passing
    assert not run.mirror.is_claimed
    run.claim()
    run.copy(1)
    Mirror(run.bucket, MODEL).claim("job 17 on node 3", POOL, 0)
    with pytest.raises(SupersededError, match="term 5: job 17 on node 3 continues with it") as told:
        run.mirror.note([Removed(bytes(16))])
    assert not told.value.passing


def test_what_is_removed_is_deleted_at_once_and_nothing_else(run: Run) -> None:
    run.claim()
    first, second = run.copy(0), run.copy(1)
    with run.mirror.open(first) as files:
        run.mirror.remove([first.token, bytes(16)])
        assert len(version_files(run.bucket)) == 1
        [file] = files.values()
        with pytest.raises(StaleError, match=r"step 1 of model .* was removed"):
            file.read(0, 1)
    with pytest.raises(StaleError, match=r"step 1 of model .* was removed"):
        loaded_by(run, first)
    assert same(loaded_by(run, second), state_of(2))


def test_what_never_counted_is_deleted_a_day_later_and_nothing_else(run: Run) -> None:
    bucket = Failing()
    mirror = Mirror(bucket, MODEL)
    mirror.claim("a test", POOL, 0)
    bucket.creates = False
    with pytest.raises(TransportError):
        mirror.copy(run.reader, run.entries[0].info.id, Stop())
    bucket.creates, bucket.puts_left = True, 2
    kept = mirror.copy(run.reader, run.entries[1].info.id, Stop())
    bucket.now += 90_000
    bucket.objects[f"{MODEL.replace('/', '=2F')}/mine.txt"] = b"of another program", 0.0
    assert mirror.sweep() == [], "the time of the store is that of an entry"
    mirror.note([Removed(bytes(16))])
    found = mirror.find_unneeded()
    assert len(found) == 2, "the file, and its digest"
    assert len(version_files(bucket)) == 2
    assert mirror.sweep() == found
    assert len(version_files(bucket)) == 1
    assert same(load_version(mirror, kept), state_of(2))
    assert mirror.objects_without_entry() != [], "what others put there stays"


def test_after_a_sweep_what_is_deleted_is_sent_again_under_a_new_name(run: Run) -> None:
    bucket = Failing()
    mirror = Mirror(bucket, MODEL)
    mirror.claim("a test", POOL, 0)
    version, bucket.creates = run.entries[0].info.id, False
    with pytest.raises(TransportError):
        mirror.copy(run.reader, version, Stop())
    before = version_files(bucket)
    bucket.creates, bucket.puts_left = True, 2
    bucket.now += 90_000
    mirror.note([Removed(bytes(16))])
    mirror.sweep()
    added = mirror.copy(run.reader, version, Stop())
    assert before != version_files(bucket)
    assert same(load_version(mirror, added), state_of(1))


def test_what_is_mended_from_a_fresh_node_s_pool_keeps_its_place_in_the_history(
    run: Run,
) -> None:
    run.claim()
    added = [run.copy(index) for index in range(3)]
    writer = new_pool()
    other = Mirror(run.bucket, MODEL)
    other.fetch(added[2], writer)
    for name in list(run.bucket.objects):
        if "/step-00000003-" in name:
            del run.bucket.objects[name]
    [(lost, names)] = other.suspects()
    assert lost == added[2]
    [entry] = writer.catalogue().entries()
    other.mend(lost, names, writer, entry.info.id, Stop())
    assert not other.suspects()
    found = other.read().newest
    assert found is not None
    assert (found.token, found.term, found.commit) == (added[2].token, 2, 4)
    assert same(loaded_by(run, found), state_of(3))
    writer.close()


def loaded_by(run: Run, added: Added) -> object:
    return load_version(run.mirror, added)


def test_an_old_version_that_is_mirrored_late_is_not_the_newest(run: Run) -> None:
    run.claim()
    newest = run.copy(2)
    assert run.copy(0).commit == 2
    assert run.mirror.read().newest == newest
    other = Mirror(run.bucket, MODEL)
    other.claim("the same pool, later", run.reader.uuid, 3)
    other.copy(run.reader, run.entries[1].info.id, Stop())
    assert other.state.newest == newest


def fact_of(n: int) -> Added:
    files = {b"a.pt": FileObject(f"versions/step-{n:08d}/a.pt", 9, bytes(16))}
    return Added(n.to_bytes(16, "big"), n, 1, n, 0, 0, False, b"", files)


def test_ten_thousand_versions_are_resumed_from_with_a_few_reads(run: Run) -> None:
    run.claim()
    run.copy(0)
    facts = [fact_of(n) for n in range(2, 10_000 - 4 * STRIDE)]
    run.mirror.note(facts)
    for n in range(10_000 - 4 * STRIDE, 10_000 + STRIDE - 1):
        run.mirror.note([fact_of(n)])
    run.bucket.counts.clear()
    other = Mirror(run.bucket, MODEL)
    other.claim("a fresh node", POOL, 0, passing=True)
    assert len(other.state.added) >= 10_000
    assert other.state.newest is not None
    assert run.bucket.counts["list"] == 1
    assert run.bucket.counts["get"] <= STRIDE + 1


def test_the_models_of_a_store_are_found_by_a_list_each_and_a_long_name_by_a_read(run: Run) -> None:
    names = ["a", "a-b", "a.b", "a/rank-0-of-2", "a/rank-1-of-2", "b" * 200, "z"]
    for name in names:
        Mirror(run.bucket, name).claim("a test", POOL, 0)
        run.bucket.put(f"{name[0]}.txt", b"somebody else's")
        run.bucket.put(f"{name[0]}/of-another/program", b"")
    run.claim()
    run.copy(0)
    run.bucket.counts.clear()
    assert list(models(run.bucket)) == sorted([*names, MODEL])
    theirs = 5  # a.txt, b.txt, z.txt, and what is in b/, which may be a run
    assert run.bucket.counts["list"] == len(names) + 1 + theirs + 1, "the last one finds the end"
    assert run.bucket.counts["get"] == 1


def test_what_a_training_goes_on_from_is_the_pool_unless_its_history_was_left_behind(
    run: Run,
) -> None:
    old, new = bytes(16), b"\1" * 16
    versions = [entry.info for entry in run.entries]
    assert not run.mirror.read().is_ahead_of(old, []), "nothing is mirrored"
    run.mirror.claim("a test", run.reader.uuid, 0)
    run.copy(1)
    state = run.mirror.read()
    uuid = run.reader.uuid
    assert not state.is_ahead_of(uuid, versions), "the pool has one that is newer"
    assert not state.is_ahead_of(uuid, versions[:2]), "it is the same one"
    assert state.is_ahead_of(uuid, versions[:1])
    assert state.is_ahead_of(new, [])
    assert state.is_ahead_of(new, versions[2:]), "of a history that nobody claimed"
    Mirror(run.bucket, MODEL).claim("a fresh node", new, 0)
    other = Mirror(run.bucket, MODEL)
    other.claim("a fresh node", new, 0)
    other.copy(run.reader, run.entries[0].info.id, Stop())  # as if it were of the fresh node's pool
    assert not other.read().is_ahead_of(new, versions[2:])


def test_a_shelf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    with portus.Shelf(path) as shelf:
        shelf.numbers = np.arange(10)
    with contextlib.closing(open_reader(str(path))) as reader:
        [entry] = reader.catalogue().entries()
        mirror = Mirror(ModelStore(), entry.info.model)
        mirror.claim("a test", POOL, 0)
        with pytest.raises(UsageError, match=r"without files \(a shelf, or tables\)"):
            mirror.copy(reader, entry.info.id, Stop())


def test_small_storages_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, object] = {f"{n}": torch.full((9,), float(n)) for n in range(500)}
    run = Run(tmp_path, [state])
    run.claim()
    fetched: list[int] = []

    def counted(medium: Medium, targets: Sources, stop: Stop) -> Digests:
        fetched.append(len(targets.length))
        return fetch(medium, targets, stop)

    monkeypatch.setattr("portus.reach.versions.open_version.fetch", counted)
    added = run.copy(0)
    assert sorted(fetched) == [1, 500], "those, and what is around them"
    assert same(load_version(run.mirror, added), state)
    run.reader.close()
