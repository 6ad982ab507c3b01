"""The table of the commands. Each has a module of its name, imported when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer
from typer.core import TyperGroup

from portus import __version__
from portus.cli.options import add_command, flag
from portus.cli.output import EXIT_CODES, reporting
from portus.errors import mask

_GROUPS: Final = {
    "Checkpoints": {
        "ls": "list the checkpoints of a directory, a pool or a mirror",
        "show": "show the contents of one",
        "verify": "read every byte and compare the checksums",
        "export": "write one as its own file, or in another format",
        "rm": "delete one",
        "gc": "remove what killed processes left",
        "report": "show where the time of a run went",
        "doctor": "check this machine: what to change, and how fast it is",
    },
    "Mirrors": {
        "pull": "fetch a run from a mirror",
        "mirror": "compare a mirror with its pool, or repair it",
    },
    "Pools on devices and storage hosts": {
        "rescue": "list or rebuild what a damaged pool holds",
        "format": "make an empty pool on a DAX device",
        "serve": "serve pools to other machines",
        "admin": "administer a storage host",
    },
}
"""The commands in the help, in its order: ``ls`` is the ``command``, or the ``commands``, of
``portus.cli.ls``."""

_NAMES: Final = tuple(name for lines in _GROUPS.values() for name in lines)


class _Modules(Mapping[str, Any]):
    """The commands by name. The module of a command is imported at its first use."""

    def __getitem__(self, name: str) -> Any:
        if name not in _NAMES:
            raise KeyError(name)
        module = importlib.import_module(f"portus.cli.{name}")
        declared = getattr(module, "commands", None)
        if declared is None:
            declared = typer.Typer(add_completion=False, rich_markup_mode=None)
            add_command(declared, name, module.command)
        command = typer.main.get_command(declared)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


class _Commands(TyperGroup):
    """Lists the commands by purpose, and reports errors of a command line with passwords masked."""

    def __init__(self, **declared: Any) -> None:
        super().__init__(**declared)
        self.commands = _Modules()  # type: ignore[assignment]

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        for title, lines in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(lines.items()))

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            with reporting(as_json=False):  # Ctrl-C while a module is imported
                return super().invoke(ctx)
        except Exception as error:
            said = getattr(error, "message", None)  # of any error of the parser
            if isinstance(said, str):
                error.message = mask(said)  # type: ignore[attr-defined]
            raise


app: Final = typer.Typer(
    name="portus",
    cls=_Commands,
    help="Inspect, verify, export and clean up checkpoints: files, and pools.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _portus(version: bool = flag("--version", "print the version and exit")) -> None:
    if version:
        print(__version__)
        raise typer.Exit
