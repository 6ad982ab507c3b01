"""What a user can say about Portus under Accelerate, and where it is said."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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
    fixed_batch: what stays if the number of processes changes within an epoch: "local", the batch
        of each process, or "global", the samples of a step of all of them.
    every, max_overhead, mtbf: when to save, as for ``portus.Cadence``. With ``every`` set,
        ``transformers.Trainer`` saves then, in place of ``save_steps``; without it as ever. Loops
        of one's own ask ``portus_accelerate.should_save``, which takes None for "auto".
    keep: which versions stay in the pool without a checkpoint: the newest so many, or a mapping of
        what ``portus.Keep`` takes, whose ``best`` goes by what was logged last. What
        ``total_limit`` keeps stays besides.
    preempt_within: seconds, or "90s", in which a job that is told to go by SIGTERM or SIGUSR1 saves
        and leaves; then it is ended. Heard by ``transformers.Trainer``, and in loops that ask
        ``portus_accelerate.should_leave``. "none" hears nothing in Trainer.
    The others are those of ``portus.Settings``.
    """

    pool: portus.Place | None = None
    model: str | None = None
    materialize: Literal["end", "none"] = "end"
    materialize_within: float = 600.0
    fixed_batch: Literal["local", "global"] = "local"
    every: str | int | None = None
    max_overhead: float = 0.035
    mtbf: float | str | None = None
    preempt_within: float | str = 60.0
    keep: portus.Keep = field(default_factory=lambda: portus.Keep(last=1))

    def __post_init__(self) -> None:
        portus.Settings.__post_init__(self)
        if self.pool is not None:  # as text in YAML and JSON
            object.__setattr__(self, "pool", portus.Place.named(self.pool))
        keep = portus.Keep.of(self.keep)  # a mapping, in YAML and JSON
        if keep is None:
            raise portus.UsageError("keep: expected versions, 1 or more, or a mapping, found None")
        object.__setattr__(self, "keep", keep)
        portus.checked_within(self.materialize_within)
        if self.preempt_within != "none":
            portus.Preemption(self.preempt_within)  # says what makes no sense, now
        if (self.every, self.max_overhead, self.mtbf) != (None, 0.035, None):
            every = "auto" if self.every is None else self.every
            portus.checked_cadence(every, self.max_overhead, self.mtbf)


def from_mapping(values: Mapping[str, object], where: str) -> Settings:
    """Settings from a YAML or JSON object. Raises ``UsageError`` naming unknown keys."""
    known = {each.name for each in fields(Settings)}
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
        raise portus.UsageError(f"${VARIABLE} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise portus.UsageError(f"${VARIABLE}: expected a JSON object, found {text!r:.80}")
    return from_mapping(values, f"${VARIABLE}")


def to_text(settings: Settings) -> str:
    """What ``from_environment`` reads."""
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    values["keep"] = settings.keep.as_mapping()
    return json.dumps({key: each for key, each in values.items() if each is not None}, default=str)
