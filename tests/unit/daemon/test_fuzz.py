"""A recorded conversation, mutated over and over, with a storage host that trainers use meanwhile.

Nothing that is said to a host ends it, hangs it, costs it memory, files or threads, or touches what
another client saved.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import xxhash

from portus.reach.daemon.server import Server
from portus.reach.index.check import check
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.protocol import messages as said
from portus.reach.protocol.connection import HEADER
from portus.reach.protocol.vocabulary import MessageKind
from tests.depth import deep
from tests.golden.conversation import FIRST, GIVEN_UP, SECOND
from tests.golden.test_protocol import turns
from tests.hosts import serving, url
from tests.moments import until
from tests.unit.daemon.test_memory import rss
from tests.unit.protocol.examples import header

TRIES = 1000
OF_ONE_HOST = 250
"""Tries before the next host is started: what a host has grows with what is committed there."""

ANSWER_S_MAX = 30
GROWTH_MAX = 48 << 20

Frames = list[bytes]
Mutation = Callable[[random.Random, Frames], Frames]

NUMBERS = (
    0,
    1,
    2,
    255,
    (1 << 16) - 1,
    1 << 20,
    (1 << 31) - 1,
    1 << 32,
    (1 << 63) - 1,
    (1 << 64) - 1,
)


def recorded() -> Frames:
    """What a client said once, frame by frame, payload with its header; without digests."""
    data = b"".join(data for who, data in turns() if who == "client")
    frames = []
    while data:
        end = HEADER.size + HEADER.unpack(data[: HEADER.size])[0]
        frames.append(data[:end])
        data = data[end + (said.DIGEST_SIZE if has_digest(data) else 0) :]
    return frames


def has_digest(each: bytes) -> bool:
    kind = said.MESSAGES.get(each[4])
    return kind is None or kind.has_digest


def sealed(each: bytes) -> bytes:
    """A frame with its check and digest, so that what is mutated gets as far as it can."""
    if len(each) < HEADER.size:
        return each
    length, kind, _ = HEADER.unpack(each[: HEADER.size])
    whole = header(length, kind) + each[HEADER.size :]
    return whole + xxhash.xxh3_128(whole).digest() if has_digest(each) else whole


def frame(message: said.Message) -> bytes:
    body = said.encode(message)
    return HEADER.pack(len(body), message.kind.number, bytes(3)) + body


def aimed(frames: Frames, chance: random.Random, version: int) -> Frames:
    """The same conversation, of versions that the host has not; the id of the first."""
    by_id: dict[MessageKind, said.Message] = {
        said.Pin.kind: said.Pin(version),
        said.Unpin.kind: said.Unpin(version),
    }
    tokens = {token: chance.randbytes(16) for token in (FIRST, SECOND, GIVEN_UP)}
    found = []
    for each in frames:
        kind = said.MESSAGES.get(each[4])
        if kind in by_id:
            found.append(frame(by_id[kind]))
            continue
        for token, other in tokens.items():
            each = each.replace(token, other)
        found.append(each)
    return found


# What is done to it.


def flip(chance: random.Random, frames: Frames) -> Frames:
    """Some bits of one frame."""
    place = chance.randrange(len(frames))
    changed = bytearray(frames[place])
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return [*frames[:place], bytes(changed), *frames[place + 1 :]]


def number(chance: random.Random, frames: Frames) -> Frames:
    """Somewhere in a body, a number that is hard to count with."""
    place = chance.randrange(len(frames))
    changed = bytearray(frames[place])
    size = chance.choice((1, 2, 4, 8))
    at = chance.randrange(min(HEADER.size, len(changed) - 1), len(changed))
    value = chance.choice(NUMBERS) % (1 << 8 * size)
    changed[at : at + size] = value.to_bytes(size, chance.choice(("little", "big")))
    return [*frames[:place], bytes(changed[: len(frames[place])]), *frames[place + 1 :]]


def length(chance: random.Random, frames: Frames) -> Frames:
    """A header that promises more or less than there is."""
    place = chance.randrange(len(frames))
    real = len(frames[place]) - HEADER.size
    told = chance.choice((0, 1, real - 1, real + 1, 2 * real, 1 << 20, (1 << 32) - 1)) % (1 << 32)
    changed = struct.pack("<I", told) + frames[place][4:]
    if chance.random() < 0.5:
        changed = changed[: HEADER.size + told]  # the digest is where it is looked for
    return [*frames[:place], changed, *frames[place + 1 :]]


def drop(chance: random.Random, frames: Frames) -> Frames:
    place = chance.randrange(len(frames))
    return frames[:place] + frames[place + 1 :]


def again(chance: random.Random, frames: Frames) -> Frames:
    """One frame several times, perhaps where it does not belong."""
    place, to = chance.randrange(len(frames)), chance.randrange(len(frames))
    return frames[:to] + [frames[place]] * chance.choice((1, 2, 20)) + frames[to:]


def swap(chance: random.Random, frames: Frames) -> Frames:
    one, other = chance.randrange(len(frames)), chance.randrange(len(frames))
    found = list(frames)
    found[one], found[other] = found[other], found[one]
    return found


def stranger(chance: random.Random, frames: Frames) -> Frames:
    """A frame of any kind, with any bytes in it."""
    body = chance.randbytes(chance.choice((1, 8, 16, 100, 4096)))
    kind = chance.choice([*(each.number for each in said.MESSAGES), chance.randrange(256)])
    made = HEADER.pack(len(body), kind, bytes(3)) + body
    place = chance.randrange(len(frames) + 1)
    return [*frames[:place], made, *frames[place:]]


MUTATIONS: Sequence[Mutation] = (flip, number, length, drop, again, swap, stranger)


def on_the_way(chance: random.Random, frames: Frames) -> bytes:
    """What arrives of it: mostly all; else a bit flips, or it hangs up in the middle of a frame."""
    data = bytearray(b"".join(map(sealed, frames)))
    place, fate = chance.randrange(len(data) + 1), chance.randrange(8)
    if fate == 0:
        del data[place:]
    if fate == 1 and place < len(data):
        data[place] ^= 1 << chance.randrange(8)
    return bytes(data)


def speak(port: int, data: bytes) -> None:
    """Say all of it, and listen until the host hangs up. Raises ``TimeoutError`` if it does not."""
    with socket.create_connection(("127.0.0.1", port), ANSWER_S_MAX) as plain:
        try:
            plain.sendall(data)
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(1 << 16):
                pass
        except TimeoutError:
            raise
        except OSError:
            return  # it hung up before all was said


def held() -> tuple[int, int]:
    """Open files, and threads, of this process. A name of a tenant that was changed has a pool."""
    files = 0
    for each in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files += not os.readlink(each.path).endswith(".portus")
    return files, threading.active_count()


class Honest:
    """A trainer of the same tenant."""

    def __init__(self, server: Server) -> None:
        self._run = PoolCheckpointer(url(server), "honest", keep=2, on_error="raise")
        self._step = 0

    def __enter__(self) -> Honest:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.close()

    def saves_and_loads(self) -> None:
        self._step += 1
        state = {"x": torch.full((500,), float(self._step))}
        self._run.save(state, self._step).wait()
        found = self._run.load()
        assert isinstance(found, dict)
        assert torch.equal(found["x"], state["x"])


def attacked(place: Path, chance: random.Random, tries: int) -> int:
    """One host; how many of what was mutated still committed a version."""
    frames, committed = recorded(), 0
    with serving(place) as server:
        writer = server.house.pools.of("default").writer
        with Honest(server) as honest:
            honest.saves_and_loads()
            quiet = held()
            for number_of in range(tries):
                before = max((each.info.id for each in writer.catalogue().entries()), default=0)
                mutated = aimed(frames, chance, before + 1)
                for _ in range(chance.choice((1, 1, 1, 3))):
                    if mutated:
                        mutated = chance.choice(MUTATIONS)(chance, mutated)
                speak(server.listeners[0].port, on_the_way(chance, mutated))
                committed += any(each.info.id > before for each in writer.catalogue().entries())
                if number_of % 50 == 0:
                    honest.saves_and_loads()
            honest.saves_and_loads()
            until(lambda: held() <= quiet)  # what a connection had went with it
            assert [str(each) for each in check(writer)] == []
        until(lambda: server.house.budget.taken_bytes == 0)
    return committed


@pytest.mark.parametrize(
    "tries",
    [
        TRIES // 2,
        pytest.param(deep(10 * TRIES), marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_nothing_that_is_said_harms_a_host(
    tmp_path: Path, seed: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    chance = random.Random(seed)
    committed, memory = [attacked(tmp_path / "warm", chance, OF_ONE_HOST)], rss(os.getpid())
    for turn in range(1, tries // OF_ONE_HOST):
        committed.append(attacked(tmp_path / f"{turn}", chance, OF_ONE_HOST))
    grown = rss(os.getpid()) - memory
    print(f"{tries} tries, {sum(committed)} of them committed; {grown >> 10} KiB more")
    assert ended == [], "a thread of the host ended by a mistake"
    assert sum(committed) > tries // 8, "most of what is said is refused at once"
    assert grown < GROWTH_MAX
