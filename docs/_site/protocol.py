"""The tables of the protocol page, made from the declarations of the messages.

``python -m docs._site.protocol`` writes them into the page. A test compares them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from portus.reach.protocol.messages import MESSAGES
from portus.reach.protocol.vocabulary import MessageKind, Phase

PAGE: Final = Path(__file__).resolve().parents[1] / "protocol.md"


def page() -> str:
    """The page, with the tables as they have to be."""
    text = PAGE.read_text()
    for table in (messages(), order()):
        before, heads, after = text.partition(table.splitlines()[0])
        assert heads, f"{PAGE}: expected a table that begins with {table.splitlines()[0]}"
        text = f"{before}{table}\n{after.partition(chr(10) * 2)[2]}"
    return text


def messages() -> str:
    """The table of messages."""
    lines = ["| number | message | from | fields | bytes at most |", "|---|---|---|---|---|"]
    for kind in MESSAGES:
        fields = "plain bytes"
        if kind.type is not None:
            fields = ", ".join(kind.type.__struct_fields__) or "none"
        row = (kind.number, kind.name, _side(kind), fields, kind.body_size_max)
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines) + "\n"


def order() -> str:
    """The table of their order."""
    lines = ["| state | message | from | state after |", "|---|---|---|---|"]
    lines += [
        f"| {before.value} | {kind.name} | {_side(kind)} | {after.value} |"
        for before in Phase
        for kind in MESSAGES
        if (after := kind.moves.get(before)) is not None
    ]
    return "\n".join(lines) + "\n"


def _side(kind: MessageKind) -> str:
    return "client" if kind.from_client else "host"


if __name__ == "__main__":
    PAGE.write_text(page())
