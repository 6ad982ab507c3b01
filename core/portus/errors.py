"""Every error that Portus raises on purpose, sorted by who has to act.

A message says what, where, expected, found, and what to do. Foreign errors (``OSError``) become
one of these at the seam where they arise (``media``, ``transport``), with ``from``. What a stranger
says goes into one through ``printable``.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with escapes for all that would not be seen as it is: what moves the cursor of a
    terminal or ends a line, what changes the direction of text, and surrogates."""
    if text.isprintable():
        return text
    escaped = (each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return "".join(escaped)


class PortusError(Exception):
    """Root of the tree. Never raised itself."""


class UsageError(PortusError, ValueError):
    """The caller must change the call (or the version of Portus, or the configuration)."""


class MediumError(PortusError, OSError):
    """The operator must look at the machine: no space, no permission, a failing disk."""


class BusyError(MediumError):
    """Another process holds the pool for writing; it is named in the message. Try again later."""


class StaleError(PortusError):
    """The version was retired while it was being read. Ask for the newest again."""


class AbandonedError(PortusError):
    """This save was given up (fence time-out, audit, shutdown). Older versions are untouched."""


class TransportError(PortusError, ConnectionError):
    """Nothing took effect; the same call may be tried again."""


class CorruptionError(PortusError):
    """Bytes break the format or fail their checksum. Never retried or repaired in silence."""
