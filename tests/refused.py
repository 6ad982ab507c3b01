"""A kernel that refuses userfaultfd, as most containers have it: by a real seccomp filter.

With ``PORTUS_TEST_USERFAULTFD=refused`` every test of a run, and each process that one starts, is
refused it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

from portus.engine.media import linux

_NO_NEW_PRIVS: Final = 38
_SET_SECCOMP: Final = 22
_FILTER: Final = 2
_ERRNO: Final = 0x50000
_ALLOW: Final = 0x7FFF0000
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06


def refuse_userfaultfd() -> None:
    """From now on and for good: EPERM, in this process and in its children. Raises ``OSError``."""
    call = linux._USERFAULTFD[os.uname().machine]
    program = b"".join(
        struct.pack("=HBBI", *each)
        for each in (
            (_LOAD, 0, 0, 0),  # the number of the call
            (_IF_EQUAL, 0, 1, call),
            (_RETURN, 0, 0, _ERRNO | 1),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    text = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("@HP", len(program) // 8, ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(filters, len(filters)), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
