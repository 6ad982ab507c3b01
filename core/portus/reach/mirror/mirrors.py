"""All mirrors at an address, one for each model; and the version that a URL names.

``s3://bucket/runs/gpt@1000`` names the address of the mirrors, the model, and the step. A prefix
and the name of a model may both have slashes: the existing mirror decides.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import dataclass, replace
from typing import Final

from portus.errors import UsageError
from portus.reach.mirror.address import StoreAddress, parse
from portus.reach.mirror.files import BY_HAND, MirroredFiles
from portus.reach.mirror.mirror import firsts, models
from portus.reach.mirror.objects import DIGEST_SUFFIX, LOG, model_of, prefix_of
from portus.reach.mirror.opening import key_from_environment, open_store
from portus.reach.mirror.store import Store

LOG_LOST: Final = (
    f"there are files of a run here, and the log that says which count is lost. {BY_HAND}"
)
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

    def has_files_alone(self) -> bool:
        """Return whether there are files of runs whose log is lost. Makes a list."""
        found = itertools.islice(self._store.list(""), _LOOKED_AT)
        return any(each.name.endswith(DIGEST_SUFFIX) for each in found)

    def lost_runs(self) -> list[str]:
        """Return the runs that have files here, and no log. Makes a list for each model."""
        folders = {each.name.partition("/")[0] + "/" for each in firsts(self._store)}
        runs = {model_of(each) for each in folders} - {None, *self.models()}
        return sorted(run for run in runs if run and self.of(run).files_alone())

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
    slash, the last one first. Raises ``UsageError`` if the URL names no mirror, and what the store
    raises."""
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
        has_files = not there and mirrors.has_files_alone()
    if has_files:
        return LOG_LOST
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
