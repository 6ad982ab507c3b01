"""Docstrings as the site shows them: parameters as a list.

In the code a parameter has a line of its own, ``name: what it is``, among the prose. To whoever
parses docstrings that is the title of a section.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import griffe

LINE = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")


class Parameters(griffe.Extension):
    """Makes an item of a list of each line that begins with names of parameters or attributes."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        _rewrite(pkg)


def _rewrite(obj: griffe.Object) -> None:
    """The docstring of an object, and of all that is in it."""
    for each in obj.members.values():
        if isinstance(each, griffe.Object):  # and no alias
            _rewrite(each)
    if obj.docstring is not None:
        obj.docstring.value = listed(obj.docstring.value, names_of(obj))


def listed(text: str, known: Collection[str]) -> str:
    """``text`` with a list in place of the lines that begin with known names."""
    made: list[str] = []
    for line in text.splitlines():
        found = LINE.match(line)
        if found and set(found[1].split(", ")) <= set(known):
            if made and made[-1] and not made[-1].startswith(("- ", "    ")):
                made.append("")
            line = f"- `{found[1]}`: {line[found.end() :]}"
        made.append(line)
    return "\n".join(made)


def names_of(obj: griffe.Object) -> set[str]:
    """Parameters of a function; of a class, those that make it, and its attributes."""
    if isinstance(obj, griffe.Function):
        return {each.name for each in obj.parameters}
    if isinstance(obj, griffe.Class):
        return {each.name for each in obj.parameters} | set(obj.members)
    return set()
