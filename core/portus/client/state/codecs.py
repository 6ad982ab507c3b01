"""Codecs: how objects of a user's class become what Portus stores, and back. No pickle.

On the medium is the name of a codec, and what its ``encode`` gave. Whoever loads needs a codec of
that name; nothing is looked for by it but what this process registered.

A torch file that Portus makes of a checkpoint has to load where nobody registered anything. There a
**stand-in** is in the place of an object: ``{MARK: name, STATE: what encode gave}``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from portus.client.state.leaves import CONTAINERS, TYPES
from portus.client.state.tensors import PLAIN_TENSORS
from portus.errors import UsageError
from portus.media import calls

MARK: Final = "__portus_codec__"
STATE: Final = "state"
"""The two keys of a stand-in."""

NAME_MAX: Final = 500

_OWN: Final = "__main__"
_SPAWNED: Final = "__mp_main__"
"""What the module of a script is called in the process that ran it, and in those it spawned."""

Object = TypeVar("Object")


@dataclass(frozen=True, slots=True)
class Codec:
    """The codec of one class. ``name`` is what is stored."""

    kind: type
    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]

    def encoded(self, value: object) -> object:
        """What stands for ``value``. Raises ``UsageError`` for whatever ``encode`` raises."""
        try:
            state = self.encode(value)
        except Exception as error:
            raise UsageError(f"encode of {self.name} raised {_told(error)}") from error
        if state is None:
            raise UsageError(f"encode of {self.name} gave None; return the state of the object")
        return state

    def decoded(self, state: object) -> object:
        """The object again. Raises ``UsageError`` for whatever ``decode`` raises."""
        try:
            value = self.decode(state)
        except Exception as error:
            raise UsageError(f"decode of {self.name} raised {_told(error)}") from error
        if not isinstance(value, self.kind):
            raise UsageError(
                f"decode of {self.name} gave {_article(type(value).__qualname__)}; return "
                f"{_article(self.kind.__qualname__)}"
            )
        return value


_turn: Final = threading.RLock()
_by_kind: dict[type, Codec] = {}
_by_name: dict[str, Codec] = {}
"""Replaced whole, in turn, and read without it: a signal handler may save, too."""


@calls.marked
def register_codec(
    kind: type[Object],
    encode: Callable[[Object], object],
    decode: Callable[[Any], Object],
    *,
    name: str | None = None,
) -> None:
    """Register how objects of the class ``kind`` are saved and loaded, in all states of this
    process.

    encode: turns an object into what Portus stores (tensors, arrays, bytes, numbers, text, dicts,
        lists; other registered objects too). Called inside of ``save``, in its thread, perhaps more
        than once for a save; it must not change the object. Its tensors are saved as any others:
        those that may be written after the call are copied during it.
    decode: turns that into an object again; its tensors are on the CPU. Called by loads. Its input
        was verified, but it comes from a file: it should not execute anything in it.
    name: what is stored; None: module and qualified name of the class. Programs that load register
        the same name. Give one for a class of a script (``__main__``) or a class that was renamed.

    It applies to ``kind`` itself, not to classes derived from it. A second call with the same
    arguments does nothing. Raises ``UsageError`` if ``kind`` or ``name`` was registered before with
    other arguments, for classes that Portus stores anyway, and for a class in a function without a
    ``name``.
    """
    if not isinstance(kind, type):
        raise UsageError(f"register_codec: expected a class, found {kind!r:.80}")
    if not (callable(encode) and callable(decode)):
        raise UsageError(f"register_codec of {kind.__qualname__}: encode and decode are functions")
    codec = Codec(kind, _checked_name(kind, name), encode, decode)
    _check_is_foreign(kind)
    global _by_kind, _by_name
    with _turn:
        for known in (_by_kind.get(kind), _by_name.get(codec.name)):
            if known is not None and known != codec:
                raise UsageError(
                    f"register_codec of {_class_name(kind)} as {codec.name!r}: "
                    f"{_class_name(known.kind)} was registered as {known.name!r} before, with "
                    "other arguments; register each class once, under a name of its own"
                )
        _by_kind = {**_by_kind, kind: codec}
        _by_name = {**_by_name, codec.name: codec}


def codec_of(kind: type) -> Codec | None:
    """The codec of exactly this class."""
    return _by_kind.get(kind)


def codec_above(kind: type) -> Codec | None:
    """Return the codec of the nearest class that ``kind`` is derived from; None if none has one."""
    return next((_by_kind[base] for base in kind.__mro__[1:] if base in _by_kind), None)


def codec_named(name: str) -> Codec:
    """Raises ``UsageError`` that says how to register it."""
    found = _by_name.get(name)
    if found is None:
        raise UsageError(
            f"an object of {name!r:.{NAME_MAX}}, for which no codec is registered in this process: "
            f"call portus.register_codec(CLASS, encode, decode, name={name!r:.{NAME_MAX}}) before "
            "loading, as the program did that saved it; or load without this object"
        )
    return found


def stand_in(name: str, state: object) -> dict[str, object]:
    """What is in the place of an object in a torch file."""
    return {MARK: name, STATE: state}


def decode_stand_ins(value: Any) -> Any:
    """``value`` with objects in the place of their stand-ins: for what ``torch.load`` gave of a
    torch file that ``portus export`` made. Dicts, lists and deques are changed in place.

    Raises ``UsageError`` for one whose codec is not registered, naming where it is.
    """
    return _Decoder().value(value, "")


class _Decoder:
    """One walk. ``_made`` has what each container became, so that no one is walked twice: what
    torch loads may contain itself."""

    def __init__(self) -> None:
        self._made: Final[dict[int, tuple[Any, Any]]] = {}

    def value(self, value: Any, path: str) -> Any:
        if not isinstance(value, dict | list | tuple | deque):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, value  # kept, so that no other gets its id
            self._made[id(value)] = value, self._container(value, path)
        return self._made[id(value)][1]

    def _container(self, value: Any, path: str) -> Any:
        start = f"{path}." if path else ""
        if isinstance(value, tuple):
            found = [self.value(each, f"{start}{place}") for place, each in enumerate(value)]
            is_same = all(one is other for one, other in zip(found, value, strict=True))
            return value if is_same else tuple.__new__(type(value), found)
        if is_stand_in(value):
            state = self.value(value[STATE], path)
            try:
                return codec_named(value[MARK]).decoded(state)
            except UsageError as error:
                raise UsageError(f"{path or 'the state'}: {error}") from error
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            found = self.value(each, f"{start}{key}")
            if found is not each:
                value[key] = found
        return value


def is_stand_in(value: object) -> bool:
    """True for what ``stand_in`` makes."""
    if not isinstance(value, dict) or value.keys() != {MARK, STATE}:
        return False
    return isinstance(value[MARK], str)


def _checked_name(kind: type, name: str | None) -> str:
    if name is None:
        if "<locals>" in kind.__qualname__:
            raise UsageError(
                f"register_codec of {_class_name(kind)}: a class in a function; give it a name="
            )
        return _class_name(kind)
    if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX or not name.isprintable():
        raise UsageError(
            f"register_codec of {_class_name(kind)}: a name has 1 to {NAME_MAX} printable "
            f"characters, found {name!r:.80}"
        )
    return name


def _check_is_foreign(kind: type) -> None:
    if kind in PLAIN_TENSORS or kind in TYPES or kind in CONTAINERS:
        raise UsageError(f"register_codec of {_class_name(kind)}: Portus stores these as they are")


def _class_name(kind: type) -> str:
    module = _OWN if kind.__module__ == _SPAWNED else kind.__module__
    return f"{module}.{kind.__qualname__}"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}"


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


__all__ = [
    "MARK",
    "STATE",
    "Codec",
    "codec_above",
    "codec_named",
    "codec_of",
    "decode_stand_ins",
    "is_stand_in",
    "register_codec",
    "stand_in",
]
