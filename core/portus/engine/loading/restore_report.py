"""The report of a restore in place."""

from __future__ import annotations

from dataclasses import dataclass

from portus.engine.spec import VersionInfo


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The result of ``restore_into``. ``missing``: tensors of the state that the version lacks,
    left as they were. ``unexpected``: tensors of the version that the state lacks."""

    version: VersionInfo
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
