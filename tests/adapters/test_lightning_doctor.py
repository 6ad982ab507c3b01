"""``portus doctor`` says whether Lightning finds what Portus adds to a Trainer."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from portus_lightning import doctor

CALLBACKS = "portus_lightning.callbacks:companion_callbacks"


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The entry points that Lightning finds; a test changes them."""
    points = [EntryPoint("portus", CALLBACKS, "lightning.pytorch.callbacks_factory")]
    monkeypatch.delenv("PORTUS_DISABLE", raising=False)
    monkeypatch.setattr(doctor, "entry_points", lambda group: points)
    return points


def said(name: str = "lightning") -> tuple[str, str]:
    [(text, advice)] = [(text, advice) for each, text, advice in doctor.findings() if each == name]
    return text, advice


def test_it_says_that_the_plugin_takes_effect() -> None:
    text, advice = said()
    assert "takes effect" in text
    assert not advice
    assert "takes effect" in said("pytorch-lightning")[0]


def test_a_trainer_that_does_not_find_the_callback_is_named(found: list[EntryPoint]) -> None:
    found[:] = [EntryPoint("other", "other.callbacks:all", "lightning.pytorch.callbacks_factory")]
    text, advice = said()
    assert "do NOT find" in text
    assert advice


def test_what_turns_it_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTUS_DISABLE", "1")
    assert said()[1] == "unset PORTUS_DISABLE"
    monkeypatch.delenv("PORTUS_DISABLE")
    monkeypatch.setattr(doctor, "version", lambda name: "2.3.1")
    assert said() == ("2.3.1 is older than 2.4", "upgrade to 2.4 or later")
