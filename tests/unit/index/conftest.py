"""For all tests of the index."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from portus.engine.media import process
from portus.engine.media.addresses import AddressRange


@pytest.fixture(autouse=True)
def addresses_given_back() -> Iterator[None]:
    """A pool sets 4 TiB of addresses aside; of some thirty that nobody closes a process is full."""
    before = set(process._held)
    yield
    for each in set(process._held) - before:
        if isinstance(each, AddressRange):
            each.close()
