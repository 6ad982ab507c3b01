"""Words for sizes and times; errors as exit codes; help."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs._site.commands import PAGE, page
from portus import errors
from portus.cli import words
from portus.cli.output import EXIT_CODES, Output, error_line, exit_code
from tests.unit.cli.scene import COMMANDS, call_of, names_of, portus

PLACES = {"ADDRESS", "DEVICE", "POOL", "[PLACE...]"}
"""Arguments that name the place: a command with one of these needs no ``--pool``."""


def taking(place: str) -> list[str]:
    """The commands whose ``--pool`` is a ``place``."""
    return [name for name in COMMANDS if {"--pool", place} <= names_of(name)]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (150 * 1024, "150 KiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 70, "1024 EiB"),
    ],
)
def test_sizes_have_units(size: int, text: str) -> None:
    assert words.size(size) == text


@pytest.mark.parametrize(
    ("passed_s", "text"),
    [
        (0, "0 s ago"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (3600, "1 h ago"),
        (47 * 3600, "47 h ago"),
        (72 * 3600, "3 days ago"),
        (-1, "in the future"),
    ],
)
def test_times_are_said_as_ages(passed_s: int, text: str) -> None:
    assert words.age(0, passed_s * 10**9) == text


def test_a_table_leaves_out_columns_of_which_nothing_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [("a", 1, None, ""), ("b", None, None, "")]
    Output(as_json=False).table(("NAME", ">STEP", "DIRECTORY", "NOTE"), rows)
    assert capsys.readouterr().out.splitlines() == ["NAME  STEP  NOTE", "a        1", "b"]


def test_a_moment_has_its_zone() -> None:
    text = words.moment(1_700_000_000_000_000_000)
    assert text.startswith("2023-11-1")
    assert text[-6] in "+-"
    assert text[-3] == ":"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("x"), 2),
        (errors.CorruptionError("x"), 1),
        (errors.MediumError(28, "x"), 74),
        (errors.BusyError(11, "x"), 75),
        (errors.StaleError("x"), 75),
        (errors.TransportError("x"), 75),
    ],
)
def test_every_error_has_an_exit_code_that_the_help_tells(
    error: errors.PortusError, code: int
) -> None:
    assert exit_code(error) == code
    assert f"{code} " in EXIT_CODES
    assert error_line(error) == "x"


def test_an_error_is_one_line() -> None:
    assert error_line(errors.UsageError("a\n  b")) == "a b"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_help_and_exit_codes(command: str) -> None:
    told = portus(*command.split(), "--help")
    assert told.code == 0
    assert "Exit codes" in told.out
    names = names_of(command)
    assert ("--json" in names) == (command != "serve")
    assert ("--pool" in names) != bool(names & PLACES)


@pytest.mark.parametrize("command", taking("PATH|MIRROR"))
def test_help_offers_a_mirror_where_one_is_taken(command: str, tmp_path: Path) -> None:
    assert "a mirror, such as" in " ".join(portus(*command.split(), "--help").out.split())
    told = portus(*call_of(command), "--pool", f"file://{tmp_path}/mirror")
    assert "takes pools" not in told.err


POOLS_ALONE = [each for each in taking("PATH") if "MIRROR" not in " ".join(names_of(each))]


@pytest.mark.parametrize("command", POOLS_ALONE)
def test_help_offers_no_mirror_where_none_is_taken(command: str, tmp_path: Path) -> None:
    assert "mirror" not in portus(*command.split(), "--help").out.lower()
    told = portus(*call_of(command), "--pool", f"file://{tmp_path}/mirror")
    assert told.code == 2
    assert "mirror" in told.err


def test_help_names_every_command() -> None:
    for command in COMMANDS:
        *above, name = command.split()
        told = portus(*above, "--help")
        assert f"  {name} " in told.out
        assert "Exit codes" in told.out


def test_there_is_a_command_of_each_kind() -> None:
    assert {"ls", "show", "rm", "gc"} <= {*taking("PATH|MIRROR")}
    assert "report" in POOLS_ALONE


def test_the_reference_page_is_made_from_the_commands() -> None:
    """Every command, argument and option with its help text, and the exit codes."""
    assert PAGE.read_text() == page(), "make it again: .venv/bin/python -m docs._site.commands"
    assert all(f"## portus {command}\n" in page() for command in COMMANDS)


def test_the_version_is_told() -> None:
    import portus as face

    assert portus("--version").out.strip() == face.__version__


def test_a_wrong_call_is_exit_code_2() -> None:
    assert portus("show").code == 2
    assert portus("nonsense").code == 2
    assert portus("ls", "--nonsense").code == 2
