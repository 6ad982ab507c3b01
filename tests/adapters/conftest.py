"""Adapter tests: Lightning finds the companion callback as on a user's machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import portus

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")


@pytest.fixture(scope="session", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The entry points of this tree, also where it is only on the path. Its directory, to be put
    before others on the path of subprocesses; empty where Portus is installed."""
    site = tmp_path_factory.mktemp("site")
    if not any(point.name == "portus" for point in entry_points(group=GROUPS[0])):
        _write_metadata(site)
        sys.path.insert(0, str(site))
        portus.register_reference_loader()  # torch was imported before it could ask
    yield site
    if str(site) in sys.path:
        sys.path.remove(str(site))


@pytest.fixture(autouse=True)
def no_training_left() -> Iterator[None]:
    """What a test of Accelerate did not end is not made real files when the tests end."""
    yield
    ending = sys.modules.get("portus_accelerate.ending")
    if ending is not None:
        ending._OPEN.clear()


def _write_metadata(site: Path) -> None:
    information = site / "portus_checkpoint-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: portus-checkpoint\n")
    # No TOML reader in Python 3.10; these tables are simple.
    tables = re.findall(
        r'^\[project\.entry-points\."(.+?)"\]\n((?:#.*\n|\w+ = ".+?"\n)+)',
        PROJECT.read_text(),
        re.MULTILINE,
    )
    assert {group for group, _ in tables} >= {*GROUPS, "torch.backends", "portus.doctor"}
    lines = [f"[{group}]\n" + points.replace('"', "") for group, points in tables]
    (information / "entry_points.txt").write_text("\n".join(lines))
