"""When saves are left to the framework's own way, and how that is said."""

from __future__ import annotations

import logging
import sys

import pytest

import portus


@pytest.fixture
def framework() -> portus.Framework:
    return portus.Framework("Plough", logging.getLogger("portus_plough"))


def test_it_saves_itself_where_portus_is_disabled(
    framework: portus.Framework, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for value, is_off in (("", False), ("0", False), ("1", True), ("yes", True)):
        monkeypatch.setenv("PORTUS_DISABLE", value)
        assert portus.is_disabled() is is_off
        assert framework.saves_itself() is is_off
    assert not caplog.records, "who turned it off knows"


def test_it_saves_itself_on_other_systems_and_that_is_said_once(
    framework: portus.Framework, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert framework.saves_itself()
    assert framework.saves_itself()
    (record,) = caplog.records
    assert record.name == "portus_plough"
    assert "on darwin Plough itself saves" in record.getMessage()


def test_what_was_said_of_one_framework_is_said_of_another(
    framework: portus.Framework, caplog: pytest.LogCaptureFixture
) -> None:
    other = portus.Framework("Harrow", logging.getLogger("portus_harrow"))
    error = portus.UsageError("state/odd: cannot be saved")
    for each in (framework, other, framework, other):
        each.say_it_saves(error)
    assert [record.getMessage().partition(", ")[2] for record in caplog.records] == [
        "Plough saves it instead: state/odd: cannot be saved",
        "Harrow saves it instead: state/odd: cannot be saved",
    ]
