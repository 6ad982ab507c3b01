"""What a handle says of its save, and what may not be waited for."""

from __future__ import annotations

import signal

import pytest

from portus.engine.media import calls
from portus.engine.pipeline.handle import EndedSave, SaveHandle, SaveStats
from portus.engine.spec import VersionInfo
from portus.errors import MediumError, PortusError, UsageError


class Going:
    """A save that never ends."""

    over = False
    error: PortusError | None = None
    stats = SaveStats()

    def join(self) -> None:
        raise AssertionError("waited for")

    def result(self, timeout_s: float | None) -> VersionInfo:
        raise AssertionError("waited for")


def test_a_save_that_was_refused_is_to_be_reported_until_somebody_heard_of_it() -> None:
    error = MediumError("no space")
    save = EndedSave(error, SaveStats())
    handle = SaveHandle(save)
    assert (handle.done, handle.committed, save.reported) == (True, False, False)
    handle.join()
    assert not save.reported, "who joins has not heard how it ended"
    with pytest.raises(MediumError, match="no space"):
        handle.wait()
    assert save.reported


def within_a_call(act: object) -> list[BaseException]:
    """What ``act`` raises in a signal handler that interrupted Portus."""
    raised: list[BaseException] = []

    def handler(*_: object) -> None:
        try:
            act()  # type: ignore[operator]
        except PortusError as error:
            raised.append(error)

    @calls.mark
    def interrupted() -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        interrupted()
    finally:
        signal.signal(signal.SIGUSR1, before)
    return raised


def test_a_handler_that_interrupted_portus_waits_for_no_save_that_goes_on() -> None:
    [error] = within_a_call(SaveHandle(Going()).wait)
    assert isinstance(error, UsageError)
    assert "wait for a save" in str(error)


def test_a_handler_that_interrupted_portus_hears_of_a_save_that_is_over() -> None:
    [error] = within_a_call(SaveHandle(EndedSave(MediumError("full"), SaveStats())).wait)
    assert isinstance(error, MediumError)
