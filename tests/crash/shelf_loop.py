"""A loop whose state lives on a shelf: killed at any moment, it goes on where it was."""

from __future__ import annotations

import itertools

import numpy as np

from portus.companions.shelf import Shelf
from portus.engine.spec import PAGE
from tests.nursery import Say

SHAPE = (40, 300)


def first() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(size=SHAPE), rng.normal(size=70_000)


def step(small: np.ndarray, large: np.ndarray, number: int) -> None:
    """One iteration, in place: all of one array, a few pages of the other."""
    small += np.sin(small * number)
    places = (np.arange(3) * 20_000 + number * 97) % len(large)
    large[places] += small.sum()


def begin(shelf: Shelf) -> None:
    """Iteration 0, if there is none yet."""
    if "step" not in shelf:
        with shelf.transaction():
            shelf.small, shelf.large = first()
            shelf.step = 0


def advance(shelf: Shelf) -> int:
    """One more iteration, committed; which it is."""
    with shelf.transaction():
        number: int = shelf.step + 1
        step(shelf.small, shelf.large, number)
        shelf.step = number
        if number % 7 == 0:
            shelf[f"note {number % 3}"] = np.full(50, number)
    return number


def verify(shelf: Shelf) -> None:
    """All that is there is what so many iterations make, to the bit."""
    small, large = first()
    for each in range(1, shelf.step + 1):
        step(small, large, each)
    assert np.array_equal(shelf.small, small)
    assert np.array_equal(shelf.large, large)
    for each in range(shelf.step, max(0, shelf.step - 21), -1):
        if each % 7 == 0:
            assert (shelf[f"note {each % 3}"] == each).all()


def run(say: Say, path: str) -> None:
    """Until it is killed. Tells the step that it found, and each that was committed."""
    with Shelf(path, log_bytes=100 * PAGE) as shelf:
        begin(shelf)
        say(f"resumed {shelf.step}")
        while True:
            say(f"committed {advance(shelf)}")


def run_on_file(say: Say, path: str) -> None:
    """The same state in a file, written over by np.savez after each iteration, until it is killed.
    Tells each that was saved."""
    small, large = first()
    for number in itertools.count(1):
        step(small, large, number)
        np.savez(path, small=small, large=large, step=number)
        say(f"saved {number}")
