"""Opens the store at an address, and reads the key that seals its objects."""

from __future__ import annotations

import os
from typing import Final

from portus.reach.mirror.address import StoreAddress, StoreKind
from portus.reach.mirror.bucket import Bucket, BucketTimeouts
from portus.reach.mirror.folder import Folder
from portus.reach.mirror.store import Store

KEY_VARIABLE: Final = "PORTUS_MIRROR_KEY"


def key_from_environment() -> bytes | None:
    """Return the key of this process's mirrors: ``$PORTUS_MIRROR_KEY``; None if it is not set."""
    said = os.environ.get(KEY_VARIABLE)
    return os.fsencode(said) if said else None


def open_store(address: StoreAddress, patience: BucketTimeouts | None = None) -> Store:
    """Return a store of the objects below ``address``. Makes no request yet. The caller closes it.

    patience: the longest that a call may take; for a folder the file system decides. Raises
    ``UsageError`` if obstore is missing (``pip install 'portus-checkpoint[mirror]'``), or for wrong
    settings in the environment.
    """
    if address.kind is StoreKind.FOLDER:
        return Folder(address.prefix)
    return Bucket(address, patience)
