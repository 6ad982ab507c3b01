"""Exports tensors of a torch file: as safetensors, as a directory that ``from_pretrained`` reads,
or as another torch file."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Sequence
from typing import Final

import torch

from portus.engine.loading.checkpoint_file import load_file
from portus.errors import UsageError, printable
from portus.reach.leaving.export_result import WrittenExport
from portus.reach.leaving.outline import leaves_of
from portus.reach.leaving.safetensors import shared_names
from portus.reach.pools.elsewhere import fill

PREFIXES: Final = ("pytorch_model_fsdp_0.model.", "model.safetensors.", "state_dict.", "model.")
"""The prefixes of weights' names: in checkpoints of Accelerate, of Lightning, and in most
others."""

Tensors = dict[str, torch.Tensor]


def write(
    path: str,
    out: str,
    *,
    names: Sequence[str],
    strip: str,
    is_torch: bool,
    limit: int | None,
    only_weights: bool,
) -> WrittenExport:
    """Write the values of the torch file at ``path`` that ``names`` select to ``out``, and sync
    them.

    names: shell patterns of key paths; none means all. strip: removed from the beginning of names.
    limit: the most bytes of a file in the directory ``out``; None: ``out`` is a file. only_weights:
    omit other tensors, and give weights their names in a model. Protected tables are read from
    their own pool. Verifies the file, and runs no code that it names. Raises ``UsageError`` for
    objects of other classes than ``weights_only`` allows, ``CorruptionError``, ``MediumError``.
    """
    try:
        state = load_file(path, list(names) or None, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise UsageError(
            f"{printable(path)}: it has objects that are no tensors and no plain values"
            f"{f' ({named[1]})' if named else ''}. Load it with torch.load in a program that "
            "trusts it, and save the tensors"
        ) from error
    state = fill(state)
    found = leaves_of(state)
    tensors = {name: value for name, value in found if isinstance(value, torch.Tensor)}
    no_weights: list[str] = []
    if only_weights:
        prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in tensors)), "")
        no_weights = [name for name in tensors if not name.startswith(prefix)]
        tensors = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    if not tensors:
        raise UsageError(f"{printable(path)} has no tensor of such a name; portus show lists them")
    done = WrittenExport(tensors=len(tensors), no_weights=no_weights)
    if is_torch:
        torch.save(state, out)
    else:
        storages = [(name, each.untyped_storage().data_ptr()) for name, each in tensors.items()]
        done.shared = shared_names(each for each in storages if each[1])
        done.left_out = [name for name, value in found if not isinstance(value, torch.Tensor)]
        _write_safetensors(tensors, strip, out, limit)
    for written in [out] if limit is None else [each.path for each in os.scandir(out)]:
        with open(written, "rb") as file:
            os.fsync(file.fileno())
        done.size += os.path.getsize(written)
    return done


def _write_safetensors(tensors: Tensors, strip: str, out: str, limit: int | None) -> None:
    try:
        from safetensors.torch import save_file

        if limit is not None:
            from huggingface_hub import save_torch_state_dict
    except ModuleNotFoundError as error:
        raise UsageError(f"this needs {error.name}; pip install {error.name}") from None
    named: Tensors = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(strip) or "tensor"
        if short in named:
            raise UsageError(f"two tensors would be called {short}; strip less")
        # A copy: safetensors refuses tensors that share memory.
        named[short] = tensor.detach().clone(memory_format=torch.contiguous_format)
    if limit is None:
        save_file(named, out, metadata={"format": "pt"})
    else:
        save_torch_state_dict(named, out, max_shard_size=limit, metadata={"format": "pt"})
