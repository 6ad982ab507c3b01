"""``python -m tests.hardware.training URL``: a small training whose storage host may die.

Momentum descent towards what moves, in float32: the state at each step follows from the step
alone, so whatever is loaded can be compared with it. Each step is saved behind a fence: the update
waits for it, ``FENCE_S`` at most. Says ``saving N``, ``saved N`` or ``lost N: why``. It ends when
the host was lost, was found again, and has saved three more; all that it then has is verified.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.client.host import HostPool
from portus.errors import PortusError
from tests.hardware.states import Bytes, begun, holds, snapshot_of, steps

LAYERS: Final = 6
ELEMENTS: Final = 400_000
FENCE_S: Final = 15.0
AFTER: Final = 3
STEPS_MAX: Final = 500


class Model:
    """Weights, and the momentum of each."""

    def __init__(self) -> None:
        self.weights = [np.full(ELEMENTS, layer, np.float32) for layer in range(LAYERS)]
        self.momenta: list[NDArray[np.float32]] = [np.zeros_like(each) for each in self.weights]
        self.step = 0

    def update(self) -> None:
        """One step, in place."""
        self.step += 1
        for weight, momentum in zip(self.weights, self.momenta, strict=True):
            momentum *= np.float32(0.9)
            momentum += weight - np.float32(self.step % 7)
            weight -= np.float32(0.05) * momentum

    def state(self) -> list[Bytes]:
        """Views of the same memory, always the same objects."""
        self._views: list[Bytes]
        if not hasattr(self, "_views"):
            self._views = [each.view(np.uint8) for each in (*self.weights, *self.momenta)]
        return self._views


def at(step: int) -> Model:
    """The training after ``step`` steps."""
    model = Model()
    for _ in range(step):
        model.update()
    return model


def train(pool: HostPool) -> list[int]:
    """The steps that were reported as saved, in order."""
    model, saved = Model(), []
    lost = after = 0
    while after < AFTER:
        assert model.step < STEPS_MAX, f"{lost} saves were lost, and none came through after"
        step = model.step
        print(f"saving {step}", flush=True)
        try:
            old = [each.info.id for each in list(pool.catalogue().entries())[:-1]]
            save = begun(pool, snapshot_of(model.state(), step), retire=old)
            worker = threading.Thread(target=save.run)
            worker.start()
            save.release(FENCE_S)
            model.update()  # while the commit may go on
            worker.join()
            assert save.result(0).step == step
            assert pool.links.verbs is None or save.stats.bounced_bytes == 0
            saved.append(step)
            after += lost > 0
            print(f"saved {step}", flush=True)
        except PortusError as error:
            lost += 1
            print(f"lost {step}: {error}", flush=True)
            time.sleep(0.5)
            if model.step == step:
                model.update()
    return saved


def main(url: str) -> None:
    pool = connected(url)
    saved = train(pool)
    kept = steps(pool)
    assert kept[-1] == saved[-1], f"reported {saved[-1]}, found {kept}"
    for step in kept:
        assert holds(pool, at(step).state(), step), f"step {step} is not what it was"
    print(f"verified {kept}", flush=True)
    pool.close()


def connected(url: str) -> HostPool:
    """Both machines start at the same time."""
    for tries in itertools.count():
        try:
            return HostPool(url, "run")
        except PortusError as error:
            if tries > 100:
                raise
            print(f"waiting: {error}", flush=True)
            time.sleep(1)
    raise AssertionError("it counts for ever")


if __name__ == "__main__":
    main(sys.argv[1])
