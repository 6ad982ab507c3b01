"""The log of a host: events with fields, and the lines of JSON that they become.

The events, and the fields of each, are a table in docs/deploying.md.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from typing import Final

from portus.errors import printable

_log: Final = logging.getLogger("portus.daemon")
_FIELDS: Final = "portus_fields"


def tell(level: int, event: str, message: str, /, **fields: str | float | None) -> None:
    """Log ``message`` for people, and ``fields``, except those of None, for programs."""
    known = {name: value for name, value in fields.items() if value is not None}
    # Not as the format: a message may contain a percent sign.
    _log.log(level, "%s", message, extra={_FIELDS: {"event": event, **known}})


class RateLimitedLog:
    """A log of events that strangers cause, as often as they like. It logs ``count_max`` of them in
    ``while_s`` seconds, and then how many it left out. Thread-safe."""

    def __init__(self, count_max: int = 20, while_s: float = 60.0) -> None:
        self._count_max: Final = count_max
        self._while_s: Final = while_s
        self._guard: Final = threading.RLock()
        self._since_s = -math.inf
        self._count = 0

    def tell(self, level: int, event: str, message: str, /, **fields: str | float | None) -> None:
        """Log an event as the function ``tell`` does, or only count it once there are too many."""
        with self._guard:
            if time.monotonic() - self._since_s > self._while_s:
                self.end()
                self._since_s = time.monotonic()
            self._count += 1
            if self._count <= self._count_max:
                tell(level, event, message, **fields)

    def end(self) -> None:
        """Log how many events were left out until now."""
        with self._guard:
            left_out, self._count = self._count - self._count_max, 0
            if left_out > 0:
                text = f"{left_out} more events of strangers were left out"
                tell(logging.WARNING, "left_out", text, count=left_out)


class Lines(logging.Formatter):
    """A formatter that writes one JSON object for each line. A record without an event becomes the
    event ``log``. All text is made ``printable``: another program may undo the escapes of JSON, and
    what clients say must not reach a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": "log",
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        line = {
            name: printable(each) if isinstance(each, str) else each for name, each in told.items()
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Send the log of Portus to stderr as lines of JSON, errors that end a thread included."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    logger = logging.getLogger("portus")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    threading.excepthook = _note_end


def _note_end(ended: threading.ExceptHookArgs) -> None:
    name = "" if ended.thread is None else ended.thread.name
    why = ended.exc_value or ended.exc_type()
    _log.critical(
        "%s ended by a bug in portus: %r; please report it with its traceback",
        name,
        why,
        exc_info=why,
    )
