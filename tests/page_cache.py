"""What the kernel has of a file in memory, for tests of reads that go past it."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import time
from typing import Any

import numpy as np


def in_memory(file: io.FileIO) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which pages of a file are in memory. (``RWF_NOWAIT`` would not say: the kernel reads ahead
    for it, and a fast disk is done before it looks.)"""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as there:
        pages = np.empty(-(-len(there) // mmap.PAGESIZE), np.uint8)
        address = np.frombuffer(there, np.uint8).ctypes.data
        assert mincore(address, len(there), pages.ctypes.data) == 0, ctypes.get_errno()
    return (pages & 1).astype(bool)


def forget(file: io.FileIO) -> None:
    """Have nothing of a file in memory. The kernel may keep pages that it is busy with when it is
    asked to drop them."""
    end_s = time.monotonic() + 60
    while in_memory(file).any():
        assert time.monotonic() < end_s, f"{in_memory(file).sum()} pages stay in memory"
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
