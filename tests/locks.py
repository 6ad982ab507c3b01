"""The locks of the code, found in its text; and those that the architecture page lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
KINDS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "InterruptibleCondition"}
"""What makes a lock; the last one is the condition of ``portus.engine.copying.thread``."""


@dataclass(frozen=True, slots=True)
class Lock:
    """One place that makes a lock. ``name``: ``Class.attribute``, or ``module.name``."""

    name: str
    path: Path
    lines: range


def rows_of_the_page() -> list[tuple[str, ...]]:
    """The locks of each row of the page's table, from top to bottom."""
    table = PAGE.read_text().partition("\n## Locks\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [tuple(re.findall("`([^`]+)`", cell)) for cell in cells]


def locks_of_the_code() -> list[Lock]:
    """Every lock that a shipped module makes. A condition over a lock that is there is none."""
    folders = [ROOT / "core" / "portus", *ROOT.glob("portus_*")]
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return [lock for path in paths for lock in _locks_of(path)]


def _locks_of(path: Path) -> Iterator[Lock]:
    tree = ast.parse(path.read_text())
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not _makes_a_lock(node):
            continue
        yield Lock(_name(node, above, path), path, range(node.lineno, (node.end_lineno or 0) + 1))


def _makes_a_lock(call: ast.Call) -> bool:
    module, _, kind = ast.unparse(call.func).rpartition(".")
    if kind not in KINDS or module not in ("", "threading"):
        return False
    return not (call.args and kind in ("Condition", "InterruptibleCondition"))


def _name(node: ast.AST, above: dict[ast.AST, ast.AST], path: Path) -> str:
    """Return what a new lock is called: the attribute or the dictionary that it is put into."""
    kept, owner, way = "", path.stem, [node]
    while not isinstance(node, ast.Module):
        node = above[node]
        way.append(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setdefault"):
            kept = kept or ast.unparse(node.func).removesuffix(".setdefault")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                target = target.elts[[value in way for value in node.value.elts].index(True)]
            kept = kept or ast.unparse(target)
        elif isinstance(node, ast.ClassDef):
            owner = node.name
            break
    assert kept, f"{path}: a lock without a name"
    return f"{owner}.{kept.removeprefix('self.')}"
