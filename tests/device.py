"""A file that stands in for a DAX device, for a process whose machine has none.

The code that is special to a pool on a device (how it is made, where its links are) then runs on
any machine, through the medium of real devices. It does not show how a device writes lines of the
cache back.
"""

from __future__ import annotations

import os
import stat
import types
from pathlib import Path
from typing import Any, Final

import pytest

from portus.reach.media import dax, pmem

ALIGNMENT: Final = 4096

_NUMBER: Final = os.makedev(511, 9)  # of no driver
_MORE: Final = ("st_atime", "st_mtime", "st_ctime", "st_atime_ns", "st_mtime_ns", "st_ctime_ns")


def stand_in(file: str, facts: str, patch: pytest.MonkeyPatch) -> None:
    """Make ``file`` look like a DAX device to this process and its forked children, in stat(2) and
    /sys, until ``patch`` is undone. It is mapped and locked like the file that it is.

    facts: a directory for what /sys says, which may be there from an earlier call.
    """
    known = os.stat(file)
    _tell(facts, known.st_size)
    look = os.stat

    def tell_device(path: Any, **how: Any) -> os.stat_result:
        found = look(path, **how)
        if (found.st_dev, found.st_ino) != (known.st_dev, known.st_ino):
            return found
        mode = stat.S_IFCHR | stat.S_IMODE(found.st_mode)
        more = {name: getattr(found, name) for name in _MORE}
        more |= {"st_rdev": _NUMBER, "st_blocks": 0}
        return os.stat_result((mode, *tuple(found)[1:10]), more)

    patch.setattr(os, "stat", tell_device)
    patch.setattr(dax, "_SYS_DEVICES", facts)
    # Every process sees all stores at once, without caches to write back.
    nothing = lambda *_: None  # noqa: E731
    processor = types.SimpleNamespace(flush=nothing, drain=nothing)
    patch.setattr(pmem, "_load", lambda library: processor)


def _tell(facts: str, size: int) -> None:
    """Write the files that /sys has for a device of an NVDIMM namespace."""
    home = Path(facts, "ndbus0", "dax9.0")
    if home.exists():
        return
    home.mkdir(parents=True)
    (home / "size").write_text(f"{size}\n")
    (home / "align").write_text(f"{ALIGNMENT}\n")
    (home / "subsystem").symlink_to("/sys/bus/dax")
    Path(facts, f"{os.major(_NUMBER)}:{os.minor(_NUMBER)}").symlink_to(home)
