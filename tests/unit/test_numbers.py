"""README's numbers are those that were measured."""

from __future__ import annotations

import json

from tests.bench import readme


def test_readme_has_the_numbers_that_were_kept() -> None:
    page = readme.README.read_text()
    assert page == readme.rewritten(page)


def test_a_number_that_changes_changes_the_table() -> None:
    data = json.loads(readme.MEASURED.read_text())
    before = readme.text(data)
    for row in data["rows"]:
        row["value"]["median"] *= 3
    after = readme.text(data)
    changed = [old != new for old, new in zip(before.splitlines(), after.splitlines(), strict=True)]
    assert sum(changed) == len(readme.LINES)
