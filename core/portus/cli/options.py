"""How commands declare their options, and those that several have."""

from __future__ import annotations

from typing import Any, Final

from typer import Argument, Option, Typer
from typer.core import TyperGroup

from portus.cli.output import EXIT_CODES


def option(names: str, text: str, default: object = None, **more: Any) -> Any:
    """Return an option; ``names`` are as in the usage, such as ``--pool -p PATH``."""
    *flags, value = names.split()
    return Option(default, *flags, metavar=value, help=text, **more)


def flag(names: str, text: str) -> Any:
    """Return an option without a value."""
    return Option(False, *names.split(), help=text)


def argument(name: str, text: str, default: object = ...) -> Any:
    """Return an argument, by its name in the usage."""
    return Argument(default, metavar=name, help=text)


def group(text: str, kind: type[TyperGroup] = TyperGroup) -> Typer:
    """Return a command that has commands, such as ``portus mirror``; ``text`` is its help."""
    return Typer(
        cls=kind,
        help=text,
        epilog=EXIT_CODES,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
    )


_WHERE: Final = (
    "a pool file, a pool directory or a portus:// address; "
    "default: $PORTUS_POOL, then the nearest .portus"
)
_OR_MIRROR: Final = f"{_WHERE}; or a mirror, such as s3://bucket/prefix or file:///path"

Text = str | None
Texts = list[str] | None
POOL: Final = option("--pool -p PATH", _WHERE)
POOL_ARGUMENT: Final = argument("[POOL]", "the same as --pool; or a directory of files", None)
POOL_OR_MIRROR: Final = option("--pool -p PATH|MIRROR", _OR_MIRROR)
AS_JSON: Final = flag("--json", "print one JSON document to stdout")
TARGET: Final = argument("MODEL[@STEP]", "a version, a file, a pointer, or MIRROR/MODEL[@STEP]")
OPTIONAL_TARGET: Final = argument(
    "[MODEL[@STEP]]", "a model, a version, a file or a directory; default: all", None
)
