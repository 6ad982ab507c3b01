"""Kill, errno, no space, rot, rotation, copies and restarts, mixed by a seed (V2, V8)."""

from __future__ import annotations

import errno
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import calls
from tests.faults.calls import Call, Fault, Where
from tests.faults.histories import FAILING_STEPS, World
from tests.faults.simulated import MISTAKES

ACTS = 7
HISTORIES_MAX = 200
"""Of the slowest to be found, one in fifteen shows it."""

POOL, FILES = Where
LONG_S = 60
HISTORIES_MIN = 10
"""So many there are, however slow the machine is."""

pytestmark = pytest.mark.skipif(bool(calls.why_not()), reason=calls.why_not())


@pytest.fixture(autouse=True)
def own_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of these runs is noted for the user who tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def lived(root: Path, seed: int, mistake: str | None = None) -> Iterator[World]:
    """One history of ``ACTS`` acts; repeat it by its seed. mistake: of the engine."""
    print(f"history {seed}", flush=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        world = World(Path(folder).resolve(), random.Random(seed), mistake)
        for _ in range(ACTS):
            world.act()
        yield world


@pytest.mark.long
def test_whatever_happens_to_runs_told_files_load_their_own_step_or_say_why_not(
    tmp_path: Path, seed: int
) -> None:
    loaded = 0
    for number in range(3):
        for world in lived(tmp_path, seed + number):
            loaded += world.loaded
    assert loaded


@pytest.mark.long
def test_a_run_that_a_call_of_its_own_ended_is_told_from_one_that_portus_stopped(
    tmp_path: Path,
) -> None:
    world, fault = World(tmp_path, random.Random(0)), Fault(Call.LIST, FILES, 0, errno.ELOOP, True)
    world.happens(lambda: world.train("run1"))
    world.happens(lambda: world.train("run1", fault))
    assert world.ended == 1
    world.happens(lambda: world.train("run1"))
    assert world.ended == 1


def it_goes_on(world: World, number: int) -> None:
    for _ in range(2):
        world.happens(lambda: world.train("run1", steps=4))


def its_disk_fails(world: World, number: int) -> None:
    """From write ``number`` on."""
    world.happens(lambda: world.train("run1", steps=4))
    fault = Fault(Call.WRITE, POOL, number, errno.EIO, True)
    world.happens(lambda: world.train("run1", fault, FAILING_STEPS))


TELLING = {
    "told before the commit": its_disk_fails,
    "pointers hold nothing": it_goes_on,
}
"""For some engines that are wrong on purpose a history that finds it, with one of ``NUMBERS``."""

NUMBERS = (13, 15, 11, 17, 9, 19)


def found(root: Path, seed: int, mistake: str) -> str:
    """What the oracle says of a wrong engine, in ``HISTORIES_MAX`` at the most."""
    for number in range(HISTORIES_MAX):
        try:
            for _ in lived(root, seed + number, mistake):
                pass
        except AssertionError as error:
            return str(error)
    raise AssertionError(f"{mistake}: {HISTORIES_MAX} histories found nothing")


@pytest.mark.long
@pytest.mark.parametrize("mistake", TELLING)
def test_a_wrong_engine_is_found_and_the_right_one_is_none(mistake: str, tmp_path: Path) -> None:
    def said_of(number: int, engine: str | None) -> str:
        root = tmp_path / f"{number} {engine}"
        root.mkdir()
        try:
            TELLING[mistake](World(root, random.Random(0), engine), number)
        except AssertionError as error:
            return str(error)
        return ""

    number, said = next((n, text) for n in NUMBERS if (text := said_of(n, mistake)))
    assert "child" not in said, "the mistake has to be a plausible one"
    assert not said_of(number, None)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_engine_is_found_whatever_the_seed(mistake: str, tmp_path: Path, seed: int) -> None:
    assert "child" not in found(tmp_path, seed, mistake)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_longer_histories_find_nothing_either(tmp_path: Path, seed: int) -> None:
    until, histories, loaded, refused = time.monotonic() + LONG_S, 0, 0, 0
    while histories < HISTORIES_MIN or time.monotonic() < until:
        for world in lived(tmp_path, seed + histories):
            loaded, refused = loaded + world.loaded, refused + world.refused
        histories += 1
    print(f"{histories} histories; {loaded} files loaded, {refused} said why not")
    assert loaded > histories
