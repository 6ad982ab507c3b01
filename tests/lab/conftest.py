"""Tests that boot guests are skipped, with the reason, where the lab cannot run."""

from __future__ import annotations

import os

import pytest

from tests.lab import kernel, needs
from tests.lab.needs import LabError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = [item for item in items if item.get_closest_marker("lab")]
    if not found or os.environ.get("PORTUS_LAB") == "required":
        return
    try:
        needs.check()
        kernel.fetched()
    except LabError as error:
        for item in found:
            item.add_marker(pytest.mark.skip(reason=f"no lab: {error}"))
