"""``python -m tests.smoke``: tests of a minute with the oldest and the newest that is promised.

Both at once, each in its environment, against the wheel of this tree. With ``PORTUS_SMOKE`` as
``optional`` it passes where there is no such Python, and says so.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.smoke.environments import (
    FLOOR,
    NEWEST,
    ROOT,
    Ends,
    SmokeError,
    environment,
    with_portus,
)

TESTS_S_MAX: Final = 900

TESTS: Final = (
    # All of it is imported, and what is saved comes back.
    "tests/unit/test_face.py::test_every_module_imports_where_linux_is_missing",
    "tests/unit/protocol/test_session.py",
    "tests/unit/pools/test_weights_only.py",
    "tests/unit/pools/test_checkpointer.py::test_every_version_holds_the_state_at_its_call",
    "tests/golden",
    # Files: equal to torch's byte for byte, written and loaded by each of its versions.
    "tests/unit/state/test_pickling.py::test_the_archive_has_the_name_that_torch_gives_it",
    "tests/unit/paths/test_face.py",
    "tests/unit/dcp/test_directories.py::test_each_reads_what_the_other_wrote",
    "tests/unit/dcp/test_directories.py::test_stock_torch_reads_it_without_portus",
    # The command, and a storage host over a unix socket.
    "tests/unit/cli/test_ls.py",
    "tests/unit/cli/test_verify.py::test_a_healthy_pool_is_said_to_be",
    "tests/unit/cli/test_host.py::test_verify_reads_every_byte_and_finds_damage",
    "tests/unit/daemon/test_main.py::test_it_ends_clean_in_time_and_starts_again_without_repair",
)


def of_adapters() -> Iterator[str]:
    """The tests of adapters that are marked ``smoke``, without an import of what they import:
    saved, and loaded or resumed."""
    for path in sorted((ROOT / "tests" / "adapters").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            marks = getattr(node, "decorator_list", [])
            if any(ast.unparse(mark) == "pytest.mark.smoke" for mark in marks):
                yield f"{path.relative_to(ROOT)}::{getattr(node, 'name')}"  # noqa: B009


def main() -> int:
    """Make what is missing, run both, print each as it ends."""
    try:
        made = [(end, environment(end)) for end in (FLOOR, NEWEST)]
    except SmokeError as error:
        optional = os.environ.get("PORTUS_SMOKE") == "optional"
        print(f"smoke: {'skipped: ' if optional else ''}{error}", file=sys.stderr)
        return 0 if optional else 1
    with tempfile.TemporaryDirectory(prefix="portus-smoke-") as own:
        running = [(end, _start(end, base, Path(own) / end.label)) for end, base in made]
        failed = [end.label for end, process in running if _ended(end, process)]
    if failed:
        print(f"smoke: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _start(end: Ends, base: Path, place: Path) -> subprocess.Popen[str]:
    """pytest in the background. Warnings of versions that are not those of .venv are no news."""
    python = with_portus(end, base, place)
    options = ["-n", "0", "-q", "-W", "default", "-p", "no:cacheprovider", "--basetemp"]
    return subprocess.Popen(
        [
            str(python),
            "-m",
            "pytest",
            *options,
            str(place / "tmp"),
            *TESTS,
            *of_adapters(),
            *sys.argv[1:],
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _ended(end: Ends, process: subprocess.Popen[str]) -> int:
    try:
        said, _ = process.communicate(timeout=TESTS_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        said += f"\nkilled after {TESTS_S_MAX} s"
    name = f"Python {end.python}, {end.torch}, {end.pins.name}"
    print(f"smoke: {end.label} ({name}):\n{said}", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
