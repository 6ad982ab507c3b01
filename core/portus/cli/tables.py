"""The batch numbers of protected tables, and of the dense part of their training."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from typing import Final

from portus.client.loading.contents import Storages, tensor_bytes
from portus.errors import CorruptionError
from portus.spec import TensorSpec

TABLES: Final = "tables"
DENSE_PART: Final = "dense part"

_BATCHES: Final = {"batch": TABLES, "dense_batch": DENSE_PART}
"""What protected tables call the numbers of their batches."""


def batches_of(tensors: Sequence[TensorSpec], storages: Storages) -> dict[str, int]:
    """The batches of a version of protected tables: its step is that of the version, and its log
    goes on. Nothing of other versions, and of damaged ones."""
    specs = {each.name: each for each in tensors if each.dtype == "int64" and not each.shape}
    if _BATCHES.keys() - specs.keys():
        return {}
    found: dict[str, int] = {}
    with contextlib.suppress(CorruptionError):
        for name, said in _BATCHES.items():
            [data] = tensor_bytes(storages, specs[name], tempfile.gettempdir())
            found[said] = int.from_bytes(data, "little", signed=True)
    return found
