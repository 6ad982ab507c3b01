"""What a rank looks at in a commit and in a load does not grow with the number of ranks."""

from __future__ import annotations

import pytest

from tests.bench.discovery import Counts, of
from tests.faults import calls

pytestmark = pytest.mark.skipif(bool(calls.why_not()), reason=calls.why_not())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_commit_and_a_load_look_at_as_much_with_48_ranks_as_with_12() -> None:
    few, many = of(12), of(48)
    for moment in ("commit", "load, every other rank"):
        assert apart_from_bytes(few[moment]) == apart_from_bytes(many[moment]), moment
        assert abs(few[moment]["bytes read"] - many[moment]["bytes read"]) < 500, moment
    looked = "load, the rank that looks"
    assert many[looked]["opens"] - few[looked]["opens"] >= 48 - 12, "calls are counted"
    assert few["commit"]["opens"] == 0, "its own pool is open"


def apart_from_bytes(counts: Counts) -> Counts:
    return {name: count for name, count in counts.items() if name != "bytes read"}
