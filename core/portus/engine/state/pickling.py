"""A state as torch pickles it: the exact bytes of ``torch.save``, and the storages beside them,
uncopied.

torch's own pickler is the standard. Ours is the one of C, as torch's is, and takes a shortcut for
plain tensors: it makes the result of their ``__reduce_ex__`` without the objects in between. It
takes the shortcut only if its bytes have equalled torch's in this process.
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Final

import numpy as np
import torch
from torch.serialization import location_tag, normalize_storage_type

from portus.engine.image.image import Column, Image
from portus.engine.image.key_paths import storage_places
from portus.engine.image.torch_zip import (
    PICKLE,
    STORAGES,
    VERSION,
    TorchFormat,
    archive_name,
    torch_image,
)
from portus.engine.state.contents import FileContents
from portus.errors import UsageError

Reducers = dict[type, Any]
"""Functions that pickle objects of a class, as in ``copyreg.dispatch_table``."""

_PROTOCOL: Final = torch.serialization.DEFAULT_PROTOCOL
_TORCHS_OWN: Final = (
    torch.Tensor.__reduce_ex__,
    torch.Tensor._reduce_ex_internal,
    torch.serialization._cpu_tag,
)


@dataclass(frozen=True, slots=True)
class PickledState(FileContents):
    """A state as ``torch.save`` pickles it. Storage i has the key "i" in ``pickle``."""

    pickle: bytes
    storages: list[torch.UntypedStorage]
    tensors: list[torch.Tensor]
    lengths: Column
    has_devices: bool

    def describer(self) -> Callable[[int], str]:
        return partial(_path_in, self.pickle)

    def image(self, path: str, note: bytes = b"") -> Image:
        """Return the image that ``torch.save`` would write to ``path``, with ``note``."""
        return torch_image(
            archive=archive_name(path),
            pickle=self.pickle,
            lengths=self.lengths,
            torch_format=torch_format(),
            note=note,
        )


def _path_in(pickled: bytes, index: int) -> str:
    """Return the path to storage ``index`` as Python writes it, such as ``['model']['weight']``."""
    places = (place for place in storage_places(pickled) if place.storage == str(index))
    return next((place.subscript for place in places), f"storage {index}")


def pickle_state(state: object, reducers: Reducers | None = None) -> PickledState:
    """Return ``state`` as ``torch.save`` pickles it. reducers: of classes pickled in other ways.

    Raises ``UsageError`` for values that torch refuses, in torch's words, with their path.
    """
    if torch.serialization._serialization_tls.skip_data:
        raise UsageError(
            "save: expected a call outside of torch.serialization.skip_data, found one inside; "
            "Portus writes the bytes of tensors: use torch.save there"
        )
    try:
        with no_collection():
            return _pickle(state, _shortcut_is_right(), reducers)
    except (MemoryError, UsageError):
        raise
    except Exception as error:
        where = _place_of_failure(state)
        raise UsageError(
            f"state{where}: torch cannot save it: {type(error).__name__}: {error}"
        ) from error


def torch_format() -> TorchFormat:
    """Return the format that the running torch writes, as it is configured now.

    Of ``torch.utils.serialization.config.save``, ``storage_alignment`` is followed. CRC32s are
    computed whatever ``compute_crc32`` is, and no memory is pinned.
    """
    with contextlib.suppress(ImportError):  # torch 2.6 has none
        from torch.utils.serialization import config

        return _probe(config.save.storage_alignment)
    return _probe(64)


@lru_cache(maxsize=8)
def _probe(alignment: int) -> TorchFormat:
    TorchFormat(records=(), sorted_as_text=False, alignment=alignment, version=b"")  # checks it
    # Eleven storages: the order of "10" and "2" tells how keys are sorted.
    file = io.BytesIO()
    with torch.serialization._open_zipfile_writer(file) as writer:
        torch.serialization._save(
            [torch.UntypedStorage(1) for _ in range(11)], writer, pickle, _PROTOCOL, False
        )
    with zipfile.ZipFile(file) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
        whole = archive.namelist()[0].partition("/")[0]
        keys = [each for each in names if each.startswith(STORAGES)]
        between = names[names.index(PICKLE) + 1 : names.index(keys[0])]
        return TorchFormat(
            records=tuple((each, archive.read(f"{whole}/{each}")) for each in between),
            sorted_as_text=keys[2] != f"{STORAGES}2",
            alignment=alignment,
            version=archive.read(f"{whole}/{VERSION}"),
        )


def _pickle(state: object, shortcut: bool, reducers: Reducers | None = None) -> PickledState:
    file = io.BytesIO()
    pickler: _Pickler | _SlowPickler = _Pickler(file) if shortcut else _SlowPickler(file)
    if reducers is not None:
        pickler.dispatch_table = {**copyreg.dispatch_table, **reducers}
    try:
        pickler.dump(state)
        data = pickler.finish(file.getvalue())
    except _NotPlainError:
        return _pickle(state, False, reducers)
    # Held, not copied: this keeps their memory where it is.
    storages = list(pickler.storages.values())
    return PickledState(
        pickle=data,
        storages=storages,
        tensors=pickler.tensors,
        lengths=np.array([storage.nbytes() for storage in storages], np.int64),
        has_devices=pickler.has_devices,
    )


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Stop garbage collection inside: searching for garbage costs more than to pickle, or to load.
    Another thread may end this early, which does no harm."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _NoHooks:
    """Takes the place of the empty ``OrderedDict`` that is pickled for the hooks of each tensor."""

    __slots__ = ()


_NO_STORAGES: Final = frozenset(
    {str, int, float, bool, tuple, list, dict, OrderedDict, bytes, type(None), torch.Tensor}
    | {type, FunctionType}
)
"""The types of most values of a state, none of them a storage: a fast answer for many objects."""


class _NotPlainError(Exception):
    """The error for a state that contains something the shortcut cannot pickle."""


class _CollectingPickler(pickle.Pickler):
    """Collects the storages, uncopied, and pickles references to them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.tensors: list[torch.Tensor] = []
        self.has_devices = False
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def finish(self, data: bytes) -> bytes:
        """Return the pickle of the dumped data. Raises ``_NotPlainError``."""
        return data

    def _key(self, storage: torch.UntypedStorage, dtype: torch.dtype, address: int) -> str:
        # torch refuses this as well, in these words.
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError(
                "Cannot save multiple tensors or storages that view the same data as different "
                "types"
            )
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._keys[storage._cdata] = str(len(self._keys))
            self.storages[key] = storage
        return key


class _SlowPickler(_CollectingPickler):
    """Pickles as torch does, without copies: all reductions are torch's own."""

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _NO_STORAGES:
            return None
        storage: Any
        if isinstance(obj, torch.storage.TypedStorage):
            legacy = getattr(torch, obj._pickle_storage_type())
            storage, dtype, count = obj._untyped_storage, obj.dtype, obj._size()
        elif torch.is_storage(obj):
            legacy = normalize_storage_type(type(obj))
            storage, dtype, count = obj, torch.uint8, obj.nbytes()
        else:
            return None
        kind = storage.device.type
        self.has_devices |= kind != "cpu"
        key = self._key(storage, dtype, 0 if kind == "meta" else storage.data_ptr())
        fake = getattr(obj, "_fake_device", None)
        return "storage", legacy, key, location_tag(storage) if fake is None else str(fake), count

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
        return NotImplemented


_LEGACY: Final = {
    dtype: (getattr(torch, name), dtype.itemsize)
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()
}


_metadata_of: Final = torch._C._get_tensor_metadata  # type: ignore[attr-defined]
_REBUILD: Final = torch._utils._rebuild_tensor_v2
_EMPTY_HOOKS: Final = (OrderedDict, ())


_PERSISTENT: Final = b"Q"
"""The opcode after a reference to a storage, see ``pickletools``."""
_SIGN: Final[float] = struct.unpack(">d", b"\x7f\xf8" + os.urandom(6))[0]
"""A NaN that occurs in no state."""
_SIGNED: Final = b"G" + struct.pack(">d", _SIGN)
"""The sign as it is pickled."""


class _Pickler(_CollectingPickler):
    """Makes the same bytes, without the objects that torch makes for each plain tensor, and without
    a call for each object of a state.

    A pickler with ``persistent_id`` calls it for every object. This one has none: it pickles a
    reference to a storage as the tuple that it is, with a sign after it, which ``finish`` replaces
    by the opcode.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._signs = 0

    def finish(self, data: bytes) -> bytes:
        # The state contains these bytes itself, so the signs cannot be told from them.
        if data.count(_SIGNED) != self._signs:
            raise _NotPlainError
        return data.replace(_SIGNED, _PERSISTENT)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is _NoHooks:
            return _EMPTY_HOOKS
        if kind is not torch.Tensor:
            if isinstance(obj, torch.Tensor):
                self.tensors.append(obj)
            elif torch.is_storage(obj):
                raise _NotPlainError
            return NotImplemented
        dtype, is_cpu = obj.dtype, obj.is_cpu
        if (
            obj.__dict__
            or obj._backward_hooks
            or obj.layout is not torch.strided
            or obj.is_quantized
            or obj.is_nested
            or dtype not in _LEGACY
            or not (is_cpu or obj.is_cuda)
            or _metadata_of(obj)
        ):
            raise _NotPlainError
        self.tensors.append(obj)
        self._signs += 1
        storage = obj.untyped_storage()
        key = self._key(storage, dtype, storage.data_ptr())
        if is_cpu:
            location = "cpu"
        else:
            location, self.has_devices = location_tag(storage), True
        legacy, itemsize = _LEGACY[dtype]
        stored = ("storage", legacy, key, location, storage.nbytes() // itemsize)
        size, offset = tuple(obj.shape), obj.storage_offset()
        arguments = stored, _SIGN, offset, size, obj.stride(), obj.requires_grad, _NoHooks()
        return _REBUILD, arguments


def _shortcut_is_right() -> bool:
    """Return whether tensors are pickled in their original way, and this torch does it as we do."""
    registry = torch.serialization._package_registry
    # At each save: a program may patch these at any time.
    now = (torch.Tensor.__reduce_ex__, torch.Tensor._reduce_ex_internal, registry[0][1])
    return now == _TORCHS_OWN and torch.Tensor not in copyreg.dispatch_table and _try_twice()


@lru_cache(maxsize=1)
def _try_twice() -> bool:
    base = torch.empty(2, 3, device="cpu", dtype=torch.float32)
    state = {
        "view": [base, base.t(), base[1:], base],
        "others": [
            torch.empty(1, device="cpu", dtype=dtype) for dtype in (torch.int64, torch.bool)
        ],
        "parameter": torch.nn.Parameter(base),
        "gradient": torch.empty(1, device="cpu", requires_grad=True),
    }
    return _pickle(state, True).pickle == _pickle(state, False).pickle


def _place_of_failure(state: object) -> str:
    """Return the path to the innermost part that cannot be pickled alone either."""
    path = ""
    seen = {id(state)}
    while True:
        for step, child in _children(state):
            if id(child) in seen:
                continue
            try:
                _pickle(child, False)
            except Exception:
                seen.add(id(child))
                path, state = path + step, child
                break
        else:
            return path


def _children(value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"[{key!r:.80}]", each) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", each) for index, each in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [("{...}", each) for each in value]
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return []
    return [(f".{name}", each) for name, each in vars(value).items()]
