"""That the environments of ``make smoke`` hold what ``pyproject.toml`` promises."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest
from packaging.requirements import Requirement

from tests.smoke.environments import FLOOR, SmokeError, interpreter

SMOKED = {"", "accelerate", "cli", "lightning", "metrics"}
"""The extras that the smoke runs; "" is what everybody gets."""


def test_the_floor_is_the_lowest_that_is_promised() -> None:
    said = [FLOOR.torch, *FLOOR.pins.read_text().splitlines()]
    pins = dict(line.split("==") for line in said if "==" in line)
    promised = {}
    for text in importlib.metadata.requires("portus-checkpoint") or ():
        each = Requirement(text)
        if any(not each.marker or each.marker.evaluate({"extra": extra}) for extra in SMOKED):
            promised[each.name] = next(s.version for s in each.specifier if s.operator == ">=")
    assert len(promised) >= 9
    assert {name: f"{pins[name]}.".startswith(f"{v}.") for name, v in promised.items()} == (
        dict.fromkeys(promised, True)
    )


def test_without_the_interpreter_it_says_which_and_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLOOR_PYTHON", "/no/such/python")
    with pytest.raises(SmokeError, match=r"Python 3\.10 is needed .*'/no/such/python'.*FLOOR_PYTH"):
        interpreter(FLOOR)
    monkeypatch.delenv("FLOOR_PYTHON")
    with pytest.raises(SmokeError, match=r"neither PATH nor pyenv has one"):
        interpreter(dataclasses.replace(FLOOR, python="2.99"))
