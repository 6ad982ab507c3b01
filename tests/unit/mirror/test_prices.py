"""What docs/mirrors.md says that a mirror costs follows from the format, and from prices with a
date and a source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from portus.reach.mirror.store import PART_SIZE

PAGE = (Path(__file__).parents[3] / "docs" / "mirrors.md").read_text()
SMALL_ONES = 3


def rows(title: str) -> list[list[str]]:
    """The rows of the table whose first column has that title."""
    table = PAGE[PAGE.index(f"| {title} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_prices_have_a_date_and_a_source() -> None:
    [line] = [line for line in PAGE.splitlines() if "dollars for 1,000 PUTs or LISTs" in line]
    assert re.search(r"in (January|July|November) 20\d\d|As of 20\d\d", line)
    assert "https://aws.amazon.com/s3/pricing/" in line
    assert "https://cloud.google.com/storage/pricing" in line


@pytest.mark.parametrize("row", rows("a checkpoint"), ids=lambda row: row[0][:6])
def test_what_1000_saves_cost_is_calculated_from_the_price_of_a_put(row: list[str]) -> None:
    price = re.search(r"([0-9.]+) dollars for 1,000 PUTs or LISTs", PAGE)
    assert price is not None
    size = re.search(r"(\d+) ([MG])iB", row[0])
    assert size is not None
    length = int(size[1]) << (20 if size[2] == "M" else 30)
    puts = 1000 * (-(-length // PART_SIZE) + SMALL_ONES)
    assert row[1] == f"{puts:,}"
    decimals = len(row[2].partition(".")[2])
    assert row[2] == f"{puts / 1000 * float(price[1]):.{decimals}f}"


@pytest.mark.parametrize("row", rows("saves every"), ids=lambda row: row[0])
def test_what_is_lost_follows_from_the_time_of_an_upload(row: list[str]) -> None:
    every, upload = (int(cell.removesuffix(" s")) for cell in row[:2])
    most = 2 * upload if upload > every else every + upload
    assert row[2] == f"{upload} to {most}"
