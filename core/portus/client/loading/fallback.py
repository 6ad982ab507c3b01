"""What is damaged or missing here, from a mirror: verified as every load is, and loudly.

Which mirrors are asked comes from configuration alone (V6): what this process saves to, what it was
allowed, and ``$PORTUS_MIRROR``. A version is found there by its token, so it is the same one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, TypeVar

from portus.errors import (
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
)
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry
from portus.media.calls import is_nested
from portus.mirror.address import StoreAddress
from portus.mirror.fetching import place_of
from portus.mirror.mirror import Mirror
from portus.mirror.mirrors import Mirrors

_log: Final = logging.getLogger("portus")

Result = TypeVar("Result")
Use = Callable[[PoolReader, VersionEntry], Result]
_Opened = AbstractContextManager[tuple[PoolReader, VersionEntry]]


def of_token(
    mirrors: Sequence[StoreAddress], model: str, token: bytes, use: Use[Result], why: PortusError
) -> Result:
    """What ``use`` gives for a version as a mirror has it. why: it cannot be had here; raised if no
    mirror has it whole, or can be asked. Raises nothing else but what ``use`` does of its own."""
    return _taken(mirrors, model, lambda mirror: mirror.opened(token), use, why)


def of_step(
    mirrors: Sequence[StoreAddress], model: str, step: int, use: Use[Result], why: PortusError
) -> Result:
    """The same for the version of a step, of several the last one."""

    def opened(mirror: Mirror) -> _Opened:
        found = [each for each in mirror.read().versions if each.step == step]
        if not found:
            raise StaleError(f"{mirror.name}: it has no step {step} of {model!r}")
        return mirror.opened_as(max(found, key=place_of))

    return _taken(mirrors, model, opened, use, why)


def _taken(
    mirrors: Sequence[StoreAddress],
    model: str,
    open_in: Callable[[Mirror], _Opened],
    use: Use[Result],
    why: PortusError,
) -> Result:
    for address in () if is_nested() else mirrors:  # a signal handler does not wait for a store
        with contextlib.ExitStack() as stack:
            try:
                there = stack.enter_context(Mirrors(address))
                reader, entry = stack.enter_context(open_in(there.of(model)))
            except StaleError:
                continue
            except PortusError as error:
                _log.error("portus: %s; and it cannot be loaded from %s: %s", why, address, error)
                continue
            _log.error(
                "portus: %s; step %d is taken from the mirror %s INSTEAD",
                why,
                entry.info.step,
                address,
            )
            try:
                return use(reader, entry)
            except (CorruptionError, MediumError, StaleError, TransportError) as error:
                _log.error("portus: step %d of the mirror %s: %s", entry.info.step, address, error)
    raise why
