"""The entry point of the command ``portus``. Imports next to nothing."""

from __future__ import annotations

import contextlib
import io
import os
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
    _open_standard_streams()
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


def _open_standard_streams() -> None:
    """Let no other file get the number of a standard stream that is closed (``portus ls >&-``)."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


if __name__ == "__main__":
    main()
