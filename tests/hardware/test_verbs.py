"""One-sided transfers by real verbs, between two queue pairs of this process."""

from __future__ import annotations

import ctypes
import random

import pytest

pytest.importorskip("pyverbs.device", reason="no pyverbs; make test-hardware", exc_type=ImportError)

from tests.hardware import verbs
from tests.hardware.conftest import DEVDAX

SIZE = 64 << 20

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

TARGETS = [
    None,
    pytest.param(DEVDAX, marks=pytest.mark.pmem),
]


@pytest.mark.parametrize("target", TARGETS, ids=["anonymous", "devdax"])
def test_what_is_read_and_written_one_sided_arrives(target: str | None) -> None:
    data = random.Random(1).randbytes(SIZE)
    with (
        verbs.mapped(None, SIZE) as trainer,
        verbs.mapped(target, SIZE) as medium,
        verbs.pair(verbs.devices()[0]) as (storage_host, trainer_host),
    ):
        tensors = trainer_host.register(trainer, SIZE)
        stored = storage_host.register(medium, SIZE)
        ctypes.memmove(trainer, data, SIZE)
        ctypes.memset(medium, 0, SIZE)
        saved_s = storage_host.move(verbs.READ, stored, tensors.remote)
        assert ctypes.string_at(medium, SIZE) == data
        ctypes.memset(trainer, 0, SIZE)
        restored_s = storage_host.move(verbs.WRITE, stored, tensors.remote)
        assert ctypes.string_at(trainer, SIZE) == data
    mib = SIZE >> 20
    print(f"{mib} MiB: READ {mib / saved_s:.0f} MiB/s, WRITE {mib / restored_s:.0f} MiB/s")
