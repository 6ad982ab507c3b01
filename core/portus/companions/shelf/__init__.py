"""The shelf: named arrays that survive, and are changed in place. A part of the public face.

``with portus.Shelf("run.portus") as shelf: shelf.centers = array``. Needs torch for tensors
alone.
"""

from __future__ import annotations

from portus.companions.shelf.shelf import Shelf as Shelf

__all__ = ["Shelf"]
