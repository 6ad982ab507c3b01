"""The tables of the protocol page, made from the declarations of the messages.

``python -m docs._site.protocol`` writes them into the page. A test compares them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from portus.reach.protocol import connection, messages

PAGE: Final = Path(__file__).resolve().parents[1] / "protocol.md"


def page() -> str:
    """The page, with the tables as they have to be."""
    text = PAGE.read_text()
    for table in (messages.table(), connection.table()):
        before, heads, after = text.partition(table.splitlines()[0])
        assert heads, f"{PAGE}: expected a table that begins with {table.splitlines()[0]}"
        text = f"{before}{table}\n{after.partition(chr(10) * 2)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
