"""Each failure is told once, to who calls next, and as ``on_error`` says."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from portus.engine.job.reports import Reports
from portus.engine.pipeline.handle import RefusedSave, SaveStats
from portus.errors import AbandonedError, MediumError, PortusError

WARNED = "a save failed; training continues"


def failed(error: PortusError) -> RefusedSave:
    return RefusedSave(error, SaveStats())


def full() -> MediumError:
    return MediumError(28, "no space")


def nothing() -> None:
    pass


def saved(reports: Reports, wait: Callable[[], None] = nothing) -> None:
    reports.tell(wait, is_save=True)


def waited(reports: Reports) -> None:
    reports.tell(nothing, is_save=False)


def test_before_a_first_commit_a_failure_is_raised_and_after_it_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports, error = Reports("warn"), full()
    reports.note_failure(failed(error))
    with pytest.raises(MediumError) as found:
        saved(reports)
    assert found.value is error
    saved(reports)  # once
    reports.note_commit()
    reports.note_failure(failed(full()))
    saved(reports)
    assert caplog.text.count(WARNED) == 1


def test_a_first_save_in_flight_is_waited_for_before_a_failure_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports = Reports("warn")
    reports.note_failure(failed(full()))
    saved(reports, wait=reports.note_commit)
    assert WARNED in caplog.text


def test_nobody_is_waited_for_once_a_save_was_committed() -> None:
    reports = Reports("warn")
    reports.note_commit()
    reports.note_failure(failed(full()))

    def fails() -> None:
        raise AssertionError

    saved(reports, wait=fails)


def test_raise_raises_the_first_failure_and_leaves_the_next_one_to_the_next_call() -> None:
    reports, errors = Reports("raise"), [full(), full()]
    reports.note_commit()
    for error in errors:
        reports.note_failure(failed(error))
    for error in errors:
        with pytest.raises(MediumError) as found:
            waited(reports)
        assert found.value is error
    waited(reports)


def test_what_its_caller_heard_of_is_not_told_again() -> None:
    reports, save = Reports("raise"), failed(full())
    reports.note_failure(save)
    with pytest.raises(MediumError):
        save.result(None)
    waited(reports)


def test_a_first_save_that_was_given_up_is_only_logged_by_saves_and_raised_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports, error = Reports("warn"), AbandonedError("too late")
    reports.note_failure(failed(error))
    saved(reports)
    assert WARNED in caplog.text
    saved(reports)
    with pytest.raises(AbandonedError) as found:
        waited(reports)
    assert found.value is error
    waited(reports)


def test_a_save_that_was_given_up_is_forgiven_once_one_was_committed() -> None:
    reports = Reports("warn")
    reports.note_failure(failed(AbandonedError("too late")))
    saved(reports)
    reports.note_commit()
    waited(reports)


def test_of_writes_by_another_process_a_run_is_warned_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports = Reports("warn")
    with caplog.at_level(logging.WARNING, "portus"):
        reports.inexact(3, "model.b", 2)
        reports.inexact(4, "model.a", 1)
    assert len(caplog.records) == 1
    assert "step 3" in caplog.text
    assert "model.b" in caplog.text
    assert "and 1 more" in caplog.text
