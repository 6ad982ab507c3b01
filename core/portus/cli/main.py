"""The entry point of the command ``portus``. Imports next to nothing."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Final

_NEEDED: Final = {
    **dict.fromkeys(("msgspec", "numpy", "rich", "typer", "xxhash"), "cli"),
    "matplotlib": "plot",
    "obstore": "mirror",
    "prometheus_client": "metrics",
}
"""Which extra installs what, and Portus with it."""


def main() -> None:
    """Run the command line, and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                # A path need not be text in anybody's encoding.
                stream.reconfigure(errors="backslashreplace")
    try:
        from portus.cli.app import app

        app()  # a command imports what it needs when it is run
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _NEEDED:
            raise
        print(
            f"portus: this needs {name}: pip install 'portus-checkpoint[{_NEEDED[name]}]'",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
