"""What a crash of some ranks leaves, over every subset of ranks that had committed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from portus.index.groups import (
    Group,
    Left,
    Past,
    cut_off,
    groups_of,
    leftovers,
    new_id,
    part_model,
    part_of,
    part_token,
    surplus,
)
from portus.index.keep import Keep
from portus.index.place import Place
from portus.spec import VersionInfo

RANKS = 4


@dataclass
class Rank:
    """The pool of one rank: versions, oldest first; and what the rank knows."""

    number: int
    held: list[VersionInfo] = field(default_factory=list)
    commits: int = 0
    past: Past = field(default_factory=Past)
    committed: list[bytes] = field(default_factory=list)
    complete: set[bytes] = field(default_factory=set)

    def commit(
        self, group: bytes, step: int, keep: int | Keep, metrics: dict[str, float] | None = None
    ) -> None:
        """Commit a part, and in the same commit let go of what the rule allows."""
        known = {*self.complete, *self.past.complete}
        rule = Keep.of(keep)
        assert rule is not None
        settled = {*known, *self.past.incomplete, *self.committed}
        unseen = {info.token[:12] for info in self.held} - settled
        gone = surplus(self.held, known, rule, unseen)
        gone += cut_off(self.held, known, self.past.incomplete)
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
                metrics=metrics or {},
            )
        )
        self.committed.append(group)


def known(ranks: list[Rank]) -> list[Group]:
    return groups_of((Place.named(f"{r.number}.portus"), info) for r in ranks for info in r.held)


def newest_complete(ranks: list[Rank]) -> int | None:
    steps = [group.step for group in known(ranks) if group.is_complete]
    return steps[-1] if steps else None


def begin(ranks: list[Rank]) -> None:
    """A job begins: one rank looks at what is there, and tells the others."""
    past = Past.of(known(ranks), RANKS, is_whole=True)
    for rank in ranks:
        rank.past, rank.committed, rank.complete = past, [], set()


def exchange(ranks: list[Rank]) -> None:
    """A save begins: all hear what each has committed in this job."""
    everywhere = set.intersection(*(set(rank.committed) for rank in ranks))
    for rank in ranks:
        rank.complete |= everywhere


SUBSETS = [
    set(subset)
    for size in range(RANKS + 1)
    for subset in itertools.combinations(range(RANKS), size)
]


@pytest.mark.parametrize("keep", [1, 2])
def test_whoever_had_committed_a_complete_group_stays_and_is_the_newest(keep: int) -> None:
    tried = 0
    # Two jobs in a row are killed in a save, each after any ranks; then one that goes on.
    for first, second in itertools.product(SUBSETS, SUBSETS):
        ranks = [Rank(number) for number in range(RANKS)]
        steps: list[int] = []
        for step, committed in enumerate((set(range(RANKS)), first, second, set(range(RANKS)))):
            group = new_id()
            begin(ranks)
            exchange(ranks)
            for rank in ranks:
                if rank.number in committed:
                    rank.commit(group, step, keep)
                    assert newest_complete(ranks) is not None or not steps
            if len(committed) == RANKS:
                steps.append(step)
            assert newest_complete(ranks) == steps[-1]
            tried += 1
        group = new_id()
        exchange(ranks)
        for rank in ranks:  # what was cut off goes once a newer group is known to be complete
            rank.commit(group, 4, keep)
        assert sum(group.is_complete for group in known(ranks)) <= keep + 1
        assert all(group.is_complete for group in known(ranks))
    assert tried == 4 * 4**RANKS


def test_keep_counts_complete_groups() -> None:
    ranks = [Rank(number) for number in range(RANKS)]
    for step in range(6):
        group = new_id()
        exchange(ranks)
        for rank in ranks:
            rank.commit(group, step, 2)
            assert sum(each.is_complete for each in known(ranks)) >= min(step, 2)
    assert [group.step for group in known(ranks) if group.is_complete][-2:] == [4, 5]
    assert all(len(rank.held) <= 3 for rank in ranks)


@pytest.mark.parametrize(
    "keep", [Keep(last=1, every=10), Keep(last=1, best=("loss", "min", 1)), Keep(within=1e-6)]
)
def test_what_was_not_seen_when_a_job_began_stays_where_keep_wants_it_for_good(keep: Keep) -> None:
    ranks = [Rank(number) for number in range(RANKS)]
    first = new_id()
    for rank in ranks:
        rank.commit(first, 10, keep, {"loss": 0.1})
        rank.past, rank.committed = Past(), []  # one pool of them could not be read
    for step in range(11, 16):
        group = new_id()
        exchange(ranks)
        for rank in ranks:
            rank.commit(group, step, keep, {"loss": 0.5})
    assert ranks[0].held[0].step == 10


def test_of_what_may_only_not_have_been_seen_nothing_counts_as_cut_off() -> None:
    ranks = [Rank(number) for number in range(RANKS)]
    one, other = new_id(), new_id()
    for rank in ranks[1:]:
        rank.commit(one, 1, 2)
    for rank in ranks:
        rank.commit(other, 2, 2)
    seen = Past.of(known(ranks), RANKS, is_whole=True)
    assert (seen.complete, seen.incomplete) == ((other,), (one,))
    assert Past.of(known(ranks), RANKS, is_whole=False).incomplete == ()
    assert {each.id for each in Past.of(known(ranks), 7, is_whole=True).others} == {one, other}
    held = ranks[1].held
    assert cut_off(held, {other}, {one}) == [held[0].id]
    assert cut_off(held, set(), {one}) == [], "a rank may commit it yet"
    assert cut_off(held, {one}, {other}) == []


def test_parts_of_two_attempts_at_one_step_do_not_mix() -> None:
    ranks = [Rank(number) for number in range(RANKS)]
    one, other = new_id(), new_id()
    for rank in ranks:
        rank.commit(one if rank.number % 2 else other, 7, 1)
    assert newest_complete(ranks) is None
    assert [group.missing for group in known(ranks)] in ([[1, 3], [0, 2]], [[0, 2], [1, 3]])


def test_ranks_keep_the_same_groups_though_some_were_never_complete() -> None:
    """Of each ten steps the first complete group, and the best; a group that a rank has no part of
    is in the place of none."""
    keep = Keep(last=1, every=10, best=("loss", "min", 1))
    ranks = [Rank(number) for number in range(RANKS)]
    begin(ranks)
    for step in range(5, 45, 5):
        group = new_id()
        exchange(ranks)
        for rank in ranks:
            if step != 10 or rank.number != 2:  # the group of step 10 is never complete
                rank.commit(group, step, keep, {"loss": abs(step - 25.0)})
    assert [each.step for each in known(ranks)] == [15, 20, 25, 30, 35, 40]
    exchange(ranks)
    last = new_id()
    for rank in ranks:
        rank.commit(last, 45, keep)
    assert [each.step for each in known(ranks)] == [15, 20, 25, 30, 40, 45]
    assert all(each.is_complete for each in known(ranks))


def test_what_jobs_of_other_numbers_of_ranks_left_stays_if_it_is_kept_for_ever() -> None:
    left = [Left(bytes([n]) * 12, 2, n != 2, step=n * 5, time_ns=n) for n in range(1, 7)]
    gone = leftovers(left, 3, Keep(last=2, every=10), 10)
    assert {each.step for each in left if each.id not in gone} == {15, 20, 30}
    assert leftovers(left, 3, Keep(last=2), 10) == {each.id for each in left}
    assert leftovers(left, 0, Keep(last=2), 10) == {each.id for each in left[:-2]}


def test_parts_of_two_steps_do_not_mix() -> None:
    ranks = [Rank(number) for number in range(RANKS)]
    one = new_id()
    for rank in ranks:
        rank.commit(one, 7 + rank.number % 2, 1)
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


def test_commits_on_different_hosts_have_no_common_order() -> None:
    """Rank 0 saved to one host, whose pool had many commits, and goes on with another."""

    def part(host: str, commit: int, step: int, time_ns: int) -> tuple[Place, VersionInfo]:
        token = part_token(step.to_bytes(12, "big"), 0)
        info = VersionInfo("run/rank-0-of-1", step, commit, step, token, time_ns, size=1)
        return Place.named(host), info

    old, new = "portus://old", "portus://new"
    parts = [part(old, 500, 1, 30), part(old, 501, 2, 20), part(new, 1, 3, 40), part(new, 2, 4, 35)]
    assert [group.step for group in groups_of(parts)] == [1, 2, 3, 4]
