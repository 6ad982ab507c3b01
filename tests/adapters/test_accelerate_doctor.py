"""``portus doctor`` says whether the flag for Accelerate takes effect, and why not."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import accelerate
import pytest

import portus_accelerate
from portus_accelerate.doctor import findings
from tests.adapters.test_accelerate_flag import damaged
from tests.unit.cli.scene import portus

LONG = pytest.mark.long


@pytest.fixture(autouse=True)
def on_the_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that are asked find the entry points of this tree."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), *filter(None, sys.path)]))


@pytest.mark.long
def test_doctor_says_that_the_flag_takes_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTUS_ACCELERATE", "1")
    (line,) = (line for line in portus("doctor", tmp_path).out.splitlines() if "Accelerate" in line)
    assert "takes effect: on, for Accelerate 1." in line


@pytest.mark.parametrize(
    ("variable", "value", "why", "advice"),
    [
        pytest.param(
            *("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", "torch did not call Portus", "unset TORCH_"),
            marks=LONG,
        ),
        pytest.param("PORTUS_DISABLE", "1", "itself saves", "unset PORTUS_DISABLE", marks=LONG),
        pytest.param(
            *("PORTUS_ACCELERATE_CONFIG", '{"pols": 1}', "unknown keys ['pols']", "mend"),
            marks=LONG,
        ),
    ],
)
def test_what_takes_the_effect_away_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str, advice: str
) -> None:
    monkeypatch.setenv("PORTUS_ACCELERATE", "1")
    monkeypatch.setenv(variable, value)
    ((_, text, remedy),) = findings()
    assert text.startswith("is set, and has NO effect: ")
    assert why in text
    assert remedy.startswith(advice)


@LONG
@pytest.mark.parametrize("broken", ["autoload", "patch"])
def test_a_damaged_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    site = damaged(tmp_path / "site", broken, "def (")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ["PYTHONPATH"]]))
    ((_, text, advice),) = findings()
    assert text.startswith("is off here, and would have NO effect: ")
    assert "SyntaxError" in text
    assert "install portus-checkpoint again" in advice


@LONG
def test_an_accelerate_outside_the_range_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "accelerate"
    shutil.copytree(Path(accelerate.__file__).parent, package)
    text = (package / "__init__.py").read_text()
    changed = text.replace(f'"{accelerate.__version__}"', '"9.9"')
    assert changed != text
    (package / "__init__.py").write_text(changed)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    ((_, text, advice),) = findings()
    assert "Accelerate 9.9 is not supported by this version of Portus (1.0 to 1.15)" in text
    assert advice.startswith("install an Accelerate in that range")


def test_status_is_a_public_name() -> None:
    """And the module that it is in has another, or one would hide the other."""
    assert isinstance(portus_accelerate.status(), str)
