"""The roll of a model: a small file beside its pools that says which of its groups are complete.

``<model>.groups``, the name quoted as in names of pool files, holds a digest and one JSON object.
It is a cache, and of complete groups alone: that one is not named says nothing, and that one is
named does not say that it is there still. What it saves is a look at every rank's pool for a group
to load. One that is missing, torn, damaged or of another model is none. It is replaced as a whole,
and not synced.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import urllib.parse
from collections.abc import Collection, Sequence
from typing import Final

from portus.format.checksum import digest
from portus.index.groups import ID_SIZE, part_of
from portus.index.place import SUFFIX, quoted

_log: Final = logging.getLogger("portus")

ROLL_SUFFIX: Final = ".groups"

GROUPS_MAX: Final = 64
"""Groups that a roll names: the newest."""

_FORMAT: Final = 1
_SIZE_MAX: Final = 64 << 10
_DIGEST_CHARS: Final = 32


def encode(model: str, groups: Sequence[bytes]) -> bytes:
    """A roll, as it lies in its file."""
    content = {"portus_roll": _FORMAT, "model": model, "groups": [each.hex() for each in groups]}
    text = json.dumps(content).encode("ascii")
    return digest(text).hex().encode("ascii") + b" " + text + b"\n"


def decode(model: str, data: bytes) -> list[bytes]:
    """The ids of groups in the roll of ``model``, newest last; none if it is not what ``encode``
    made of them."""
    try:
        groups = [bytes.fromhex(each) for each in json.loads(data[_DIGEST_CHARS:])["groups"]]
        is_whole = data == encode(model, groups)
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return groups if is_whole and {ID_SIZE}.issuperset(map(len, groups)) else []


def path_of(directory: str, model: str) -> str:
    """Where the roll of a model is."""
    return os.path.join(directory, quoted(model) + ROLL_SUFFIX)


def read(directory: str, model: str) -> list[bytes]:
    """What the roll of a model in a pool directory names, newest last; nothing if there is none."""
    try:
        with open(path_of(directory, model), "rb") as file:
            return decode(model, file.read(_SIZE_MAX))
    except OSError:
        return []


def add(directory: str, model: str, groups: Sequence[bytes]) -> None:
    """Name these groups, which are complete, newest last. What cannot be written is not: then the
    parts tell. Two that add at once may each leave out what the other added."""
    known = read(directory, model)
    more = [each for each in groups if each not in known]
    if not more:
        return
    target = path_of(directory, model)
    start, end = _unfinished(model)
    fresh = os.path.join(directory, start + os.urandom(8).hex() + end)
    try:
        with open(fresh, "wb") as file:
            file.write(encode(model, [*known, *more][-GROUPS_MAX:]))
        os.replace(fresh, target)
    except OSError as error:
        _log.debug("%s: cannot record which groups are complete: %s", target, error)
        with contextlib.suppress(OSError):
            os.unlink(fresh)


def remove(directory: str, model: str) -> None:
    """Take a roll away. One that cannot be removed stays."""
    with contextlib.suppress(OSError):
        os.unlink(path_of(directory, model))


def deserted(directory: str, names: Collection[str]) -> list[str]:
    """Rolls among ``names``, all that is in a pool directory, of models that have no pool there. A
    file of somebody else's is none, whatever its name."""
    pools = [name for name in names if name.endswith(SUFFIX)]
    found = []
    for name in names:
        stem = name.removesuffix(ROLL_SUFFIX)
        if stem == name or any(pool.startswith(f"{stem}%2F") for pool in pools):
            continue
        if read(directory, urllib.parse.unquote(stem)):
            found.append(name)
    return found


def clear(directory: str, model: str) -> None:
    """Take away what those who were killed while they added left. By one who knows that nobody
    adds now."""
    start, end = _unfinished(model)
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name.startswith(start) and name.endswith(end):
                os.unlink(os.path.join(directory, name))


def part_files(directory: str, model: str) -> dict[tuple[int, int], list[str]]:
    """The pool files of the parts of a model: by rank and number of ranks, those of one run, from
    names alone. Raises ``OSError``."""
    start = quoted(model) + "%2Frank-"
    found: dict[tuple[int, int], list[str]] = {}
    for name in sorted(os.listdir(directory)):
        match = _POOL.fullmatch(name) if name.startswith(start) else None
        said = urllib.parse.unquote(match[1].removeprefix(quoted(model))) if match else ""
        part = part_of(model + said)
        if said and part is not None and part[0] == model:
            found.setdefault(part[1:], []).append(os.path.join(directory, name))
    return found


_POOL: Final = re.compile(rf"([^+]+)(?:\+[0-9]+)?{re.escape(SUFFIX)}")
"""A pool file: its writer, and which of the generations of it."""


def _unfinished(model: str) -> tuple[str, str]:
    """How the name of a roll that is being written begins and ends."""
    return f".{quoted(model)}{ROLL_SUFFIX}.", ".new"
