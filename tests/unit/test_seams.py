"""Interfaces with one implementation: each has its reason here, and there are no others.

No more functions are passed as arguments than were.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("core/portus", "portus_accelerate", "portus_lightning")
KIT = "core/portus/testing"

ONE_IMPLEMENTATION = {
    "core/portus/engine/pipeline/plan.py: Previous": "of pools, which the engine may not import",
    "core/portus/reach/media/pool.py: FileSystem": "tests replace the disk, which crashes",
    "core/portus/reach/media/space.py: Space": "tests replace the memory, which crashes",
}
"""Why there is a ``Protocol`` that fewer than two classes of what is shipped, but for the test kit,
implement. With one, write its class instead, or pass what is needed of it."""

FUNCTIONS_MAX = 208
"""How many parameters and fields of what is shipped, but for the test kit, are functions. It only
falls. Where a function would have one value, call it, make it a method, pass the object that has
it, or return an iterator; then lower this."""


@dataclass(frozen=True)
class Class:
    """A class as it is written. ``members``: the parameters of methods, by name; none of others."""

    where: str
    name: str
    bases: list[str]
    members: dict[str, set[str]]


def members_of(node: ast.ClassDef) -> Iterator[tuple[str, set[str]]]:
    """Yield what instances have: methods, fields, and what methods set."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign | ast.Assign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            yield from ((one.id, set()) for one in targets if isinstance(one, ast.Name))
        elif isinstance(each, ast.FunctionDef):
            for one in ast.walk(each):
                if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                    yield one.attr, set()
            parameters = [*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]
            yield each.name, {one.arg for one in parameters} - {"self", "cls"}


def classes() -> list[Class]:
    """Return every class that is shipped, with the members of its bases."""
    found = [
        Class(
            f"{path.relative_to(ROOT)}: {node.name}",
            node.name,
            [ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases],
            dict(members_of(node)),
        )
        for package in SHIPPED
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    by_name = {each.name: each for each in found} | {each.where: each for each in found}
    for each in found:
        module = each.where.partition(" ")[0]
        above = [name for name in each.bases if name != each.name]
        for name in above:
            if base := by_name.get(f"{module} {name}") or by_name.get(name):
                above += [more for more in base.bases if more not in above]
                each.members.update(base.members | each.members)
    return found


def implements(one: Class, protocol: Class) -> bool:
    """True if it has every member, and methods every parameter."""
    return all(
        name in one.members and (not one.members[name] or parameters <= one.members[name])
        for name, parameters in protocol.members.items()
    )


def test_interfaces_have_two_implementations_or_a_reason() -> None:
    found = classes()
    protocols = [each for each in found if "Protocol" in each.bases]
    real = [each for each in found if each not in protocols and KIT not in each.where]
    assert len(protocols) > 20
    alone = {each.where for each in protocols if sum(implements(one, each) for one in real) < 2}
    assert sorted(alone - {*ONE_IMPLEMENTATION}) == [], "write the class instead of these"
    assert sorted({*ONE_IMPLEMENTATION} - alone) == [], "these have two by now, or are gone"


def is_function(annotation: ast.expr | None, names: set[str]) -> bool:
    """True for ``Callable``, also inside of others, and under one of ``names``."""
    words = re.findall(r"\w+", ast.unparse(annotation)) if annotation is not None else []
    return not names.isdisjoint(words)


def aliases(tree: ast.Module) -> set[str]:
    """Return the names that a module gives to types of functions."""
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp)
        for target in node.targets
        if isinstance(target, ast.Name) and is_function(node.value, {"Callable"})
    }


def annotated(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the parameters of a function, or the fields of a class, and their types."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        every = node.args
        parameters = [*every.posonlyargs, *every.args, *every.kwonlyargs]
        parameters += [one for one in (every.vararg, every.kwarg) if one is not None]
        yield from ((f"{node.name}({one.arg})", one.annotation) for one in parameters)
    elif isinstance(node, ast.ClassDef):
        for one in node.body:
            if isinstance(one, ast.AnnAssign):
                yield f"{node.name}.{ast.unparse(one.target)}", one.annotation


def passed_functions() -> Iterator[str]:
    """Yield the parameters and fields that are functions."""
    paths = [path for each in SHIPPED for path in sorted((ROOT / each).rglob("*.py"))]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
    known = set().union(*map(aliases, trees.values()))
    for where, tree in trees.items():
        names = {"Callable"} | aliases(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names |= known & {one.name for one in node.names}
        if not where.startswith(KIT):
            for node in ast.walk(tree):
                yield from (
                    f"{where}: {name}"
                    for name, type_ in annotated(node)
                    if is_function(type_, names)
                )


def test_no_more_functions_are_passed_than_were() -> None:
    found = list(passed_functions())
    assert "core/portus/engine/paths/saver.py: _Owner.name" in found
    assert "core/portus/engine/image/image.py: verify(read)" in found, "under a name of its own"
    assert len(found) <= FUNCTIONS_MAX
    assert len(found) > FUNCTIONS_MAX - 10, f"lower FUNCTIONS_MAX to {len(found)}"
