"""The entry point of the command ``portus``. Imports next to nothing."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import Final

DISTRIBUTION: Final = "portus-checkpoint"


def main() -> None:
    """Run the command line, and exit."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                # A path need not be valid text in any encoding.
                stream.reconfigure(errors="backslashreplace")
    try:
        from portus.cli.app import app

        app()  # a command imports what it needs when it is run
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        extra = _extra_of(name)
        if extra is None:
            raise
        print(f"portus: this needs {name}: pip install '{DISTRIBUTION}[{extra}]'", file=sys.stderr)
        sys.exit(2)


def _extra_of(module: str) -> str | None:
    """Return the extra that installs ``module`` for users; None if none does."""
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires(DISTRIBUTION) or ():
            name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"](\w+)", line)
            if name is None or name[0].lower().replace("-", "_") != module:
                continue
            if extra is None:
                return "cli"  # Portus needs it everywhere
            if extra[1] != "dev":
                return extra[1]
    return None


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
