"""Tests that boot guests are skipped, with the reason, where the lab cannot run; the one that may
take longest is the first to start, so that several side by side end together."""

from __future__ import annotations

import os

import pytest

from tests.conftest import time_out
from tests.lab import kernel, needs
from tests.lab.needs import LabError


@pytest.hookimpl(trylast=True)  # of those that are left: nothing is fetched for no test
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = [item for item in items if item.get_closest_marker("lab")]
    found.sort(key=time_out, reverse=True)
    if len(found) > 3:  # each process of xdist is given two at first: a long and a short one
        found.insert(1, found.pop())
        found.insert(3, found.pop())
    items[:] = [*found, *(item for item in items if not item.get_closest_marker("lab"))]
    if not found or os.environ.get("PORTUS_LAB") == "required":
        return
    try:
        needs.check()
        kernel.fetched()
    except LabError as error:
        for item in found:
            item.add_marker(pytest.mark.skip(reason=f"no lab: {error}"))
