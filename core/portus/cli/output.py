"""The output of all commands: results on stdout, messages on stderr, errors as exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

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

if TYPE_CHECKING:
    from portus.reach.places.base import Progress

# 74 and 75 are EX_IOERR and EX_TEMPFAIL of sysexits.h; 130 and 141 are 128 and the number of SIGINT
# and of SIGPIPE, as shells report them.
FOUND: Final = 1
USAGE: Final = 2
MEND: Final = 3
MEDIUM: Final = 74
BUSY: Final = 75
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

EXIT_CODES: Final = (
    "Exit codes: 0 success; 1 damage was found; 2 wrong usage: change the call; 3 nothing is lost, "
    "but a repair is pending, which the next writer of the pool makes; "
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
"""Exit codes of errors. The first match counts: a ``BusyError`` is a ``MediumError`` too."""

_WIDE: Final = 1 << 16
"""Columns of a table that no terminal will cut."""

Row = tuple[str | int | None, ...]

Json = None | bool | int | float | str | Sequence["Json"] | dict[str, "Json"]


class Output:
    """Prints the output of a command: one document on stdout with ``as_json``, else text and
    tables.

    Messages and progress go to stderr, so that stdout can be piped. All text is made ``printable``
    here: the names of models, tensors and files may hold anything. JSON is ASCII.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json: Final = as_json
        self.code = 0
        """The exit code of the command, unless an error ends it."""
        self._has_document = False

    def document(self, value: Json) -> None:
        """Print the JSON document of the result, once, if ``--json`` asked for it."""
        if self.as_json and not self._has_document:
            self._has_document = True
            _print(json.dumps(value, indent=2))

    def line(self, text: str = "") -> None:
        """Print a line of the result for people."""
        if not self.as_json:
            _print(printable(text))

    def note(self, text: str) -> None:
        """Print a message on stderr."""
        print(printable(text), file=sys.stderr)

    def ask(self, question: str) -> bool:
        """Return whether a user at a terminal answers yes; False if there is no terminal."""
        if not sys.stdin.isatty():
            return False
        print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in {"y", "yes"}

    def table(self, heads: Sequence[str], rows: Sequence[Row]) -> None:
        """Print a table for people. Columns whose head begins with ">" are aligned to the right;
        those with nothing but None are left out. Only a terminal cuts rows."""
        if self.as_json:
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        shown = [at for at in range(len(heads)) if {row[at] for row in rows} != {None}]
        for head in (heads[at] for at in shown):
            justify: Literal["left", "right"] = "right" if head.startswith(">") else "left"
            table.add_column(head.lstrip(">"), justify=justify, no_wrap=True)
        for row in rows:
            cells = ("" if row[at] is None else str(row[at]) for at in shown)
            table.add_row(*(Text(printable(cell)) for cell in cells))
        is_terminal, drawn = sys.stdout.isatty(), io.StringIO()
        width = None if is_terminal else _WIDE
        Console(file=drawn, width=width, force_terminal=is_terminal).print(table)
        _print("\n".join(line.rstrip() for line in drawn.getvalue().splitlines()))

    def skip(self, error: PortusError, what: str = "") -> dict[str, Json]:
        """Report an error that ended a part of the command, which exits with its code if no other
        one is higher; return the JSON document of the error."""
        self.code = max(self.code, exit_code(error))
        self.note(f"portus: {what}{error_line(error)}")
        return error_document(error)


@contextlib.contextmanager
def reporting(as_json: bool) -> Iterator[Output]:
    """Run a command: its errors become one line and an exit code, never a traceback."""
    output = Output(as_json)
    try:
        yield output
        with _writing():
            sys.stdout.flush()
        if output.code:
            raise typer.Exit(output.code)
    except PortusError as error:
        output.document({"error": output.skip(error)})
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt as error:
        output.note("portus: interrupted")
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:  # the reader of our output has enough
        _print_no_more()
        raise typer.Exit(BROKEN_PIPE) from error


def _print(text: str) -> None:
    with _writing():
        print(text)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Raise ``MediumError`` if the result cannot be written, as when the disk behind ``>>`` is
    full."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _print_no_more()
        text = f"cannot write to standard output: {error.strerror}"
        raise MediumError(error.errno, text) from error


def _print_no_more() -> None:
    """Discard the output that Python would write, and complain about, at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def bar(title: str) -> Iterator[Progress]:
    """Show the bytes done, of the bytes to do, on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(printable(title), total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextlib.contextmanager
def counter(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of ``total`` bytes; yield a function that takes each piece's bytes."""
    from portus.reach.places.base import adding

    with bar(title) as progress:
        yield adding(progress, total)


def exit_code(error: PortusError) -> int:
    """Return the exit code of an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FOUND)


def error_document(error: PortusError) -> dict[str, Json]:
    """Return the JSON document of an error."""
    return {
        "kind": type(error).__name__,
        "message": error_line(error),
        "exit_code": exit_code(error),
    }


def fields(source: object, *names: str) -> dict[str, Json]:
    """Return attributes of an object for a JSON document, by their names."""
    return {name: getattr(source, name) for name in names}


def error_line(error: PortusError) -> str:
    """Return an error in one line, without the number of an ``OSError``."""
    text = error.strerror if isinstance(error, MediumError) and error.strerror else str(error)
    return " ".join(text.split())


def newest_rows(rows: Sequence[Row], most: int | None, *before: str) -> list[Row]:
    """Return the last ``most`` of the rows of a table, or all. Above them is a row that counts the
    others, after the cells ``before``."""
    left_out = 0 if most is None else max(0, len(rows) - most)
    if not left_out:
        return list(rows)
    older = (*before, f"{left_out} older: --all")
    return [older + (None,) * (len(rows[0]) - len(older)), *rows[left_out:]]
