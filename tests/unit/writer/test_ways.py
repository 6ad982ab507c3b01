"""The faster way is found, whichever it is, and found again when that changes."""

from __future__ import annotations

import pytest

from portus.engine.writer.ways import AGAIN, MEASURED_MIN, Kind, Way, Ways

SIZE = MEASURED_MIN


def used(ways: Ways, kind: Kind, seconds: dict[Way, float], files: int) -> list[Way]:
    """The ways of so many files, each of which takes as long as its way does."""
    found = []
    for _ in range(files):
        way = ways.choose(kind, SIZE)
        ways.took(kind, way, SIZE, seconds[way])
        found.append(way)
    return found


@pytest.mark.parametrize("is_spare", [False, True])
@pytest.mark.parametrize("faster", list(Way))
def test_each_way_is_tried_and_then_the_faster_one_is_taken(faster: Way, is_spare: bool) -> None:
    ways, kind = Ways(), Kind(1, is_spare)
    seconds = {way: 1.0 if way is faster else 2.0 for way in Way}
    first = used(ways, kind, seconds, 4)
    assert first[0] is kind.ways[0]
    assert sorted(first) == sorted([*Way, *Way])
    later = used(ways, kind, seconds, 2 * AGAIN)
    assert later.count(faster) == 2 * AGAIN - 2
    assert ways.choose(kind, 0) is faster


def test_the_usual_way_is_taken_unless_the_other_is_faster_by_far() -> None:
    ways, kind = Ways(), Kind(1, True)
    used(ways, kind, {Way.CACHED: 1.0, Way.DIRECT: 0.8}, 20)
    assert ways.choose(kind, 0) is Way.CACHED
    assert list(ways.speeds(kind)) == [Way.CACHED, Way.DIRECT]


def test_one_slow_file_does_not_decide() -> None:
    ways, kind = Ways(), Kind(1, True)
    used(ways, kind, {Way.CACHED: 1.0, Way.DIRECT: 1.5}, 12)
    ways.took(kind, Way.CACHED, SIZE, 100.0)
    assert ways.choose(kind, 0) is Way.CACHED


def test_a_disk_that_changes_changes_the_way() -> None:
    ways, kind = Ways(), Kind(1, False)
    used(ways, kind, {Way.CACHED: 2.0, Way.DIRECT: 1.0}, 20)
    assert ways.choose(kind, 0) is Way.DIRECT
    used(ways, kind, {Way.CACHED: 2.0, Way.DIRECT: 9.0}, 20)
    assert ways.choose(kind, 0) is Way.CACHED


def test_file_systems_and_kinds_of_files_are_measured_apart() -> None:
    ways = Ways()
    used(ways, Kind(1, False), {Way.CACHED: 1.0, Way.DIRECT: 2.0}, 4)
    assert ways.choose(Kind(1, False), 0) is Way.CACHED
    assert ways.choose(Kind(2, False), 0) is Way.DIRECT
    assert ways.choose(Kind(1, True), 0) is Way.CACHED


def test_small_files_say_nothing() -> None:
    ways, kind = Ways(), Kind(1, False)
    for _ in range(9):
        assert ways.choose(kind, SIZE - 1) is Way.DIRECT
        ways.took(kind, Way.DIRECT, SIZE - 1, 9.0)
    assert ways.choose(kind, SIZE) is Way.DIRECT
