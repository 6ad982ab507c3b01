"""Mirrors of every released format are read for ever."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from portus.reach.mirror.mirror import Mirror, models
from portus.reach.mirror.objects import FORMAT_VERSION
from portus.reach.pools.mirror_versions import load_version
from tests.golden.describe import Describer
from tests.golden.mirrors import KEY, MODEL
from tests.simulation.model_store import ModelStore

HERE = Path(__file__).resolve().parent
GOLDEN = sorted(HERE.glob("mirror-*.json.xz"))


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return found


def test_the_format_of_the_day_has_a_golden_mirror() -> None:
    assert HERE / f"mirror-{FORMAT_VERSION}.json.xz" in GOLDEN


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
@pytest.mark.parametrize("kind", ["plain", "keyed"])
def test_a_golden_mirror_holds_what_was_mirrored(path: Path, kind: str) -> None:
    golden, bucket = content(path), ModelStore()
    for name, data in golden["objects"][kind].items():
        bucket.put(name, bytes.fromhex(data))
    key = KEY if kind == "keyed" else None
    assert list(models(bucket, key=key)) == [MODEL]
    mirror = Mirror(bucket, MODEL, key=key)
    state = mirror.read()
    assert state.who == "golden"
    assert state.term > 1
    assert [str(each.step) for each in state.added] == list(golden["states"])
    assert [each.metrics for each in state.added] == [{"loss": 0.5}]
    for each in state.added:
        mirror.check(each, lambda _: None)
        found = Describer().describe(load_version(mirror, each, weights_only=False))
        assert found == golden["states"][str(each.step)]
