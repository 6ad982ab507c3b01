"""Many checkpoints made real files, one after another, in the room and the time that there is."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from portus.client.files.keeper import is_aside
from portus.client.files.reference import read
from portus.client.leaving.materialize import give_back, in_place
from portus.client.loading.resolve import POOLS, KnownPools, pool_of, use_reference
from portus.errors import AbandonedError, PortusError, UsageError

_log: Final = logging.getLogger("portus")


@dataclass(frozen=True, slots=True)
class Remaining:
    """What stayed a reference: the file or directory, the bytes that it leads to (None: they
    cannot be told), and why. As text: the command that makes it real, and the rest."""

    path: str
    size: int | None
    reason: str

    def __str__(self) -> str:
        size = "" if self.size is None else f"{self.size} bytes; "
        return f"portus materialize {shlex.quote(self.path)}  # {size}{self.reason}"


def materialize_in_turn(
    paths: Iterable[str | os.PathLike[str]], pools: KnownPools = POOLS, *, within_s: float
) -> list[Remaining]:
    """Put real files in place of the references at ``paths``, or below them, as ``materialize``
    does, in this order. What there is no room for stays, and all that is left after ``within_s``
    seconds. What nothing leads to then goes, and its space is given back.

    Files that were put aside (``.uncommitted``) stay as they are, and are not named.
    Returns what stayed, and why. Raises none of our errors: they are reasons.
    """
    end = time.monotonic() + within_s

    def advanced(size: int) -> None:
        if time.monotonic() >= end:
            raise AbandonedError(f"it was not done within {within_s:g} s")

    left, found = [], _found(paths)
    led_to = _pools_of(found, pools)
    for path in found:
        try:
            list(in_place(path, pools, advanced))
        except PortusError as error:
            left.append(Remaining(path, _size(path, pools), str(error)))
    for pool in led_to:
        give_back(pool)
    return left


def materialize_at_end(paths: Iterable[str | os.PathLike[str]], *, within_s: float) -> None:
    """``materialize_in_turn``, for the end of a training; what stays is said, once."""
    say_remaining(materialize_in_turn(paths, within_s=within_s))


def say_remaining(remaining: Iterable[Remaining]) -> None:
    """Log what stays references, with the commands that make real files of it; nothing for none."""
    lines = list(map(str, remaining))
    if lines:
        _log.warning(
            "Portus: these stay references into the pool; before you copy or upload one:\n%s",
            "\n".join(lines),
        )


def checked_within(seconds: float) -> float:
    """The longest that the end of a training may wait, as a user says it (``materialize_within``).
    Raises ``UsageError``."""
    if not (isinstance(seconds, int | float) and seconds >= 0):
        raise UsageError(f"materialize_within: expected seconds, 0 or more, found {seconds!r}")
    return seconds


def saved_in(directories: Iterable[str], model: str) -> list[str]:
    """What lies in ``directories`` and was saved as ``model``, in whichever process, the newest
    first: reference files, and directories with such files in them. What cannot be read is none,
    nor what was put aside."""
    found: dict[str, int] = {}
    for directory in dict.fromkeys(directories):
        with contextlib.suppress(OSError):
            for path in sorted(entry.path for entry in os.scandir(directory)):
                found[path] = _written_ns(path, model)
    kept = [path for path in found if found[path] and not is_aside(path)]
    return sorted(kept, key=lambda path: -found[path])


def _found(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Where they really are, each once; none that was put aside."""
    found = dict.fromkeys(os.path.realpath(os.fspath(each)) for each in paths)
    return [path for path in found if not is_aside(path)]


def _pools_of(paths: Iterable[str], pools: KnownPools) -> list[str]:
    """The pool files that the references at ``paths``, or below them, lead to."""
    found: dict[str, str] = {}
    for path in (each for place in paths for each in _references(place)):
        with contextlib.suppress(PortusError):
            reference = read(path)
            if reference is not None and reference.pool not in found:
                found[reference.pool] = pool_of(path, pools).path
    return list(found.values())


def remaining_references(
    paths: Iterable[str | os.PathLike[str]], reason: str, pools: KnownPools = POOLS
) -> list[Remaining]:
    """Return a ``Remaining`` for each of ``paths`` that is a reference or has some below it."""
    return [
        Remaining(path, _size(path, pools), reason) for path in _found(paths) if _references(path)
    ]


def _size(path: str, pools: KnownPools) -> int | None:
    """Bytes of the tensors of the versions that are led to from ``path``."""
    sizes = {}
    for each in _references(path):
        with contextlib.suppress(PortusError):
            info = use_reference(
                each, lambda pool, entry, reference: entry.info, pools, falls_back=False
            )
            sizes[info.token] = info.size
    return sum(sizes.values()) if sizes else None


def _written_ns(path: str, model: str) -> int:
    """When the newest reference file of ``model`` was written at ``path``, or in it; 0: none."""
    inside = [path]
    if os.path.isdir(path):
        inside = [each for each in _references(path) if os.path.dirname(each) == path]
    written = [0]
    for each in inside:
        with contextlib.suppress(PortusError, OSError):
            reference = read(each)
            if reference is not None and reference.model == model:
                written.append(reference.written_ns)
    return max(written)


def _references(path: str) -> list[str]:
    """The reference files at ``path``, or below it; a damaged one is one."""
    if not os.path.isdir(path):
        return [path] if _is_reference(path) else []
    files = [os.path.join(above, name) for above, _, names in os.walk(path) for name in names]
    there = [each for each in files if not os.path.islink(each) and not is_aside(each)]
    return [each for each in there if _is_reference(each)]


def _is_reference(path: str) -> bool:
    try:
        return read(path) is not None
    except PortusError:
        return True
