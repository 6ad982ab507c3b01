"""Each failure is told once, to who calls next, and as ``on_error`` says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from portus.engine.files.queue import Errand, Queue
from portus.engine.job.reports import Reports
from portus.engine.pipeline.handle import EndedSave, SaveStats
from portus.errors import AbandonedError, MediumError, PortusError

WAIT_S = 10.0
WARNED = "a save failed; training continues"


def failed(error: PortusError) -> EndedSave:
    return EndedSave(error, SaveStats())


def full() -> MediumError:
    return MediumError(28, "no space")


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue("test")
    yield queue
    queue.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def saved(reports: Reports) -> None:
    reports.tell(is_save=True)


def waited(reports: Reports) -> None:
    reports.tell()


def test_before_a_first_commit_a_failure_is_raised_and_after_it_logged(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    reports, error = Reports("warn", queue, WAIT_S), full()
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
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    reports = Reports("warn", queue, WAIT_S)
    reports.note_failure(failed(full()))
    is_asked = threading.Event()

    def commits() -> None:
        assert_set(is_asked)
        reports.note_commit()

    queue.put(Errand(commits))
    threading.Timer(0.05, is_asked.set).start()
    saved(reports)
    assert WARNED in caplog.text


def test_nobody_is_waited_for_once_a_save_was_committed(queue: Queue) -> None:
    reports = Reports("warn", queue, WAIT_S)
    reports.note_commit()
    reports.note_failure(failed(full()))
    is_over = threading.Event()
    queue.put(Errand(lambda: assert_set(is_over)))
    saved(reports)
    is_over.set()


def test_raise_raises_the_first_failure_and_leaves_the_next_one_to_the_next_call(
    queue: Queue,
) -> None:
    reports, errors = Reports("raise", queue, WAIT_S), [full(), full()]
    reports.note_commit()
    for error in errors:
        reports.note_failure(failed(error))
    for error in errors:
        with pytest.raises(MediumError) as found:
            waited(reports)
        assert found.value is error
    waited(reports)


def test_what_its_caller_heard_of_is_not_told_again(queue: Queue) -> None:
    reports, save = Reports("raise", queue, WAIT_S), failed(full())
    reports.note_failure(save)
    with pytest.raises(MediumError):
        save.result(None)
    waited(reports)


def test_a_first_save_that_was_given_up_is_only_logged_by_saves_and_raised_at_the_end(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    reports, error = Reports("warn", queue, WAIT_S), AbandonedError("too late")
    reports.note_failure(failed(error))
    saved(reports)
    assert WARNED in caplog.text
    saved(reports)
    with pytest.raises(AbandonedError) as found:
        waited(reports)
    assert found.value is error
    waited(reports)


def test_a_save_that_was_given_up_is_forgiven_once_one_was_committed(queue: Queue) -> None:
    reports = Reports("warn", queue, WAIT_S)
    reports.note_failure(failed(AbandonedError("too late")))
    saved(reports)
    reports.note_commit()
    waited(reports)


def test_of_writes_by_another_process_a_run_is_warned_once(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    reports = Reports("warn", queue, WAIT_S)
    with caplog.at_level(logging.WARNING, "portus"):
        reports.inexact(3, "model.b", 2)
        reports.inexact(4, "model.a", 1)
    assert len(caplog.records) == 1
    assert "step 3" in caplog.text
    assert "model.b" in caplog.text
    assert "and 1 more" in caplog.text
