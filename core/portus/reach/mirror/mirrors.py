"""All mirrors at an address, one for each model; and the version that a URL names.

``s3://bucket/runs/gpt@1000`` names the address of the mirrors, the model, and the step. A prefix
and the name of a model may both have slashes: the existing mirror decides.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from portus.errors import CorruptionError, UsageError
from portus.reach.mirror.address import StoreAddress, parse
from portus.reach.mirror.files import BY_HAND, MirroredFiles
from portus.reach.mirror.mirror import firsts, models
from portus.reach.mirror.objects import DIGEST_SUFFIX, LOG, VERSIONS, model_of, prefix_of
from portus.reach.mirror.opening import key_from_environment, open_store
from portus.reach.mirror.store import Store

RUN_LOST: Final = (
    f"there are files of a run here, and the log that says which count is lost. {BY_HAND}"
)
HOST_LOST: Final = (
    "there are versions of a storage host here, and the log that says which count is lost. The "
    "host makes it anew from its pool when it starts again, and so does portus mirror repair "
    "--pool POOL. Without the pool, copy the files with any client of the store, and check them "
    "with xxhsum -c *.xxh128"
)
"""What to do about files whose log is lost, by what saved them."""

_VERSION_FILE: Final = re.compile(rf"(^|/){VERSIONS}step-[0-9]+-[0-9a-f]+/")
_STEP: Final = re.compile(r"(.+)@(-?[0-9]+)", re.DOTALL)
_SHOWN: Final = 20
"""Models that an error lists."""

_LOOKED_AT: Final = 1000
"""Objects to look at before reporting that there is no mirror."""


class Mirrors:
    """All mirrors at an address, sealed with ``$PORTUS_MIRROR_KEY``, if it is set. Close it."""

    def __init__(self, address: StoreAddress) -> None:
        """Make no request yet. Raises as ``open_store``."""
        self.address: Final = address
        self._store: Final[Store] = open_store(address)
        self._key: Final = key_from_environment()

    def models(self) -> list[str]:
        """Return the models that have a mirror here. Raises as ``mirror.models``."""
        return list(models(self._store, key=self._key))

    def of(self, model: str) -> MirroredFiles:
        """Return the mirror of a model or run, which need not exist. It is closed with this
        object."""
        return MirroredFiles(self._store, model, str(self.address))

    def has(self, model: str) -> bool:
        """Return whether the model has a mirror here. Makes one request."""
        return next(self._store.list(prefix_of(model) + LOG), None) is not None

    def require_log(self) -> None:
        """Where no model has a mirror, raise ``CorruptionError`` if there are files whose log is
        lost. Makes a list."""
        first = itertools.islice(self._store.list(""), _LOOKED_AT)
        if advice := _advise_on(each.name for each in first):
            raise CorruptionError(f"{self.address}: {advice}")

    def find_lost(self) -> dict[str, str]:
        """Return the runs and models that have files here, and no log, and what to do about each.
        Makes a list for each folder."""
        folders = {each.name.partition("/")[0] + "/" for each in firsts(self._store)}
        names = {model_of(each) for each in folders} - {None, *self.models()}
        found = {
            name: _advise_on(each.name for each in self._store.list(prefix_of(name)))
            for name in sorted(filter(None, names))
        }
        return {name: advice for name, advice in found.items() if advice}

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def __enter__(self) -> Mirrors:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class MirrorUrl:
    """The parts of a URL: address, model, and step, which is None if the URL names none."""

    address: StoreAddress
    model: str
    step: int | None


def resolve(url: str, what: str = "mirror") -> MirrorUrl:
    """Return the meaning of ``<mirror>/<model>`` or ``<mirror>/<model>@<step>``; or of
    ``<mirror>``, with or without ``@<step>``, where that has one model. Makes a list for each
    slash, the last one first. Raises ``UsageError`` if the URL names no mirror, ``CorruptionError``
    if the log of all there is lost, and what the store raises."""
    said = _STEP.fullmatch(url)
    texts = [(url, None)] if said is None else [(said[1], int(said[2])), (url, None)]
    for text, step in texts:
        found = _with_model(parse(text, what)) or _of_one(parse(text, what))
        if found is not None:
            return MirrorUrl(*found, step)
    raise UsageError(f"{what} {url!r}: {_advice(parse(texts[0][0], what))}")


def _with_model(address: StoreAddress) -> tuple[StoreAddress, str] | None:
    segments = address.prefix.strip("/").split("/") if address.prefix.strip("/") else []
    root = "/" if address.prefix.startswith("/") else ""
    for count in range(len(segments) - 1, -1, -1):
        above = replace(address, prefix=root + "/".join(segments[:count]))
        model = "/".join(segments[count:])
        with Mirrors(above) as mirrors:
            if mirrors.has(model):
                return above, model
    return None


def _of_one(address: StoreAddress) -> tuple[StoreAddress, str] | None:
    with Mirrors(address) as mirrors:
        there = mirrors.models()
    return (address, there[0]) if len(there) == 1 else None


def _advice(address: StoreAddress) -> str:
    with Mirrors(address) as mirrors:
        there = mirrors.models()
        if not there:
            mirrors.require_log()
    if there:
        names = ", ".join(map(repr, there[:_SHOWN]))
        return f"say which model, {address}/MODEL; it has mirrors of {names}"
    above = replace(address, prefix=address.prefix.rpartition("/")[0])
    if not above.prefix:
        return "there is no mirror"
    with contextlib.suppress(UsageError), Mirrors(above) as mirrors:
        there = mirrors.models()
    names = f"; {above} has mirrors of {', '.join(map(repr, there[:_SHOWN]))}" if there else ""
    return f"there is no mirror here, and no mirror of a model of that name{names}"


def _advise_on(objects: Iterable[str]) -> str:
    """Return what to do about objects without a log; "" if none is a file with its digest beside
    it, or if they are of several mirrors."""
    names = set(objects)
    files = [name for name in names if name + DIGEST_SUFFIX in names]
    if not files or any(f"/{LOG}" in name for name in names):
        return ""
    return HOST_LOST if all(map(_VERSION_FILE.search, files)) else RUN_LOST
