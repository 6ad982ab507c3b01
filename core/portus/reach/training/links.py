"""Links that lead to the newest checkpoint: replaced in one step."""

from __future__ import annotations

import contextlib
import os

from portus.engine.directory.folder import PATH, HiddenFolder, hidden_name
from portus.engine.directory.system import Linux
from portus.errors import MediumError


def replace_link(link: str, target: str) -> None:
    """Make ``link`` a symbolic link to ``target``, in place of the link or file that may be there,
    in one step: whoever dies meanwhile leaves the one or the other, and what is left in the hidden
    folder goes with the next start. Raises ``MediumError``."""
    directory, name = os.path.split(os.path.abspath(link))
    folder = HiddenFolder(Linux(), directory)
    try:
        # Locked meanwhile: a start of another process removes what belongs to no locked record.
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
