"""Trainings that are killed, at any call that changes a name: what is there is whole, and the same
script goes on from the newest. Who looks has no Portus."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.adapters import forked, killed_script
from tests.adapters.killed_script import fit
from tests.adapters.tiny import BATCHES, NO_FUSS, Net, every_step, files, loader, same, trainer
from tests.adapters.without_portus import steps_and_sums
from tests.nursery import nursery

pytestmark = [
    *NO_FUSS,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

ASKED = os.environ.get("PORTUS_TEST_KILLS")
"""So many kills for each way of keeping, up to 60; a few, spread out, if nobody asks."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, dict[int, float]]:
    """The run that nobody kills, and its weights at each step."""
    root = tmp_path_factory.mktemp("whole")
    net = fit(root)
    return net, dict(steps_and_sums(root / "ckpt").values())


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("top_k", "last"),
    [
        (-1, "link"),
        *(
            pytest.param(top_k, last, marks=pytest.mark.long)
            for top_k, last in ((1, "link"), (2, "true"), (1, "none"), (-1, "true"))
        ),
    ],
)
def test_a_run_that_is_killed_at_any_change_of_a_name_goes_on_from_the_newest(
    tmp_path: Path, whole: tuple[Net, dict[int, float]], top_k: int, last: str, seed: int
) -> None:
    net, weights = whole
    numbers = [13, 40] if top_k == -1 and last == "link" else [1, 5, 9, 14, 22, 31, 45, 60]
    if ASKED:
        numbers = random.Random(seed).sample(range(1, 61), min(60, int(ASKED)))
    for number in numbers:
        root = tmp_path / str(number)
        root.mkdir()
        killed = nursery(killed_script.__name__)
        with killed.start("run", "one", str(root), number, {}, top_k, last) as child:
            assert child.wait() == -signal.SIGKILL
        found = steps_and_sums(root / "ckpt")
        for name, (step, total) in found.items():
            assert total == weights[step], name
        newest = max((step for step, _ in found.values()), default=0)
        link = root / "ckpt" / "last.ckpt"
        assert not link.is_symlink() or link.exists(), "a link leads nowhere"
        at = found["last.ckpt"][0] if "last.ckpt" in found else 0
        assert last == "none" or newest - at <= 1
        goes_on = fit(root, "last", top_k, last)
        assert goes_on.seen[0][0] == at
        assert same(dict(goes_on.state_dict()), dict(net.state_dict()))
        assert not list(root.glob("ckpt/.*")), "nothing hidden is left"
        assert all(name.endswith(".ckpt") for name in files(root))


@pytest.mark.long
@pytest.mark.parametrize("what", ["ddp", "fabric"])
def test_so_does_one_of_two_ranks_and_one_of_fabric(tmp_path: Path, what: str, seed: int) -> None:
    source, programs = random.Random(seed), nursery(killed_script.__name__)

    def ends(root: Path, number: int) -> tuple[int | None, bool]:
        """Where it began, None if it was killed before that; and whether it was killed."""
        root.mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            alone = forked.environments(stack, 2) if what == "ddp" else [{}]
            started = [
                stack.enter_context(programs.start("run", what, str(root), number, environment))
                for environment in alone
            ]
            code = started[0].wait()
            assert number or code == 0
            said = started[0].rest()
            if code == 0:
                assert [child.wait() for child in started] == [0] * len(started)
        starts = [line for line in said if line.startswith("starts at ")]
        return int(starts[0].split()[-1]) if starts else None, code != 0

    ends(tmp_path / "whole", 0)
    expected, run, killed = 0, tmp_path / "run", 0
    for _ in range(int(ASKED or 3)):
        start, was_killed = ends(run, source.randint(1, 60))
        assert start == expected or (start is None and was_killed)
        killed += was_killed
        found = [torch.load(path) for path in sorted(run.glob("ckpt/*.ckpt"))]  # each is whole
        steps = [each["global_step" if what == "ddp" else "step"] for each in found]
        links = list(run.glob("ckpt/last*.ckpt"))
        assert all(link.exists() for link in links), "a link leads nowhere"
        expected = max(steps, default=0)
        if what == "ddp":  # goes on from the newest "last"; there is -v1 after the very first one
            assert links or expected <= 1
            expected = max((torch.load(link)["global_step"] for link in links), default=0)
            assert max(steps, default=0) - expected <= 1
    assert killed
    assert ends(run, 0)[0] == expected
    assert same(torch.load(run / "weights.pt"), torch.load(tmp_path / "whole" / "weights.pt"))


def test_a_damaged_newest_file_is_passed_over_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: tuple[Net, dict[int, float]]
) -> None:
    fit(tmp_path)
    newest = tmp_path / "ckpt" / f"step={BATCHES}.ckpt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with caplog.at_level("ERROR", "portus_lightning"):
        net = fit(tmp_path, "last")
    assert net.seen[0][0] == BATCHES - 1
    assert f"FALLING BACK to {tmp_path}/ckpt/step={BATCHES - 1}.ckpt" in caplog.text
    assert same(dict(net.state_dict()), dict(whole[0].state_dict()))


def test_a_damaged_file_that_the_user_names_is_an_error(tmp_path: Path) -> None:
    fit(tmp_path)
    path = tmp_path / "ckpt" / "step=3.ckpt"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(Exception, match=r"step=3\.ckpt"):
        fit(tmp_path, os.fspath(path))


@pytest.mark.parametrize("there", ["nothing", "a link", "a file", "a directory"])
def test_a_last_link_takes_the_place_of(there: str, tmp_path: Path) -> None:
    target, link = tmp_path / "step=1.ckpt", tmp_path / "last.ckpt"
    target.write_bytes(b"new")
    if there == "a link":
        link.symlink_to("step=0.ckpt")
    elif there == "a file":
        link.write_bytes(b"old")
    elif there == "a directory":
        (link / "shards").mkdir(parents=True)
    ModelCheckpoint._link_checkpoint(trainer(tmp_path), str(target), str(link))
    assert os.readlink(link) == "step=1.ckpt"
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=1.ckpt"]


def test_a_last_file_takes_the_place_of_a_link_and_leaves_alone_where_it_led(
    tmp_path: Path,
) -> None:
    """As after ``save_last="link"`` was changed to ``True``."""
    fit(tmp_path, last="link")
    led_to = os.path.realpath(tmp_path / "ckpt" / "last.ckpt")
    keep = every_step(tmp_path, filename="new-{step}", save_last=True, enable_version_counter=False)
    made = trainer(tmp_path, callbacks=[keep])
    made.fit(Net(), loader())
    assert not (tmp_path / "ckpt" / "last.ckpt").is_symlink()
    before = torch.load(led_to)["state_dict"]
    after = torch.load(tmp_path / "ckpt" / "last.ckpt")["state_dict"]
    assert not same(dict(before), dict(after))
