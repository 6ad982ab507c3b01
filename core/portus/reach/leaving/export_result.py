"""The result of an export."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class WrittenExport:
    """``size``: of the files, in bytes. ``exact``: every byte is as it was saved. ``shared``: names
    of tensors that share memory in the source, and are written separately. ``left_out``: of values
    that are no tensors. ``no_weights``: of tensors that are no weights. ``batches``: of protected
    tables, the last batch in each part."""

    size: int = 0
    tensors: int = 0
    exact: bool = False
    shared: list[list[str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    no_weights: list[str] = field(default_factory=list)
    batches: dict[str, int] = field(default_factory=dict)
