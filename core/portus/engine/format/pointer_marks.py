"""The marks of a pointer. All else of it is in ``portus.reach.format.reference``."""

from __future__ import annotations

from typing import Final

GLOBAL_MODULE: Final = "portus"
GLOBAL_NAME: Final = "this_is_a_pointer_run_portus_export"
"""What torch calls with the string in a pointer; the name is what a machine without Portus prints.
"""

POINTER_MAX: Final = 128 << 10
"""Bytes. A longer file is no pointer."""

HEAD_SIZE: Final = 256
"""Bytes; a pointer is longer, and says within them that it is one."""

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


def may_begin(head: bytes) -> bool:
    """False if ``head``, ``HEAD_SIZE`` bytes, is not how a pointer begins."""
    return HEAD_MARK in head


def is_pointer(data: bytes) -> bool:
    """Return whether ``data``, all bytes of a file, has a mark of a pointer, which may be damaged
    all the same."""
    return len(data) <= POINTER_MAX and (may_begin(data[:HEAD_SIZE]) or _TAIL_MARK in data)
