"""``DeliveredOrder``: a digest of the samples that a loader was given, batch by batch.

A resumed epoch asks its sampler again for the delivered samples. A sampler with its own counter
gives other samples then, which only the digest reveals. The digest after each of the last batches
is kept, because loaders request more than they deliver.
"""

from __future__ import annotations

import operator
from collections import deque
from typing import Any, Final

import msgspec
import xxhash

KEPT: Final = 65536
"""The most batches that a loader may be ahead of training."""


class DeliveredOrder:
    """The order of one epoch so far. Samples are numbers, texts, or tuples, arrays and tensors of
    these; others have no digest."""

    def __init__(self) -> None:
        self._asked = 0
        self._digests: deque[bytes] = deque([b""], maxlen=KEPT)
        self._is_known = True

    def add(self, batch: Any) -> None:
        """Count one more batch, or sample, in the order in which the sampler gave them."""
        self._asked += 1
        said = _bytes_of(batch) if self._is_known else None
        if said is None:
            self._is_known = False
        else:
            self._digests.append(xxhash.xxh3_64_digest(self._digests[-1] + said))

    def after(self, asked: int) -> str | None:
        """Return the digest of the first ``asked`` batches, in hex; None if it is not known."""
        behind = self._asked - asked
        if not self._is_known or not 0 <= behind < len(self._digests):
            return None
        return self._digests[-1 - behind].hex()


def _bytes_of(batch: Any) -> bytes | None:
    try:
        return _ENCODER.encode(batch)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    """Return a plain value for a number, an array or a tensor."""
    return value.tolist() if hasattr(value, "tolist") else operator.index(value)


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain)
