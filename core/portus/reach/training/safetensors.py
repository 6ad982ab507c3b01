"""Saves safetensors files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from portus.engine.paths.process import handle_of, saver
from portus.engine.paths.request import OwnFormat
from portus.engine.pipeline.handle import SaveHandle
from portus.engine.state.contents import FileContents
from portus.reach.formats.safetensors_file import NamedTensors


@dataclass(frozen=True, slots=True)
class Safetensors(OwnFormat):
    """Tensors by their names, to be saved as a safetensors file, and its metadata."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def file_contents(self) -> FileContents:
        return NamedTensors(self.tensors, self.metadata)


def save_safetensors(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    wait: bool = False,
) -> SaveHandle:
    """Save ``tensors`` to ``path`` in the background, as ``safetensors.torch.save_file`` would.

    Every reader of safetensors reads the file, which has digests in its metadata. Otherwise the
    same as ``portus.save``. The call copies a tensor that is a part of a larger storage.

    tensors: dense and contiguous, by their names; no two of them may share memory.
    metadata: texts by their names, which readers find in the file.

    Raises ``UsageError`` for tensors that safetensors cannot hold, and as ``portus.save``.
    """
    return handle_of(saver().save(Safetensors(tensors, metadata or {}), path), wait)
