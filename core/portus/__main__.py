"""Run the command ``portus`` by ``python -m portus``."""

from __future__ import annotations

from portus.cli.main import main

if __name__ == "__main__":
    main()
