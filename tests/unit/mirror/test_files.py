"""Files in a store: whole, verified, of one writer at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import xxhash

from portus.engine.copying.segments import Stop, StoppedError
from portus.engine.format.checksum import UNIT
from portus.engine.loading.open_file import open_file
from portus.errors import CorruptionError, StaleError, TransportError, UsageError
from portus.reach.mirror.address import parse
from portus.reach.mirror.files import MirroredFiles
from portus.reach.mirror.log import SupersededError
from portus.reach.mirror.objects import DIGEST_SUFFIX, FileObject, file_name, prefix_of
from portus.reach.mirror.opening import open_store
from portus.reach.mirror.store import MissingError, Part, Store

RUN = bytes(range(16))
NUMBERS = itertools.count()


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    folder, memory = f"file://{tmp_path}/store", f"memory:files-{next(NUMBERS)}"
    opened = open_store(parse(folder if request.param == "folder" else memory))
    yield opened
    opened.close()


@pytest.fixture
def files(store: Store) -> MirroredFiles:
    made = MirroredFiles(store, "run", "the store")
    made.claim("a test", RUN)
    return made


def put(files: MirroredFiles, path: Path, name: str | None = None, stop: Stop | None = None) -> int:
    with open_file(str(path)) as file:
        time_ns = path.stat().st_mtime_ns
        sent = files.upload(name or path.name, file, stop or Stop(), time_ns=time_ns)
    files.count([files.checkpoint(name or path.name, {name or path.name: sent}, 7)])
    return sent.size


def remove(files: MirroredFiles, *paths: str) -> None:
    files.remove(each.token for path in paths for each in files.below(path))


def fetched(files: MirroredFiles, name: str, into: Path) -> bytes:
    said = files.read().at(name)
    assert said is not None
    number = os.open(into, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        with files.open(said) as opened:
            opened[os.path.basename(said.path)].write(number, said.path, lambda _: None)
    finally:
        os.close(number)
    return into.read_bytes()


def made(path: Path, size: int) -> bytes:
    data = os.urandom(size)
    path.write_bytes(data)
    return data


@pytest.mark.parametrize("size", [0, 1, UNIT, 2 * UNIT + 5])
def test_a_file_comes_back_as_it_was_and_its_digest_is_beside_it(
    tmp_path: Path, store: Store, files: MirroredFiles, size: int
) -> None:
    data = made(tmp_path / "epoch=1-step=7.ckpt", size)
    assert put(files, tmp_path / "epoch=1-step=7.ckpt") == size
    assert fetched(files, "epoch=1-step=7.ckpt", tmp_path / "back") == data
    assert store.get("run/epoch=1-step=7.ckpt") == data
    beside = store.get("run/epoch=1-step=7.ckpt.xxh128").decode()
    assert beside == f"{xxhash.xxh3_128_hexdigest(data)}  epoch=1-step=7.ckpt\n"


@pytest.mark.parametrize(
    "name", ["a/b c.ckpt", "ü.ckpt", "../x", ".hidden", "x" * 900, "a=41", "~"]
)
def test_names_that_not_all_stores_take_are_kept_apart(
    tmp_path: Path, files: MirroredFiles, name: str
) -> None:
    one, other = made(tmp_path / "one", 100), made(tmp_path / "other", 100)
    put(files, tmp_path / "one", name)
    put(files, tmp_path / "other", f"{name}.other")
    assert fetched(files, name, tmp_path / "back") == one
    assert fetched(files, f"{name}.other", tmp_path / "back") == other


def test_names_that_are_quoted_are_never_those_of_others() -> None:
    names = [
        "a b",
        "a=20b",
        "_portus/quoted/a=20b",
        "versions/a",
        "_portus/log/a",
        "a b" * 400,
        "a b" * 400 + "c",
    ]
    names += ["a", f"a{DIGEST_SUFFIX}", f"a{DIGEST_SUFFIX}{DIGEST_SUFFIX}", f"a{DIGEST_SUFFIX}/b"]
    names += ["x" * 248, "x" * 249, f"a/{'x' * 255}", "_portus", "versions"]
    found = {file_name(each) + beside for each in names for beside in ("", DIGEST_SUFFIX)}
    assert len(found) == 2 * len(names)
    assert max(len(each) for name in found for each in name.split("/")) <= 255
    assert "_portus" not in found, "there is a directory of that name"


def test_a_file_that_replaces_one_counts_at_its_entry_and_not_before(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    first = made(tmp_path / "last.ckpt", 1000)
    put(files, tmp_path / "last.ckpt")
    second = made(tmp_path / "last.ckpt", 500)
    put(files, tmp_path / "last.ckpt")
    assert fetched(files, "last.ckpt", tmp_path / "back") == second != first
    [said] = files.read().added
    assert (said.size, said.step) == (500, 7)


@pytest.mark.parametrize("copies", [True, False])
def test_a_writer_that_is_killed_anywhere_leaves_the_file_before_or_the_new_one(
    tmp_path: Path, store: Store, files: MirroredFiles, *, copies: bool
) -> None:
    calls = 0
    for call in range(18):
        before = made(tmp_path / "last.ckpt", 1000 + call)
        put(files, tmp_path / "last.ckpt")
        killing = _Killing(store, call // 2, is_done=bool(call % 2), copies=copies)
        killed = MirroredFiles(killing, "run", "the store")  # type: ignore[arg-type]
        new = made(tmp_path / "last.ckpt", 500)
        with contextlib.suppress(KeyboardInterrupt):
            killed.claim("a test", RUN)
            put(killed, tmp_path / "last.ckpt")
        calls = max(calls, killing.calls)
        files.claim("a test", RUN)
        assert fetched(files, "last.ckpt", tmp_path / "back") in (before, new)
        if copies:
            assert store.get("run/last.ckpt") in (before, new), "for whoever has no Portus"
    assert calls == (8 if copies else 5), "it was killed at each of them"


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_copy_that_fails_is_asked_for_again(
    tmp_path: Path, store: Store, files: MirroredFiles, failures: int
) -> None:
    made(tmp_path / "last.ckpt", 1000)
    put(files, tmp_path / "last.ckpt")
    left, copy = [failures], store.copy

    def fail(name: str, target: str, size: int) -> bool:
        left[0] -= 1
        if left[0] >= 0:
            raise TransportError("503")
        return copy(name, target, size)

    store.copy = fail  # type: ignore[method-assign]
    new = made(tmp_path / "last.ckpt", 500)
    put(files, tmp_path / "last.ckpt")
    assert fetched(files, "last.ckpt", tmp_path / "back") == new
    there = [each.name for each in store.list("run/") if each.name.endswith("last.ckpt")]
    assert there == (["run/last.ckpt"] if failures < 3 else ["run/_portus/again/last.ckpt"])


class _Killing:
    """A store whose user is killed at a change of it, or once it is done. copies: whether it copies
    objects."""

    def __init__(self, store: Store, call: int, *, is_done: bool, copies: bool) -> None:
        self._store, self._call, self._is_done, self._copies = store, call, is_done, copies
        self.calls = 0

    def __getattr__(self, name: str) -> object:
        found = getattr(self._store, name)
        if name == "copy" and not self._copies:
            return lambda name, target, size: False
        return partial(self._change, found) if name in _CHANGES else found

    def _change(self, change: Callable[..., object], *args: object, **rest: object) -> object:
        self.calls += 1
        is_last = self.calls - 1 == self._call
        if is_last and not self._is_done:
            raise KeyboardInterrupt
        found = change(*args, **rest)
        if is_last:
            raise KeyboardInterrupt
        return found


_CHANGES = ("put", "put_stream", "create", "copy", "delete")


def test_what_is_replaced_goes_when_the_new_one_counts(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    for number in range(5):
        made(tmp_path / "last.ckpt", 100 + number)
        put(files, tmp_path / "last.ckpt")
        there = [each.name for each in store.list("run/") if "log/" not in each.name]
        assert there == ["run/last.ckpt", f"run/last.ckpt{DIGEST_SUFFIX}"]


def test_what_a_superseded_writer_overwrites_is_never_taken_for_the_file(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    made(tmp_path / "last.ckpt", 1000)
    put(files, tmp_path / "last.ckpt")
    other = MirroredFiles(store, "run", "the store")
    other.claim("another", bytes(16))
    with pytest.raises(SupersededError):
        put(files, tmp_path / "last.ckpt")
    store.put("run/last.ckpt", os.urandom(1000))  # it was under way
    with pytest.raises(CorruptionError, match="expected the digest"):
        fetched(other, "last.ckpt", tmp_path / "back")


def test_a_writer_that_is_superseded_in_the_middle_says_nothing_more(
    tmp_path: Path, store: Store
) -> None:
    made(tmp_path / "a.ckpt", 10)
    other = MirroredFiles(store, "run", "the store")

    class Overtaken:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def put_stream(self, name: str, parts: Iterable[Part], size: int, **rest: str) -> None:
            store.put_stream(name, parts, size, **rest)
            other.claim("another", bytes(16))

    files = MirroredFiles(Overtaken(), "run", "the store")  # type: ignore[arg-type]
    files.claim("a test", RUN)
    with pytest.raises(SupersededError):
        put(files, tmp_path / "a.ckpt")
    assert other.read().added == ()


def test_an_upload_that_began_before_another_writer_s_claim_replaces_no_file_of_that_one(
    tmp_path: Path, store: Store
) -> None:
    made(tmp_path / "last.ckpt", 2 * UNIT)
    theirs = made(tmp_path / "theirs.ckpt", 1000)
    other = MirroredFiles(store, "run", "the store")

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def put_stream(self, name: str, parts: Iterable[Part], size: int, **rest: str) -> None:
            sent = list(map(bytes, parts))
            other.claim("another", bytes(16))
            put(other, tmp_path / "theirs.ckpt", "last.ckpt")
            store.put_stream(name, sent, size, **rest)

    files = MirroredFiles(Slow(), "run", "the store")  # type: ignore[arg-type]
    files.claim("a test", RUN)
    with pytest.raises(SupersededError):
        put(files, tmp_path / "last.ckpt")
    assert fetched(other, "last.ckpt", tmp_path / "back") == theirs


def test_a_stop_ends_an_upload_and_what_was_there_stays(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    before = made(tmp_path / "a.ckpt", 100)
    put(files, tmp_path / "a.ckpt")
    made(tmp_path / "a.ckpt", 3 * UNIT)
    stop = Stop()
    stop.set()
    with pytest.raises(StoppedError):
        put(files, tmp_path / "a.ckpt", stop=stop)
    assert fetched(files, "a.ckpt", tmp_path / "back") == before


def test_a_file_that_becomes_shorter_meanwhile_does_not_count(
    tmp_path: Path, files: MirroredFiles
) -> None:
    made(tmp_path / "a.ckpt", 2 * UNIT)

    class Truncating(Stop):
        def check(self) -> None:
            with open(tmp_path / "a.ckpt", "r+b") as file:
                file.truncate(UNIT + 5)

    with pytest.raises(StaleError):
        put(files, tmp_path / "a.ckpt", stop=Truncating())
    assert files.read().added == ()


@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_a_damaged_file_is_told(
    tmp_path: Path, store: Store, files: MirroredFiles, damage: str
) -> None:
    data = bytearray(made(tmp_path / "a.ckpt", UNIT + 100))
    put(files, tmp_path / "a.ckpt")
    name = prefix_of("run") + file_name("a.ckpt")
    if damage == "missing":
        store.delete([name])
    elif damage == "short":
        store.put(name, bytes(data[:-1]))
    else:
        data[-1] ^= 1
        store.put(name, bytes(data))
    with pytest.raises(CorruptionError):
        fetched(files, "a.ckpt", tmp_path / "back")


def test_what_is_removed_is_gone_with_its_digest(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    for name in ("a.ckpt", "b.ckpt"):
        made(tmp_path / name, 10)
        put(files, tmp_path / name)
    files.link("last.ckpt", "b.ckpt")
    remove(files, "a.ckpt", "never.ckpt", "a.ckpt", "last.ckpt")
    assert [each.path for each in files.read().added] == ["b.ckpt"]
    assert [each.name for each in store.list("run/", "run/_portus0")] == [
        "run/b.ckpt",
        f"run/b.ckpt{DIGEST_SUFFIX}",
    ]


def test_a_deletion_that_takes_effect_late_takes_no_file_that_counts(
    tmp_path: Path, store: Store, files: MirroredFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "a.ckpt", 100)
    put(files, tmp_path / "a.ckpt")
    late: list[str] = []

    def unanswered(names: Sequence[str]) -> None:
        late.extend(names)
        raise TransportError("no answer")

    with monkeypatch.context() as cut:
        cut.setattr(store, "delete", unanswered)
        with pytest.raises(TransportError):
            remove(files, "a.ckpt")
    data = made(tmp_path / "a.ckpt", 200)
    put(files, tmp_path / "a.ckpt")
    assert late
    store.delete(late)
    assert fetched(files, "a.ckpt", tmp_path / "back") == data
    remove(files, "a.ckpt")
    assert [each.name for each in store.list("run/") if "/_portus/log/" not in each.name] == []


def test_what_was_to_replace_a_file_goes_with_it(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    made(tmp_path / "last.ckpt", 10)
    put(files, tmp_path / "last.ckpt")
    with open_file(str(tmp_path / "last.ckpt")) as file:
        files.upload("last.ckpt", file, Stop(), time_ns=8)
    remove(files, "last.ckpt")
    assert [each.name for each in store.list("run/") if "log/" not in each.name] == []


def test_a_link_that_replaces_a_file_takes_its_object_away(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    made(tmp_path / "last.ckpt", 10)
    put(files, tmp_path / "last.ckpt")
    files.link("last.ckpt", "b.ckpt")
    said = files.read().at("last.ckpt")
    assert said is not None
    assert said.link == "b.ckpt"
    assert files.read().newest is None
    with pytest.raises(MissingError):
        store.get("run/last.ckpt")


def test_the_newest_upload_that_is_as_its_digest_says_is_found_where_the_log_is_lost(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    """Whatever a kill left of a file that was to be replaced."""
    first = made(tmp_path / "last.ckpt", 10)
    put(files, tmp_path / "last.ckpt")
    made(tmp_path / "last.ckpt", 20)
    with open_file(str(tmp_path / "last.ckpt")) as file:
        sent = files.upload("last.ckpt", file, Stop(), time_ns=8)

    def found() -> MirroredFiles:
        store.delete([each.name for each in store.list("run/_portus/log/")])
        fresh = MirroredFiles(store, "run", "the store")
        lost = fresh.find_lost()
        fresh.claim("a repair", RUN, passing=True)
        fresh.restore(lost)
        return fresh

    assert fetched(found(), "last.ckpt", tmp_path / "back") == first
    files._put_digest(sent)
    second = (tmp_path / "last.ckpt").read_bytes()
    assert fetched(found(), "last.ckpt", tmp_path / "back") == second


def test_a_later_upload_of_an_earlier_step_does_not_become_the_newest(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    for step in (90, 80):
        made(tmp_path / f"step={step}.ckpt", step)
        put(files, tmp_path / f"step={step}.ckpt")
    store.delete([each.name for each in store.list("run/_portus/log/")])
    fresh = MirroredFiles(store, "run", "the store")
    lost = fresh.find_lost()
    assert len(lost) == 2
    fresh.claim("a repair", RUN, passing=True)
    fresh.restore(lost, {"step=90.ckpt": 1_000})
    newest = fresh.read().newest
    assert newest is not None
    assert (newest.path, newest.time_ns) == ("step=90.ckpt", 1_000)
    said = fresh.state.at("step=80.ckpt")
    assert said is not None
    assert said.time_ns < 1_000


def test_a_part_of_a_directory_is_not_found_where_the_log_is_lost(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    sent: dict[str, FileObject] = {}
    for name in ("checkpoint-1/a.ckpt", "checkpoint-1/custom_checkpoint_0.pkl"):
        sent |= upload(files, tmp_path, name)
        assert files.find_lost() == []
    files._put_digest(sent["checkpoint-1/a.ckpt"])
    assert files.find_lost() == [], "killed between the two digests"
    files.count([files.checkpoint("checkpoint-1", sent, 1)])
    store.delete([each.name for each in store.list("run/_portus/log/")])
    [lost] = MirroredFiles(store, "run", "the store").find_lost()
    assert (lost.path, lost.paths.keys()) == ("checkpoint-1", sent.keys())


def upload(
    files: MirroredFiles, folder: Path, *names: str, time_ns: int = 1
) -> dict[str, FileObject]:
    sent = {}
    for name in names:
        made(folder / "part", 10)
        with open_file(str(folder / "part")) as file:
            sent[name] = files.upload(name, file, Stop(), time_ns=time_ns)
    return sent


def test_a_directory_that_counts_is_not_replaced_by_parts_of_it_that_are_found(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    both = ("checkpoint-1/a.ckpt", "checkpoint-1/custom_checkpoint_0.pkl")
    files.count(files.checkpoints(upload(files, tmp_path, *both)))
    [whole] = files.read().added
    more = upload(files, tmp_path, "checkpoint-1/c.ckpt")
    files._put_digest(more["checkpoint-1/c.ckpt"])
    fresh = MirroredFiles(store, "run", "the store")
    assert fresh.find_lost() == []
    store.delete([each.name for each in store.list("run/_portus/log/")])
    lost = MirroredFiles(store, "run", "the store").find_lost()
    files = MirroredFiles(store, "run", "the store")
    files.claim("a test", RUN)
    files.count([whole])  # after the list, and before the claim
    fresh = MirroredFiles(store, "run", "the store")
    fresh.claim("a repair", RUN, passing=True)
    fresh.restore(lost)
    assert fresh.state.added == (whole,)


def test_a_step_that_was_removed_and_is_kept_does_not_make_a_restored_one_old(
    tmp_path: Path, store: Store, files: MirroredFiles
) -> None:
    for step in (100, 45):  # the run went back
        made(tmp_path / f"step={step}.ckpt", step)
        put(files, tmp_path / f"step={step}.ckpt")
    files.retire([each.token for each in files.below("step=100.ckpt")], 1)
    files._put_digest(upload(files, tmp_path, "step=50.ckpt", time_ns=2**62)["step=50.ckpt"])
    fresh = MirroredFiles(store, "run", "the store")
    lost = fresh.find_lost()
    fresh.claim("a repair", RUN, passing=True)
    fresh.restore(lost)
    newest = fresh.read().newest
    assert newest is not None
    assert newest.path == "step=50.ckpt"


def test_files_are_one_checkpoint_only_in_a_directory_with_a_step_in_its_name(
    tmp_path: Path, files: MirroredFiles
) -> None:
    for step in (1, 2):
        names = (f"ckpts/rank-0-{step}.pt", f"ckpts/rank-1-{step}.pt", f"ckpts/step={step}/a/b.pt")
        files.count(files.checkpoints(upload(files, tmp_path, *names), step))
    paths = [f"ckpts/rank-{rank}-{step}.pt" for step in (1, 2) for rank in (0, 1)]
    assert {each.path for each in files.read().added} == {*paths, "ckpts/step=1", "ckpts/step=2"}
    assert {each.step for each in files.read().added} == {1, 2}


def test_what_never_counted_is_swept_a_day_later_and_nothing_else(
    tmp_path: Path, store: Store, files: MirroredFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "a.ckpt", 10)
    put(files, tmp_path / "a.ckpt")
    for name in ("stray.ckpt", "stray.ckpt.xxh128", "_portus/quoted/stray", "_portus/again/a.ckpt"):
        store.put(f"run/{name}", b"x")
    for name in ("mine.txt", "mine.ckpt.xxh128"):
        store.put(f"run/{name}", b"not of Portus")
    store.put("files/mine.txt", b"not of Portus")
    assert files.sweep() == []
    monkeypatch.setattr("portus.reach.mirror.writer.GRACE_S", -10.0)
    assert len(files.sweep()) == 4
    left = [each.name for each in store.list("") if "_portus/log" not in each.name]
    assert left == [
        "files/mine.txt",
        "run/a.ckpt",
        "run/a.ckpt.xxh128",
        "run/mine.ckpt.xxh128",
        "run/mine.txt",
    ]


def test_what_another_mirror_has_below_a_run_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = open_store(parse(f"file://{tmp_path}/store/run"))
    made(tmp_path / "a.ckpt", 10)
    outer = MirroredFiles(open_store(parse(f"file://{tmp_path}/store")), "run", "the store")
    outer.claim("a test", RUN)
    inner = MirroredFiles(below, "a", "the store below")
    inner.claim("a test", RUN)
    for each in (outer, inner):
        put(each, tmp_path / "a.ckpt")
    monkeypatch.setattr("portus.reach.mirror.writer.GRACE_S", -10.0)
    assert outer.objects_without_entry() == outer.sweep() == []
    assert fetched(inner, "a.ckpt", tmp_path / "back") == (tmp_path / "a.ckpt").read_bytes()


def test_a_key_seals_what_the_log_says(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTUS_MIRROR_KEY", "secret")
    sealed = MirroredFiles(store, "sealed", "the store")
    sealed.claim("a test", RUN)
    made(tmp_path / "a.ckpt", 10)
    put(sealed, tmp_path / "a.ckpt")
    monkeypatch.setenv("PORTUS_MIRROR_KEY", "another")
    with pytest.raises(UsageError, match="PORTUS_MIRROR_KEY"):
        MirroredFiles(store, "sealed", "the store").read()


def test_a_closed_store_ends_an_upload(tmp_path: Path) -> None:
    store = open_store(parse(f"memory:files-{next(NUMBERS)}"))
    asked, closed = threading.Event(), threading.Event()

    def parts() -> Iterator[bytes]:
        yield bytes(100)
        asked.set()
        closed.wait(30)
        yield bytes(100)

    def close() -> None:
        asked.wait(30)
        threading.Timer(0.05, closed.set).start()
        store.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(Exception, match="closed"):
        store.put_stream("a", parts(), 200)
    closing.join()


@pytest.mark.parametrize("beside", ["", DIGEST_SUFFIX])
def test_a_check_finds_whatever_happens_to_a_file_or_to_its_digest(
    tmp_path: Path, store: Store, files: MirroredFiles, beside: str
) -> None:
    made(tmp_path / "last.ckpt", 1000)
    put(files, tmp_path / "last.ckpt")
    [said] = files.read().added
    name = f"run/{said.files[b''].name}{beside}"
    data = store.get(name)
    for damaged in (data[:-1], data + b"x", bytes([data[0] ^ 1]) + data[1:], b"", None):
        store.put(name, damaged) if damaged is not None else store.delete([name])
        with pytest.raises(CorruptionError, match=name):
            files.check(said, lambda _: None)
    store.put(name, data)
    read: list[int] = []
    files.check(said, read.append)
    assert sum(read) == 1000
