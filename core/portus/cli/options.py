"""Declarations of the options of commands, and the options that several commands have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from typer import Argument, Option, Typer
from typer.core import TyperGroup

from portus.cli.output import EXIT_CODES, reporting


def option(names: str, text: str, default: object = None, **more: Any) -> Any:
    """Return an option; ``names`` are as in the usage, such as ``--pool -p PATH``."""
    *flags, value = names.split()
    return Option(default, *flags, metavar=value, help=text, **more)


def flag(names: str, text: str) -> Any:
    """Return an option without a value."""
    return Option(False, *names.split(), help=text)


def argument(name: str, text: str, default: object = ...) -> Any:
    """Return an argument; ``name`` is its name in the usage."""
    return Argument(default, metavar=name, help=text)


def group(text: str, *functions: Callable[..., None], kind: type[TyperGroup] = TyperGroup) -> Typer:
    """Return a command that has commands, such as ``portus mirror``; ``text`` is its help. Each of
    ``functions`` is a command of its name."""
    made = Typer(
        cls=kind,
        help=text,
        epilog=EXIT_CODES,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
    )
    for each in functions:
        add_command(made, each.__name__.replace("_", "-"), each)
    return made


def add_command(to: Typer, name: str, function: Callable[..., None]) -> None:
    """Add a command whose ``function`` prints to its parameter ``output``, in the form that
    ``--json`` chooses. Without such a parameter it has no ``--json``. Its errors become exit codes.
    """
    # Annotations are text in our modules, and typer needs the types.
    signature = inspect.signature(function, eval_str=True)
    parameters = [each for name, each in signature.parameters.items() if name != "output"]
    has_output = len(parameters) < len(signature.parameters)

    @functools.wraps(function)
    def command(as_json: bool = False, **given: object) -> None:
        with reporting(as_json) as output:
            function(**given, **({"output": output} if has_output else {}))

    if has_output:
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("as_json", keyword, default=_AS_JSON, annotation=bool))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    to.command(name, epilog=EXIT_CODES)(command)


_WHERE: Final = (
    "a pool file, a pool directory or a portus:// address; "
    "default: $PORTUS_POOL, then the nearest .portus"
)
_OR_MIRROR: Final = f"{_WHERE}; or a mirror, such as s3://bucket/prefix or file:///path"
_AS_JSON: Final = flag("--json", "print one JSON document to stdout")

Text = str | None
Texts = list[str] | None
POOL: Final = option("--pool -p PATH", _WHERE)
POOL_ARGUMENT: Final = argument("[POOL]", "the same as --pool; or a directory of files", None)
POOL_OR_MIRROR: Final = option("--pool -p PATH|MIRROR", _OR_MIRROR)
TARGET: Final = argument("MODEL[@STEP]", "a version, a file, a pointer, or MIRROR/MODEL[@STEP]")
OPTIONAL_TARGET: Final = argument(
    "[MODEL[@STEP]]", "a model, a version, a file, a directory or a pool; default: all", None
)
