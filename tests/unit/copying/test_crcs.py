"""What is copied, or arrives at a host, is summed on the way: the CRC32 of each unit."""

from __future__ import annotations

import contextlib
import random
import socket
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from portus.engine.copying.local import Engine, copy
from portus.engine.copying.segments import Crcs, Stop, cut
from portus.engine.format.checksum import UNIT
from portus.engine.media.base import Medium
from portus.engine.spec import Extent
from portus.reach.media.space import Memory
from portus.reach.pools.image_draft import sum_sources
from portus.reach.protocol.vocabulary import Phase
from portus.reach.transport.stream import Link, give, take
from tests.unit.copying.sources import Source
from tests.unit.copying.test_local import Case, random_case, rows

ROUNDS = 8
LENGTHS = (0, 1, 0, 100_003, UNIT, 4096, 2 * UNIT + 5, 300, 0)
"""Empty ones, small ones beside each other, and some of several units."""


def expected(case: Case) -> list[int]:
    """The sums of the units, by zlib."""
    return [
        zlib.crc32(case.bytes_of(source)[start : start + UNIT])
        for source in case.sources
        for start in range(0, max(1, source.length), UNIT)
    ]


def nothing(case: Case) -> Crcs:
    """A row for each unit; none of them is right but those of units without bytes."""
    units = [each.length > 0 for each in case.sources for _ in range(0, max(1, each.length), UNIT)]
    return np.where(units, 0xDEADBEEF, 0).astype(np.uint32)


def big_case(chance: random.Random) -> Case:
    """Sources of ``LENGTHS``, end to end, in a pool too."""
    memory = np.frombuffer(chance.randbytes(sum(LENGTHS)), np.uint8).copy()
    sources, start = [], 0
    for length in LENGTHS:
        address = memory.ctypes.data + start if length else 0
        sources.append(Source(address, length, (Extent(start, length),) if length else ()))
        start += length
    return Case(memory, tuple(sources))


def cases(seed: int, room: int) -> Iterator[Case]:
    chance = random.Random(seed)
    for _ in range(ROUNDS):
        yield random_case(chance, room)


def test_what_is_copied_is_summed(engine: Engine, medium: Medium, seed: int) -> None:
    for case in cases(seed, medium.size):
        crcs = nothing(case)
        digests = copy(medium, case.columns, Stop(), engine=engine, crcs=crcs)
        assert rows(digests) == case.expected
        assert crcs.tolist() == expected(case)


def test_each_unit_of_a_big_source_is_summed(engine: Engine, seed: int) -> None:
    case = big_case(random.Random(seed))
    crcs = nothing(case)
    copy(Memory(sum(LENGTHS)), case.columns, Stop(), engine=engine, crcs=crcs)
    assert crcs.tolist() == expected(case)
    assert sum_sources(case.columns).tolist() == expected(case)


def test_what_arrives_over_a_socket_is_summed(medium: Medium, seed: int) -> None:
    for case in cases(seed, medium.size):
        with linked() as (client, host), ThreadPoolExecutor(1) as pool:
            giving = pool.submit(give, client, case.columns, Stop())
            crcs, (segments, digests) = nothing(case), cut(case.columns)
            take(host, segments, digests, Stop(), medium, crcs)
            sent = giving.result(60)
        assert rows(digests) == rows(sent) == case.expected
        assert crcs.tolist() == expected(case)


@contextlib.contextmanager
def linked() -> Iterator[tuple[Link, Link]]:
    """The client and the host in the middle of a pull."""
    ends = [
        Link(end, is_client=is_client, name="peer", silence_s=60)
        for end, is_client in zip(socket.socketpair(), (True, False), strict=True)
    ]
    for end in ends:
        end.connection.state = Phase.PULLING
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()
