"""The mirror of the files of one run: newest first, and never without the newest."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.companions.job.journal import JOURNALS
from portus.engine.directory.publisher import Publisher
from portus.engine.fence import fence
from portus.engine.job.settings import Settings
from portus.engine.paths import process
from portus.errors import CorruptionError, MediumError, TransportError, UsageError
from portus.reach.index.directory import make_directory
from portus.reach.mirror.address import parse
from portus.reach.mirror.files import MirroredFiles
from portus.reach.mirror.opening import open_store
from portus.reach.mirror.store import Part, Store, UnwritableError
from portus.reach.training import file_mirror
from portus.reach.training.training_files import TrainingFiles, _CheckpointRequest
from tests.moments import at, until

NUMBERS = itertools.count()


class Bucket:
    """What a store has, and what it is told to do. ``gate``: an upload waits for it."""

    def __init__(self) -> None:
        self.address = f"memory:mirror-{next(NUMBERS)}"
        self.store: Store = open_store(parse(self.address))
        self.behind: Store = open_store(parse(self.address))
        """The same objects, for who looks: an upload that waits holds the first one up."""
        self.sent: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def put_stream(self, name: str, parts: Iterable[Part], size: int, **rest: str) -> None:
        def asked() -> Iterator[Part]:
            for part in parts:
                self.begun.set()
                assert self.gate.wait(30)
                if self.error is not None:
                    raise self.error
                yield part

        self.store.put_stream(name, asked(), size, **rest)
        self.sent.append(name.removeprefix("run/"))

    def files(self) -> dict[str, int]:
        """The names that count, and the steps of their checkpoints, as plain torch reads them."""
        state = MirroredFiles(self.behind, "run", "bucket").read()
        found = {}
        for each in state.added:
            if each.link:
                found[each.path] = -1
                continue
            for path, file in each.paths.items():
                Path("read.ckpt").write_bytes(self.behind.get(f"run/{file.name}"))
                found[path] = torch.load("read.ckpt")["step"]
        return found

    def close(self) -> None:
        """Of the run: the objects stay."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    made = Bucket()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "_savers", [])
    monkeypatch.setattr(process, "_writers", [])
    monkeypatch.setattr(file_mirror, "open_store", lambda _: made)
    monkeypatch.setattr("portus.reach.mirror.background_copier._PAUSE_MIN_S", 0.01)
    yield made
    process._finish()
    made.store.close()
    made.behind.close()


class Run:
    """A training in ``root`` that saves to ``root/ckpt``."""

    of_directories = False

    def __init__(self, bucket: Bucket, root: Path, *, wait: float = 60.0, keep: int = 0) -> None:
        self.root, self.place = root, str(root / ".portus")
        self.checkpoints = str(root / "ckpt")
        settings = Settings(mirror=bucket.address, mirror_keep=keep, mirror_wait=wait)
        self.files = TrainingFiles(settings, of_directories=self.of_directories)

    def fetch(self) -> Run:
        self.files.fetch("run", self.place, self.checkpoints)
        return self

    def begin(self) -> Run:
        os.makedirs(self.root, exist_ok=True)
        self.files.begin("run", self.place, self.checkpoints)
        return self

    def save(self, name: str, step: int, size: int = 100) -> portus.SaveHandle:
        state = {"step": step, "w": torch.full((size,), float(step))}
        return self.files.save(state, os.path.join(self.checkpoints, name), step)

    def save_stuck(self, bucket: Bucket, name: str, step: int, size: int = 100) -> None:
        """Save, and return once the upload waits at the gate."""
        bucket.gate.clear()
        bucket.begun.clear()
        self.save(name, step, size).wait()
        assert bucket.begun.wait(30)

    def remove(self, name: str) -> None:
        self.files.remove(os.path.join(self.checkpoints, name))

    def here(self) -> set[str]:
        return set(os.listdir(self.checkpoints)) - {".portus"}

    def kill(self) -> None:
        """It is gone, and its thread with it."""
        mirror = self.files._mirror
        assert mirror is not None
        self.files._mirror = None
        self.files.close()
        mirror.end()
        assert mirror._thread is not None
        mirror._thread.join()


def test_ctrl_c_at_the_end_of_the_journal_leaves_nothing_unmirrored(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save_stuck(bucket, "1.ckpt", 1)
    journal = run.files._journal
    assert journal is not None

    def interrupted() -> None:
        bucket.gate.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(journal, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.files.close()
    assert bucket.files() == {"ckpt/1.ckpt": 1}


def test_each_committed_file_is_there_whole_under_its_own_name(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    for step in (1, 2, 3):
        run.save(f"step={step}.ckpt", step)
    run.files.close()
    assert bucket.files() == {f"ckpt/step={step}.ckpt": step for step in (1, 2, 3)}


def test_the_newest_goes_first_and_what_was_removed_before_its_turn_never_goes(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save_stuck(bucket, "0.ckpt", 0)
    for step in (1, 2, 3):
        run.save(f"{step}.ckpt", step).wait()
    run.remove("1.ckpt")
    until(lambda: run.here() == {"0.ckpt", "2.ckpt", "3.ckpt"})
    bucket.gate.set()
    run.files.close()
    assert bucket.sent == ["ckpt/0.ckpt", "ckpt/3.ckpt", "ckpt/2.ckpt"]


@pytest.mark.parametrize("is_open", [False, True], ids=["begun", "opened before it begins"])
def test_what_the_run_removes_goes_after_the_newest_is_there(
    bucket: Bucket, tmp_path: Path, is_open: bool
) -> None:
    run = Run(bucket, tmp_path / "run")
    if is_open:
        run.files.open()
    run.begin().save("1.ckpt", 1).wait()
    until(lambda: bucket.files() == {"ckpt/1.ckpt": 1})
    bucket.gate.clear()
    bucket.begun.clear()
    run.save("2.ckpt", 2).wait()
    run.remove("1.ckpt")
    assert bucket.begun.wait(30)
    until(lambda: run.here() == {"2.ckpt"})
    assert bucket.files() == {"ckpt/1.ckpt": 1}, "the only one there stays"
    bucket.gate.set()
    run.files.close()
    assert bucket.files() == {"ckpt/2.ckpt": 2}


def meanwhile(bucket: Bucket, act: Callable[[int], object], times: int) -> None:
    """Have ``act`` happen during each of the next uploads."""
    count, put_stream = itertools.count(), bucket.put_stream

    def put_stream_late(name: str, parts: Iterable[Part], size: int, **rest: str) -> None:
        def asked() -> Iterator[Part]:
            for part in parts:
                if (number := next(count)) < times:
                    act(number)
                yield part

        put_stream(name, asked(), size, **rest)

    bucket.put_stream = put_stream_late  # type: ignore[method-assign]


def test_where_saves_come_faster_than_uploads_the_mirror_has_what_the_run_keeps_and_not_more(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    last, there = str(tmp_path / "run/ckpt/last.ckpt"), []

    def save(step: int) -> None:
        run.save(f"{step}.ckpt", step).wait()
        run.files.link(last, str(tmp_path / f"run/ckpt/{step}.ckpt"))
        until(lambda: os.path.islink(last) and os.readlink(last) == f"{step}.ckpt")
        if step > 1:
            run.remove(f"{step - 2}.ckpt")

    def save_two(number: int) -> None:
        there.append(MirroredFiles(bucket.behind, "run", "bucket").read())
        for step in (2 * number + 1, 2 * number + 2):
            save(step)

    meanwhile(bucket, save_two, 8)
    save(0)
    until(lambda: run.here() == {"15.ckpt", "16.ckpt", "last.ckpt"})
    run.files.close()
    for state in there[2:]:
        names = {os.path.basename(each.path): each.link for each in state.added}
        assert len(names) <= 3, "what the run removed does not pile up"
        assert names["last.ckpt"] in names
    assert bucket.files() == {"ckpt/15.ckpt": 15, "ckpt/16.ckpt": 16, "ckpt/last.ckpt": -1}
    assert os.readlink(last) == "16.ckpt"


def test_what_is_removed_while_all_was_mirrored_stays_until_the_newest_is_there(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save("0.ckpt", 0).wait()
    run.save("1.ckpt", 1).wait()
    until(lambda: bucket.files() == {"ckpt/0.ckpt": 0, "ckpt/1.ckpt": 1})
    asked, answer, create = threading.Event(), threading.Event(), bucket.store.create

    def create_late(name: str, data: bytes) -> bool:
        asked.set()
        assert answer.wait(30)
        return create(name, data)

    bucket.create = create_late  # type: ignore[attr-defined]
    run.files.link(str(tmp_path / "run/ckpt/last.ckpt"), str(tmp_path / "run/ckpt/0.ckpt"))
    assert asked.wait(30)  # nothing waited to be uploaded
    bucket.gate.clear()
    bucket.begun.clear()
    run.save("2.ckpt", 2).wait()
    run.remove("1.ckpt")
    until(lambda: run.here() == {"0.ckpt", "2.ckpt", "last.ckpt"})
    answer.set()
    assert bucket.begun.wait(30)
    assert bucket.files()["ckpt/1.ckpt"] == 1, "the newest there stays"
    bucket.gate.set()
    run.files.close()
    assert bucket.files() == {"ckpt/0.ckpt": 0, "ckpt/2.ckpt": 2, "ckpt/last.ckpt": -1}


def test_a_file_that_is_removed_while_it_is_uploaded_is_removed_there(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save_stuck(bucket, "1.ckpt", 1)
    run.save("2.ckpt", 2).wait()
    run.remove("1.ckpt")
    until(lambda: run.here() == {"2.ckpt"})
    bucket.gate.set()
    run.files.close()
    assert bucket.files() == {"ckpt/2.ckpt": 2}


def test_a_file_that_is_written_to_while_it_is_uploaded_does_not_count(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save_stuck(bucket, "1.ckpt", 1)
    with open(tmp_path / "run/ckpt/1.ckpt", "r+b") as file:
        file.write(b"another")
    bucket.gate.set()
    mirror = run.files._mirror
    assert mirror is not None
    until(lambda: not mirror.backlog())
    assert bucket.sent == ["ckpt/1.ckpt"]
    assert bucket.files() == {}, "what was sent is of no single moment"


def test_what_the_run_removes_stays_where_what_replaced_it_cannot_be_mirrored(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save("1.ckpt", 1).wait()
    until(lambda: bucket.files() == {"ckpt/1.ckpt": 1})
    run.save_stuck(bucket, "2.ckpt", 2)
    os.truncate(tmp_path / "run/ckpt/2.ckpt", 0)
    run.remove("1.ckpt")
    until(lambda: run.here() == {"2.ckpt"})
    bucket.gate.set()
    run.files.close()
    assert bucket.files() == {"ckpt/1.ckpt": 1}


def test_a_run_that_finds_its_log_lost_sweeps_nothing_and_counts_what_is_there(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    for step in (1, 2):
        run.save(f"{step}.ckpt", step).wait()
        until(lambda step=step: f"ckpt/{step}.ckpt" in bucket.files())  # type: ignore[misc]
    run.files.close()
    os.remove(tmp_path / "run/ckpt/1.ckpt")
    bucket.behind.delete([each.name for each in bucket.behind.list("run/_portus/log/")])
    again = Run(bucket, tmp_path / "run").begin()
    again.files.close()
    assert "were lost: 2 files count again" in caplog.text
    assert bucket.files() == {"ckpt/1.ckpt": 1, "ckpt/2.ckpt": 2}


def test_a_file_under_upload_is_no_spare(bucket: Bucket, tmp_path: Path) -> None:
    """The next save would write over the bytes that are being sent."""
    run = Run(bucket, tmp_path / "run").begin()
    run.save_stuck(bucket, "1.ckpt", 1, size=1 << 20)
    run.save("2.ckpt", 2, size=1 << 20).wait()
    run.remove("1.ckpt")
    run.save("3.ckpt", 3, size=1 << 20).wait()
    run.save("4.ckpt", 4, size=1 << 20).wait()
    sent = {}
    real = bucket.store.put_stream

    def put_stream(name: str, parts: Iterable[Part], size: int, **rest: str) -> None:
        data = b"".join(parts)
        sent[name] = data
        real(name, [data], size, **rest)

    bucket.store.put_stream = put_stream  # type: ignore[method-assign]
    bucket.gate.set()
    run.files.close()
    assert bucket.files() == {f"ckpt/{step}.ckpt": step for step in (2, 3, 4)}


def test_a_path_that_is_saved_to_again_is_replaced(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    for step in range(4):
        run.save("last.ckpt", step).wait()
    run.files.close()
    assert bucket.files() == {"ckpt/last.ckpt": 3}


def test_links_lead_where_they_led(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    last = str(tmp_path / "run/ckpt/last.ckpt")
    for step in (1, 2):
        run.save(f"{step}.ckpt", step)
        run.files.link(last, str(tmp_path / f"run/ckpt/{step}.ckpt"))
    run.files.close()
    shutil.rmtree(tmp_path / "run")
    fresh = Run(bucket, tmp_path / "run").fetch()
    fresh.files.close()
    assert os.readlink(last) == "2.ckpt"
    assert torch.load(last)["step"] == 2


def test_a_machine_that_lost_everything_has_it_again_with_the_times_of_its_files(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    for step in (1, 2, 3):
        run.save(f"{step}.ckpt", step).wait()
    run.files.close()
    times = {name: (tmp_path / "run/ckpt" / name).stat().st_mtime_ns for name in run.here()}
    shutil.rmtree(tmp_path / "run")
    again = Run(bucket, tmp_path / "run").fetch().begin()
    assert again.here() == set(times)
    assert {n: (tmp_path / "run/ckpt" / n).stat().st_mtime_ns for n in times} == times
    for step in (1, 2, 3):
        assert portus.load(tmp_path / f"run/ckpt/{step}.ckpt")["step"] == step
    before = list(bucket.sent)
    again.save("4.ckpt", 4).wait()
    again.files.close()
    assert bucket.sent == [*before, "ckpt/4.ckpt"], "what was fetched is not sent again"


def test_a_fetch_that_was_interrupted_is_finished_by_the_next(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    for step in (1, 2, 3):
        run.save(f"{step}.ckpt", step).wait()
    run.files.close()
    shutil.rmtree(tmp_path / "run")
    real, count = bucket.store.get_range, itertools.count()

    def get_range(name: str, start: int, length: int) -> Part:
        if next(count) == 2:
            raise TransportError("the network is gone")
        return real(name, start, length)

    monkeypatch.setattr(bucket.store, "get_range", get_range)
    with pytest.raises(TransportError):
        Run(bucket, tmp_path / "run").fetch()
    assert 0 < len(os.listdir(tmp_path / "run/ckpt")) < 3
    assert Run(bucket, tmp_path / "run").fetch().here() == {"1.ckpt", "2.ckpt", "3.ckpt"}


def test_a_run_that_was_killed_mirrors_and_removes_what_it_had_not_come_to(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save("1.ckpt", 1).wait()
    until(lambda: bucket.files() == {"ckpt/1.ckpt": 1})
    run.save_stuck(bucket, "2.ckpt", 2)
    run.save("3.ckpt", 3).wait()
    run.remove("1.ckpt")
    until(lambda: run.here() == {"2.ckpt", "3.ckpt"})
    bucket.error = TransportError("killed")
    bucket.gate.set()
    run.kill()
    bucket.error = None
    assert bucket.files() == {"ckpt/1.ckpt": 1}
    again = Run(bucket, tmp_path / "run").fetch().begin()
    assert again.here() == {"2.ckpt", "3.ckpt"}, "what the run removed does not come back"
    again.files.close()
    assert bucket.files() == {"ckpt/2.ckpt": 2, "ckpt/3.ckpt": 3}


def test_a_machine_that_fetched_and_was_killed_goes_on_from_what_it_has(
    bucket: Bucket, tmp_path: Path
) -> None:
    """What it removed was saved by another machine, and what it saved is not mirrored yet."""
    run = Run(bucket, tmp_path / "run").begin()
    run.save("1.ckpt", 1).wait()
    run.files.close()
    shutil.rmtree(tmp_path / "run")
    second = Run(bucket, tmp_path / "run").fetch().begin()
    bucket.gate.clear()
    bucket.begun.clear()
    second.save("2.ckpt", 2).wait()
    second.remove("1.ckpt")
    until(lambda: second.here() == {"2.ckpt"})
    assert bucket.begun.wait(30)
    bucket.error = TransportError("killed")
    bucket.gate.set()
    second.kill()
    bucket.error = None
    assert bucket.files() == {"ckpt/1.ckpt": 1}
    third = Run(bucket, tmp_path / "run").fetch().begin()
    assert third.here() == {"2.ckpt"}
    third.files.close()
    assert bucket.files() == {"ckpt/2.ckpt": 2}


def test_who_only_fetches_takes_the_mirror_from_nobody(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save("1.ckpt", 1).wait()
    until(lambda: bucket.files() == {"ckpt/1.ckpt": 1})
    (tmp_path / "other").mkdir()
    other = Run(bucket, tmp_path / "other").fetch()
    last = str(tmp_path / "other/ckpt/last.ckpt")
    other.files.link(last, str(tmp_path / "other/ckpt/1.ckpt"))
    other.remove("1.ckpt")
    other.files.close()
    run.save("2.ckpt", 2).wait()
    run.files.close()
    assert bucket.files() == {"ckpt/1.ckpt": 1, "ckpt/2.ckpt": 2}


def test_what_a_user_deletes_here_stays_in_the_mirror_and_is_not_fetched(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    for step in (1, 2):
        run.save(f"{step}.ckpt", step).wait()
    run.files.close()
    shutil.rmtree(run.checkpoints)
    assert "removed here" not in caplog.text
    again = Run(bucket, tmp_path / "run").fetch().begin()
    assert not os.path.exists(again.checkpoints)
    assert f"removed here, and are not fetched; portus pull {bucket.address}" in caplog.text
    again.save("3.ckpt", 3).wait()
    again.files.close()
    assert bucket.files() == {f"ckpt/{step}.ckpt": step for step in (1, 2, 3)}


def test_a_machine_whose_run_went_on_elsewhere_is_told_before_it_trains(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save("1.ckpt", 1).wait()
    until(lambda: bucket.files() == {"ckpt/1.ckpt": 1})
    (tmp_path / "elsewhere").mkdir()
    other = Run(bucket, tmp_path / "elsewhere/run").fetch().begin()
    other.save("2.ckpt", 2).wait()
    other.files.close()
    run.save("3.ckpt", 3).wait()
    run.files.close()
    assert bucket.files() == {"ckpt/1.ckpt": 1, "ckpt/2.ckpt": 2}, "one writer counts"
    for act in (Run.fetch, Run.begin):
        with pytest.raises(UsageError, match="continued elsewhere"):
            act(Run(bucket, tmp_path / "run"))


def test_who_is_superseded_says_so_and_trains_on(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save("1.ckpt", 1).wait()
    until(lambda: bucket.files() == {"ckpt/1.ckpt": 1})
    MirroredFiles(bucket.store, "run", "bucket").claim("somebody", bytes(16))
    run.save("2.ckpt", 2).wait()
    run.files.close()
    assert "no longer mirroring" in caplog.text
    assert "somebody continues with it" in caplog.text
    assert run.here() == {"1.ckpt", "2.ckpt"}


def test_a_command_that_passes_by_takes_nothing_away(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save("1.ckpt", 1).wait()
    until(lambda: bucket.files() == {"ckpt/1.ckpt": 1})
    passing = MirroredFiles(bucket.store, "run", "bucket")
    passing.claim("a command", bytes(16), passing=True)
    run.save("2.ckpt", 2).wait()
    run.files.close()
    assert bucket.files() == {"ckpt/1.ckpt": 1, "ckpt/2.ckpt": 2}


@pytest.mark.parametrize(
    "error", [TransportError("no answer"), MediumError(28, "it is full"), ValueError("a bug")]
)
def test_a_store_that_fails_for_a_while_loses_nothing(
    bucket: Bucket, tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    bucket.error = error
    run.save("1.ckpt", 1).wait()
    until(lambda: "is behind; retrying" in caplog.text)
    bucket.error = None
    run.files.close()
    assert bucket.files() == {"ckpt/1.ckpt": 1}


def test_a_full_store_gets_room_from_what_the_run_removed_but_for_the_newest_there(
    bucket: Bucket, tmp_path: Path
) -> None:
    run, put_stream = Run(bucket, tmp_path / "run", wait=5).begin(), bucket.put_stream
    there = []

    def put_stream_in_room_for_two(
        name: str, parts: Iterable[Part], size: int, **rest: str
    ) -> None:
        there.append(sum(each.name.endswith(".ckpt") for each in bucket.behind.list("run/ckpt/")))
        if there[-1] == 2:
            raise MediumError(errno.ENOSPC, "it is full")
        put_stream(name, parts, size, **rest)

    bucket.put_stream = put_stream_in_room_for_two  # type: ignore[method-assign]
    for step in (1, 2):
        run.save(f"{step}.ckpt", step).wait()
    until(lambda: bucket.files() == {"ckpt/1.ckpt": 1, "ckpt/2.ckpt": 2})
    for step in (3, 4):
        run.save(f"{step}.ckpt", step).wait()
        run.remove(f"{step - 2}.ckpt")
        until(partial(lambda name: name not in run.here(), f"{step - 2}.ckpt"))
        run.remove(f"{step - 1}.ckpt")
    run.files.close()
    assert bucket.files() == {"ckpt/4.ckpt": 4}
    assert there[0] == 0 < min(there[1:]), "the newest there stays"


def test_what_is_removed_while_its_entry_has_no_answer_goes_when_the_store_is_back(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, create, get = Run(bucket, tmp_path / "run").begin(), bucket.create, bucket.get
    away, back = threading.Event(), threading.Event()

    def create_unheard(name: str, data: bytes) -> bool:
        made: bool = create(name, data)
        away.set()
        if not back.is_set():
            raise TransportError("the answer was lost")
        return made

    def get_nothing(name: str) -> Any:
        if away.is_set() and not back.is_set():
            raise TransportError("no answer")
        return get(name)

    bucket.create, bucket.get = create_unheard, get_nothing  # type: ignore[attr-defined]
    run.save("1.ckpt", 1).wait()
    until(lambda: "the answer was lost" in caplog.text)
    run.save("2.ckpt", 2).wait()
    until(lambda: "no answer" in caplog.text)
    run.remove("1.ckpt")
    until(lambda: run.here() == {"2.ckpt"})
    back.set()
    run.files.close()
    assert bucket.files() == {"ckpt/2.ckpt": 2}


def test_a_store_that_does_not_come_back_is_waited_for_no_longer_than_said(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(bucket, tmp_path / "run", wait=0.05).begin()
    bucket.error = TransportError("no answer")
    run.save("1.ckpt", 1).wait()
    run.files.close()
    assert "1 checkpoints of" in caplog.text
    assert "the newest ckpt/1.ckpt" in caplog.text


def test_a_mirror_that_cannot_be_written_is_an_error_at_the_start(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(name: str, data: bytes) -> bool:
        raise UnwritableError("permission is denied")

    monkeypatch.setattr(bucket.store, "create", create)
    before = fence._listeners
    with pytest.raises(UsageError, match="may be read, not written"):
        Run(bucket, tmp_path / "run").begin()
    assert fence._listeners == before, "nobody listens to steps"


def test_a_directory_without_hard_links_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    mirror = file_mirror.DirectoryMirror(
        parse(f"file://{tmp_path}/mirror"),
        "run",
        Settings(mirror_wait=0),
        root=str(tmp_path / "run"),
        checkpoints=str(tmp_path / "run/ckpt"),
        home=str(tmp_path / "run/.portus"),
    )
    monkeypatch.setattr(os, "link", fails)
    with pytest.raises(UsageError, match=r"nothing can be mirrored there: .* no hard links"):
        mirror.begin()
    mirror.close()


@pytest.mark.parametrize("when", ["before", "as it is noted"])
def test_a_directory_that_was_moved_away_is_not_made_again_for_the_note(
    bucket: Bucket, tmp_path: Path, when: str
) -> None:
    root, gone = tmp_path / "run", tmp_path / "gone"
    run = Run(bucket, root).begin()
    run.save("1.ckpt", 1).wait()
    mirror = run.files._mirror
    assert mirror is not None
    if when == "before":
        shutil.move(root, gone)
        mirror.removing(str(root / "ckpt/1.ckpt"))
    else:
        with at("return", make_directory, lambda: shutil.move(root, gone)):
            mirror.removing(str(root / "ckpt/1.ckpt"))
    assert not root.exists()
    shutil.move(gone, root)
    run.files.close()
    assert (root / ".portus" / JOURNALS / "run.mirror").exists()


def test_a_mirror_that_would_be_the_directory_of_the_run_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for mirror in (tmp_path, tmp_path / "link"):
        with pytest.raises(UsageError, match="expected another directory"):
            portus.Checkpointer(tmp_path / "run", mirror=f"file://{mirror}")
        assert not (tmp_path / "run").exists()
    with portus.Checkpointer(tmp_path / "run", mirror=f"file://{tmp_path}/run") as checkpointer:
        checkpointer.save({"step": 1}, 1).wait()
    for where in ("run", "run/run"):
        assert torch.load(tmp_path / where / "step-00000001.pt")["step"] == 1


def test_a_mirror_that_does_not_answer_is_an_error_only_where_there_is_nothing_to_go_on_from(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save("1.ckpt", 1).wait()
    run.files.close()

    def fail(*_: object) -> None:
        raise TransportError("no answer")

    with monkeypatch.context() as patch:
        for name in ("get", "list"):
            patch.setattr(bucket.store, name, fail)
        with pytest.raises(TransportError):
            Run(bucket, tmp_path / "empty").begin()
        again = Run(bucket, tmp_path / "run").begin()
        again.save("2.ckpt", 2).wait()
    again.files.close()
    assert bucket.files() == {"ckpt/1.ckpt": 1, "ckpt/2.ckpt": 2}


def test_a_damaged_file_of_the_mirror_is_left_out_and_said(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    for step in (1, 2):
        run.save(f"{step}.ckpt", step).wait()
    run.files.close()
    bucket.store.put("run/ckpt/2.ckpt", b"damaged")
    shutil.rmtree(tmp_path / "run")
    assert Run(bucket, tmp_path / "run").fetch().here() == {"1.ckpt"}
    assert "ckpt/2.ckpt" in caplog.text
    again = Run(bucket, tmp_path / "run").fetch().begin()  # in another process
    again.save("2.ckpt", 4).wait()
    again.files.close()
    assert bucket.files() == {"ckpt/1.ckpt": 1, "ckpt/2.ckpt": 4}
    for name in ("1", "2"):
        bucket.store.put(f"run/ckpt/{name}.ckpt", b"damaged")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CorruptionError):
        Run(bucket, tmp_path / "run").fetch()
    assert not os.path.lexists(tmp_path / "run/ckpt")


def test_a_full_disk_gets_the_space_of_a_removed_file_that_is_being_sent(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save_stuck(bucket, "1.ckpt", 1, size=16 << 20)
    room = _CheckpointRequest(gate=lambda: None, training=run.files, number=0, path="")
    assert not room.make_room(), "it is there still"
    run.save("2.ckpt", 2).wait()
    run.remove("1.ckpt")
    until(lambda: run.here() == {"2.ckpt"})
    threading.Timer(0.05, bucket.gate.set).start()
    assert room.make_room()
    run.files.close()
    assert bucket.files() == {"ckpt/2.ckpt": 2}


def test_files_of_others_and_elsewhere_are_not_mirrored(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(bucket, tmp_path / "run")
    os.makedirs(run.checkpoints)
    torch.save({"step": 1}, os.path.join(run.checkpoints, "stock.ckpt"))
    Path(run.checkpoints, "notes.txt").write_text("mine")
    run.begin()
    run.files.save({"step": 1}, str(tmp_path / "outside.ckpt"), 1).wait()
    run.save("1.ckpt", 1).wait()
    run.files.close()
    assert bucket.files() == {"ckpt/1.ckpt": 1}


def test_a_forked_child_neither_takes_the_mirror_nor_writes_there(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    run.save("1.ckpt", 1).wait()
    mirror, own = run.files._mirror, run.files._process
    saver, journal = run.files._saver, run.files._journal
    assert mirror is not None
    assert saver is not None
    assert journal is not None
    run.files._process = -1  # as a child sees it
    run.save("2.ckpt", 2).wait()
    assert run.files._mirror is None
    run.files.close()
    for each in (saver, journal):  # of the parent
        each.close()
    mirror.end()
    run.files._process = own
    assert "ckpt/2.ckpt" not in bucket.files()


def test_the_lag_is_the_age_of_the_newest_that_is_there(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(bucket, tmp_path / "run").begin()
    first = run.save("1.ckpt", 1)
    first.wait()
    assert first.stats.mirror_lag_s is None
    until(lambda: bucket.files() == {"ckpt/1.ckpt": 1})
    second = run.save("2.ckpt", 2)
    second.wait()
    run.files.close()
    assert second.stats.mirror_lag_s is not None
    assert second.stats.mirror_lag_s > 0


class Directories(Run):
    """A training whose checkpoints are directories of files: ``root/ckpt/<name>``."""

    of_directories = True

    def save(self, name: str, step: int, size: int = 100) -> portus.SaveHandle:
        whole = os.path.join(self.checkpoints, name)
        os.makedirs(whole, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(f"{whole}/config.json", "x") as file:
            file.write(name)
        tensors = {"w": torch.full((size,), float(step))}
        files = {"model.safetensors": portus.Safetensors(tensors), "rest.bin": {"step": step}}
        return self.files.save_directory(whole, files, step)


def mirrored(bucket: Bucket) -> set[str]:
    """The paths of the files that count."""
    state = MirroredFiles(bucket.behind, "run", "bucket").read()
    return {path for each in state.added for path in each.paths}


PARTS = ("config.json", "model.safetensors", "rest.bin")


def parts(*names: str) -> set[str]:
    return {f"ckpt/{name}/{part}" for name in names for part in PARTS}


def test_a_directory_counts_once_all_its_files_are_there(bucket: Bucket, tmp_path: Path) -> None:
    run = Directories(bucket, tmp_path / "run").begin()
    run.save_stuck(bucket, "a", 1)
    assert mirrored(bucket) == set()
    bucket.gate.set()
    run.save("b", 2).wait()
    run.files.close()
    assert mirrored(bucket) == parts("a", "b")
    entries = list(bucket.behind.list("run/_portus/log/"))
    assert len(entries) <= 4, "one entry for each directory, however many files it has"


def test_a_mirror_within_a_checkpoint_is_not_mirrored(bucket: Bucket, tmp_path: Path) -> None:
    run = Directories(bucket, tmp_path / "run").begin()
    mirror = tmp_path / "run/ckpt/a/mirror/run"
    (mirror / "_portus/log").mkdir(parents=True)
    for name in ("_portus/log/1", "rest.bin"):
        (mirror / name).write_bytes(b"1")
    run.save("a", 1).wait()
    run.files.close()
    assert mirrored(bucket) == parts("a")


def test_a_machine_that_lost_all_its_directories_has_them_again_each_as_a_whole(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Directories(bucket, tmp_path / "run").begin()
    for step in (1, 2):
        run.save(f"s{step}", step).wait()
    run.remove("s1")
    run.files.close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "run" / "ckpt" / "s2").iterdir()}
    shutil.rmtree(tmp_path / "run")
    seen: list[list[str]] = []
    publish = Publisher.publish

    def noted(self: Any, draft: Any, turn: Any = None) -> None:
        seen.append([each.name for each in draft.files])
        publish(self, draft, turn)

    monkeypatch.setattr(Publisher, "publish", noted)
    again = Directories(bucket, tmp_path / "run").fetch()
    found = {path.name: path.read_bytes() for path in (tmp_path / "run" / "ckpt" / "s2").iterdir()}
    assert found == before
    assert [sorted(each) for each in seen] == [sorted(PARTS)], "all in one publication"
    assert set(os.listdir(tmp_path / "run" / "ckpt")) - {".portus"} == {"s2"}
    again.files.close()


def test_a_directory_of_which_a_nested_file_is_damaged_is_not_there_at_all(
    bucket: Bucket, tmp_path: Path
) -> None:
    """Half of it, or an empty directory, would look like the newest checkpoint."""
    run = Directories(bucket, tmp_path / "run").begin()
    for step in (1, 2):
        nested = tmp_path / f"run/ckpt/s{step}/global/step"
        nested.mkdir(parents=True)
        (nested / "rank.bin").write_bytes(b"x" * step)
        run.save(f"s{step}", step).wait()
    run.files.close()
    shutil.rmtree(tmp_path / "run")
    bucket.behind.put("run/ckpt/s2/config.json", b"XX")
    again = Directories(bucket, tmp_path / "run").fetch()
    assert set(os.listdir(tmp_path / "run/ckpt")) - {".portus"} == {"s1"}
    assert (tmp_path / "run/ckpt/s1/global/step/rank.bin").read_bytes() == b"x"
    again.files.close()


def objects(bucket: Bucket) -> set[str]:
    """The names of all objects of the run, but for its log and for digests."""
    names = {each.name.removeprefix("run/") for each in bucket.behind.list("")}
    return {each for each in names if not each.startswith("_portus/log") and "xxh128" not in each}


def test_a_directory_that_the_run_removes_while_it_is_uploaded_is_mirrored_nevertheless(
    bucket: Bucket, tmp_path: Path
) -> None:
    """Else nothing is where saves come faster than uploads."""
    run, there = Directories(bucket, tmp_path / "run").begin(), []

    def save_next(number: int) -> None:
        if number % len(PARTS) == 1:  # in the middle of a directory
            step = number // len(PARTS)
            there.append(mirrored(bucket))
            run.save(f"s{step + 1}", step + 1).wait()
            run.remove(f"s{step}")
            until(lambda: run.here() == {f"s{step + 1}"})

    meanwhile(bucket, save_next, 5 * len(PARTS))
    run.save("s0", 0).wait()
    until(lambda: run.here() == {"s5"})
    run.files.close()
    assert there == [set(), *(parts(f"s{step}") for step in range(4))]
    assert mirrored(bucket) == objects(bucket) == parts("s5")


def test_what_was_uploaded_of_a_directory_that_is_given_up_does_not_stay(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Directories(bucket, tmp_path / "run").begin()
    put_stream = bucket.put_stream

    def put_first(name: str, parts: Iterable[Part], size: int, **rest: str) -> None:
        put_stream(name, parts, size, **rest)
        for part in set(PARTS) - {os.path.basename(name)}:  # they are others from now on
            os.utime(f"{run.checkpoints}/s0/{part}", (1, 1))

    bucket.put_stream = put_first  # type: ignore[method-assign]
    run.save("s0", 0).wait()
    mirror = run.files._mirror
    assert mirror is not None
    until(lambda: bool(bucket.sent) and not mirror.backlog())
    assert mirrored(bucket) == objects(bucket) == set()
    run.files.close()


def test_a_directory_that_is_removed_goes_there_too_and_one_that_was_left_comes(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Directories(bucket, tmp_path / "run").begin()
    run.save_stuck(bucket, "s1", 1)
    run.remove("s1")
    run.save("s2", 2).wait()
    bucket.gate.set()
    run.files.close()
    assert mirrored(bucket) == parts("s2")
    bucket.error = TransportError("no answer")
    dead = Directories(bucket, tmp_path / "run", wait=0.0).begin()
    dead.save("s3", 3).wait()
    dead.kill()
    bucket.error = None
    next_run = Directories(bucket, tmp_path / "run").begin()
    next_run.files.close()
    assert mirrored(bucket) == parts("s2", "s3")


def test_what_a_run_removed_stays_in_the_mirror_as_far_as_mirror_keep_says(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Directories(bucket, tmp_path / "run", keep=2).begin()
    for step in range(1, 6):
        run.save(f"s{step}", step).wait()
        until(lambda step=step: parts(f"s{step}") <= mirrored(bucket))  # type: ignore[misc]
        if step > 1:
            run.remove(f"s{step - 1}")
    run.files.close()
    assert mirrored(bucket) == parts("s3", "s4", "s5")
    shutil.rmtree(tmp_path / "run")
    fresh = Directories(bucket, tmp_path / "run", keep=1).begin()
    assert fresh.here() == {"s5"}, "what was removed does not come back"
    fresh.save("s4", 4).wait()
    fresh.save("s6", 6).wait()
    fresh.remove("s5")
    fresh.files.close()
    assert mirrored(bucket) == parts("s4", "s5", "s6"), "s4 is of the run again"
    assert Directories(bucket, tmp_path / "other").fetch().here() == {"s4", "s6"}


def test_a_removed_checkpoint_that_is_put_back_is_of_the_run_again(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Run(bucket, tmp_path / "run", keep=1).begin()
    run.save("1.ckpt", 1).wait()
    shutil.copy2(tmp_path / "run/ckpt/1.ckpt", tmp_path / "1.ckpt")
    run.save("2.ckpt", 2).wait()
    run.remove("1.ckpt")
    run.files.close()
    shutil.copy2(tmp_path / "1.ckpt", tmp_path / "run/ckpt/1.ckpt")
    Run(bucket, tmp_path / "run", keep=1).begin().files.close()
    assert Run(bucket, tmp_path / "other").fetch().here() == {"1.ckpt", "2.ckpt"}


def test_files_that_come_later_to_a_directory_are_mirrored_with_the_next(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = Directories(bucket, tmp_path / "run").begin()
    run.save("s1", 1).wait()
    until(lambda: mirrored(bucket) == parts("s1"))
    (tmp_path / "run" / "ckpt" / "s1" / "late.txt").write_text("late")
    run.save("s2", 2).wait()
    run.files.close()
    assert "ckpt/s1/late.txt" in mirrored(bucket)


def test_the_directory_of_a_checkpointer_has_a_mirror_with_the_same_files(
    bucket: Bucket, tmp_path: Path
) -> None:
    def run() -> portus.Checkpointer:
        return portus.Checkpointer("run", mirror=bucket.address, keep=2)

    with run() as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save({"step": step, "w": torch.full((9,), float(step))}, step)
    expected = {f"step-{step:08d}.pt": step for step in (2, 3)}
    assert bucket.files() == expected
    shutil.rmtree("run")
    with run() as checkpointer:
        assert [each.step for each in checkpointer.versions()] == [2, 3]
        assert checkpointer.load()["step"] == 3
        checkpointer.save({"step": 4}, 4)
    assert bucket.files() == {"step-00000003.pt": 3, "step-00000004.pt": 4}


def test_who_ends_the_wait_of_a_checkpointer_hears_what_is_not_mirrored(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = portus.Checkpointer(tmp_path / "run", mirror=bucket.address, mirror_wait=60)
    bucket.gate.clear()
    checkpointer.save({"step": 1}, 1).wait()
    assert bucket.begun.wait(30)
    bucket.error = TransportError("no answer")
    main = threading.main_thread().ident
    assert main is not None
    ctrl_c = partial(signal.pthread_kill, main, signal.SIGINT)
    timers = threading.Timer(0.3, ctrl_c), threading.Timer(1.0, bucket.gate.set)
    for each in timers:
        each.start()
    with pytest.raises(KeyboardInterrupt):
        checkpointer.close()
    assert "the mirror is behind: 1 checkpoints" in caplog.text
    assert not [each for each in threading.enumerate() if each.name.startswith("portus-mirror")]
    for each in timers:
        each.join()


def test_a_checkpointer_that_cannot_fetch_leaves_nothing_open(
    bucket: Bucket, tmp_path: Path
) -> None:
    with portus.Checkpointer("run", mirror=bucket.address) as checkpointer:
        checkpointer.save({"step": 1}, 1)
    bucket.store.put("run/step-00000001.pt", b"damaged")
    shutil.rmtree("run")
    with pytest.raises(CorruptionError):
        portus.Checkpointer("run", mirror=bucket.address)
    assert not process._open


def test_a_checkpointer_that_loads_takes_nothing_from_the_one_that_saves(
    bucket: Bucket, tmp_path: Path
) -> None:
    with portus.Checkpointer("run", mirror=bucket.address) as saves:
        saves.save({"step": 1}, 1).wait()
        with portus.Checkpointer("run", mirror=bucket.address) as loads:
            assert loads.load()["step"] == 1
        saves.save({"step": 2}, 2).wait()
    assert bucket.files() == {"step-00000001.pt": 1, "step-00000002.pt": 2}


def test_a_mirror_that_may_not_be_written_is_an_error_of_each_save(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(name: str, data: bytes) -> bool:
        raise UnwritableError("permission is denied")

    monkeypatch.setattr(bucket.store, "create", create)
    with portus.Checkpointer("run", mirror=bucket.address) as checkpointer:
        for step in (1, 2):
            with pytest.raises(UsageError, match="may be read, not written"):
                checkpointer.save({"step": step}, step)
    assert not os.path.exists("run")


def test_a_run_without_the_right_to_delete_starts_and_mirrors(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(names: list[str]) -> None:
        raise UsageError("permission is denied: s3:DeleteObject")

    monkeypatch.setattr("portus.reach.mirror.writer.GRACE_S", -10.0)
    monkeypatch.setattr(bucket.store, "delete", delete)
    bucket.store.put("run/stray.ckpt", b"x")
    run = Run(bucket, tmp_path / "run").begin()
    run.save("1.ckpt", 1).wait()
    run.save("2.ckpt", 2).wait()
    run.remove("1.ckpt")
    run.files.close()
    assert bucket.files() == {"ckpt/2.ckpt": 2}
