"""Calls of ``torch.distributed.checkpoint`` that raise our errors, not torch's wrapping of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException

from portus.errors import PortusError


@contextlib.contextmanager
def call_torch() -> Iterator[None]:
    """Raise the error of the lowest rank that has one of ours, in place of torch's exception."""
    with warnings.catch_warnings():
        # One process without a process group is a valid use.
        warnings.filterwarnings("ignore", "torch.distributed is")
        try:
            yield
        except CheckpointException as error:
            for _, failure in sorted(error.failures.items()):
                if isinstance(failure[0], PortusError):
                    raise failure[0] from error
            raise
