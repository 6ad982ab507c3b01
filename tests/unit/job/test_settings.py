"""What is declared of a setting is all that there is to say of it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
from dataclasses import dataclass
from typing import Any, Literal

import pytest

import portus
from portus.engine.job import settings as module
from portus.engine.settings.fits import SomeBytes

FIELDS = [field.name for field in dataclasses.fields(portus.Settings)]


@pytest.mark.parametrize("name", FIELDS)
def test_nonsense_is_refused_for_every_setting_by_its_name(name: str) -> None:
    for nonsense in (object(), [], -1):
        with pytest.raises(portus.UsageError, match=rf"^{name}[: ].*expected .*"):
            portus.Settings(**{name: nonsense})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("on_error", ("warn", "raise")),
        ("verify", (True, False)),
        ("fence_timeout", (1, 0.5)),
        ("max_bytes", (None, 1)),
        ("mirror", (None, "none", "file:///nfs/runs", "s3://bucket/runs")),
        ("mirror_wait", (0, 2.5)),
    ],
)
def test_what_a_setting_may_be_is_taken_as_it_is(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert getattr(portus.Settings(**{name: value}), name) is value


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("fence_timeout", 0, "expected seconds over 0, found 0"),
        ("fence_timeout", True, "expected seconds over 0, found True"),
        ("max_bytes", 0.5, "expected bytes, or None, found 0.5"),
        ("snapshot", "late", "expected 'auto', 'sync' or 'device', found 'late'"),
        ("verify", 1, "expected True or False, found 1"),
    ],
)
def test_what_is_refused_is_told_with_what_it_may_be(
    name: str, value: object, expected: str
) -> None:
    with pytest.raises(portus.UsageError, match=f"^{name}: {re.escape(expected)}$"):
        portus.Settings(**{name: value})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(portus.Settings):
    color: Literal["red", "blue"] = "red"
    room: SomeBytes | None = None
    label: str = "anything"


def test_settings_derived_from_these_are_looked_at_alike() -> None:
    made = Own(color="blue", room=3, label="", verify=False)
    assert (made.color, made.room, made.verify) == ("blue", 3, False)
    for name, value in {"color": "green", "room": 0, "guard": "never"}.items():
        with pytest.raises(portus.UsageError, match=f"^{name}: expected"):
            Own(**{name: value})  # type: ignore[arg-type]


def test_every_setting_has_its_sentence_below_it() -> None:
    body = next(
        node.body
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    told = {
        field.target.id
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
    assert told == set(FIELDS)
