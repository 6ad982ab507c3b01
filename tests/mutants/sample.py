"""Which mutants there are of a package, and which of them are tried."""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names


@dataclass(frozen=True)
class Mutant:
    """A module with one change. ``lines``: which ones it changes, from 1; ``code``: all of it."""

    module: Path
    operator: str
    lines: range
    code: str
    change: str
    """The lines before and after, as ``old -> new``."""


def sampled(package: Path, count: int, seed: int) -> list[Mutant]:
    """``count`` mutants of the modules in ``package``, by chance: each place is as likely as any
    other, and each change of it. Those whose code means the same are passed over."""
    sources = {module: module.read_text() for module in sorted(package.glob("*.py"))}
    places: dict[tuple[Path, tuple[int, int]], list[tuple[str, int]]] = {}
    for module, source in sources.items():
        for operator, occurrence, start in _all_of(source):
            places.setdefault((module, start), []).append((operator, occurrence))
    chance = random.Random(f"{seed} {package.name}")
    order = sorted(places)
    chance.shuffle(order)
    found: list[Mutant] = []
    for module, start in order:
        operator, occurrence = chance.choice(places[module, start])
        mutant = _made(module, sources[module], operator, occurrence)
        if mutant is not None:
            found.append(mutant)
        if len(found) == count:
            break
    return found


def _all_of(source: str) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """The operators that apply to ``source``, each with which of its occurrences, and where."""
    nodes: Final = list(ast_nodes(get_ast(source)))
    for name in sorted(operator_names()):
        operator = get_operator(name)
        if operator.arguments():  # needs the name of a variable
            continue
        starts = (start for node in nodes for start, _ in operator().mutation_positions(node))
        for occurrence, start in enumerate(starts):
            yield name, occurrence, start


def _made(module: Path, source: str, operator: str, occurrence: int) -> Mutant | None:
    """None if it means the same, or is no Python."""
    code = mutate_code(source, get_operator(operator)(), occurrence)
    try:
        if code is None or meaning(code) == meaning(source):
            return None
    except SyntaxError:
        return None
    old, new = source.splitlines(), code.splitlines()
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    [(_, first, last, its_first, its_last)] = [each for each in blocks if each[0] != "equal"][:1]
    before = " ".join(line.strip() for line in old[first:last])
    after = " ".join(line.strip() for line in new[its_first:its_last])
    lines = range(first + 1, max(last, first + 1) + 1)
    return Mutant(module, operator, lines, code, f"{before} -> {after}")


class _Meaning(ast.NodeTransformer):
    """Without what only mypy and readers look at: annotations (``from __future__ import
    annotations``), and whether a dataclass is frozen, has slots, or takes names alone."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.keywords = []
        for each in node.decorator_list:
            if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "dataclass":
                each.keywords = []
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(value=None)
        return self.generic_visit(node)


def meaning(source: str) -> str:
    """The same for modules that do the same, as far as that can be read off their syntax."""
    return ast.dump(_Meaning().visit(ast.parse(source)))
