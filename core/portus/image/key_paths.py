"""Which keys lead to each storage, read from a pickle of torch without running any of it."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any


class _Made:
    """Stands for whatever a pickle makes: keeps what it was made of."""

    def __new__(cls, *args: object, **kwargs: object) -> _Made:
        made = super().__new__(cls)
        made.parts = [*args, *kwargs.values()]
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


class _Storage:
    def __init__(self, key: str) -> None:
        self.key = key


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name, (_Made,), {})

    def persistent_load(self, pid: Any) -> Any:
        return _Storage(str(pid[2]))


def storage_paths(data: bytes) -> dict[str, str]:
    """By the key of each storage: the first path to it, such as ``['model']['layer.weight']``.

    ``data`` is a pickle of torch that was verified. What cannot be followed has no path.
    """
    found: dict[str, str] = {}
    try:
        state = _Unpickler(io.BytesIO(data)).load()
    except Exception:
        return found  # a message with the number of a storage is better than none
    seen: set[int] = set()
    waiting: list[tuple[Any, str]] = [(state, "")]
    while waiting:
        value, path = waiting.pop()
        if id(value) in seen:
            continue
        children: list[tuple[Any, str]] = []
        if isinstance(value, _Storage):
            found.setdefault(value.key, path or "the state itself")
        elif isinstance(value, dict):
            children = [(each, f"{path}[{key!r}]") for key, each in value.items() if _plain(key)]
        elif isinstance(value, (list, tuple)):
            children = [(each, f"{path}[{index}]") for index, each in enumerate(value)]
        elif isinstance(value, _Made):
            children = [
                (each, path)
                for part in value.parts
                for each in (part if isinstance(part, (list, tuple)) else (part,))
            ]
        if children:
            seen.add(id(value))
            waiting += reversed(children)
    return found


def _plain(key: object) -> bool:
    return isinstance(key, (str, int, float, bytes, tuple))
