"""The rules of the format, and the findings of a check against them.

``docs/format.md`` holds the rules too, and is tested.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from portus.errors import PortusError

RULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "F1": (
            "Both places of a root slot MUST be whole, and equal. After a crash those of one slot "
            "MAY be torn, or differ."
        ),
        "F2": "Reserved fields and padding MUST be zero.",
        "F3": (
            "All root slots MUST have the same uuid, and each a sequence whose parity is its "
            "number."
        ),
        "F4": (
            "Two whole slots MUST have sequences that differ by one; `next_version` and `size` "
            "MUST NOT fall from the older to the newer."
        ),
        "F5": (
            "The `size` of a root MUST NOT exceed that of the medium, and all that the root "
            "reaches MUST lie between byte 32768 and its `size`."
        ),
        "F6": (
            "A record MUST begin at a multiple of 8, and have the magic, the kind that is "
            "expected there, a known kind version, the pool's uuid, and the length and the "
            "digest of its pointer, and so MUST its copy. It MUST NOT be of a later commit than "
            "its pointer."
        ),
        "F7": (
            "A catalogue MUST list the versions of each model in ascending order of commit and of "
            "id."
        ),
        "F8": (
            "The entries of a log MUST be whole and follow each other without gaps, stand on the "
            "commit of the version or an earlier one, and have the number of patches that they "
            "give, within the pool."
        ),
        "F9": (
            "In the whole pool ids MUST be unique, from 1 to below `next_version`; tokens "
            "unique; commits of versions not above that of the catalogue."
        ),
        "F10": "A version record MUST agree with the catalogue.",
        "F11": (
            "A version MUST have as many extent entries and unit digests as its storages have, "
            "extents MUST add up to their storage and be over 0, storages MUST add up to the "
            "version's `size`, and `born` MUST lie between 1 and the "
            "version's commit. A storage that is changed in place MUST be one extent of whole "
            "cells, and have a storage with as many digests as it has units; no storage is both, "
            "or either twice. A log MUST have whole pages of its own, and be born like a storage."
        ),
        "F13": (
            "Extents and records MUST NOT overlap; an extent or a record that several versions "
            "reach MUST be the same in all of them, and occur once in each."
        ),
        "F14": (
            "Contents MUST be JSON in UTF-8, which is a table of files or a shelf; or a pickle "
            "of torch. A table of files MUST have the storages of the version. A shelf MUST name "
            "each of them once, and no other, with a dtype and sizes that take its bytes. A "
            "pickle MUST name each storage, and no other, and its tensors MUST lie within their "
            "storages."
        ),
        "V1": "A page MUST NOT hold bytes of two commits.",
        "V4": (
            "The bytes of every unit MUST have the digest that was computed when they were saved."
        ),
    }
)


class Severity(enum.Enum):
    """The severity of a finding. An error breaks a rule. A finding to mend comes from a crash or
    from rot: nothing is lost, and the next writer repairs it. A warning may be the trace of a
    crash, which does no harm."""

    ERROR = "error"
    MEND = "mend"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule. ``invariant`` is a key of ``RULES``; ``where`` names place and owner."""

    invariant: str
    where: str
    expected: str
    found: str
    severity: Severity = Severity.ERROR

    def __str__(self) -> str:
        return f"{self.invariant}: {self.where}: expected {self.expected}, found {self.found}"


class Findings:
    """Collects findings, each once: a check looks twice at what both roots reach."""

    def __init__(self, tell: Callable[[Finding], None] = lambda finding: None) -> None:
        """tell: receives each finding when it is found."""
        self._tell: Final = tell
        self._found: Final[dict[Finding, None]] = {}

    @property
    def all(self) -> list[Finding]:
        """Return all findings, in the order in which they were found."""
        return list(self._found)

    def require(self, holds: bool, invariant: str, where: str, expected: str, found: str) -> None:
        """Add an error unless ``holds``."""
        if not holds:
            self.add(Finding(invariant, where, expected, found))

    @contextlib.contextmanager
    def note(self, invariant: str, where: str, expected: str) -> Iterator[None]:
        """Add an error if the block raises an error of ours, and end the block."""
        try:
            yield
        except PortusError as error:
            self.add(Finding(invariant, where, expected, str(error)))

    def add(self, finding: Finding) -> None:
        """Add a finding."""
        assert finding.invariant in RULES
        if finding not in self._found:
            self._found[finding] = None
            self._tell(finding)
