"""The grammar of the tree of a state: what writing, reading and listing must agree on.

A **node** is what JSON has: None, bool, int, finite float, str, list, and dict with keys that do
not begin with ``$``. All else is a dict with one key, the **tag**:

- ``{"$dict": [[key, value], ...]}``: a dict with other keys;
- ``{"$tensor": i}``: tensor i; ``{"$tensor": [i, j]}``: tensor i, the same object as tensor j;
- ``{"$array": [data, dtype, shape, fortran]}``, ``{"$bytes": [data]}``, ``{"$bytearray": [data]}``,
  ``{"$bytes_io": [data, position]}`` where data is base64, or a ``$tensor`` of bytes;
- a **wrapper**, ``{tag: [inner, ...]}``: a container made of the list or dict ``inner``; or
  ``{"$object": [inner, name]}``, an object of the codec ``name``, which gave ``inner``, any node;
- a tag of ``leaves.KINDS``.

A **leaf** is what has a key path: a tensor, a single value, an empty container, and a list or
tuple of nothing but None, bool, int, float, str. A key path joins the keys on the way by dots; a
place in a list is its number; the fields of a dataclass, named tuple or namespace are their names.
Dots in keys are kept as they are. Keys that are not strings are written as Python does (``1``,
``True``, ``(0, 1)``). If two leaves come out with one path, the later ones get ``#2``, ``#3``...
What is in sets, in keys and in attributes (``_metadata`` of an OrderedDict) has no path. An object
of a codec has the paths of what is in it, and is loaded whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from portus.errors import CorruptionError, UsageError

DEPTH_MAX: Final = 100
"""Containers inside each other."""

PLAIN_TAGS: Final = frozenset({"$int", "$float", "$str"})
"""Tags of values that make a row of a list or tuple, as plain JSON values do."""

OBJECT: Final = "$object"

UNKNOWN: Final = "$unknown"
"""The tag of a leaf that no tree can hold, and that is kept beside it, in memory alone."""

ELSEWHERE: Final = "portus.embedding.Elsewhere"
"""The codec of what stands for a tensor that is in another pool: see elsewhere.py."""

WRAPPERS: Final = frozenset(
    {
        *("$tuple", "$deque", "$ordered", "$defaultdict", "$counter", "$mapping"),
        *("$namedtuple", "$dataclass", "$namespace", "$arguments", OBJECT),
    }
)

OF_DATA: Final = frozenset({"$array", "$bytes", "$bytearray", "$bytes_io"})
"""Tags of leaves whose content begins with bytes, here or in a storage."""

FOREIGN: Final = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
"""What Python, numpy and torch raise for nonsense; a reader turns them into ``CorruptionError``."""


class SaidUsageError(UsageError):
    """A ``UsageError`` whose message already names the key path."""


class SaidCorruptionError(CorruptionError):
    """A ``CorruptionError`` whose message already names the key path."""


class said_at:  # noqa: N801 - reads as a verb in a with statement
    """Makes what goes wrong inside an error of Portus that names the key path, once."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path or "the state"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (SaidUsageError, SaidCorruptionError)):
            return
        if isinstance(error, UsageError):
            raise SaidUsageError(f"{self._path:.200}: {error}") from error
        if isinstance(error, CorruptionError):
            raise SaidCorruptionError(f"{self._path:.200}: {error}") from error
        if isinstance(error, FOREIGN):
            message = f"{self._path:.200}: {type(error).__name__}: {error}"
            raise SaidCorruptionError(message) from error


def decode(tree: bytes) -> object:
    """The root node. Raises ``CorruptionError``."""
    try:
        root: object = msgspec.json.decode(tree)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"the tree of the state is not JSON: {error}") from error
    return root


def below(path: str) -> str:
    """The beginning of the key paths of what is inside ``path``."""
    return f"{path}." if path else ""


def key_text(node: object) -> str:
    """How a key looks in a key path; made from its node, so that writing and reading agree."""
    if isinstance(node, str):
        return node
    wrapped = wrapper(node)
    if wrapped is not None and wrapped[0] == "$tuple" and isinstance(wrapped[1][0], list):
        return f"({', '.join(map(key_text, wrapped[1][0]))})"
    if isinstance(node, dict):
        return msgspec.json.encode(node).decode()
    return repr(node)


def wrapper(node: object) -> tuple[str, list[Any]] | None:
    """Tag and content of a wrapper, ``inner`` first; None for all else."""
    if not isinstance(node, dict) or len(node) != 1:
        return None
    [(tag, payload)] = node.items()
    if tag not in WRAPPERS:
        return None
    if not isinstance(payload, list) or not payload:
        raise CorruptionError(f"{tag} without content: {payload!r:.80}")
    return tag, payload


def children(node: object) -> list[tuple[object, object]] | None:
    """Key node and node of what is directly inside a list or dict node; None for a leaf."""
    if is_tensor(node):
        return None
    if isinstance(node, list):
        return None if all(map(_is_plain, node)) else list(enumerate(node))
    if not isinstance(node, dict) or not node:
        return None
    if len(node) == 1:
        [(tag, payload)] = node.items()
        if tag == "$dict":
            return _pairs(payload)
        if tag.startswith("$"):
            return None
    if any(key.startswith("$") for key in node):
        raise CorruptionError(f"a tag beside other keys: {[*node]!r:.80}")
    return list(node.items())


def leaf_nodes(
    node: object, path: str = "", depth: int = 0, *, whole: bool = False
) -> Iterator[tuple[str, object]]:
    """Key path, not yet distinct, and node of every leaf. whole: an object of a codec counts as
    one. Raises ``CorruptionError``."""
    check_depth(path, depth)
    wrapped = wrapper(node)
    if wrapped is not None and not (whole and wrapped[0] == OBJECT):
        yield from leaf_nodes(wrapped[1][0], path, depth + 1, whole=whole)
        return
    found = children(node)
    if found is None:
        yield path, node
        return
    start = below(path)
    for key, child in found:
        inside = start + key_text(key)
        if is_tensor(child) or not isinstance(child, (list, dict)):
            yield inside, child
        else:
            yield from leaf_nodes(child, inside, depth + 1, whole=whole)


def objects(root: object, start: str = "") -> Iterator[tuple[str, str, list[str]]]:
    """Key path and codec name of every object of a codec, and the paths of its leaves; paths are
    not yet distinct. Raises ``CorruptionError``."""
    for path, node in leaf_nodes(root, start, whole=True):
        wrapped = wrapper(node)
        if wrapped is not None:
            inner, *name = wrapped[1]
            yield path, str(*name), [inside for inside, _ in leaf_nodes(inner, path)]
            yield from objects(inner, path)


def objects_of(tree: bytes, codec: str) -> dict[str, object]:
    """Return the node in each object of one codec, by key path. Raises ``CorruptionError``."""
    if f'"{codec}"'.encode() not in tree:
        return {}
    return dict(_objects_of(decode(tree), "", codec))


def _objects_of(root: object, start: str, codec: str) -> Iterator[tuple[str, object]]:
    for path, node in leaf_nodes(root, start, whole=True):
        wrapped = wrapper(node)
        if wrapped is not None:
            inner, *name = wrapped[1]
            if name == [codec]:
                yield path, inner
            yield from _objects_of(inner, path, codec)


def object_paths(tree: bytes) -> dict[str, str]:
    """Map the key path of each leaf in an object of a codec to the path of that object; of the
    outermost one, if objects are nested. Raises ``CorruptionError``."""
    if f'"{OBJECT}"'.encode() not in tree:
        return {}
    root = decode(tree)
    owners: list[str | None] = []
    for path, node in leaf_nodes(root, whole=True):
        is_object = wrapper(node) is not None
        owners += [path] * sum(1 for _ in leaf_nodes(node)) if is_object else [None]
    named = zip(named_leaves(root), owners, strict=True)
    return {path: owner for (path, _), owner in named if owner is not None}


def is_tensor(node: object) -> bool:
    """True for the node of a tensor: most are, so they are asked for first."""
    return isinstance(node, dict) and len(node) == 1 and "$tensor" in node


def named_leaves(root: object) -> list[tuple[str, object]]:
    """Return the leaves of a tree, and the key paths of each, made distinct. Raises as
    ``leaf_nodes``."""
    leaves = list(leaf_nodes(root))
    names = _distinct([path for path, _ in leaves])
    return [(name, node) for name, (_, node) in zip(names, leaves, strict=True)]


def _distinct(paths: list[str]) -> list[str]:
    """``paths`` with ``#2``, ``#3``... after those that came before."""
    if len(set(paths)) == len(paths):
        return paths
    used: set[str] = set()
    counts: Counter[str] = Counter()
    found = []
    for path in paths:
        counts[path] += 1
        name = path
        while name in used:  # ends: the count grows and ``used`` does not
            name = f"{path}#{max(2, counts[path])}"
            counts[path] += name in used
        used.add(name)
        found.append(name)
    return found


def check_depth(path: str, depth: int) -> None:
    """Raises ``CorruptionError`` for nodes nested deeper than any state that is saved."""
    if depth > 2 * DEPTH_MAX:  # a container may be a tag and a list or dict
        raise CorruptionError(f"{path:.200}: nested deeper than {DEPTH_MAX}")


def tensor_index(node: object) -> int | None:
    """The index of the tensor of a leaf (or of its bytes), None if it has none."""
    while isinstance(node, dict) and len(node) == 1:
        [(tag, payload)] = node.items()
        if tag == "$tensor":
            return payload[0] if isinstance(payload, list) else payload  # type: ignore[no-any-return]
        if tag not in OF_DATA:
            return None
        node = payload[0]
    return None


def _is_plain(node: object) -> bool:
    if isinstance(node, dict):
        return len(node) == 1 and not PLAIN_TAGS.isdisjoint(node)
    return not isinstance(node, list)


def _pairs(payload: object) -> list[tuple[object, object]]:
    if not isinstance(payload, list) or not payload:
        raise CorruptionError(f"$dict without content: {payload!r:.80}")
    for pair in payload:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CorruptionError(f"not a key and its value: {pair!r:.80}")
    return [(key, value) for key, value in payload]
