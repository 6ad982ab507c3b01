"""What programs begin with that save to paths."""

from __future__ import annotations

from typing import Final

SLOW: Final = (
    "import threading, time\n"
    "from portus.engine.writer.image_file import ImageFile\n"
    "real = ImageFile.finish\n"
    "def finish(file):\n"
    "    if threading.current_thread() is not threading.main_thread():\n"
    "        time.sleep(1)\n"
    "    real(file)\n"
    "ImageFile.finish = finish\n"
)
"""What delays each commit by a second, but for those of a signal handler."""
