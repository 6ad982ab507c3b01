"""A state as torch pickles it: the very bytes of ``torch.save``, and the storages beside them,
uncopied.

torch's own pickler is the rule. Ours is the one of C, as torch's is, and takes a shortcut for plain
tensors: it makes what their ``__reduce_ex__`` would return without the objects in between. The
shortcut is taken only if its bytes were seen to equal torch's in this process.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch.serialization import location_tag, normalize_storage_type
from torch.utils.serialization import config

from portus.errors import UsageError
from portus.image.image import Column, Image
from portus.image.key_paths import storage_places
from portus.image.torch_zip import (
    PICKLE,
    STORAGES,
    VERSION,
    TorchFormat,
    archive_name,
    torch_image,
)

_PROTOCOL: Final = torch.serialization.DEFAULT_PROTOCOL
_TORCHS_OWN: Final = (torch.Tensor.__reduce_ex__, torch.Tensor._reduce_ex_internal)


@dataclass(frozen=True, slots=True)
class PickledState:
    """A state at the moment of the call, but for the bytes of its storages.

    Storage i has the key "i" in ``pickle``; holding it keeps its memory. ``tensors``: those that
    were pickled.
    """

    pickle: bytes
    storages: list[torch.UntypedStorage]
    tensors: list[torch.Tensor]

    @property
    def lengths(self) -> Column:
        """Bytes of each storage."""
        return np.array([storage.nbytes() for storage in self.storages], np.int64)

    def changes(self) -> Column:
        """How often torch saw the tensors over each storage being written."""
        index = {storage._cdata: number for number, storage in enumerate(self.storages)}
        counts = np.zeros(len(self.storages), np.int64)
        for tensor in self.tensors:
            if tensor.layout is torch.strided and not tensor.is_inference():
                number = index.get(_storage_of(tensor))
                if number is not None:
                    counts[number] += tensor._version
        return counts

    def image(self, path: str, note: bytes = b"") -> Image:
        """The image of the file that ``torch.save`` would write to ``path``, with ``note``."""
        return torch_image(
            archive=archive_name(path),
            pickle=self.pickle,
            lengths=self.lengths,
            torch_format=torch_format(),
            note=note,
        )


def pickle_state(state: object) -> PickledState:
    """``state`` as ``torch.save`` pickles it.

    Raises ``UsageError`` for what torch refuses, in torch's words, with the path to it.
    """
    if _skips_data():
        raise UsageError(
            "save: expected a call outside of torch.serialization.skip_data, found one inside; "
            "Portus writes the bytes of tensors: use torch.save there"
        )
    try:
        return _pickled(state, _shortcut_is_right())
    except (MemoryError, UsageError):
        raise
    except Exception as error:
        where = _place_of_failure(state)
        raise UsageError(
            f"state{where}: torch cannot save it: {type(error).__name__}: {error}"
        ) from error


def path_in(pickled: bytes, index: int) -> str:
    """Where a storage is in the state of a pickle, for messages: ``['model']['weight']``."""
    places = (place for place in storage_places(pickled) if place.storage == str(index))
    return next((place.subscript for place in places), f"storage {index}")


def torch_format() -> TorchFormat:
    """What the torch that runs writes, as it is configured now.

    Of ``torch.utils.serialization.config.save``, ``storage_alignment`` is followed. CRC32s are
    computed whatever ``compute_crc32`` says, and no memory is pinned.
    """
    save = getattr(config, "save", None)
    return _probed(getattr(save, "storage_alignment", 64))


@lru_cache(maxsize=8)
def _probed(alignment: int) -> TorchFormat:
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


def _skips_data() -> bool:
    return bool(torch.serialization._serialization_tls.skip_data)


def _pickled(state: object, shortcut: bool) -> PickledState:
    file = io.BytesIO()
    pickler = _Pickler(file) if shortcut else _SlowPickler(file)
    pickler.dump(state)
    return PickledState(file.getvalue(), list(pickler.storages.values()), pickler.tensors)


def _storage_of(tensor: torch.Tensor) -> int | None:
    """The identity of its storage; None for one that has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


_NO_STORAGES: Final = frozenset(
    {str, int, float, bool, tuple, list, dict, OrderedDict, bytes, type(None), torch.Tensor}
)
"""What most of a state is: hundreds of thousands of objects are asked about."""


class _Stored:
    """Takes the place of a typed storage that exists only to be pickled."""

    __slots__ = ("dtype", "storage")

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.storage = storage
        self.dtype = dtype


class _SlowPickler(pickle.Pickler):
    """What torch does, but for copies: all reductions are torch's own."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.tensors: list[torch.Tensor] = []
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

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
        fake = getattr(obj, "_fake_device", None)
        return self.persistent(storage, dtype, legacy, count, None if fake is None else str(fake))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
        return NotImplemented

    def persistent(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        legacy: type,
        count: int,
        location: str | None = None,
    ) -> tuple[object, ...]:
        """What stands for a storage in the pickle; the storage is collected."""
        address = 0 if storage.device.type == "meta" else storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError(
                "Cannot save multiple tensors or storages that view the same data as different "
                "types"
            )
        key = self._keys.setdefault(storage._cdata, str(len(self._keys)))
        if location is None:
            location = location_tag(storage)
        self.storages[key] = storage
        return ("storage", legacy, key, location, count)


_LEGACY: Final = {
    dtype: (getattr(torch, name), dtype.itemsize)
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()
}


class _Pickler(_SlowPickler):
    """The same bytes, without the objects that torch makes for each plain tensor."""

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _NO_STORAGES:
            return None
        if kind is _Stored:
            legacy, size = _LEGACY[obj.dtype]
            count = obj.storage.nbytes() // size
            return self.persistent(obj.storage, obj.dtype, legacy, count)
        return super().persistent_id(obj)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return super().reducer_override(obj)
        self.tensors.append(obj)
        if (
            obj.__dict__
            or obj._backward_hooks
            or obj.layout is not torch.strided
            or obj.is_quantized
            or obj.is_nested
            or obj.dtype not in _LEGACY
            or obj.device.type not in ("cpu", "cuda")
            or torch._utils.get_tensor_metadata(obj)
        ):
            return NotImplemented
        args: tuple[object, ...] = (
            _Stored(obj.untyped_storage(), obj.dtype),
            obj.storage_offset(),
            tuple(obj.size()),
            obj.stride(),
            obj.requires_grad,
            OrderedDict(),
        )
        return torch._utils._rebuild_tensor_v2, args


def _shortcut_is_right() -> bool:
    """Whether nobody changed how tensors are pickled, and this torch does it as we do."""
    now = (torch.Tensor.__reduce_ex__, torch.Tensor._reduce_ex_internal)
    return now == _TORCHS_OWN and torch.Tensor not in copyreg.dispatch_table and _tried()


@lru_cache(maxsize=1)
def _tried() -> bool:
    base = torch.empty(2, 3, device="cpu", dtype=torch.float32)
    state = {
        "view": [base, base.t(), base[1:], base],
        "others": [
            torch.empty(1, device="cpu", dtype=dtype) for dtype in (torch.int64, torch.bool)
        ],
        "parameter": torch.nn.Parameter(base),
        "gradient": torch.empty(1, device="cpu", requires_grad=True),
    }
    return _pickled(state, True).pickle == _pickled(state, False).pickle


def _place_of_failure(state: object) -> str:
    """The path to the innermost part that alone cannot be pickled either."""
    path = ""
    seen = {id(state)}
    while True:
        for step, child in _children(state):
            if id(child) in seen:
                continue
            try:
                _pickled(child, False)
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
