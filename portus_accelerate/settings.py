"""What a user can say about Portus under Accelerate, and where it is said."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal

import portus

ACCELERATE: Final = portus.Framework("Accelerate", logging.getLogger("portus_accelerate"))

VARIABLE: Final = "PORTUS_ACCELERATE_CONFIG"
"""Settings as a JSON object: how ``accelerate launch`` hands them to the processes it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(portus.Settings):
    """The keys of ``portus_config:``; all may be left out.

    pool: a pool file, or a directory for pool files; by default ``$PORTUS_POOL``, or ``.portus``
        beside the directory of the checkpoints. model: the name of the run in the pool.
    materialize: "end" makes the checkpoints of the run ones of real files at ``end_training()``,
        or where the program ends without it: the newest first; "none" never.
    materialize_within: the longest, in seconds, that the end waits for that. What there is no time
        or no room for stays as it is, and is listed.
    The others are those of ``portus.Settings``.
    """

    pool: portus.Place | None = None
    model: str | None = None
    materialize: Literal["end", "none"] = "end"
    materialize_within: float = 600.0

    def __post_init__(self) -> None:
        portus.Settings.__post_init__(self)
        if self.pool is not None:  # as text in YAML and JSON
            object.__setattr__(self, "pool", portus.Place.named(self.pool))
        if self.materialize not in ("end", "none"):
            raise portus.UsageError(
                f"materialize: expected 'end' or 'none', found {self.materialize!r}"
            )
        portus.checked_within(self.materialize_within)


def from_mapping(values: Mapping[str, object], where: str) -> Settings:
    """Settings from a YAML or JSON object. Raises ``UsageError`` naming unknown keys."""
    known = {field.name for field in fields(Settings)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise portus.UsageError(f"{where}: unknown keys {unknown}; there are {sorted(known)}")
    return Settings(**values)  # type: ignore[arg-type]  # it looks at each itself


def from_environment() -> Settings:
    """What the environment says. Raises ``UsageError``."""
    text = os.environ.get(VARIABLE)
    if not text:
        return Settings()
    try:
        values = json.loads(text)
    except ValueError as error:
        raise portus.UsageError(f"${VARIABLE} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise portus.UsageError(f"${VARIABLE}: expected a JSON object, found {text!r:.80}")
    return from_mapping(values, f"${VARIABLE}")


def to_text(settings: Settings) -> str:
    """What ``from_environment`` reads."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return json.dumps({key: each for key, each in values.items() if each is not None}, default=str)
