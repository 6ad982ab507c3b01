"""``accelerate launch -m portus_accelerate.run train.py ...``: a script with the flag on.

Needs neither the environment variable nor the entry point; the script gets the arguments. ``-m
module`` runs a module.
"""

from __future__ import annotations

import os
import runpy
import sys

from portus_accelerate import FLAG, is_on, register


def main() -> None:
    """Turn the flag on and run the script or module of the arguments."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit("usage: python -m portus_accelerate.run [-m] SCRIPT [ARGUMENT ...]")
    if not is_on():  # else the entry point has registered
        os.environ[FLAG] = "1"
        register()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
