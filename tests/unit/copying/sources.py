"""Sources one by one, for tests that look at each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from portus.engine.copying.segments import Sources
from portus.engine.spec import Extent


class Source(NamedTuple):
    """One source: its address, its bytes, and the extents that hold it."""

    address: int
    length: int
    extents: tuple[Extent, ...] = ()


def columns_of(sources: Sequence[Source]) -> Sources:
    extents = [each for source in sources for each in source.extents]
    return Sources.at(
        [each.address for each in sources], [each.length for each in sources], extents
    )
