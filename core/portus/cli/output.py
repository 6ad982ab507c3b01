"""What all commands share: results on stdout, messages on stderr, errors as exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import typer

from portus.errors import (
    BusyError,
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
    printable,
)

FOUND: Final = 1
USAGE: Final = 2
MEND: Final = 3
ROT: Final = 4
MEDIUM: Final = 74
BUSY: Final = 75
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

EXIT_CODES: Final = (
    "Exit codes: 0 success; 1 damage was found; 2 wrong usage: change the call; 3 nothing is lost, "
    "but a repair is pending, which the next writer of the pool makes; 4 a scrub found damage; "
    "74 the machine refused (no space, no permission, a failing disk); 75 another process holds "
    "the pool, or changed it meanwhile: try again; 130 interrupted."
)

_CODES: Final[tuple[tuple[type[PortusError], int], ...]] = (
    (BusyError, BUSY),
    (StaleError, BUSY),
    (TransportError, BUSY),
    (CorruptionError, FOUND),
    (UsageError, USAGE),
    (MediumError, MEDIUM),
)
"""The first that fits: a ``BusyError`` is a ``MediumError`` too."""

_WIDE: Final = 1 << 16
"""Columns of what no terminal will cut."""

Json = None | bool | int | float | str | Sequence["Json"] | dict[str, "Json"]


class Output:
    """Where a command says what it has to say.

    With ``as_json`` there is one document on stdout; else text and tables. Messages and progress
    go to stderr, so that stdout can be piped. All text is made ``printable`` here: names of models,
    tensors and files are anybody's. JSON is ASCII.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json: Final = as_json
        self.code = 0
        """What the command exits with, if no error does."""
        self._said = False

    def document(self, value: Json) -> None:
        """The result for machines; nothing unless they are asked for."""
        if self.as_json and not self._said:
            self._said = True
            _print(json.dumps(value, indent=2))

    def line(self, text: str = "") -> None:
        """A line of the result for people."""
        if not self.as_json:
            _print(printable(text))

    def note(self, text: str) -> None:
        """A message."""
        print(printable(text), file=sys.stderr)

    def ask(self, question: str) -> bool:
        """True if somebody at a terminal says yes; False too where nobody can be asked."""
        if not sys.stdin.isatty():
            return False
        print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in {"y", "yes"}

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table for people; never cut when it is piped."""
        if self.as_json:
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for head in heads:
            right = head.startswith(">")
            table.add_column(head.lstrip(">"), justify="right" if right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        if sys.stdout.isatty():
            Console().print(table)
            return
        console = Console(file=io.StringIO(), width=_WIDE, force_terminal=False, color_system=None)
        with console.capture() as captured:
            console.print(table, crop=False)
        _print("\n".join(line.rstrip() for line in captured.get().splitlines()))

    def fail(self, error: PortusError) -> int:
        """Say why a command could not do what it was asked for; its exit code."""
        code = exit_code(error)
        self.document({"error": error_document(error)})
        self.note(f"portus: {said(error)}")
        return code


@contextlib.contextmanager
def reported(as_json: bool) -> Iterator[Output]:
    """Run a command: its errors become one line and an exit code, never a traceback."""
    output = Output(as_json)
    try:
        yield output
        _flush()
        if output.code:
            raise typer.Exit(output.code)
    except PortusError as error:
        raise typer.Exit(output.fail(error)) from error
    except KeyboardInterrupt as error:
        output.note("portus: interrupted")
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:
        # Who read our output has enough. Python would complain once more at exit.
        _print_no_more()
        raise typer.Exit(BROKEN_PIPE) from error


def _print(text: str) -> None:
    try:
        print(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _unwritable(error) from error


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> MediumError:
    """The result cannot be written: the disk behind ``>>`` is full, for example."""
    _print_no_more()
    return MediumError(error.errno, f"cannot write to standard output: {error.strerror}")


def _print_no_more() -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(error: PortusError) -> int:
    """The exit code of an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FOUND)


def error_document(error: PortusError) -> dict[str, Json]:
    """An error for machines."""
    return {"kind": type(error).__name__, "message": said(error), "exit_code": exit_code(error)}


def said(error: PortusError) -> str:
    """An error in one line; without the number of an ``OSError``."""
    text = error.strerror if isinstance(error, MediumError) and error.strerror else str(error)
    return " ".join(text.split())


def size_text(size: int) -> str:
    """Bytes, for people."""
    if size < 1024:
        return f"{size} B"
    value, units = float(size), iter(("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
    unit = ""
    while value >= 1024 and (following := next(units, None)) is not None:
        value, unit = value / 1024, following
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


def age_text(time_ns: int, now_ns: int | None = None) -> str:
    """How long ago a moment was, for people."""
    passed_s = ((time.time_ns() if now_ns is None else now_ns) - time_ns) / 1e9
    if passed_s < 0:
        return "in the future"
    units = ((60, 1, "s"), (3600, 60, "min"), (2 * 86400, 3600, "h"), (float("inf"), 86400, "days"))
    unit_s, unit = next((unit_s, unit) for limit_s, unit_s, unit in units if passed_s < limit_s)
    return f"{passed_s / unit_s:.0f} {unit} ago"


def moment_text(time_ns: int) -> str:
    """A moment, in local time and ISO 8601."""
    moment = time.localtime(time_ns // 10**9)
    zone = time.strftime("%z", moment)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}{zone[:3]}:{zone[3:]}"


def count_text(count: int, noun: str) -> str:
    """``1 version``, ``2 versions``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
