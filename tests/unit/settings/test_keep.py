"""Which versions stay: against brute force, and as many commits decide one after another."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from portus.engine.settings.keep import METRICS_MAX, Keep, check_metrics
from portus.engine.spec import VersionInfo
from portus.errors import UsageError

HOUR_NS = 3600 * 10**9


def version(number: int, step: int, time_ns: int, score: float | None) -> VersionInfo:
    metrics = {} if score is None else {"loss": score, "other": -score}
    return VersionInfo("m", number, number, step, b"", time_ns, 0, metrics=metrics)


VERSIONS = st.lists(
    st.tuples(
        st.integers(-3, 25),  # steps come twice, and go back
        st.integers(0, 5),  # hours since the one before
        st.none() | st.sampled_from([0.0, 1.0, 2.0, 3.0]),  # many equals
    ),
    max_size=12,
)
KEEPS = st.builds(
    Keep,
    last=st.integers(1, 4),
    every=st.none() | st.integers(1, 9),
    within=st.none() | st.sampled_from(["1h", "6h", 7200.0, 1e300]),
    best=st.none() | st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
)


def made(rows: list[tuple[int, int, float | None]]) -> list[VersionInfo]:
    found, time_ns = [], 10**18
    for number, (step, hours, score) in enumerate(rows, 1):
        time_ns += hours * HOUR_NS
        found.append(version(number, step, time_ns, score))
    return found


def is_wanted(keep: Keep, each: VersionInfo, every: list[VersionInfo]) -> bool:
    """By the words of ``Keep``, one version at a time."""
    if sum(other.id > each.id for other in every) < keep.last:
        return True
    age_s = (every[-1].time_ns - each.time_ns) / 1e9
    if keep.within is not None and age_s <= float(keep.within):
        return True
    if keep.every is not None and each.step >= keep.every:
        multiple = max(n for n in range(each.step + 1) if n % keep.every == 0)
        rivals = [o for o in every if multiple <= o.step < multiple + keep.every]
        if each.id == max(o.id for o in rivals if o.step == min(r.step for r in rivals)):
            return True
    if keep.best is not None and "loss" in each.metrics:
        sign = 1 if keep.best[1] == "min" else -1
        scored = [o for o in every if "loss" in o.metrics]
        mine = sign * each.metrics["loss"]
        better = [
            o
            for o in scored
            if sign * o.metrics["loss"] < mine
            or (o.metrics["loss"] == each.metrics["loss"] and o.id > each.id)
        ]
        return len(better) < keep.best[2]
    return False


@given(VERSIONS, KEEPS)
def test_what_stays_is_what_the_words_say(rows: Any, keep: Keep) -> None:
    every = made(rows)
    expected = [each.id for each in every if is_wanted(keep, each, every)]
    assert [each.id for each in keep.staying(every)] == expected


@given(VERSIONS, KEEPS)
def test_nothing_that_was_let_go_of_is_wanted_again(rows: Any, keep: Keep) -> None:
    every, there = made(rows), list[VersionInfo]()
    for each in every:  # a commit each
        there = keep.staying([*there, each])
    assert there == keep.staying(every)


def test_a_number_is_that_many_of_the_newest() -> None:
    assert Keep.of(3) == Keep(last=3)
    assert Keep.of(None) is None
    assert Keep.of({"every": 10, "best": ["loss", "max", 2]}) == Keep(
        last=2, every=10, best=("loss", "max", 2)
    )


def test_it_goes_there_and_back_as_plain_values_and_as_text() -> None:
    keep = Keep(last=3, every=1000, within="24h", best=("val:loss", "min", 3))
    assert keep.within == 86400.0
    assert Keep.of(dataclasses.asdict(keep)) == keep
    assert Keep.parse("last=3, every=1000,within=24h,best=val:loss:min:3") == keep
    assert Keep.parse("5") == Keep(last=5)
    assert Keep.parse("within=7d") == Keep(within=7 * 86400)


@pytest.mark.parametrize(
    "value",
    [0, -1, True, "2", 1.5, {"lasts": 2}, {"last": 0}, {"every": 0}, {"within": "soon"}]
    + [
        {"best": each}
        for each in (
            *("loss", ("loss", "least", 3), ("loss", "min", 0), ("", "min", 1)),
            *(("loss", "min"), ("loss", "min", 3, 3)),
        )
    ],
)
def test_what_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="keep: "):
        Keep.of(value)


@pytest.mark.parametrize("text", ["", "0", "x", "last=2,last=3", "2,every=5", "best=loss", "of=2"])
def test_text_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="keep: "):
        Keep.parse(text)


def test_metrics_are_finite_numbers_by_name() -> None:
    said = {"a": 1, "b": torch.tensor(0.5), "c": float("nan"), "d": float("-inf")}
    assert check_metrics(said) == {"a": 1.0, "b": 0.5}
    assert check_metrics(None) == {}
    too_many = {str(n): n for n in range(METRICS_MAX + 1)}
    for wrong in ({"a": "x"}, {"a": torch.ones(2)}, {"": 1}, {1: 1}, {"\ud800": 1}, too_many):
        with pytest.raises(UsageError, match="metrics: "):
            check_metrics(wrong)  # type: ignore[arg-type]


def test_a_version_is_the_same_whatever_it_scored() -> None:
    one = version(1, 1, 1, 0.5)
    assert one == dataclasses.replace(one, metrics={})
    assert hash(one) == hash(dataclasses.replace(one, metrics={}))
