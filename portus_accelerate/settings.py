"""The settings of Portus under Accelerate, and the places from which they are read.

One of them is ``portus_config:`` in the YAML of ``accelerate launch``. Accelerate refuses keys that
it does not know. So in the process of ``accelerate launch``, and only there, Portus removes the key
first, and puts it into the environment, which the started processes inherit. A file without the key
is left alone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import portus
from portus_accelerate import FLAG

ACCELERATE: Final = portus.Framework("Accelerate", logging.getLogger("portus_accelerate"))

KEY: Final = "portus_config"
VARIABLE: Final = "PORTUS_ACCELERATE_CONFIG"
"""Settings as a JSON object, from ``accelerate launch`` to the processes that it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(portus.Settings):
    """The keys of ``portus_config:``; all may be left out.

    pool: a device for persistent memory, a pool file on it, or the address of a storage host: the
        files of checkpoints are pointers to it. Default: ``$PORTUS_POOL``, or none.
    model: the name of the run in the pool.
    fixed_batch: the batch that stays the same when a run resumes within an epoch with another
        number of processes: "local", the batch of each process, or "global", the number of samples
        in a step of all processes.
    every, max_overhead, mtbf: when to save, as in ``portus.Cadence``. If ``every`` is set,
        ``transformers.Trainer`` saves by it instead of ``save_steps``. Your own loops call
        ``portus_accelerate.should_save``, for which None means "auto".
    blocking: make each ``save_state`` return when its files exist.
    preempt_within: seconds, or a text like "90s", within which a job that receives SIGTERM or
        SIGUSR1 saves and exits; after that it is killed. This applies to ``transformers.Trainer``,
        and to loops that call ``portus_accelerate.should_leave``. With "none", Portus leaves these
        signals alone under Trainer.

    All other keys are those of ``portus.Settings``.
    """

    pool: portus.Place | None = None
    model: str | None = None
    fixed_batch: Literal["local", "global"] = "local"
    every: str | int | None = None
    max_overhead: float = portus.Cadence.MAX_OVERHEAD
    mtbf: float | str | None = None
    preempt_within: float | str = 60.0
    blocking: bool = False

    def __post_init__(self) -> None:
        portus.Settings.__post_init__(self)
        if self.pool is not None:  # text in YAML and JSON
            object.__setattr__(self, "pool", portus.Place.parse(self.pool))
        if self.preempt_within != "none":
            portus.Preemption(self.preempt_within)  # refuses invalid values now
        if (self.every, self.max_overhead, self.mtbf) != (None, portus.Cadence.MAX_OVERHEAD, None):
            every = "auto" if self.every is None else self.every
            portus.parse_cadence(every, self.max_overhead, self.mtbf)

    @property
    def pool_at(self) -> portus.Place | None:
        """Return the pool that the user named, on a device or on storage hosts, or None."""
        return portus.Place.of_pool(self.pool)


def from_mapping(values: Mapping[str, object], where: str) -> Settings:
    """Return settings from a YAML or JSON object. Raises ``UsageError`` naming unknown keys."""
    known = {each.name for each in fields(Settings)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise portus.UsageError(f"{where}: unknown keys {unknown}; there are {sorted(known)}")
    return Settings(**values)  # type: ignore[arg-type]  # it checks each itself


def from_environment() -> Settings:
    """Return the settings of the environment. Raises ``UsageError``."""
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
    """Return the text that ``from_environment`` reads."""
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return json.dumps({key: each for key, each in values.items() if each is not None}, default=str)


def install() -> None:
    """Make the loaded ``accelerate.commands.config.config_args`` accept the key."""
    module: Any = sys.modules["accelerate.commands.config.config_args"]
    base = module.BaseConfig
    process = base.process_config

    def process_config(config: Any) -> Any:
        if isinstance(config, dict) and KEY in config:
            _tell(config.pop(KEY))
        return process(config)

    base.process_config = staticmethod(process_config)


def _tell(values: object) -> None:
    """Put the flag into the environment. Raises ``UsageError`` for unknown keys."""
    if values is False:
        return
    if values is None or values is True:
        values = {}
    if not isinstance(values, dict):
        raise portus.UsageError(f"{KEY}: expected keys and values, found {values!r}")
    settings = from_mapping(values, KEY)
    if settings.pool is not None:
        os.environ["PORTUS_POOL"] = str(settings.pool)
    os.environ[VARIABLE] = to_text(settings)
    os.environ.setdefault(FLAG, "1")
