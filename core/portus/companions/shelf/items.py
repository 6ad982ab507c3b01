"""The items of a shelf, under their names: arrays, plain values, and containers of both.

An item is an ``Array``; None, a bool, int, float, str or bytes; or a dict, list or tuple of items.
They are encoded as ``docs/format.md`` says, so that all code that loads a version can load a shelf.
A numpy array is an ``$array`` here, and a tensor a ``$tensor``. Each has a storage of its own,
however small, since it can be changed in place.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from portus.companions.media.private import PrivateMapping, Run
from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.settings.fits import is_text
from portus.errors import UsageError
from portus.reach.format.arrays import array_over, dtype_node
from portus.reach.format.items import DEPTH_MAX, item_size

if TYPE_CHECKING:
    import torch

Item = Any
"""An item, see the module. Its closed set of types cannot be expressed to a type checker."""

# Integers that msgspec encodes in JSON; all others are an ``$int``.
_INT_MIN: Final = -(1 << 63)
_INT_MAX: Final = (1 << 64) - 1


class Array:
    """One array or tensor on the shelf, of zeros at first: its memory, and how to view it.
    ``dtype``: torch's name of a tensor's; numpy's of an array."""

    def __init__(self, dtype: str | np.dtype[Any], sizes: tuple[int, ...]) -> None:
        """Raise ``UsageError`` for a dtype of tensors that cannot be saved."""
        if isinstance(dtype, str) and dtype not in ITEM_SIZES:
            raise UsageError(f"tensors of {dtype} cannot be put on a shelf")
        self.memory: Final = PrivateMapping(item_size(dtype) * math.prod(sizes))
        self.sizes: Final = sizes
        self.dtype: Final = dtype
        self.is_read_only = False
        """True if its views are read-only: the shelf is open for reading."""
        self._view: Any = None
        self._own: Any = None
        self._dtype_node: object = None

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return self.memory.size

    @property
    def view(self) -> Any:
        """The array or tensor to be changed in place; the same object each time."""
        if self._view is None:
            self._view = self._read_only() if self.is_read_only else self._over(self.memory.view)
        return self._view

    def _read_only(self) -> Any:
        """Return a view that raises when it is written to. Torch has no such tensors except those
        of inference mode, which raise outside of it."""
        if not isinstance(self.dtype, str):
            data = self.memory.view[: self.size].data.toreadonly()
            return array_over(self.dtype, self.sizes, data)
        import torch

        with torch.inference_mode():
            return self._over(self.memory.view)

    @property
    def own(self) -> Any:
        """Return another object over the memory; it keeps its shape whatever a user makes of
        ``view``."""
        if self._own is None:
            self._own = self._over(self.memory.view)
        return self._own

    def changes(self) -> Sequence[Run]:
        """Return the runs of memory that changed; none, without a look, if no view was ever made.
        If torch moved a view elsewhere, its elements are copied back first. Raises ``UsageError``
        if that view has another shape or dtype by now."""
        if self._view is None and self._own is None:
            return ()
        if self._has_moved():
            if not self.fits(self._view):
                raise UsageError(
                    f"a tensor on the shelf: expected {list(self.sizes)} of {self.dtype}, found "
                    f"{list(self._view.shape)} of {self._view.dtype}: its .data was set; assign "
                    "the tensor to its name instead"
                )
            self._copy(self._view, self.own)
        return self.memory.changes()

    def revert(self) -> None:
        """Restore the committed elements in the view, wherever that is."""
        self.memory.revert()
        self._show_own()

    def _has_moved(self) -> bool:
        """Return whether the view is not over its memory any more: torch moves a tensor that is
        shared with other processes (``share_memory_``, or sent to one), and when ``.data`` is set.
        """
        if not isinstance(self.dtype, str) or self._view is None or not self.size:
            return False
        moved: bool = self._view.data_ptr() != self.own.data_ptr()
        return moved

    def _show_own(self) -> None:
        """Copy the memory into a view that was moved. Drop a moved view that does not fit any
        more."""
        if self._has_moved():
            if self.fits(self._view):
                self._view.detach().copy_(self.own)
            else:
                self._view = None

    def _over(self, memory: np.ndarray[Any, Any]) -> Any:
        if not isinstance(self.dtype, str):
            return array_over(self.dtype, self.sizes, memory[: self.size].data)
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.size:
            return torch.empty(self.sizes, dtype=dtype, device="cpu")
        return torch.frombuffer(memory[: self.size].data, dtype=dtype).reshape(self.sizes)

    def fill(self, value: Any) -> None:
        """Copy ``value``, which ``fits``, into the view."""
        if value is not self.view and self.size:
            self._copy(value, self.own)
            self._show_own()

    def begin(self, value: Any) -> None:
        """Begin with ``value``, which ``fits``: no view exists yet, and none of its pages is a
        copy."""
        if self.size:
            self._copy(value, self._over(self.memory.committed))
            self.memory.refresh()

    def _copy(self, value: Any, target: Any) -> None:
        if not isinstance(self.dtype, str):
            np.copyto(target, value)
            return
        source = value.detach()
        place = source.untyped_storage().data_ptr() - target.data_ptr()
        if 0 <= place < len(self.memory.view):
            source = source.clone()  # its own memory, perhaps in another order
        target.copy_(source)

    def fits(self, value: object) -> bool:
        """Return whether ``value`` is of the same kind, dtype and shape."""
        if not isinstance(self.dtype, str):
            return (
                isinstance(value, np.ndarray)
                and not isinstance(value, np.ma.MaskedArray)
                and value.dtype == self.dtype
                and value.shape == self.sizes
            )
        return (
            _is_dense_tensor(value)
            and tuple(value.shape) == self.sizes  # type: ignore[attr-defined]
            and str(value.dtype) == f"torch.{self.dtype}"  # type: ignore[attr-defined]
        )

    def like(self, sizes: tuple[int, ...]) -> Array:
        """Return another array of a given shape, with the elements that both shapes contain; the
        others are zero. Raises ``UsageError`` for a shape that no array can have."""
        made = Array(self.dtype, sizes)
        try:
            target = made._over(made.memory.committed)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"no array has {len(sizes)} sizes {sizes!s:.200}: {error}") from error
        if len(sizes) == len(self.sizes) and made.size:
            both = tuple(slice(0, min(pair)) for pair in zip(sizes, self.sizes, strict=True))
            target[both] = self.own[both]
            made.memory.refresh()
        return made

    def node(self, storage: int) -> object:
        """Return the node of the array in the contents of a shelf."""
        if isinstance(self.dtype, str):
            return {"$tensor": [storage, self.dtype, self.sizes]}
        if self._dtype_node is None:
            self._dtype_node = dtype_node(self.dtype)
        return {"$array": [storage, self._dtype_node, self.sizes]}


def _is_tensor(value: object) -> bool:
    """Return whether ``value`` is a tensor. Does not import torch: a caller with one did."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_dense_tensor(value: Any) -> bool:
    """Return whether ``value`` is a tensor whose elements are in its own memory. A class that
    redefines operations (a distributed tensor, a fake one) has them elsewhere, or none."""
    return (
        _is_tensor(value)
        and type(value).__torch_dispatch__ is sys.modules["torch"].Tensor.__torch_dispatch__
        and str(value.layout) == "torch.strided"
        and value.device.type != "meta"
        and not value.is_nested
        and not value.is_quantized
    )


def copy_item(value: object, path: str, depth: int = 0) -> Item:
    """Return ``value`` as an item, with arrays copied. Raise ``UsageError`` naming ``path``."""
    if depth > DEPTH_MAX:
        raise UsageError(f"{path:.200}: nested deeper than {DEPTH_MAX}; make it flatter")
    if isinstance(value, dict):
        return {_key(k, path): copy_item(v, f"{path}.{k}", depth + 1) for k, v in value.items()}
    if type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        return type(value)(copy_item(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value))
    if isinstance(value, str) and not is_text(value):
        raise UsageError(f"{path!r:.200}: text with a lone surrogate: {value!r:.80}")
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.generic):
        value = np.asarray(value)
    try:
        made = _make_array_for(value)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    if made is not None:
        made.begin(value)
        return made
    raise UsageError(
        f"{path}: {type(value).__module__}.{type(value).__qualname__} cannot be put on a shelf; "
        "numpy arrays, tensors, None, bool, int, float, str, bytes, and dicts, lists and tuples of "
        "them can"
    )


def _key(key: object, path: str) -> str | int:
    if type(key) is int or (type(key) is str and is_text(key)):
        assert isinstance(key, (str, int))
        return key
    raise UsageError(f"{path}: keys on a shelf are text or integers, found {key!r:.80}")


def _make_array_for(value: Any) -> Array | None:
    """Return a new array that ``value`` fits; None if it is neither an array nor a tensor."""
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise UsageError(
                "the mask of an array would be lost; assign .data and .mask separately"
            )
        dtype_node(value.dtype)  # refuses what cannot be saved
        if value.dtype.itemsize == 0 and value.size:
            raise UsageError(f"numpy arrays of {value.dtype} have no bytes to save")
        return Array(value.dtype, value.shape)
    if not _is_tensor(value):
        return None
    if not _is_dense_tensor(value):
        raise UsageError("only dense tensors can be put on a shelf")
    return Array(str(value.dtype).removeprefix("torch."), tuple(value.shape))


def arrays_of(item: Item) -> Iterator[Array]:
    """Yield every array in an item, in the order of contents."""
    if isinstance(item, Array):
        yield item
    elif isinstance(item, (dict, list, tuple)):
        for each in item.values() if isinstance(item, dict) else item:
            yield from arrays_of(each)


def view_item(item: Item) -> Any:
    """Return an item as its user sees it: views in new containers."""
    if isinstance(item, Array):
        return item.view
    if isinstance(item, dict):
        return {key: view_item(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(map(view_item, item))
    return item


def encode(items: Mapping[str, Item]) -> tuple[bytes, list[Array]]:
    """Return the contents of a shelf, and its arrays in the order of its storages."""
    arrays: list[Array] = []
    return msgspec.json.encode(_node(items, arrays)), arrays


def _node(item: Item, arrays: list[Array]) -> object:
    if isinstance(item, Array):
        arrays.append(item)
        return item.node(len(arrays) - 1)
    if isinstance(item, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in item):
            return {key: _node(value, arrays) for key, value in item.items()}
        return {"$dict": [[key, _node(value, arrays)] for key, value in item.items()]}
    if isinstance(item, tuple):
        return {"$tuple": [[_node(value, arrays) for value in item]]}
    if isinstance(item, list):
        return [_node(value, arrays) for value in item]
    if isinstance(item, bytes):
        return {"$bytes": [base64.b64encode(item).decode("ascii")]}
    if type(item) is int and not _INT_MIN <= item <= _INT_MAX:
        return {"$int": hex(item)}
    if type(item) is float and not math.isfinite(item):
        return {"$float": "nan" if math.isnan(item) else ("inf" if item > 0 else "-inf")}
    return item
