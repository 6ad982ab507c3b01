"""What a checkpoint says of where an epoch was."""

from __future__ import annotations

import pytest

from portus.companions.samples.position import FORMAT, Position
from portus.errors import UsageError

HERE = Position(batches=3, delivered=24, ranks=2, batch=4, samples=50, data=50, fingerprint="a")


def test_a_position_comes_back() -> None:
    assert Position.of(HERE.state()) == HERE
    bare = Position(batches=0, delivered=0, ranks=1, batch=None, samples=None, data=None)
    assert Position.of(bare.state()) == bare


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}, and this Portus knows {FORMAT}: resume"),
        ({"format": None}, "expected format 1, found None"),
        ({"format": "1"}, "expected format 1, found '1'"),
        ({"batches": -1}, r"Expected `int` >= 0 - at `\$.batches`"),
        ({"batches": None}, r"got `null` - at `\$.batches`"),
        ({"ranks": 0}, r"Expected `int` >= 1 - at `\$.ranks`"),
        ({"batch": True}, r"got `bool` - at `\$.batch`"),
        ({"fingerprint": 7}, r"got `int` - at `\$.fingerprint`"),
        ({"is_over": 1}, r"got `int` - at `\$.is_over`"),
    ],
    ids=str,
)
def test_what_portus_did_not_say_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Position.of({**HERE.state(), **changes})


def test_a_dataset_that_changed_is_told() -> None:
    assert HERE.describe_change(50, "a") == ""
    assert HERE.describe_change(49, "a") == "the dataset had 50 samples, and has 49 now"
    assert "fingerprint was 'a', and is None now" in HERE.describe_change(50, None)
    silent = Position(batches=0, delivered=0, ranks=1, batch=None, samples=None, data=None)
    assert silent.describe_change(3, "b") == ""
