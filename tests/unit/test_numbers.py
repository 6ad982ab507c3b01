"""The numbers of README and of docs/benchmarks.md are those that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import readme


@pytest.mark.parametrize("page", readme.TEXTS, ids=lambda page: page.name)
def test_a_page_has_the_numbers_that_were_kept(page: Path) -> None:
    assert page.read_text() == readme.rewritten(page)


@pytest.mark.parametrize("page", readme.TEXTS, ids=lambda page: page.name)
def test_a_number_that_changes_changes_the_table(page: Path) -> None:
    data = json.loads(readme.MEASURED.read_text())
    before = readme.TEXTS[page](data)
    for row in data["rows"]:
        row["value"]["median"] *= 3
    after = readme.TEXTS[page](data)
    changed = [old != new for old, new in zip(before.splitlines(), after.splitlines(), strict=True)]
    lines = [line for line in readme.LINES if page == readme.BENCHMARKS or line.in_readme]
    assert sum(changed) == len(lines) >= 6
