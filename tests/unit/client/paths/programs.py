"""Programs that save to paths, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

SLOW: Final = (
    "import threading, time\n"
    "from portus.writer.image_file import ImageFile\n"
    "real = ImageFile.finish\n"
    "def finish(file):\n"
    "    if threading.current_thread() is not threading.main_thread():\n"
    "        time.sleep(1)\n"
    "    real(file)\n"
    "ImageFile.finish = finish\n"
)
"""What delays each commit by a second, but for those of a signal handler."""


def in_process(program: str) -> subprocess.CompletedProcess[str]:
    """What becomes of a program, here, with the modules of this process."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONWARNINGS": "ignore::DeprecationWarning",  # newer Pythons warn of each fork
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
