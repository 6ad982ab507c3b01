"""The entry point of the command ``portus``. Imports next to nothing."""

from __future__ import annotations

import contextlib
import io
import sys


def main() -> None:
    """Run the command line, and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                # A path need not be text in anybody's encoding.
                stream.reconfigure(errors="backslashreplace")
    try:
        from portus.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"rich", "typer"}:
            raise
        print(
            f"portus: the command line needs {error.name}: pip install 'portus-checkpoint[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
