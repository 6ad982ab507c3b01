"""``portus_config:`` in the YAML of ``accelerate launch``.

Accelerate refuses keys that it does not know. So in the process of ``accelerate launch``, and only
there, Portus removes the key first, and puts it into the environment, which the started processes
inherit. A file without the key is left alone.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import portus
from portus_accelerate import FLAG
from portus_accelerate.settings import VARIABLE, from_mapping, to_text

KEY: Final = "portus_config"


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
