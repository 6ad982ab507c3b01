"""A mirror in a real S3 server: each of its requests fails once, and the server is killed."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import torch

import portus
from portus.engine.copying.segments import Stop
from portus.errors import PortusError, TransportError, UsageError
from portus.reach.index.directory import open_reader
from portus.reach.index.reader import PoolReader
from portus.reach.mirror.address import parse
from portus.reach.mirror.bucket import Bucket, BucketTimeouts
from portus.reach.mirror.log import SupersededError
from portus.reach.mirror.mirror import Mirror
from portus.reach.pools.mirror_versions import load_version
from tests.s3.server import Server
from tests.same import assert_same
from tests.simulation.proxy import ConnectionCut, Request, RequestFault, RequestProxy

pytestmark = pytest.mark.s3

MODEL = "gpt"
STEPS = (1, 2, 3)
ONCE = BucketTimeouts(connect_s=5, request_s=10, retries=0, retry_s=1)
"""obstore repeats nothing: what a mirror does about it is tried."""

FAULTS = {
    "500": RequestFault(status=500, code="InternalError"),
    "503": RequestFault(status=503, code="SlowDown"),
    "403": RequestFault(status=403, code="AccessDenied"),
    **{f"cut {cut.name}": RequestFault(cut=cut) for cut in ConnectionCut},
}
EACH = os.environ.get("PORTUS_TEST_REQUESTS") == "each"
"""Each request in each way; else in one way, by the seed."""

Result = TypeVar("Result")


def state_of(step: int, size: int = 200_000) -> dict[str, object]:
    frozen = torch.rand(size, generator=torch.Generator().manual_seed(0))
    return {
        "frozen": frozen,
        "head": torch.rand(1000, generator=torch.Generator().manual_seed(step)),
        "step": step,
    }


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolReader]:
    """A pool of three versions."""
    path = tmp_path_factory.mktemp("pool") / "run.portus"
    with portus.PoolCheckpointer(path, model=MODEL, keep=None) as saver:
        for step in STEPS:
            saver.save(state_of(step), step=step).wait()
    with contextlib.closing(open_reader(str(path))) as reader:
        yield reader


def ids(reader: PoolReader) -> list[int]:
    return [entry.info.id for entry in reader.catalogue().entries()]


@dataclass
class Tries:
    """Makes a call again until nothing fails, and keeps what did. mend: called in between."""

    mend: Callable[[], None]
    failed: list[PortusError] = field(default_factory=list)

    def __call__(self, call: Callable[[], Result]) -> Result:
        for _ in range(4):
            try:
                return call()
            except (TransportError, UsageError) as error:
                self.failed.append(error)
                self.mend()
        raise AssertionError(f"it fails again and again: {self.failed}")


def mirrored(
    url: str, reader: PoolReader, mend: Callable[[], None] = lambda: None
) -> list[PortusError]:
    """Claim, mirror all, let go of the first, sweep; what failed meanwhile."""
    tries = Tries(mend)
    with contextlib.closing(Bucket(parse(url), ONCE)) as store:
        mirror = Mirror(store, MODEL)
        tries(lambda: mirror.claim("a test", reader.uuid, 0))
        added = [
            tries(functools.partial(mirror.copy, reader, each, Stop())) for each in ids(reader)
        ]
        tries(lambda: mirror.remove([added[0].token]))
        tries(mirror.sweep)
        assert [each.step for each in tries(mirror.read).added] == [2, 3]
    return tries.failed


def only(number: int, fault: RequestFault, request: Request) -> RequestFault | None:
    return fault if request.number == number else None


def assert_loads(url: str, steps: list[int]) -> None:
    """Who has the mirror alone gets these, bit for bit; and from the files, with plain torch."""
    with contextlib.closing(Bucket(parse(url))) as store:
        mirror = Mirror(store, MODEL)
        versions = mirror.read().added
        assert [each.step for each in versions] == steps
        for added, step in zip(versions, steps, strict=True):
            assert_same(load_version(mirror, added), state_of(step))
            [file] = added.files.values()
            assert_same(torch.load(io.BytesIO(store.get(f"{MODEL}/{file.name}"))), state_of(step))


def test_each_request_may_fail_once(
    url: str, proxy: RequestProxy, reader: PoolReader, seed: int
) -> None:
    assert mirrored(url, reader) == []
    count, source, tried = len(proxy.requests), random.Random(seed), 0
    assert count > 12
    for number in range(count):
        for name in FAULTS if EACH else [source.choice(sorted(FAULTS))]:
            first, fault = len(proxy.requests), FAULTS[name]
            proxy.fault = functools.partial(only, first + number, fault)
            place = f"{url}-{number}-{name.replace(' ', '-')}"
            failed = mirrored(place, reader)
            what = proxy.requests[first + number]
            assert len(failed) <= 1, (what, name)
            proxy.fault = lambda _: None
            assert_loads(place, [2, 3])
            tried += 1
    assert tried >= count


def test_a_server_that_is_killed_and_started_again_costs_a_try(
    url: str, server: Server, proxy: RequestProxy, reader: PoolReader
) -> None:
    assert mirrored(url, reader) == []
    targets = [r.target for r in proxy.requests if r.method == "PUT"]
    for number in (0, len(targets) // 2, len(targets) - 1):
        puts = itertools.count()

        def kill(
            request: Request, number: int = number, puts: Iterator[int] = puts
        ) -> RequestFault | None:
            if request.method == "PUT" and next(puts) == number:
                server.kill_gateway()
                return RequestFault(cut=ConnectionCut.BEFORE)
            return None

        proxy.fault = kill
        failed = mirrored(f"{url}-{number}", reader, mend=server.start)
        assert 1 <= len(failed) <= 3  # a connection that was kept may lead to what is gone
        assert_loads(f"{url}-{number}", [2, 3])


def test_of_several_who_mirror_at_once_each_is_told_the_truth(
    url: str, environment: dict[str, str], reader: PoolReader
) -> None:
    """What is told as mirrored is there, whoever claims afterwards; the others are told."""
    start = threading.Barrier(4)

    def one(number: int) -> list[int]:
        told = []
        with contextlib.closing(Bucket(parse(url))) as store:
            mirror = Mirror(store, MODEL)
            start.wait()
            with contextlib.suppress(SupersededError):
                mirror.claim(f"writer {number}", reader.uuid, 0)
                for each in ids(reader):
                    told.append(mirror.copy(reader, each, Stop()).step)
        return told

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(one, range(4)))
    assert list(STEPS) in told, "the last to claim is superseded by nobody"
    assert_loads(url, list(STEPS))
