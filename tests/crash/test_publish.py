"""Files that are published on a disk that crashes at every event.

At each path there is nothing, an earlier checkpoint, or a later one, whole; what was told committed
is there; what was removed too early is found again. Mutants of the protocol are found.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable

import pytest

from portus.directory import recovery
from portus.directory.publisher import Publisher
from portus.directory.system import FileState
from portus.errors import MediumError
from portus.testing.crash import Crash
from portus.testing.crash_folder import CrashFolder, _Open

STEPS = 5


def content(step: int) -> bytes:
    return b"%04d" % step * (2 + step % 3)


def step_of(data: bytes) -> int | None:
    """The step of a whole file; None if it is not one."""
    step = int(data[:4]) if data[:4].isdigit() else -1
    return step if data == content(step) else None


def verify(system: object, file: object, name: str) -> bool:
    assert isinstance(system, CrashFolder)
    assert isinstance(file, _Open)
    return step_of(system.data_of(file)) is not None


class Told:
    """What a training was told, and did."""

    def __init__(self) -> None:
        self.committed: int = -1
        self.removed: set[str] = set()


Scenario = Callable[[CrashFolder, Told], None]


def save(system: CrashFolder, files: Publisher[_Open], path: str, step: int, told: Told) -> None:
    draft = files.begin(path)
    try:
        system.write(draft.files[0].file, content(step))
        system.sync(draft.files[0].file)
        draft.publish()
    except MediumError:
        draft.abandon()
        raise
    told.committed = step


def keep_one(system: CrashFolder, told: Told) -> None:
    files = Publisher(system, verify)
    for step in range(STEPS):
        save(system, files, f"/d/step-{step}.pt", step, told)
        if step:
            files.remove(f"/d/step-{step - 1}.pt")
    files.close()


def keep_all_with_reader(system: CrashFolder, told: Told) -> None:
    files = Publisher(system, verify)
    readers = []
    for step in range(STEPS):
        save(system, files, f"/d/step-{step}.pt", step, told)
        if step:
            if step % 2:
                readers.append((system.read_path(f"/d/step-{step - 1}.pt"), step - 1))
            files.remove(f"/d/step-{step - 1}.pt")
        for reader, seen in readers:
            assert step_of(system.data_of(reader)) == seen, "a reader sees other bytes"
    files.close()


def one_path(system: CrashFolder, told: Told) -> None:
    files = Publisher(system, verify)
    for step in range(STEPS):
        save(system, files, "/d/last.pt", step, told)
    files.close()


def linked_before_removal(system: CrashFolder, told: Told) -> None:
    """A user makes a hard link of a checkpoint: it keeps its bytes."""
    files = Publisher(system, verify)
    for step in range(STEPS):
        save(system, files, f"/d/step-{step}.pt", step, told)
        if step:
            source = system.open_directory("/d"), f"step-{step - 1}.pt"
            if step == 2:
                system.link(source, (system.open_directory("/other"), "kept.pt"))
            files.remove(f"/d/step-{step - 1}.pt")
    assert step_of(system.visible("/other")["kept.pt"]) == 1
    files.close()


def removed_too_early(system: CrashFolder, told: Told) -> None:
    """A script that removes the old checkpoint while the new one is in flight."""
    files = Publisher(system, verify)
    for step in range(STEPS):
        draft = files.begin(f"/d/step-{step}.pt")
        if step:
            system.unlink_path(f"/d/step-{step - 1}.pt")
        system.write(draft.files[0].file, content(step))
        system.sync(draft.files[0].file)
        draft.publish()
        told.committed = step
    files.close()


def swapped(system: CrashFolder, told: Told) -> None:
    """A script that saves beside, and swaps directories before the new file is complete."""
    files = Publisher(system, verify)
    system.mkdir("/d/ckpt")
    for step in range(STEPS):
        system.mkdir(f"/d/new{step}")
        draft = files.begin(f"/d/new{step}/a.pt")
        system.move("/d/ckpt", f"/d/old{step}")
        system.move(f"/d/new{step}", "/d/ckpt")
        if step:
            system.unlink_path(f"/d/old{step}/a.pt")
        system.write(draft.files[0].file, content(step))
        system.sync(draft.files[0].file)
        draft.publish()
        told.committed = step
    files.close()


SCENARIOS = {
    each.__name__: each
    for each in (keep_one, keep_all_with_reader, one_path, linked_before_removal)
}

EARLY: dict[str, Scenario] = {"removed_too_early": removed_too_early, "swapped": swapped}


def fresh(stop: int | None = None) -> CrashFolder:
    system = CrashFolder(stop)
    system.mkdir("/d")
    system.mkdir("/other")
    return system


def run(scenario: Scenario, stop: int | None) -> tuple[CrashFolder, Told]:
    system, told = fresh(stop), Told()
    with contextlib.suppress(Crash):
        scenario(system, told)
    return system, told


def events_of(scenario: Scenario) -> int:
    return run(scenario, None)[0].events


def directories(system: CrashFolder) -> list[str]:
    names = system.names(system.open_directory("/d"))
    below = [f"/d/{name}" for name in names if name == "ckpt" or name.startswith(("new", "old"))]
    return ["/d", *below]


def check(system: CrashFolder, told: Told, *, newest: bool) -> None:
    """Everything that is visible is whole, before and after a start; what was committed is there
    then, if ``newest``; nothing is left behind."""
    whole(system)
    for directory in directories(system):
        files = Publisher(system, verify)
        files.recover(directory)
        files.close()
        assert not system.hidden(directory)
    steps = whole(system)
    if newest and told.committed >= 0:
        assert max(steps, default=-1) >= told.committed, f"step {told.committed} was committed"


def whole(system: CrashFolder) -> list[int]:
    found = []
    for directory in (*directories(system), "/other"):
        for name, data in system.visible(directory).items():
            step = step_of(data)
            assert step is not None, f"{directory}/{name} has the bytes {data!r}"
            found.append(step)
    return found


def explore(scenario: Scenario, *, early: bool = False, samples: int = 4) -> int:
    """Crash at every event in every way; the number of outcomes."""
    source, outcomes = random.Random(7), 0
    for stop in range(1, events_of(scenario) + 2):
        system, told = run(scenario, stop)
        check(system.kill(), told, newest=True)
        for lost in system.power_losses(source, samples):
            check(lost, told, newest=not early)
            outcomes += 1
    return outcomes


@pytest.mark.parametrize("name", SCENARIOS)
def test_at_each_path_is_nothing_or_a_whole_checkpoint_whenever_power_fails(name: str) -> None:
    assert explore(SCENARIOS[name]) > 500


@pytest.mark.parametrize("name", EARLY)
def test_a_checkpoint_that_was_removed_too_early_is_found_again(name: str) -> None:
    assert explore(EARLY[name], early=True) > 500


def test_a_second_crash_in_the_start_after_the_first_one_loses_nothing() -> None:
    for stop in range(1, events_of(removed_too_early) + 2, 3):
        system, told = run(removed_too_early, stop)
        found = system.kill()
        for second in range(1, 20):
            again = found.kill()
            again.stop = again.events + second
            with contextlib.suppress(Crash):
                files = Publisher(again, verify)
                files.recover("/d")
            check(again.kill(), told, newest=True)


@pytest.mark.parametrize("name", [*SCENARIOS, *EARLY])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_a_call_that_fails_costs_no_checkpoint_that_was_committed(name: str, number: int) -> None:
    scenario = {**SCENARIOS, **EARLY}[name]
    for failing in range(1, events_of(scenario) + 1):
        system, told = fresh(), Told()

        def fails(event: int, text: str, failing: int = failing) -> int | None:
            moved = text.startswith(("move", "remove"))  # of the script
            return number if event == failing and not moved else None

        system.fails = fails
        with contextlib.suppress(MediumError):
            scenario(system, told)
        check(system.kill(), told, newest=True)


def test_a_start_removes_nothing_of_a_process_that_is_alive() -> None:
    system = fresh()
    files = Publisher(system, verify)
    save(system, files, "/d/step-0.pt", 0, Told())
    draft = files.begin("/d/step-1.pt")
    before = system.hidden("/d")
    other = Publisher(system, verify)
    other.recover("/d")
    other.close()
    assert system.hidden("/d") == before
    system.write(draft.files[0].file, content(1))
    system.sync(draft.files[0].file)
    draft.publish()
    assert {step_of(data) for data in system.visible("/d").values()} == {0, 1}


def test_a_file_that_was_removed_while_nothing_was_in_flight_is_not_put_back() -> None:
    system = fresh()
    files = Publisher(system, verify)
    save(system, files, "/d/step-0.pt", 0, Told())
    system.unlink_path("/d/step-0.pt")
    check(system.kill(), Told(), newest=False)
    assert not system.kill().visible("/d")


def test_a_held_file_that_does_not_verify_is_not_put_back() -> None:
    system = fresh()
    files = Publisher(system, verify)
    save(system, files, "/d/step-0.pt", 0, Told())
    files.begin("/d/step-1.pt")
    system.write(system.read_path("/d/step-0.pt"), b"rotten")
    system.unlink_path("/d/step-0.pt")
    found = system.kill()
    other = Publisher(found, verify)
    other.recover("/d")
    assert not found.visible("/d")


# Mutants: each of them breaks one rule, and the search finds it.


class _NoFileSync(CrashFolder):
    def sync(self, file: _Open) -> None:
        if self._nodes[file.node].is_directory:
            super().sync(file)


class _NoDirectorySync(CrashFolder):
    def sync(self, file: _Open) -> None:
        if not self._nodes[file.node].is_directory:
            super().sync(file)


class _NoSpareSync(CrashFolder):
    """What makes a spare out of a removed file syncs nothing."""

    def sync(self, file: _Open) -> None:
        if not _called_by("_as_spare", "remove"):
            super().sync(file)


class _NoLease(CrashFolder):
    def is_unused(self, file: _Open) -> bool:
        return True


class _NoLinkCount(CrashFolder):
    def _status(self, number: int) -> FileState:
        found = super()._status(number)
        return FileState(found.identity, 1, found.size, found.mode, found.changed_ns)


def _called_by(*names: str) -> bool:
    import sys

    frame = sys._getframe(2)
    return frame.f_code.co_name in names and "directory" in frame.f_code.co_filename


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        (_NoFileSync, "one_path"),
        (_NoDirectorySync, "keep_one"),
        (_NoSpareSync, "keep_one"),
        (_NoLease, "keep_all_with_reader"),
        (_NoLinkCount, "linked_before_removal"),
    ],
)
def test_the_search_finds_a_protocol_without_one_of_its_rules(
    mutant: type[CrashFolder], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "CrashFolder", mutant)
    with pytest.raises(AssertionError):
        explore(SCENARIOS[name])


def test_the_search_finds_a_start_that_puts_back_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "restore", lambda *_: False)
    with pytest.raises(AssertionError):
        explore(removed_too_early, early=True)


def test_the_search_finds_a_hold_that_is_put_back_too_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "DRAFT", "")  # every record counts as unfinished
    with pytest.raises(AssertionError):
        nothing_older_comes_back()


def test_what_has_a_successor_is_not_put_back() -> None:
    nothing_older_comes_back()


def nothing_older_comes_back() -> None:
    for stop in range(1, events_of(removed_too_early) + 2):
        system, _ = run(removed_too_early, stop)
        before = set(whole(system))
        found = system.kill()
        files = Publisher(found, verify)
        files.recover("/d")
        assert not before or set(whole(found)) == before


def test_a_draft_that_fails_puts_back_what_was_removed_meanwhile() -> None:
    system = fresh()
    files = Publisher(system, verify)
    save(system, files, "/d/step-0.pt", 0, Told())
    draft = files.begin("/d/step-1.pt")
    system.unlink_path("/d/step-0.pt")
    draft.abandon()
    assert list(system.visible("/d")) == ["step-0.pt"]
