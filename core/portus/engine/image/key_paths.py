"""The keys of each storage in a state, and the tensors over it, read from a pickle of torch without
running any of it."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any, Final, NamedTuple

from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.spec import TensorSpec


class _PickledObject:
    """Stands for any object that a pickle makes, and keeps the arguments."""

    def __new__(cls, *args: object, **kwargs: object) -> _PickledObject:
        made = super().__new__(cls)
        made.parts = [*args, *kwargs.values()]
        for each in (args, *args):
            if isinstance(each, tuple) and each and isinstance(each[0], _Storage):
                each[0].view = each[1:]
        return made

    parts: list[Any]

    def __setstate__(self, state: object) -> None:
        self.parts.append(state)

    def __setitem__(self, key: object, value: object) -> None:
        self.parts.append({key: value})

    def append(self, value: object) -> None:
        self.parts.append(value)

    def extend(self, values: list[Any]) -> None:
        self.parts.extend(values)

    def add(self, value: object) -> None:
        self.parts.append(value)


_PLAIN: Final = frozenset({"_rebuild_tensor_v2", "_rebuild_parameter"})
"""The functions that rebuild ordinary tensors."""

_TENSORS_MAX: Final = 1 << 22
"""Places of tensors that are followed: a short pickle may have more than can be followed."""

_STORED: Final = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}
"""The dtypes of torch's classes of storages, except those of bytes."""


class _Storage:
    """A storage, as one tensor names it. ``view``: the other arguments of that tensor."""

    def __init__(self, key: str, kind: object) -> None:
        self.key = key
        self.kind = kind
        self.view: tuple[Any, ...] = ()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.keys: set[str] = set()
        """Keys of the storages so far."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        # Never the named class: to find it would import a module, and to make it runs its code.
        return type(name, (_PickledObject,), {})

    def persistent_load(self, pid: Any) -> Any:
        key = str(pid[2])
        self.keys.add(key)
        return _Storage(key, pid[1])


class _OrdinaryUnpickler(pickle.Unpickler):
    """Makes no objects, and raises for any that are not ordinary tensors and plain values."""

    loose = 0
    """The number of storages so far that are in no tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if name in _PLAIN:
            return self._take if name == "_rebuild_tensor_v2" else self._keep
        if name in _STORED or name == "UntypedStorage":
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> None:
        self.loose += 1

    def _take(self, *parts: object) -> None:
        self.loose -= 1

    def _keep(self, *parts: object) -> None:
        return


def is_ordinary(data: bytes) -> bool:
    """Return whether all storages of a pickle of torch are in ordinary tensors, and all else in it
    are plain values; False if that is slow to see."""
    unpickler = _OrdinaryUnpickler(io.BytesIO(data))
    try:
        unpickler.load()
    except Exception:
        return False
    return not unpickler.loose


def storages_in(data: bytes) -> tuple[set[str], list[TensorSpec]] | None:
    """Return the keys of the storages that a pickle of torch names, and the tensors over them, by
    their places, as far as these can be followed; None if it is no pickle."""
    unpickler = _Unpickler(io.BytesIO(data))
    try:
        found = [place.tensor for place in _places(unpickler.load())]
    except Exception:
        return None
    return unpickler.keys, [spec for spec in found if spec is not None]


class StoragePlace(NamedTuple):
    """The keys of a storage in a state. ``is_plain``: in an ordinary tensor, which needs only the
    bytes of a storage to load."""

    keys: tuple[Any, ...]
    stored: _Storage
    is_plain: bool

    @property
    def storage(self) -> str:
        return self.stored.key

    @property
    def subscript(self) -> str:
        """The keys as a subscript in Python: ``['model']['layer.weight']``."""
        return "".join(f"[{key!r}]" for key in self.keys) or "the state itself"

    @property
    def pattern_path(self) -> str:
        """The keys as patterns write them: ``model.layer.weight``."""
        return ".".join(map(str, self.keys))

    @property
    def tensor(self) -> TensorSpec | None:
        """The tensor there; None if there is none, or one of an unknown dtype."""
        match self.stored.view:
            case (int(offset), tuple(sizes), tuple(strides), *others):
                kinds = [getattr(each, "__name__", "") for each in (self.stored.kind, *others)]
                named = next((each for each in kinds if each in ITEM_SIZES), "")
                dtype = named or _STORED.get(kinds[0], "")
                if dtype and all(type(each) is int for each in (*sizes, *strides)):
                    number = int(self.storage)
                    return TensorSpec(self.pattern_path, dtype, sizes, strides, number, offset)
        return None


def storage_places(data: bytes) -> list[StoragePlace]:
    """Return all places of storages, in order.

    ``data`` is a pickle of torch that was verified. Objects that cannot be followed have no place.
    """
    try:
        return _places(_Unpickler(io.BytesIO(data)).load())
    except Exception:
        return []  # a message with the number of a storage is better than none


def _places(state: object) -> list[StoragePlace]:
    found: list[StoragePlace] = []
    seen: set[int] = set()
    waiting: list[tuple[Any, tuple[Any, ...], bool]] = [(state, (), True)]
    tensors = 0
    while waiting:
        value, keys, is_plain = waiting.pop()
        if isinstance(value, _Storage):
            # A storage that is in no tensor has no view: it is loaded as it is.
            found.append(StoragePlace(keys, value, is_plain and value.view != ()))
            continue
        if id(value) in seen:
            continue
        children: list[tuple[Any, tuple[Any, ...], bool]] = []
        if isinstance(value, dict):
            pairs = [(key, each) for key, each in value.items() if _plain(key)]
            children = [(each, (*keys, key), is_plain) for key, each in pairs]
        elif isinstance(value, (list, tuple)):
            children = [(each, (*keys, index), is_plain) for index, each in enumerate(value)]
        elif isinstance(value, _PickledObject):
            is_plain = is_plain and type(value).__name__ in _PLAIN
            children = [
                (each, keys, is_plain)
                for part in value.parts
                for each in (part if isinstance(part, (list, tuple)) else (part,))
            ]
        if type(value).__name__ in _PLAIN:  # a tensor may be at two places
            tensors += 1
            if tensors > _TENSORS_MAX:
                raise ValueError(f"tensors at more than {_TENSORS_MAX} places")
        elif children:
            seen.add(id(value))
        waiting += reversed(children)
    return found


def _plain(key: object) -> bool:
    return isinstance(key, (str, int, float, bytes, tuple))
