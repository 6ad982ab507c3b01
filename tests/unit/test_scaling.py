"""docs/scaling.md says what its formulas say, and its constants are those of the benchmarks."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from tests.bench.pages import written
from tests.bench.scaling import (
    CALL,
    COMMIT,
    CONSTANTS,
    DOCS,
    RATE,
    WIRE,
    Constant,
    Site,
    tables,
)


def test_the_page_has_the_numbers_of_the_formulas() -> None:
    page = (DOCS / "scaling.md").read_text()
    assert written(page, tables()) == page, "python -m tests.bench.scaling --write renews it"
    assert (DOCS / "scaling.png").is_file()


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.name)
def test_every_constant_stands_in_the_row_that_it_names(constant: Constant) -> None:
    lines = (DOCS / constant.page).read_text().splitlines()
    [row] = [line for line in lines if line.startswith(f"| {constant.row} |")]
    assert re.search(rf"(?<![\d.]){re.escape(constant.text)}(?![\d.])", row)
    number, _, unit = constant.text.partition(" ")
    unit = unit or constant.what.partition(",")[0]
    assert math.isclose(float(number) * {"ms": 1e-3}.get(unit, 1), constant.value)


def test_the_formulas_by_hand() -> None:
    site = Site(ranks=100, hosts=2, state=1e9, host_nic=10e9, rank_nic=1e9, medium=5e9, window=4)
    assert site.host_rate == 5e9
    assert site.pulled == 100 / 2 * 1e9 / 5e9
    assert site.blocked == pytest.approx(CALL.value + 6)
    assert site.committing == pytest.approx(COMMIT.value + 50 / RATE.value)
    assert site.durable == pytest.approx(CALL.value + 10 + site.committing)
    assert site.interval == pytest.approx(math.sqrt(2 * site.blocked * site.mtbf / 100))
    wasted = (site.interval / 2 + site.durable) / (site.mtbf / 100)
    assert site.lost == pytest.approx(site.blocked / site.interval + wasted)
    slow = replace(site, hosts=100)
    assert slow.pulled == 1e9 / (WIRE.value * 1e9), "a rank sends no faster than it can"


def test_so_many_hosts_hide_the_copy_and_one_fewer_does_not() -> None:
    site = Site(ranks=512, hosts=1)
    enough = replace(site, hosts=site.hosts_to_hide)
    assert enough.pulled <= site.window < replace(site, hosts=site.hosts_to_hide - 1).pulled


def test_connections_set_a_least_number_of_hosts() -> None:
    assert Site(ranks=10_000, hosts=1, state=1.0).hosts_to_hide == 53
