"""Files that are published on a disk that crashes at every event.

At each path there is nothing, an earlier checkpoint, or a later one, whole; what was told committed
is there; what was removed too early is found again. Mutants of the protocol are found.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest

from portus.engine.directory import recovery, redo
from portus.engine.directory.folder import HiddenFolder
from portus.engine.directory.publisher import Publisher
from portus.engine.directory.system import FileState
from portus.engine.media.process import Descriptor
from portus.errors import MediumError
from tests.simulation.crash import Crash
from tests.simulation.crash_folder import CrashFolder, content, node_of, step_of

STEPS = 5


class Told:
    """What a training was told, and did."""

    def __init__(self) -> None:
        self.committed: int = -1
        self.removed: set[str] = set()


Scenario = Callable[[CrashFolder, Told], None]


def save(
    system: CrashFolder,
    files: Publisher,
    path: str,
    step: int,
    told: Told,
    **more: Any,
) -> bool:
    """Whether it went into a spare."""
    draft = files.begin(path, **more)
    try:
        system.write(draft.files[0].file, content(step))
        system.sync(draft.files[0].file)
        draft.publish()
    except MediumError:
        draft.abandon()
        raise
    told.committed = step
    return draft.files[0].is_spare


def keep_one(system: CrashFolder, told: Told) -> None:
    files = Publisher(system)
    for step in range(STEPS):
        save(system, files, f"/d/step-{step}.pt", step, told)
        if step:
            files.remove(f"/d/step-{step - 1}.pt")
    files.close()


def keep_one_of_several_in_flight(system: CrashFolder, told: Told) -> None:
    assert spares_of_several_in_flight(system, told) < STEPS


def spares_of_several_in_flight(system: CrashFolder, told: Told) -> int:
    files = Publisher(system)
    drafts = [files.begin("/d/step-0.pt"), files.begin("/d/step-1.pt")]
    for step in range(STEPS):
        system.write(drafts[step].files[0].file, content(step))
        system.sync(drafts[step].files[0].file)
        drafts[step].publish()
        told.committed = step
        if step:
            files.remove(f"/d/step-{step - 1}.pt")
        drafts.append(files.begin(f"/d/step-{step + 2}.pt"))
    for draft in drafts[STEPS:]:
        draft.abandon()
    files.close()
    return sum(draft.files[0].is_spare for draft in drafts)


def keep_all_with_reader(system: CrashFolder, told: Told) -> None:
    files = Publisher(system)
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


def keep_one_that_another_process_removes(system: CrashFolder, told: Told) -> None:
    """It syncs nothing. Somebody still reads one of them."""
    assert spares_of_what_another_process_removes(system, told) <= 1


def spares_of_what_another_process_removes(system: CrashFolder, told: Told) -> int:
    files, spares, readers = Publisher(system), 0, []
    for step in range(STEPS):
        system.mkdir(f"/d/new{step}")
        path = f"/d/new{step}/step-{step}.pt"
        spares += save(system, files, path, step, told, base="/d", removed_elsewhere=True)
        if step == 2:
            readers.append(system.read_path("/d/new1/step-1.pt"))
        if step:
            system.unlink_path(f"/d/new{step - 1}/step-{step - 1}.pt")
        for reader in readers:
            assert step_of(system.data_of(reader)) == 1, "a reader sees other bytes"
    files.close()
    return spares


def one_path(system: CrashFolder, told: Told) -> None:
    files = Publisher(system)
    for step in range(STEPS):
        save(system, files, "/d/last.pt", step, told)
    files.close()


def linked_before_removal(system: CrashFolder, told: Told) -> None:
    """A user makes a hard link of a checkpoint: it keeps its bytes."""
    files = Publisher(system)
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
    _remove_in_flight(system, told, Publisher(system), system.unlink_path)


def removed_by_itself_too_early(system: CrashFolder, told: Told) -> None:
    """A process that removes its newest checkpoint while the next one is in flight."""
    files = Publisher(system)
    _remove_in_flight(system, told, files, files.remove)


def _remove_in_flight(
    system: CrashFolder, told: Told, files: Publisher, remove: Callable[[str], object]
) -> None:
    for step in range(STEPS):
        draft = files.begin(f"/d/step-{step}.pt")
        if step:
            remove(f"/d/step-{step - 1}.pt")
        system.write(draft.files[0].file, content(step))
        system.sync(draft.files[0].file)
        draft.publish()
        told.committed = step
    files.close()


def swapped(system: CrashFolder, told: Told) -> None:
    """A script that saves beside, and swaps directories before the new file is complete."""
    files = Publisher(system)
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


# Several files as one.

FILES = ("a.pt", "b.pt", "c.pt")


def save_all(
    system: CrashFolder,
    files: Publisher,
    directory: str,
    step: int,
    told: Told,
    meanwhile: Callable[[], None] = lambda: None,
    base: str | None = None,
) -> None:
    draft = files.begin(*(f"{directory}/{name}" for name in FILES), base=base)
    try:
        meanwhile()
        for each in draft.files:
            system.write(each.file, content(step))
            system.sync(each.file)
        draft.publish()
    except MediumError:
        draft.abandon()
        raise
    told.committed = step


def all_in_one_directory(system: CrashFolder, told: Told) -> None:
    files = Publisher(system)
    system.mkdir("/d/new")
    for step in range(4):
        save_all(system, files, "/d/new", step, told)
    files.close()


def all_in_new_directories(system: CrashFolder, told: Told) -> None:
    """The one before is removed once the next one is there."""
    files = Publisher(system)
    for step in range(4):
        system.mkdir(f"/d/new{step}")
        save_all(system, files, f"/d/new{step}", step, told)
        for name in FILES if step else ():
            files.remove(f"/d/new{step - 1}/{name}")
    files.close()


def all_removed_too_early(system: CrashFolder, told: Told) -> None:
    files = Publisher(system)
    for step in range(4):
        system.mkdir(f"/d/new{step}")

        def meanwhile(before: int = step - 1) -> None:
            for name in FILES if before >= 0 else ():
                system.unlink_path(f"/d/new{before}/{name}")

        save_all(system, files, f"/d/new{step}", step, told, meanwhile)
    files.close()


def all_swapped(system: CrashFolder, told: Told) -> None:
    """A script that saves beside, and swaps directories before the new files are complete."""
    files = Publisher(system)
    system.mkdir("/d/ckpt")
    for step in range(4):
        system.mkdir(f"/d/new{step}")

        def meanwhile(step: int = step) -> None:
            for name in FILES if step else ():
                system.unlink_path(f"/d/ckpt/{name}")
            system.move("/d/ckpt", f"/d/old{step}")
            system.move(f"/d/new{step}", "/d/ckpt")

        save_all(system, files, f"/d/new{step}", step, told, meanwhile)
    files.close()


def all_with_drafts_above(system: CrashFolder, told: Told) -> None:
    """The drafts are in the hidden folder of the directory above; the script removes too early."""
    files = Publisher(system)
    for step in range(4):
        system.mkdir(f"/d/new{step}")

        def meanwhile(before: int = step - 1) -> None:
            for name in FILES if before >= 0 else ():
                system.unlink_path(f"/d/new{before}/{name}")

        save_all(system, files, f"/d/new{step}", step, told, meanwhile, base="/d")
        assert not system.hidden(f"/d/new{step}")
    files.close()


def all_swapped_with_drafts_above(system: CrashFolder, told: Told) -> None:
    files = Publisher(system)
    system.mkdir("/d/ckpt")
    for step in range(4):
        system.mkdir(f"/d/new{step}")

        def meanwhile(step: int = step) -> None:
            for name in FILES if step else ():
                system.unlink_path(f"/d/ckpt/{name}")
            system.move("/d/ckpt", f"/d/old{step}")
            system.move(f"/d/new{step}", "/d/ckpt")

        save_all(system, files, f"/d/new{step}", step, told, meanwhile, base="/d")
    files.close()


SCENARIOS = {
    each.__name__: each
    for each in (
        *(keep_one, keep_all_with_reader, one_path, linked_before_removal),
        keep_one_of_several_in_flight,
        keep_one_that_another_process_removes,
        *(all_in_one_directory, all_in_new_directories),
    )
}

EARLY: dict[str, Scenario] = {
    each.__name__: each
    for each in (
        *(removed_too_early, swapped, all_removed_too_early, all_swapped),
        removed_by_itself_too_early,
        *(all_with_drafts_above, all_swapped_with_drafts_above),
    )
}


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
        recover(system, directory)
        assert not system.hidden(directory)
    for directory in directories(system)[1:]:
        steps_there = [step_of(data) for data in system.visible(directory).values()]
        assert len(set(steps_there)) <= 1, f"{directory} is a mixture: {steps_there}"
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


def recover(system: CrashFolder, directory: str) -> None:
    """Do what the next start does."""
    folder = HiddenFolder(system, directory)
    try:
        recovery.recover(folder)
    finally:
        folder.close()


def explore(scenario: Scenario, *, early: bool = False, samples: int = 4) -> int:
    """Crash at every event in every way; the number of outcomes."""
    source, outcomes = random.Random(7), 0
    logging.disable()  # each file that is put back is logged, and pytest would keep that
    try:
        for stop in range(1, events_of(scenario) + 2):
            system, told = run(scenario, stop)
            check(system.kill(), told, newest=True)
            for lost in system.power_losses(source, samples):
                check(lost, told, newest=not early)
                outcomes += 1
    finally:
        logging.disable(logging.NOTSET)
    return outcomes


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("name", SCENARIOS)
def test_at_each_path_is_nothing_or_a_whole_checkpoint_whenever_power_fails(name: str) -> None:
    assert explore(SCENARIOS[name]) > 500


@pytest.mark.long(every_case=True)
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
                recover(again, "/d")
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


def test_what_another_process_removed_is_written_over_and_nothing_stays_in_hiding() -> None:
    system = fresh()
    assert spares_of_what_another_process_removes(system, Told()) == 1, "the other one is read"
    assert not system.hidden("/d")


def test_what_drafts_held_that_were_begun_before_it_was_removed_is_written_over() -> None:
    assert spares_of_several_in_flight(fresh(), Told()) == STEPS - 1


def test_a_start_removes_nothing_of_a_process_that_is_alive() -> None:
    system = fresh()
    files = Publisher(system)
    save(system, files, "/d/step-0.pt", 0, Told())
    draft = files.begin("/d/step-1.pt")
    before = system.hidden("/d")
    recover(system, "/d")
    assert system.hidden("/d") == before
    system.write(draft.files[0].file, content(1))
    system.sync(draft.files[0].file)
    draft.publish()
    assert {step_of(data) for data in system.visible("/d").values()} == {0, 1}


def test_a_start_leaves_the_links_to_files_that_another_process_removes() -> None:
    system = fresh()
    files = Publisher(system)
    save(system, files, "/d/step-0.pt", 0, Told(), removed_elsewhere=True)
    [watched] = system.hidden("/d")
    for _ in range(2):  # watched, and then a spare
        recover(system, "/d")
        assert watched in system.hidden("/d")
        if "step-0.pt" in system.visible("/d"):
            system.unlink_path("/d/step-0.pt")
            save(system, files, "/d/step-1.pt", 1, Told())
    assert save(system, files, "/d/step-2.pt", 2, Told())


def test_a_file_that_was_removed_while_nothing_was_in_flight_is_not_put_back() -> None:
    system = fresh()
    files = Publisher(system)
    save(system, files, "/d/step-0.pt", 0, Told())
    system.unlink_path("/d/step-0.pt")
    check(system.kill(), Told(), newest=False)
    assert not system.kill().visible("/d")


def test_a_held_file_that_does_not_verify_is_not_put_back() -> None:
    system = fresh()
    files = Publisher(system)
    save(system, files, "/d/step-0.pt", 0, Told())
    files.begin("/d/step-1.pt")
    system.write(system.read_path("/d/step-0.pt"), b"rotten")
    system.unlink_path("/d/step-0.pt")
    found = system.kill()
    recover(found, "/d")
    assert not found.visible("/d")


# Mutants: each of them breaks one rule, and the search finds it.


class _NoFileSync(CrashFolder):
    def sync(self, file: Descriptor) -> None:
        if self._nodes[node_of(file)].is_directory:
            super().sync(file)


class _NoDirectorySync(CrashFolder):
    def sync(self, file: Descriptor) -> None:
        if not self._nodes[node_of(file)].is_directory:
            super().sync(file)


class _NoSpareSync(CrashFolder):
    """What makes a spare out of a removed file syncs nothing."""

    def sync(self, file: Descriptor) -> None:
        if not _called_by("_as_spare", "remove"):
            super().sync(file)


class _NoLease(CrashFolder):
    def is_unused(self, file: Descriptor) -> bool:
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
        (_NoSpareSync, "keep_one_that_another_process_removes"),
        (_NoLease, "keep_one_that_another_process_removes"),
        (_NoLinkCount, "keep_one_that_another_process_removes"),
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


def test_the_search_finds_files_that_get_their_names_without_a_marker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redo, "write", lambda *_: None)
    with pytest.raises(AssertionError, match="mixture"):
        explore(all_in_one_directory)


def test_the_search_finds_a_marker_that_is_trusted_without_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redo, "_is_there", lambda *_: True)
    with pytest.raises(AssertionError, match="mixture"):
        explore(all_in_one_directory)


class _NoFolderSync(CrashFolder):
    """The hidden folder's own name is not made durable before the marker counts."""

    def sync(self, file: Descriptor) -> None:
        if not (_called_by("sync_hidden") and self.path_of(file) == "/d/new"):
            super().sync(file)


def test_the_search_finds_a_marker_in_a_folder_that_may_not_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "CrashFolder", _NoFolderSync)
    with pytest.raises(AssertionError, match="mixture"):
        explore(all_in_one_directory)


def test_a_file_that_somebody_put_in_place_after_the_crash_stays() -> None:
    for stop in range(1, events_of(all_in_one_directory) + 1):
        system, _ = run(all_in_one_directory, stop)
        found = system.kill()
        where = found.open_directory("/d/new")
        if not any("redo" in name for name in found.hidden("/d/new")):
            continue
        found.unlink(where, "b.pt")
        found.write(found.create(where, "b.pt"), b"theirs")
        recover(found, "/d/new")
        assert found.visible("/d/new")["b.pt"] == b"theirs"
        assert not found.hidden("/d/new")


def test_a_damaged_marker_is_said_and_nothing_is_renamed(caplog: pytest.LogCaptureFixture) -> None:
    seen = 0
    for stop in range(1, events_of(all_in_one_directory) + 1):
        system, _ = run(all_in_one_directory, stop)
        found = system.kill()
        hidden = [name for name in found.hidden("/d/new") if ".redo" in name]
        if not hidden:
            continue
        seen += 1
        folder = found.open_folder(found.open_directory("/d/new"), ".portus", create=False)
        assert folder is not None
        file = found.open(folder, hidden[0], writable=True)
        assert file is not None
        found.write(file, b'{"moves": [["a"]]}')
        before = found.visible("/d/new")
        recover(found, "/d/new")
        assert found.visible("/d/new").items() >= before.items()
    assert seen
    assert "/d/new: the redo marker" in caplog.text


def test_the_next_save_of_a_process_finishes_what_a_failed_call_left() -> None:
    """Names could not be changed for a while: the files of that checkpoint get them later."""
    left = 0
    for failing in range(1, events_of(all_in_one_directory) + 1):
        system, told = fresh(), Told()
        system.mkdir("/d/new")
        files = Publisher(system)

        def fails(event: int, text: str, failing: int = failing) -> int | None:
            return errno.EIO if event == failing and text.startswith("rename .") else None

        system.fails = fails
        try:
            save_all(system, files, "/d/new", 0, told)
        except MediumError as error:
            left += "may not have their names yet" in str(error)
            expected = {0} if "may not have their names yet" in str(error) else set()
            recover(system, "/d/new")
            assert {step_of(data) for data in system.visible("/d/new").values()} == expected
        system.fails = lambda event, text: None
        save_all(system, files, "/d/new", 1, told)
        files.close()
        assert system.visible("/d/new") == dict.fromkeys(FILES, content(1))
    assert left == len(FILES)


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
        recover(found, "/d")
        assert not before or set(whole(found)) == before


def test_a_draft_that_fails_puts_back_what_was_removed_meanwhile() -> None:
    system = fresh()
    files = Publisher(system)
    save(system, files, "/d/step-0.pt", 0, Told())
    draft = files.begin("/d/step-1.pt")
    system.unlink_path("/d/step-0.pt")
    draft.abandon()
    assert list(system.visible("/d")) == ["step-0.pt"]
