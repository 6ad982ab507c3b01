"""A save that companions observe."""

from __future__ import annotations

from portus.engine.pipeline.handle import SaveStats
from portus.engine.pipeline.run import Save


class Flight(Save):
    """A save that stores nothing, and is over when the test says so."""

    over = False
    stats = SaveStats()

    def __init__(self, stats: SaveStats | None = None, *, over: bool = False) -> None:
        self.stats = stats or SaveStats()
        self.over = over
