"""Messages in a pool: which process has it open for writing, and which save to it failed last."""

from __future__ import annotations

from portus.engine.media.base import Medium
from portus.errors import printable
from portus.reach.format.layout import HOLDER_OFFSET, HOLDER_SIZE


def read_holder(medium: Medium) -> str:
    """Return which process opened the pool for writing last, in words; empty if none did."""
    return _messages(medium)[0]


def read_failure(medium: Medium) -> str:
    """Return which save to the pool failed last, when and why, in words; empty if none did."""
    return _messages(medium)[1]


def store_failure(medium: Medium, text: str) -> None:
    """Store which save failed. A message takes no space, and is not persisted."""
    store_messages(medium, read_holder(medium), text)


def _messages(medium: Medium) -> tuple[str, str]:
    data = memoryview(bytearray(HOLDER_SIZE))
    medium.load(HOLDER_OFFSET, data)
    text = bytes(data).split(b"\0")[0].decode("utf-8", "replace")
    holder, _, failure = text.partition("\n")
    return holder, failure


def store_messages(medium: Medium, holder: str, failure: str) -> None:
    """Store both messages, not durably. Each is one line; the second is cut if there is no room."""
    # The text may be from a client of a host: a zero byte in it would end the page's text.
    text = "\n".join(printable(" ".join(each.split())) for each in (holder, failure) if each)
    data = text.encode()[: HOLDER_SIZE - 1].decode("utf-8", "ignore").encode()
    medium.store(HOLDER_OFFSET, data.ljust(HOLDER_SIZE, b"\0"))
