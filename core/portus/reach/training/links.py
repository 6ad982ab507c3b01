"""Links to the newest checkpoint, replaced in one step."""

from __future__ import annotations

import contextlib
import os

from portus.engine.directory.folder import PATH, HiddenFolder, hidden_name
from portus.engine.directory.system import Linux
from portus.errors import MediumError


def replace_link(link: str, target: str) -> None:
    """Make ``link`` a symbolic link to ``target``, in place of an existing link or file, in one
    step: a kill leaves the one or the other, and the next start removes leftovers in the hidden
    folder. Raises ``MediumError``."""
    directory, name = os.path.split(os.path.abspath(link))
    folder = HiddenFolder(Linux(), directory)
    try:
        # Locked meanwhile: another process's start removes the files of unlocked records.
        record = folder.claim()
        try:
            made = folder.make(), hidden_name(record.token, PATH)
            # Relative, as Lightning makes it: the directory may be moved as a whole.
            text = os.fsencode(os.path.relpath(target, directory))
            folder.system.note(*made, text)
            folder.system.rename(made, (folder.base, name))
        finally:
            for each in (hidden_name(record.token, PATH), record.name):
                with contextlib.suppress(MediumError):
                    folder.system.unlink(folder.make(), each)
            folder.system.close(record.file)
    finally:
        folder.close()
