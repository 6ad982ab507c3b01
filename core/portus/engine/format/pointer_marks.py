"""The marks of a pointer. The rest of a pointer is in ``portus.reach.format.reference``."""

from __future__ import annotations

from typing import Final

GLOBAL_MODULE: Final = "portus"
GLOBAL_NAME: Final = "this_is_a_pointer_run_portus_export"
"""The function that torch calls with the string in a pointer. A machine without Portus prints
it."""

POINTER_MAX: Final = 128 << 10
"""Bytes. A longer file is no pointer."""

_HEAD_SIZE: Final = 256
"""Bytes in which a pointer has its mark; it is longer than that."""

HEAD_MARK: Final = f"c{GLOBAL_MODULE}\n{GLOBAL_NAME}\n".encode()

README: Final = b" ".join(  # at run time, or this file, compiled or not, would have the mark
    (
        b"This file is a pointer of Portus:",
        b"the checkpoint itself is in the pool named in data.pkl.\n"
        b"torch.load reads it through Portus (pip install portus-checkpoint).\n"
        b"To make a file of it: portus export PATH FILE\n",
    )
)

_TAIL_MARK: Final = README[:64]


def is_pointer(data: bytes) -> bool:
    """Return whether ``data``, all bytes of a file, has a mark of a pointer, which may be
    damaged."""
    return len(data) <= POINTER_MAX and (HEAD_MARK in data[:_HEAD_SIZE] or _TAIL_MARK in data)
