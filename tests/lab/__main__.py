"""``python -m tests.lab [COMMAND...]``: a shell in a guest, or a command in it.

The exit status is that of the command; 125 if the guest died or took too long. Where the lab
cannot run, it says why and ends with 0, but with 1 if ``PORTUS_LAB`` is ``required``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.lab import kernel, needs
from tests.lab.guest import Guest, run, whole
from tests.lab.needs import LabError

DIED = 125


def main() -> int:
    """Parse, boot, run."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("--setup", action="store_true", help="only install and fetch")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a command")
    parser.add_argument("--nvdimms", type=Path, help="a folder that keeps the NVDIMMs' files")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    try:
        if given.setup:
            needs.install()
        needs.check()
        kernel.fetched()
    except LabError as error:
        print(f"lab: skipped: {error}", file=sys.stderr)
        wish = os.environ.get("PORTUS_LAB", "required" if given.setup else "")
        return 1 if wish == "required" else 0
    if given.setup:
        print("lab: ready; make lab, make test-hardware")
        return 0
    try:
        return _boot(given.command, given.nvdimms, given.timeout)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return DIED


def _boot(command: list[str], nvdimms: Path | None, timeout_s: float) -> int:
    with tempfile.TemporaryDirectory(prefix="portus-lab-") as own:
        folder = nvdimms or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        machine = whole(folder)
        if command:
            return run(machine, command, timeout_s=timeout_s)
        with Guest(machine, ["bash", "-l"], shell=True) as guest:
            guest.boot()
            return guest.wait(None)


if __name__ == "__main__":
    sys.exit(main())
