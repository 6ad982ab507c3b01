"""Tests that need a device are skipped with the reason where it is not; in the lab, never."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pytest

from portus.reach.daemon.server import Server
from portus.reach.daemon.shared_state import ClientTimeouts
from portus.reach.index.directory import format_device
from portus.reach.media.local import LocalFiles
from tests.hosts import connect_again_at_once, serving

IN_LAB: Final = os.environ.get("PORTUS_LAB") == "guest"

DEVDAX_IN_LAB: Final = "/dev/dax0.0"
FSDAX_IN_LAB: Final = "/mnt/fsdax"
EXPANDER_IN_LAB: Final = "/dev/dax2.0"

DEVDAX: Final = os.environ.get("PORTUS_TEST_DEVDAX", "")
FSDAX: Final = os.environ.get("PORTUS_TEST_FSDAX", "")
EXPANDER: Final = os.environ.get("PORTUS_TEST_EXPANDER", "")
"""What tests may overwrite: a devdax with an NVDIMM namespace, a directory on a file system with
DAX, a devdax without a namespace."""

WAIT_S_MAX: Final = 240.0
PATIENCE: Final = ClientTimeouts(silent_s=WAIT_S_MAX)
"""The lab may stand still for a while: it is a guest of a machine that has other work."""


@pytest.fixture
def by_verbs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTUS_TRANSPORT", "verbs")
    connect_again_at_once(monkeypatch)
    monkeypatch.setattr("portus.reach.transport.host.SILENCE_S", WAIT_S_MAX)


@pytest.fixture
def server() -> Iterator[Server]:
    """On a DAX device."""
    format_device(DEVDAX, LocalFiles(), force=True)
    with serving(DEVDAX, patience=PATIENCE) as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IN_LAB:
        return
    for marker, why_not in (("rdma", _why_no_rdma), ("pmem", _why_no_pmem)):
        found = [item for item in items if item.get_closest_marker(marker)]
        reason = why_not() if found else ""
        for item in found if reason else ():
            item.add_marker(pytest.mark.skip(reason=f"{reason}; make test-hardware"))


def _why_no_rdma() -> str:
    try:
        from pyverbs.device import get_device_list
    except ImportError as error:
        return f"no pyverbs: {error}"
    return "" if get_device_list() else "no RDMA device"


def _why_no_pmem() -> str:
    if DEVDAX and FSDAX and EXPANDER:
        return ""
    return "PORTUS_TEST_DEVDAX, PORTUS_TEST_FSDAX and PORTUS_TEST_EXPANDER name no devices"
