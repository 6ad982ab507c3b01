"""``python -m tests.hardware.training URL``: a small training, whose storage host may die.

A linear layer that learns the identity, by AdamW, with torch; it is saved by verbs at every step,
behind the fence of its optimizer. Says ``saving N DIGEST`` (of the bytes of all its tensors),
``saved N`` or ``lost N: why``, and ``back`` when a host that was lost has saved three more.

``python -m tests.hardware.training URL restore``, on another machine: reads the newest version by
verbs, without torch, and says ``restored N DIGEST``.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable
from typing import Final

import numpy as np
import xxhash

from portus.errors import PortusError
from portus.reach.versions.host import HostPool
from tests.hardware.states import Bytes, loaded

FEATURES: Final = 1200
BATCH: Final = 8
FENCE_S: Final = 20.0
SAVE_S_MAX: Final = 120.0
AFTER: Final = 3
LOST_MAX: Final = 500
BOUNCED_MAX: Final = 64 << 10
"""Of one save: small tensors go over the socket."""

MODEL: Final = "run"


def digest_of(tensors: Iterable[Bytes]) -> str:
    """Of their bytes, in any order."""
    each = sorted(xxhash.xxh3_128_digest(tensor.tobytes()) for tensor in tensors)
    return xxhash.xxh3_128_hexdigest(b"".join(each))


def train(url: str) -> None:
    """For ever."""
    print("importing torch", flush=True)
    import torch

    import portus

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.Linear(FEATURES, FEATURES)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)

    def update() -> None:
        optimizer.zero_grad()
        given = torch.randn(BATCH, FEATURES)
        (layer(given) - given).square().mean().backward()
        optimizer.step()  # behind the fence

    def tensors() -> list[torch.Tensor]:
        moments = [each for state in optimizer.state.values() for each in state.values()]
        return [*(each.detach() for each in layer.parameters()), *moments]

    update()
    connected(url).close()
    lost = after = 0
    with portus.PoolCheckpointer(url, MODEL, fence_timeout=FENCE_S) as checkpointer:
        for step in itertools.count(1):
            digest = digest_of(each.numpy().reshape(-1).view(np.uint8) for each in tensors())
            print(f"saving {step} {digest}", flush=True)
            state = {"layer": layer.state_dict(), "optimizer": optimizer.state_dict()}
            handle = checkpointer.save(state, step)
            update()
            try:
                handle.wait(SAVE_S_MAX)
            except PortusError as error:
                lost += 1
                assert lost < LOST_MAX, "no save came through"
                print(f"lost {step}: {error}", flush=True)
                time.sleep(0.5)
                continue
            assert handle.stats.bounced_bytes < BOUNCED_MAX, "it went over the socket"
            print(f"saved {step}", flush=True)
            after += lost > 0
            if after == AFTER:
                print("back", flush=True)


def restore(url: str) -> None:
    """What another machine finds."""
    pool = connected(url)
    newest = list(pool.catalogue().entries())[-1]
    with pool.pin(newest.info.id) as current:
        lengths = pool.record(current).storages["length"].tolist()
    targets = [np.zeros(length, np.uint8) for length in lengths]
    assert loaded(pool, targets, newest.info.step), "it does not verify"
    tensors = targets[:-1]  # the last one has what is around them in the file
    print(f"restored {newest.info.step} {digest_of(tensors)}", flush=True)
    pool.close()


def connected(url: str) -> HostPool:
    """Both machines start at the same time."""
    for tries in itertools.count():
        try:
            return HostPool(url)
        except PortusError as error:
            if tries > 300:
                raise
            print(f"waiting: {error}", flush=True)
            time.sleep(1)
    raise AssertionError("it counts for ever")


if __name__ == "__main__":
    {"": train, "restore": restore}["".join(sys.argv[2:])](sys.argv[1])
