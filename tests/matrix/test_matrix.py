"""Each framework, with Portus and without, on what the other saved: the matrix of
docs/compatibility.md. ``make long ARGS=tests/matrix``.

Each training has few steps. One that was interrupted, and goes on with the other or on another
number of ranks, has to end with the bits of one that nobody interrupted.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.adapters import forked
from tests.matrix import trainings
from tests.nursery import nursery

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 4
DIGESTS = re.compile(rb"portus[./]digests")
OURS = re.compile("done|end")
RANKS = {name: 2 if name in trainings.SHARDED else 1 for name in trainings.TRAININGS}


def train(
    root: Path,
    name: str,
    *,
    portus: bool,
    until: int = STEPS,
    kill_at: int | None = None,
    ranks: int | None = None,
) -> tuple[int, str]:
    """How many steps were done when it began, and the digest of the state at the end: empty if it
    was killed, as it has to be where asked."""
    root.mkdir(exist_ok=True)
    children = nursery(trainings.__name__)
    with contextlib.ExitStack() as stack:
        started = []
        alone = [{}] if RANKS[name] == 1 else forked.environments(stack, ranks or RANKS[name])
        for environment in alone:
            wanted = ("start", name, str(root), portus, until, kill_at, environment)
            started.append(stack.enter_context(children.start(*wanted)))
        if kill_at is not None:
            assert started[-1].wait() == -signal.SIGKILL
            return 0, ""
        assert [child.wait() for child in started] == [0] * len(started)
        said = {tuple(filter(OURS.match, child.rest())) for child in started}
    [lines] = said
    done = [int(line.removeprefix("done ")) for line in lines[:-1]]
    begun = done[0] if done else until
    assert done == [*range(begun, until)]
    if done:
        digests = [bool(DIGESTS.search(path.read_bytes())) for path in newest_files(root)]
        assert digests == [portus] * len(digests)
    return begun, lines[-1]


def newest_files(root: Path) -> list[Path]:
    """What has tensors, of the last checkpoint that was saved."""
    kinds = {".pt", ".ckpt", ".safetensors", ".bin", ".distcp"}
    found = [path for path in root.rglob("*.*") if path.suffix in kinds and path.is_file()]
    newest = max(path.stat().st_mtime_ns for path in found)
    return [path for path in found if path.stat().st_mtime_ns == newest]


@pytest.fixture(scope="module", params=trainings.TRAININGS)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """A training, and how it ends without Portus if nobody interrupts it."""
    _, digest = train(tmp_path_factory.mktemp("whole"), request.param, portus=False)
    return request.param, digest


def test_stock_goes_on_from_what_portus_saved(whole: tuple[str, str], tmp_path: Path) -> None:
    name, expected = whole
    train(tmp_path, name, portus=True, until=2)
    assert train(tmp_path, name, portus=False) == (2, expected)


def test_portus_goes_on_from_what_stock_saved(whole: tuple[str, str], tmp_path: Path) -> None:
    name, expected = whole
    train(tmp_path, name, portus=False, until=2)
    assert train(tmp_path, name, portus=True) == (2, expected)


def test_a_killed_training_goes_on_from_its_last_save_or_the_one_before(
    whole: tuple[str, str], tmp_path: Path
) -> None:
    name, expected = whole
    train(tmp_path, name, portus=True, kill_at=3)
    begun, digest = train(tmp_path, name, portus=True)
    assert 0 < begun <= 3
    assert digest == expected


@pytest.mark.parametrize("name", trainings.SHARDED)
def test_another_number_of_ranks_loads_the_same_bits(name: str, tmp_path: Path) -> None:
    _, saved = train(tmp_path / "saved", name, portus=True, until=2)
    for ranks in (1, 3):
        for portus in (True, False):
            root = shutil.copytree(tmp_path / "saved", tmp_path / f"{ranks}-{portus}")
            found = train(root, name, portus=portus, until=2, ranks=ranks)
            assert found == (2, saved), (ranks, portus)
