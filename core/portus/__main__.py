"""``python -m portus`` is the command ``portus``."""

from __future__ import annotations

from portus.cli.main import main

if __name__ == "__main__":
    main()
