"""What a host logs: events with fields, and the lines of JSON that they become.

The events, and the fields of each, are a table in docs/deploying.md.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Final

_log: Final = logging.getLogger("portus.daemon")
_FIELDS: Final = "portus_fields"


def tell(level: int, event: str, message: str, /, **fields: str | float | None) -> None:
    """Log ``message`` for people, and the same as fields for programs. None is not known."""
    known = {name: value for name, value in fields.items() if value is not None}
    _log.log(level, "%s", message, extra={_FIELDS: {"event": event, **known}})


class Lines(logging.Formatter):
    """One JSON object for each line. What was not told as an event is the event ``log``."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": "log",
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Send what Portus logs to stderr, as lines of JSON; and what ends a thread."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    logger = logging.getLogger("portus")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    threading.excepthook = _note_end


def _note_end(ended: threading.ExceptHookArgs) -> None:
    name = "" if ended.thread is None else ended.thread.name
    why = ended.exc_value or ended.exc_type()
    _log.critical("%s ended by a mistake of portus: %r", name, why, exc_info=why)
