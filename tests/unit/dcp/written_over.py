"""Damage to a file, and back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_over(path: Path, at: int, data: bytes) -> Iterator[None]:
    """Other bytes in a file for a while, in place: a file that is cut off and written again is
    flushed to the disk by some file systems when it is closed."""
    with open(path, "r+b", buffering=0) as file:
        before = os.pread(file.fileno(), len(data), at)
        os.pwrite(file.fileno(), data, at)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), before, at)
