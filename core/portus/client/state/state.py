"""A state (nested Python values with tensors) as a tree of JSON, tensor specs and storages.

What comes back is equal to what was saved, types included. Lost are: that two places hold one and
the same object (tensors keep it), attributes and gradients of tensors, and that two meta tensors
share memory. An object of a registered class is what its codec makes of it. tree.py has the grammar
and the rules of key paths, leaves.py the types of leaves, classes.py what may be found by name,
codecs.py what a user registered.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch

from portus.client.state.tensors import TensorTable
from portus.client.state.tree import (
    children,
    decode,
    named_leaves,
    said_at,
    tensor_index,
    wrapper,
)
from portus.client.state.tree_reader import DROPPED, TreeReader
from portus.client.state.tree_writer import TreeWriter
from portus.errors import UsageError
from portus.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state taken apart; nothing of a tensor is copied.

    ``tree`` is tagged JSON in UTF-8, with tensors replaced by indices into ``tensors``.
    ``storages`` are the distinct ones in order of first use, so that ties stay tied. ``owned``
    are the indices of those that are private copies (of big numpy arrays and bytes): the spec
    that uses one has the key path of the array. ``live`` are the tensors of ``tensors``.
    """

    tree: bytes
    tensors: tuple[TensorSpec, ...]
    storages: tuple[torch.UntypedStorage, ...]
    owned: frozenset[int]
    live: tuple[torch.Tensor, ...] = ()


class Flattener:
    """``flatten``, faster for states that look like the last one. Not for several threads.

    Between calls it keeps no tensor and no storage alive.
    """

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table = TensorTable()

    def flatten(self, state: object, unknown: list[object] | None = None) -> FlatState:
        """See ``flatten``. ``tensors`` is the very same tuple if all tensors look the same."""
        with _no_collection():
            walk = TreeWriter([], unknown)
            tree = _encode(walk, state)
            specs, storages = self._table.describe(_names(walk, tree), walk.tensors)
            owned = frozenset(specs[index].storage for index in walk.owned)
            return FlatState(tree, specs, storages, owned, tuple(walk.tensors))


def flatten(state: object, unknown: list[object] | None = None) -> FlatState:
    """Take ``state`` apart. Reads no tensor data and does not wait for a device.

    unknown: takes the leaves that no tree can hold: objects of unknown classes, tensors that are no
        plain ones. Such a tree is of use in this process alone. None: they are refused.

    Raises ``UsageError`` that names the key path of what cannot be saved, and what to do.
    """
    return Flattener().flatten(state, unknown)


def unflatten(
    tree: bytes,
    tensors: Sequence[TensorSpec],
    storages: Sequence[torch.UntypedStorage | None],
    keep: Callable[[str], bool] | None = None,
    hole: object = None,
    *,
    stand_ins: bool = False,
    unknown: Sequence[object] = (),
) -> object:
    """The state again. Its tensors and big arrays use the memory of ``storages``; no copy.

    With ``keep``, only leaves whose key path it accepts: other dict entries (and namespace
    attributes) disappear, other places in lists, tuples and dataclasses are ``hole``; of a dict of
    which nothing is kept comes an empty one, of all else None. A storage that only dropped leaves
    use may be None. stand_ins: objects of codecs are not made, see codecs.py. unknown: what
    ``flatten`` put beside the tree.

    Raises ``CorruptionError`` for a tree or specs that no ``flatten`` made, and ``UsageError``
    that names the key path if a class in the state must be imported first, if an object needs a
    codec that is not registered, or fails in it, or if a part of an object would be dropped.
    """
    root = decode(tree)
    with _no_collection(), torch.inference_mode(False), torch.no_grad(), said_at(""):
        paths = iter([path for path, _ in named_leaves(root)])
        reader = TreeReader(
            tensors, storages, paths, keep, hole, stand_ins=stand_ins, unknown=unknown
        )
        state: object = reader.value(root, "", 0)
    return _nothing(root) if state is DROPPED else state


def _nothing(root: object) -> object:
    """A state of which nothing is kept: a dict without entries, or None."""
    wrapped = wrapper(root)
    inner = root if wrapped is None else wrapped[1][0]
    return {} if isinstance(inner, dict) and children(inner) is not None else None


def _encode(walk: TreeWriter, state: object) -> bytes:
    try:
        root = walk.node(state, "")
        walk.tie()
        return msgspec.json.encode(root)
    except RecursionError as error:
        raise UsageError("the state is nested too deep for this call stack") from error
    except UnicodeEncodeError as error:
        raise UsageError(f"a name in the state is not valid text: {error}") from error


def _names(walk: TreeWriter, tree: bytes) -> list[str]:
    """The distinct key paths of the tensors."""
    if len({*walk.names, *walk.others}) == len(walk.names) + len(walk.others):
        return walk.names
    indices = ((tensor_index(node), path) for path, node in named_leaves(decode(tree)))
    return [path for _, path in sorted((i, path) for i, path in indices if i is not None)]


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside: many small objects are made, and a full one takes longer
    than all the rest (0.1 s in a trainer)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
