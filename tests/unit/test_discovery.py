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
    without = "load without a roll, the rank that looks"
    assert many[without]["opens"] - few[without]["opens"] >= 48 - 12, "calls are counted"
    for moment in few.keys() - {without, "first commit, the rank that looks"}:
        assert apart_from_bytes(few[moment]) == apart_from_bytes(many[moment]), moment
        assert abs(few[moment]["bytes read"] - many[moment]["bytes read"]) < 500, moment
    assert few["commit"]["opens"] == 3, "the roll, and the links of its two references"


def apart_from_bytes(counts: Counts) -> Counts:
    """But for the names in a list."""
    return {name: count for name, count in counts.items() if name not in ("bytes read", "lists")}
