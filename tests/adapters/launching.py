"""How tests start programs: on two processes, or in one of their own."""

import subprocess
import sys
from typing import Final

TWO: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""Where they meet is a port that the system chooses: two tests run at once."""


def run_program(text: str, *arguments: str, code: int = 0) -> None:
    """Run a program in a process of its own, which has to end with that code."""
    command = [sys.executable, "-c", text, *arguments]
    ended = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
