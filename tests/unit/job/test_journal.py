"""The journal of a PoolCheckpointer: what goes wrong with it, and that training does not notice."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import portus
from portus.companions.job.journal import JOURNALS, SIZE_MAX, Journal
from portus.companions.journal.account import Account, account
from portus.companions.journal.lines import Head, IntervalDecided, Saved, encode
from portus.engine.fence import fence
from portus.engine.job.settings import Settings
from portus.engine.media.file_calls import FileSystemTraits, file_system_of
from portus.reach.index.directory import make_directory
from portus.reach.index.journals import journals_in, pages, read
from portus.reach.media import local
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.training.companions import companions_of
from tests.moments import at


class Training:
    """A model that steps, and saves every third step."""

    def __init__(self, root: Path, **settings: object) -> None:
        self.root = root
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.checkpointer = PoolCheckpointer(root / "pools" / "run.portus", "run", **settings)  # type: ignore[arg-type]
        self.step = 0

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.step()
            self.step += 1
            if self.step % 3 == 0:
                self.checkpointer.save(self.state(), self.step)
                self.checkpointer.wait()  # also for what comes after the commit

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict()}

    def resume(self, step: int | None = None) -> None:
        self.step = self.checkpointer.restore_into(self.state(), step).version.step


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path)
    yield training
    training.checkpointer.close()


def folder(root: Path) -> Path:
    return root / "pools" / "run.journal"


def seen(root: Path) -> Account:
    (path,) = journals_in(str(folder(root)))
    found = account(read(path).lines)
    assert found is not None
    return found


def test_a_session_says_its_saves_and_its_last_step_while_it_runs(run: Training) -> None:
    run.go(8)
    (path,) = journals_in(str(folder(run.root)))
    found = read(path)
    assert len(found.running) == 1
    now = seen(run.root)
    assert (now.steps, now.pending_steps, [each.at for each in now.saves]) == (8, 2, [3, 6])
    run.checkpointer.close()
    assert not read(path).running
    assert not pages(path)
    then = seen(run.root)
    assert (then.steps, then.restarts) == (8, ())
    assert all(save.line.blocked_s > 0 and save.line.total_s > 0 for save in then.saves)


def test_a_session_that_went_on_from_an_older_version_lost_what_came_after(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.go(7)
    first.checkpointer.close()
    second = Training(tmp_path)
    second.resume(3)
    second.go(1)
    second.checkpointer.close()
    (restart,) = seen(tmp_path).restarts
    assert (restart.at, restart.lost_steps, restart.killed) == (3, 4, False)


def test_a_save_right_before_the_end_is_in_the_journal(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.optimizer.step()
    training.checkpointer.save(training.state(), 1)
    training.checkpointer.close()
    (save,) = seen(tmp_path).saves
    assert (save.at, save.line.step) == (1, 1)
    assert save.line.blocked_s > 0, "what the caller waited is known a little later"


def test_a_run_that_saved_nothing_leaves_nothing(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.go(2)
    training.checkpointer.close()
    assert os.listdir(tmp_path) == []


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    training = Training(tmp_path, journal=False)
    training.go(3)
    training.checkpointer.close()
    assert not folder(tmp_path).exists()
    with pytest.raises(portus.UsageError, match="journal: expected True or False, found 'yes'"):
        Training(tmp_path, journal="yes")


def test_torch_is_left_as_it_was(tmp_path: Path) -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks as after
    from torch.optim.optimizer import _global_optimizer_pre_hooks as before

    hooks = dict(before), dict(after)
    training = Training(tmp_path)
    assert len(after) == len(hooks[1]) + 1
    training.go(1)
    training.checkpointer.close()
    assert (dict(before), dict(after)) == hooks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_journal_that_cannot_be_written_is_said_once_and_ends_no_save(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = open

    def refuses(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if "run.journal" in str(path) and mode.startswith(("a", "w", "x")):
            raise OSError(code, os.strerror(code), path)
        return real(path, mode, *rest, **named)

    monkeypatch.setattr("builtins.open", refuses)
    training = Training(tmp_path)
    training.go(9)
    training.checkpointer.close()
    said = [each for each in caplog.messages if "journal" in each]
    assert len(said) == 1
    assert os.strerror(code) in said[0]
    with PoolCheckpointer(tmp_path / "pools" / "run.portus", "run") as again:
        assert again.steps() == [6, 9]


def test_a_file_in_its_place_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "pools").mkdir()
    folder(tmp_path).write_text("mine")
    training = Training(tmp_path)
    training.go(3)
    training.checkpointer.close()
    assert folder(tmp_path).read_text() == "mine"


def test_a_journal_of_a_newer_format_is_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder(tmp_path).mkdir(parents=True)
    path = folder(tmp_path) / "run.lines"
    data = encode(Head(format=2, model="run")) + b"what comes then\n"
    path.write_bytes(data)
    training = Training(tmp_path)
    training.go(6)
    training.checkpointer.close()
    assert path.read_bytes() == data
    (said,) = [each for each in caplog.messages if "journal" in each]
    assert "format 2" in said
    with pytest.raises(portus.UsageError, match="Upgrade"):
        read(str(path))


def test_a_torn_end_and_damage_cost_no_line_behind_them(tmp_path: Path) -> None:
    for _ in range(2):
        training = Training(tmp_path)
        training.go(3)
        training.checkpointer.close()
        path = folder(tmp_path) / "run.lines"
        path.write_bytes(path.read_bytes()[:-20])
    found = read(str(path))
    assert found.damaged == 1
    assert path.read_bytes().split(b"\n").count(encode(Head(format=1, model="run")).strip()) == 2
    assert len({each.session for each in found.lines}) == 2


def test_what_is_just_being_begun_is_read_by_its_heartbeat(run: Training) -> None:
    run.go(3)
    path = folder(run.root) / "run.lines"
    whole = path.read_bytes()
    for data in (b"", whole[:30]):  # made, and not written yet; or the disk was full
        path.write_bytes(data)
        assert seen(run.root).steps == 3
        assert read(str(path)).running


def test_a_forked_child_beats_for_nobody(run: Training) -> None:
    run.go(4)
    child = os.fork()
    if not child:
        code = 1
        try:
            run.optimizer.step()
            run.optimizer.step()
            run.checkpointer.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert seen(run.root).steps == 4
    run.go(1)
    assert seen(run.root).steps == 5


@pytest.mark.long
def test_a_fork_while_another_thread_opens_or_closes_holds_no_child_up(
    run: Training,
) -> None:
    def forked() -> int:
        child = os.fork()
        if not child:
            os._exit(0)
        until = time.monotonic() + 30
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
        return ended[1]

    run.go(4)
    with fence._lock, ThreadPoolExecutor(1) as other:
        assert other.submit(forked).result() == 0


def test_a_signal_while_the_session_begins_is_told_that_it_cannot_save_to_a_pool(
    run: Training,
) -> None:
    told: list[str] = []

    def handle(*_: object) -> None:
        try:
            run.checkpointer.save(run.state(), 7)
        except portus.UsageError as error:
            told.append(str(error))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        run.go(3)
        with at("call", Journal.note_start, lambda: signal.raise_signal(signal.SIGUSR1)):
            run.go(3)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(told) == 1
    assert "save of step 7 to a pool" in told[0]
    assert (seen(run.root).steps, seen(run.root).committed) == (6, 2)


def test_a_copy_of_a_running_training_is_not_running(run: Training, tmp_path: Path) -> None:
    run.go(5)
    copy = tmp_path / "copy"
    shutil.copytree(run.root / "pools", copy / "pools")
    (path,) = journals_in(str(folder(copy)))
    assert not read(path).running
    other = Training(copy)
    other.resume()
    other.go(1)
    other.checkpointer.close()
    (restart,) = seen(copy).restarts
    assert (restart.at, restart.lost_steps, restart.killed) == (3, 2, True)
    assert not pages(path)
    assert len(read(journals_in(str(folder(run.root)))[0]).running) == 1


def test_where_no_page_can_be_mapped_it_lies_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no file system in memory at /dev/shm")
    real = file_system_of

    def as_over_a_network(number: int, path: str) -> tuple[FileSystemTraits, bool]:
        found, in_place = real(number, path)
        return found, in_place and path.startswith("/dev/shm")

    monkeypatch.setattr(local, "file_system_of", as_over_a_network)
    training = Training(tmp_path)
    training.go(4)
    (path,) = journals_in(str(folder(tmp_path)))
    (page,) = pages(path)
    assert page.startswith(f"/dev/shm/portus-{os.getuid()}/")
    assert seen(tmp_path).steps == 4
    training.checkpointer.close()
    assert not os.path.exists(page)


def test_a_decision_of_a_cadence_is_in_the_journal(run: Training) -> None:
    cadence = portus.Cadence(max_overhead=0.25)
    for _ in range(9):
        run.optimizer.step()
        if cadence.should_save():
            run.checkpointer.save(run.state(), 1).wait()
    run.checkpointer.close()
    (path,) = journals_in(str(folder(run.root)))
    decided = [each for each in read(path).lines if isinstance(each, IntervalDecided)]
    assert decided
    first = decided[0].decision
    assert (first.steps, first.reason, first.rule.max_overhead) == (4, "first", 0.25)


def test_a_journal_stays_small(tmp_path: Path, run: Training) -> None:
    run.go(3)
    path = folder(tmp_path) / "run.lines"
    (line,) = {
        each for each in read(str(path)).lines if isinstance(each, Saved) and each.steps == 3
    }

    data = b"".join(
        encode(msgspec.structs.replace(line, number=n, steps=n, step=n)) for n in range(4, 3400)
    )
    with open(path, "ab") as file:
        file.write(data)
    assert path.stat().st_size > SIZE_MAX
    run.go(3)
    assert path.stat().st_size < SIZE_MAX // 2 + 4096
    assert seen(tmp_path).committed == 3396 + 2


def test_a_step_asks_nothing_of_the_system_but_the_time(run: Training) -> None:
    run.go(3)
    (journal,) = run.checkpointer._steps.companions
    assert isinstance(journal, Journal)
    called: set[str] = set()

    def note(_: object, event: str, function: object) -> None:
        if event == "c_call" and getattr(function, "__module__", None):
            called.add(f"{function.__module__}.{getattr(function, '__name__', '')}")

    gc.disable()  # what it collects may call anything
    sys.setprofile(note)
    try:
        for _ in range(200):
            journal._clock.before_step(run.optimizer)
            journal.after_step(run.optimizer)
    finally:
        sys.setprofile(None)
        gc.enable()
    ours = {name for name in called if not name.startswith(("builtins.", "msgspec.", "sys."))}
    assert "zlib.crc32" in ours  # of the line in the page
    assert ours <= {"time.clock_gettime_ns", "time.perf_counter", "zlib.crc32", "math.fsum"}


@pytest.mark.parametrize("instead", [False, True])
def test_a_directory_that_is_moved_away_as_its_journal_begins_is_not_made_again(
    tmp_path: Path, instead: bool
) -> None:
    run, gone = tmp_path / "run", tmp_path / "gone"
    run.mkdir()
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())

    def move() -> None:
        shutil.move(run, gone)
        if instead:
            run.write_text("in the way")

    (journal,) = companions_of(str(run), Settings())
    try:
        with at("call", make_directory, move):
            optimizer.step()
        assert sorted(os.listdir(tmp_path)) == (["gone", "run"] if instead else ["gone"])
        run.unlink(missing_ok=True)
        shutil.move(gone, run)
        optimizer.step()
    finally:
        journal.close()
    (path,) = journals_in(str(run / ".portus" / JOURNALS))
    found = account(read(path).lines)
    assert found is not None
    assert found.steps == 2, "also the step before it began"


def test_a_journal_goes_on_in_the_directory_that_is_made_after_one_was_moved_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, gone = tmp_path / "run", tmp_path / "gone"
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with portus.Checkpointer(run) as checkpointer:
        for step in (1, 2):
            optimizer.step()
            checkpointer.save({"model": model.state_dict()}, step)
            checkpointer.wait()  # also for what comes after the commit
            if step == 1:
                shutil.move(run, gone)
                optimizer.step()
                assert not run.exists()
    for step, where in enumerate((gone, run), 1):
        (path,) = journals_in(str(where / ".portus" / JOURNALS))
        found = account(read(path).lines)
        assert found is not None
        assert found.saves[-1].line.step == step
    assert not [each for each in caplog.messages if "journal" in each]
