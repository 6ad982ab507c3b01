"""The stores that addresses mean, and the key that seals their objects."""

from __future__ import annotations

import os
from typing import Final

from portus.reach.mirror.address import StoreAddress, StoreKind
from portus.reach.mirror.bucket import Bucket, BucketTimeouts
from portus.reach.mirror.folder import Folder
from portus.reach.mirror.host_store import HostStore
from portus.reach.mirror.store import FileStore, Store

KEY_VARIABLE: Final = "PORTUS_MIRROR_KEY"


def key_from_environment() -> bytes | None:
    """The key of the mirrors of this process: ``$PORTUS_MIRROR_KEY``; None if there is none."""
    said = os.environ.get(KEY_VARIABLE)
    return os.fsencode(said) if said else None


def open_store(address: StoreAddress, patience: BucketTimeouts | None = None) -> Store:
    """The objects below ``address``. Asks nobody yet. Whoever opened it closes it.

    patience: how long a call may take; of a folder the file system says it. Raises ``UsageError``
    if obstore is missing (``pip install 'portus-checkpoint[mirror]'``), or the environment says
    what cannot be.
    """
    if address.kind is StoreKind.HOST:
        return HostStore(address.bucket, address.prefix)
    return open_file_store(address, patience)


def open_file_store(address: StoreAddress, patience: BucketTimeouts | None = None) -> FileStore:
    """Open a store as ``open_store`` does, for files of any size. Not on a storage host."""
    assert address.kind is not StoreKind.HOST, "objects on a storage host are small"
    if address.kind is StoreKind.FOLDER:
        return Folder(address.prefix)
    return Bucket(address, patience)
