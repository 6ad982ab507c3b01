"""The packages that are shipped, found and not listed: whatever is about each of them asks here."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

ADAPTERS: Final = sorted(path.parent.name for path in ROOT.glob("portus_*/__init__.py"))
"""The packages that bring Portus into a framework, which begin with ``portus_``."""

FOLDERS: Final = {"portus": ROOT / "core" / "portus", **{name: ROOT / name for name in ADAPTERS}}
"""Where the modules of each package are."""
