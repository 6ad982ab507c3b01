"""What a crash of some ranks leaves, over every subset of ranks that had committed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from portus.index.groups import (
    Group,
    groups_of,
    never_complete,
    new_id,
    part_model,
    part_of,
    part_token,
    surplus,
)
from portus.index.place import Place
from portus.spec import VersionInfo

RANKS = 4


@dataclass
class Rank:
    """The pool of one rank: versions, oldest first."""

    number: int
    held: list[VersionInfo] = field(default_factory=list)
    commits: int = 0

    def commit(self, group: bytes, step: int, everyone: list[Rank], keep: int) -> None:
        """Commit a part, and in the same commit let go of what the rule allows."""
        there = known(everyone)
        gone = surplus(self.held, there, keep) + never_complete(self.held, there)
        self.held = [info for info in self.held if info.id not in gone]
        self.commits += 1
        self.held.append(
            VersionInfo(
                model=part_model("run", self.number, RANKS),
                id=self.commits,
                commit=self.commits,
                step=step,
                token=part_token(group, self.number),
                time_ns=1000 - self.commits,  # a clock that goes back
                size=1,
            )
        )


def known(ranks: list[Rank]) -> list[Group]:
    return groups_of((Place.named(f"{r.number}.portus"), info) for r in ranks for info in r.held)


def newest_complete(ranks: list[Rank]) -> int | None:
    steps = [group.step for group in known(ranks) if group.is_complete]
    return steps[-1] if steps else None


SUBSETS = [
    set(subset)
    for size in range(RANKS + 1)
    for subset in itertools.combinations(range(RANKS), size)
]


@pytest.mark.parametrize("keep", [1, 2])
def test_whoever_had_committed_a_complete_group_stays_and_is_the_newest(keep: int) -> None:
    tried = 0
    # Two saves in a row are cut off, each after any ranks; then one more, in any single order.
    for first, second in itertools.product(SUBSETS, SUBSETS):
        ranks = [Rank(number) for number in range(RANKS)]
        steps: list[int] = []
        for step, committed in enumerate((set(range(RANKS)), first, second, set(range(RANKS)))):
            group = new_id()
            for rank in ranks:
                if rank.number in committed:
                    rank.commit(group, step, ranks, keep)
                    assert newest_complete(ranks) is not None or not steps
            if len(committed) == RANKS:
                steps.append(step)
            assert newest_complete(ranks) == steps[-1]
            tried += 1
        group = new_id()
        for rank in ranks:  # what was cut off goes once a newer group is known to be complete
            rank.commit(group, 4, ranks, keep)
        assert sum(group.is_complete for group in known(ranks)) <= keep + 1
        assert keep > 1 or all(len(rank.held) == 2 for rank in ranks)
    assert tried == 4 * 4**RANKS


def test_keep_counts_complete_groups() -> None:
    ranks = [Rank(number) for number in range(RANKS)]
    for step in range(6):
        group = new_id()
        for rank in ranks:
            rank.commit(group, step, ranks, 2)
            assert sum(each.is_complete for each in known(ranks)) >= min(step, 2)
    assert [group.step for group in known(ranks) if group.is_complete][-2:] == [4, 5]
    assert all(len(rank.held) <= 3 for rank in ranks)


def test_parts_of_two_attempts_at_one_step_do_not_mix() -> None:
    ranks = [Rank(number) for number in range(RANKS)]
    one, other = new_id(), new_id()
    for rank in ranks:
        rank.commit(one if rank.number % 2 else other, 7, ranks, 1)
    assert newest_complete(ranks) is None
    assert [group.missing for group in known(ranks)] in ([[1, 3], [0, 2]], [[0, 2], [1, 3]])


def test_parts_of_two_steps_do_not_mix() -> None:
    ranks = [Rank(number) for number in range(RANKS)]
    one = new_id()
    for rank in ranks:
        rank.commit(one, 7 + rank.number % 2, ranks, 1)
    assert newest_complete(ranks) is None
    assert [group.missing for group in known(ranks)] in ([[1, 3], [0, 2]], [[0, 2], [1, 3]])


def test_a_model_that_only_happens_to_be_called_so_is_no_part() -> None:
    assert part_of("run/rank-1-of-2") == ("run", 1, 2)
    for name in ("run/rank-2-of-2", "run/rank-0-of-0", "run/rank-01-of-2", "run", "/rank-0-of-1"):
        assert part_of(name) is None, name
    info = VersionInfo(
        model="run/rank-0-of-1", id=1, commit=1, step=1, token=b"x" * 16, time_ns=1, size=1
    )
    assert groups_of([(Place.named("a"), info)]) == []
