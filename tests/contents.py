"""Contents of versions that are saved by hand, as a storage host wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from portus.reach.index.file_table import FileTable, PackedFile, encode_table


def table(lengths: Sequence[int], name: str = "a") -> bytes:
    """The contents of a version of one file, whose storages have these lengths; the last one is
    what is around the others."""
    length = np.array(lengths[:-1], np.int64)
    file = PackedFile(name, sum(lengths), np.cumsum(length) - length, length)
    return encode_table(FileTable([file]))


def tabled(draft: Any, lengths: Sequence[int]) -> Any:
    """``draft``, whose version is of one file, as a host wants it; ``lengths``: of its storages."""
    commit = draft.commit
    contents = table(lengths)
    draft.commit = lambda labels, *others: commit(replace(labels, contents=contents), *others)
    return draft
