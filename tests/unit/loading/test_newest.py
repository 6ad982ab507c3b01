"""Which checkpoint is loaded as the newest. See ``unit/pools/test_restore`` and
``unit/paths/test_checkpointer`` for real ones."""

from __future__ import annotations

import errno
import logging

import pytest

from portus.engine.loading.checkpoint_file import use_newest
from portus.errors import CorruptionError, MediumError, StaleError, TransportError

DAMAGE = CorruptionError("damaged")
DISK = MediumError(errno.EIO, "the disk failed")


def use(found: str | Exception) -> str:
    if isinstance(found, Exception):
        raise found
    return found


@pytest.mark.parametrize("error", [StaleError("gone"), TransportError("cut off")])
def test_what_is_gone_meanwhile_is_chosen_anew_and_is_no_damage(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    listed: list[list[str | Exception]] = [["older", error], [error], ["newer"]]
    with caplog.at_level(logging.DEBUG):
        assert use_newest(lambda: listed.pop(0), use) == "newer"
    assert caplog.text == ""


def test_what_is_always_gone_is_told_after_a_few_times() -> None:
    listed: list[Exception] = [StaleError("gone")] * 9
    with pytest.raises(StaleError):
        use_newest(lambda: [listed.pop()], use)
    assert 0 < len(listed) < 8


@pytest.mark.parametrize("errors", [[DAMAGE, DISK], [DISK, DAMAGE]])
def test_an_error_of_the_disk_is_passed_over_and_damage_is_what_is_raised(
    caplog: pytest.LogCaptureFixture, errors: list[Exception]
) -> None:
    found: list[str | Exception] = ["oldest", "old", *errors]
    assert use_newest(lambda: found, use) == "old"
    assert [f"{each}; FALLING BACK" in caplog.text for each in errors] == [True, True]
    assert caplog.text.count("FALLING BACK to") == 2
    assert "FALLING BACK to oldest" not in caplog.text
    with pytest.raises(CorruptionError, match="damaged"):
        use_newest(lambda: errors, use)
