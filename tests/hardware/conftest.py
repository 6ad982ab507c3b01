"""Tests that need a device are skipped with the reason where it is not; in the lab, never."""

from __future__ import annotations

import os
from typing import Final

import pytest

IN_LAB: Final = os.environ.get("PORTUS_LAB") == "guest"

DEVDAX_IN_LAB: Final = "/dev/dax0.0"
FSDAX_IN_LAB: Final = "/mnt/fsdax"
EXPANDER_IN_LAB: Final = "/dev/dax2.0"

DEVDAX: Final = os.environ.get("PORTUS_TEST_DEVDAX", "")
FSDAX: Final = os.environ.get("PORTUS_TEST_FSDAX", "")
EXPANDER: Final = os.environ.get("PORTUS_TEST_EXPANDER", "")
"""What tests may overwrite: a devdax with an NVDIMM namespace, a directory on a file system with
DAX, a devdax without a namespace."""


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
