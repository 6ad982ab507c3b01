"""Tables of a page of docs/ that a program writes: each between ``<!-- name -->`` and the next
``<!-- end -->``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(head: str, rows: Sequence[str]) -> str:
    """A table of Markdown. head: the names of its columns, with | between."""
    return "\n".join([f"| {head} |", "|" + "---|" * (head.count("|") + 1), *rows])


def written(page: str, tables: Mapping[str, str]) -> str:
    """``page`` with every table, by the name of its mark, as it is given."""
    for name, text in tables.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        assert mark, f"no table {name}"
        page = f"{before}{mark}{text}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page
