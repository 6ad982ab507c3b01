"""The tables of the modules of adapters, made from the first paragraph of each.

``python -m docs._site.modules`` writes them into the architecture page. A test compares them.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "architecture.md"
BEGIN: Final = "<!-- made by: python -m docs._site.modules -->\n\n"
END: Final = "<!-- end of the modules -->"


def page() -> str:
    """The architecture page, with the tables as they have to be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE}: expected {BEGIN} and {END}"
    return "".join([before, BEGIN, *map(_table, sorted(ROOT.glob("portus_*/"))), END, after])


def _table(folder: Path) -> str:
    paths = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
    rows = [f"| `{path.stem}` | {_first(path)} |" for path in paths]
    return "\n".join([f"| module of `{folder.name}` | what |", "|---|---|", *rows, "", ""])


def _first(path: Path) -> str:
    """The first paragraph of a module."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text, f"{path}: a module says what it is"
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`").removesuffix(".")


if __name__ == "__main__":
    PAGE.write_text(page())
