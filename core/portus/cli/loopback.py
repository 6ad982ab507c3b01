"""A test of verbs on this machine: transfers from one queue pair to another of the same device, to
and from places within pages, with every byte compared.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import mmap
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from portus.cli import words
from portus.cli.machine import MachineFinding
from portus.engine.copying.segments import memory
from portus.engine.spec import PAGE
from portus.errors import TransportError
from portus.reach.transport.verbs import Domain, Port, QueuePair, Region, load, ports

TOPIC: Final = "RDMA loopback"
SIZE: Final = 8 * PAGE
# No page begins there; some transfers cross from one page to the next.
OFFSETS: Final = (1, 63, 100, PAGE // 2, PAGE - 96, PAGE - 1)
LENGTHS: Final = (8, PAGE + 904)
PLACES: Final = tuple(itertools.product(OFFSETS, LENGTHS))
_NEAR: Final = 3 * PAGE + 7
_WAIT_S_MAX: Final = 60.0


def loopback_findings() -> Iterator[MachineFinding]:
    """Yield the limits of each active port, and whether its transfers are right."""
    active = ports()
    if not active:
        return
    try:
        verbs = load()
    except TransportError as error:
        yield MachineFinding(TOPIC, "-", f"cannot be tried: {error}")
        return
    yield MachineFinding("RDMA device", "pyverbs", f"loaded, with {verbs.constants.__name__}")
    for port in active:
        try:
            with contextlib.closing(Domain(port)) as domain:
                yield from _try_port(port, domain)
        except TransportError as error:
            advice = "trainers reach this host over sockets until that is fixed"
            yield MachineFinding(TOPIC, port.device, f"cannot be tried: {error}", advice)


def count_misplaced(pair: QueuePair, near: Region, far: Region, *, writes: bool) -> int:
    """Return how many of the transfers at ``PLACES`` left wrong bytes.

    Each region has ``SIZE`` bytes of this process. writes: from near to far, else reads back.
    """
    source, target = (near, far) if writes else (far, near)
    given, got = (
        np.frombuffer(memory(each.start, each.length), np.uint8) for each in (source, target)
    )
    wrong = 0
    for number, (offset, length) in enumerate(PLACES):
        here, there = near.start + _NEAR, far.start + offset
        # Never zero: the target is zeroed, so that a missing byte shows.
        given[:] = np.random.default_rng(number).integers(1, 256, SIZE, np.uint8)
        got[:] = 0
        expected = np.zeros(SIZE, np.uint8)
        begin, end = (_NEAR, offset) if writes else (offset, _NEAR)
        expected[end : end + length] = given[begin : begin + length]
        if writes:
            pair.write(there, far.remote_key, here, near.local_key, length)
        else:
            pair.read(here, near.local_key, there, far.remote_key, length)
        _wait(pair)
        wrong += not np.array_equal(got, expected)
    return wrong


def _try_port(port: Port, domain: Domain) -> Iterator[MachineFinding]:
    limits, device, count = domain.limits, port.device, 2 * len(PLACES)
    address = ipaddress.IPv6Address(port.gid)
    text = f"port {port.number} has {address.ipv4_mapped or address}; at most {limits.regions} "
    text += f"regions, of {words.size(limits.region_size)} each"
    yield MachineFinding("RDMA limits", device, text)
    wrong = _wrong(domain)
    text = f"{count - wrong} of {count} transfers arrived whole"
    bad = "do not use this device: PORTUS_TRANSPORT=tcp, portus serve --transport tcp"
    yield MachineFinding(TOPIC, device, text, bad if wrong else "")


def _wrong(domain: Domain) -> int:
    """Return how many writes and reads went wrong. Raises ``TransportError``."""
    pairs = [domain.queue_pair(), domain.queue_pair()]
    for pair, other in itertools.permutations(pairs):
        pair.connect(other.endpoint, remote=True)
    pages = [mmap.mmap(-1, SIZE) for _ in pairs]
    near, far = (
        domain.register(
            np.frombuffer(each, np.uint8).ctypes.data, SIZE, remote=is_far, writable=True
        )
        for each, is_far in zip(pages, (False, True), strict=True)
    )
    try:
        return sum(count_misplaced(pairs[0], near, far, writes=each) for each in (True, False))
    finally:
        for pair in pairs:
            pair.close()
        near.close()
        far.close()


def _wait(pair: QueuePair) -> None:
    until_s = time.monotonic() + _WAIT_S_MAX
    while not pair.poll():
        if time.monotonic() > until_s:
            raise TransportError(f"nothing arrived in {_WAIT_S_MAX:.0f} s")
        time.sleep(0.0005)
