"""A state in words that no version of Python, numpy or torch changes: as JSON."""

from __future__ import annotations

import datetime
import enum
import functools
import hashlib
import io
import pathlib
import struct
from typing import Any

import numpy as np
import torch


class Describer:
    """Storages and tensors are numbered as they are met, so ties are seen."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        self._tensors: dict[int, int] = {}

    def describe(self, value: Any) -> object:
        """What ``value`` is, types included, down to its bits."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            flags, dtype = value.flags, str(np.lib.format.dtype_to_descr(value.dtype))
            fortran = flags.f_contiguous and not flags.c_contiguous
            raw = value.tobytes("F" if fortran else "C")
            return ["array", dtype, list(value.shape), fortran, short(raw)]
        if isinstance(value, dict):
            items = [[self.describe(key), self.describe(item)] for key, item in value.items()]
            factory = getattr(getattr(value, "default_factory", None), "__name__", None)
            return [_name(type(value)), items, self.describe_attributes(value), factory]
        if isinstance(value, list | tuple) or type(value).__name__ == "deque":
            longest = getattr(value, "maxlen", None)
            return [_name(type(value)), [self.describe(item) for item in value], longest]
        if isinstance(value, set | frozenset):
            return [_name(type(value)), sorted(map(str, map(self.describe, value)))]
        return self._leaf(value)

    def describe_attributes(self, value: object) -> object:
        """What was set on a container."""
        found = getattr(value, "__dict__", {})
        return {name: self.describe(item) for name, item in sorted(found.items())}

    def _tensor(self, value: torch.Tensor) -> object:
        again = self._tensors.setdefault(id(value), len(self._tensors))
        words = [
            "tensor",
            _name(type(value)),
            str(value.dtype),
            list(value.shape),
            list(value.stride()),
            value.storage_offset(),
            hasattr(value, "_is_buffer"),
            value.requires_grad,
            value.is_conj(),
            value.is_neg(),
            again,
        ]
        if value.device.type == "meta":
            return [*words, "meta"]
        storage = value.untyped_storage()
        place = self._storages.setdefault(storage._cdata, len(self._storages))
        raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
        return [*words, place, len(raw), short(raw)]

    def _leaf(self, value: Any) -> object:
        kind = _name(type(value))
        if isinstance(value, enum.Enum):
            return ["enum", kind, repr(value.value)]
        if isinstance(value, np.generic):
            return ["numpy", value.dtype.str, value.tobytes().hex()]
        if isinstance(value, bool | int) or value is None:
            return [kind, str(value)]
        if isinstance(value, float):
            return [kind, struct.pack("<d", value).hex()]
        if isinstance(value, complex):
            return [kind, struct.pack("<dd", value.real, value.imag).hex()]
        if isinstance(value, str):
            return [kind, value.encode("utf-8", "surrogatepass").hex()]
        if isinstance(value, bytes | bytearray):
            return [kind, short(bytes(value))]
        if isinstance(value, io.BytesIO):
            held = self.describe_attributes(value)
            return [kind, short(value.getvalue()), value.tell(), held]
        if isinstance(value, datetime.timezone):
            return [kind, value.utcoffset(None).total_seconds(), value.tzname(None)]
        if isinstance(value, datetime.datetime | datetime.date | datetime.time):
            return [kind, value.isoformat(), getattr(value, "fold", 0)]
        if isinstance(value, pathlib.PurePath):
            return ["path", value.as_posix()]
        if isinstance(value, functools.partial):
            return ["partial", _name(value.func), self.describe([value.args, value.keywords])]
        if isinstance(value, np.dtype):
            return ["dtype", str(np.lib.format.dtype_to_descr(value))]
        if isinstance(value, type) or callable(value):
            return ["named", _name(value)]
        if hasattr(value, "__dict__"):
            return [kind, self.describe_attributes(value)]
        return [kind, str(value)]


def short(data: bytes) -> str:
    """Few bytes in hex; of more, the SHA-256."""
    return data.hex() if len(data) <= 64 else f"sha256 {hashlib.sha256(data).hexdigest()}"


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
