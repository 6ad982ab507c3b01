"""The media that the transport is tried with."""

from __future__ import annotations

from tests.unit.copying.conftest import medium as medium
