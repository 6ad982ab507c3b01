"""The page of the command line, made from the commands themselves.

``python -m docs._site.commands`` writes it. A test compares the page with what this makes. The page
is committed, for readers of the repository. Plugins that read click's commands cannot read typer's,
which has a click of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

from portus.cli.app import app
from portus.cli.output import EXIT_CODES

PAGE: Final = Path(__file__).resolve().parents[1] / "reference" / "cli.md"
"""Where the page is."""

_HEAD: Final = """# The command line

<!-- Made by `python -m docs._site.commands` from the modules of core/portus/cli: change those. -->

`portus COMMAND --help` prints the same. With `--json`, a command prints one JSON document on
stdout. Messages and progress go to stderr. All commands but `serve` take `--json`.

A pointer can stand in for `MODEL[@STEP]`. The pool is `--pool PATH`, or `POOL` where a command has
that argument, else `$PORTUS_POOL`, else `.portus` here or in a directory above. All commands but
`rm`, `gc`, `format` and `rescue --in-place` work while a trainer writes. Those whose pool is
`PATH|MIRROR` also take mirrors: `portus show s3://bucket/runs/gpt@1000`.
"""


PORTUS: Final[Any] = typer.main.get_command(app)
"""The command line."""


def page() -> str:
    """The page: exit codes, then each command with its arguments and options."""
    return "\n".join([_HEAD, _exit_codes(), *_sections(PORTUS, "portus")])


def commands(above: Any = PORTUS, *names: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, as it is called: ``ls``, ``admin show``."""
    below = getattr(above, "commands", {})
    for name, command in below.items():
        yield from commands(command, *names, name)
    if not below:
        yield " ".join(names), above


def _exit_codes() -> str:
    codes = EXIT_CODES.removeprefix("Exit codes: ").removesuffix(".").split("; ")
    rows = [f"| {code} | {meaning} |" for code, meaning in (each.split(" ", 1) for each in codes)]
    return "\n".join(["## Exit codes", "", "| code | meaning |", "|---|---|", *rows, ""])


def _sections(command: Any, name: str) -> Iterator[str]:
    """The section of a command, then those of its subcommands."""
    yield _section(command, name)
    for below in getattr(command, "commands", {}).values():
        yield from _sections(below, f"{name} {below.name}")


def _section(command: Any, name: str) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    last = ["COMMAND ..."] if hasattr(command, "commands") else [_value(a) for a in arguments]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *last])
    lines = [f"## {name}", "", _text(command.help), "", "```text", usage, "```", ""]
    lines += [f"- `{_value(each)}`: {_text(each.help)}" for each in arguments]
    for each in options:
        names = ", ".join(f"`{option}`" for option in each.opts)
        value = "" if each.is_flag else f" `{_value(each)}`"
        lines.append(f"- {names}{value}: {_text(each.help)}{_default(each)}")
    return "\n".join([*lines, ""])


def _value(parameter: Any) -> str:
    """What stands for the value of an argument or option, such as ``PATH``."""
    return str(parameter.metavar or parameter.name.upper())


def _default(option: Any) -> str:
    shown = isinstance(option.default, (str, int, float)) and option.default not in ("", False)
    return f"; default: `{option.default}`" if shown else ""


def _text(text: str | None) -> str:
    """A help text, each paragraph on one line."""
    assert text, "each command, argument and option has a help text"
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


if __name__ == "__main__":
    PAGE.write_text(page())
