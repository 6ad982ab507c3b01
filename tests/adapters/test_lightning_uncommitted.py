"""Trainings that are killed in a save, and what the next one makes of the file that is left."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import portus
from portus_lightning import PortusIO
from tests.adapters.launching import run_program
from tests.adapters.tiny import BATCHES, NO_FUSS, Net, every_step, files, loader, trainer

pytestmark = [
    *NO_FUSS,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
]

KILLED = """
import os, sys
from pathlib import Path
from portus.client.files.keeper import Keeper
from tests.adapters.test_lightning_uncommitted import fit

saves = iter(range(1, 99))
make_durable = Keeper.make_durable

def die_in_save(keeper, paths):
    if paths and next(saves) == int(sys.argv[2]):  # the file is there, and nothing is committed
        os.kill(os.getpid(), 9)
    make_durable(keeper, paths)

Keeper.make_durable = die_in_save
fit(Path(sys.argv[1]), last="link" if len(sys.argv) == 3 else True)
"""

KILLED_AT_LINK = """
import os, sys
from pathlib import Path
from tests.adapters.test_lightning_uncommitted import fit

links = iter(range(1, 99))
symlink = os.symlink

def die_at_link(target, link, **more):
    if "last.ckpt" in str(link) and next(links) == 4:  # what was to be replaced may be gone by now
        os.kill(os.getpid(), 9)
    symlink(target, link, **more)

os.symlink = die_at_link
fit(Path(sys.argv[1]))
"""


def fit(root: Path, resume: Any = None, last: Any = "link") -> Net:
    net = Net()
    callbacks = [every_step(root, save_last=last)]  # by default last.ckpt is a symbolic link
    made = trainer(root, plugin=PortusIO(), callbacks=callbacks)
    made.fit(net, loader(), ckpt_path=resume)
    return net


def killed_in_save(root: Path, number: int) -> None:
    killed(KILLED, str(root), str(number))


def killed(program: str, *arguments: str) -> None:
    run_program(program, *arguments, code=-signal.SIGKILL)


def linked(root: Path, step: int) -> None:
    """As Lightning does right after it asked for the save; it may have been killed before."""
    link = root / "ckpt" / "last.ckpt"
    link.unlink(missing_ok=True)
    link.symlink_to(f"step={step}.ckpt")


@pytest.mark.long
def test_a_run_that_died_before_its_first_commit_starts_anew(tmp_path: Path) -> None:
    killed_in_save(tmp_path, 1)
    linked(tmp_path, 1)
    assert "step=1.ckpt" in files(tmp_path)
    net = fit(tmp_path, "last")
    assert [step for step, _ in net.seen] == list(range(BATCHES))
    assert "step=1-v1.ckpt" not in files(tmp_path)
    assert torch.load(tmp_path / "ckpt" / "step=1.ckpt")["global_step"] == 1


@pytest.mark.long
def test_each_file_of_a_run_that_was_killed_and_resumed_leads_to_its_own_step(
    tmp_path: Path,
) -> None:
    killed_in_save(tmp_path, 4)
    linked(tmp_path, 4)
    net = fit(tmp_path, "last")
    assert [step for step, _ in net.seen] == [3, 4, 5]
    found = files(tmp_path)
    assert "step=4.ckpt.uncommitted" in found
    checkpoints = [name for name in found if name.endswith(".ckpt") and name != "last.ckpt"]
    assert torch.load(tmp_path / "ckpt" / "last.ckpt")["global_step"] == BATCHES
    assert checkpoints == [f"step={step}.ckpt" for step in range(1, BATCHES + 1)]
    for step, name in enumerate(checkpoints, 1):
        assert torch.load(tmp_path / "ckpt" / name)["global_step"] == step


@pytest.mark.long
def test_a_last_link_to_a_save_that_was_refused_resumes_the_newest(tmp_path: Path) -> None:
    """Lightning makes the link whatever becomes of the save, and takes it for no checkpoint."""
    killed_in_save(tmp_path, 4)
    linked(tmp_path, 9)
    assert not (tmp_path / "ckpt" / "last.ckpt").exists()
    net = fit(tmp_path, "last")
    assert [step for step, _ in net.seen] == [3, 4, 5]


def test_ranks_that_lead_the_last_file_to_the_newest_all_find_it(tmp_path: Path) -> None:
    fit(tmp_path)
    last = tmp_path / "ckpt" / "last.ckpt"
    io = PortusIO()
    io.begin(os.fspath(tmp_path), None)
    with ThreadPoolExecutor(4) as ranks:
        for _ in range(100):
            last.unlink()
            assert all(ranks.map(lambda _: io.lead_to_newest(os.fspath(last)), range(4)))
            assert os.readlink(last) == f"step={BATCHES}.ckpt"


def test_a_run_that_died_while_lightning_made_its_last_link_anew_goes_on(tmp_path: Path) -> None:
    """Lightning removes the link before it makes the new one; then no checkpoint is the last."""
    killed(KILLED_AT_LINK, str(tmp_path))
    assert os.readlink(tmp_path / "ckpt" / "last.ckpt") == "step=3.ckpt"
    net = fit(tmp_path, "last")
    assert net.seen[0][0] in (2, 3), "the save of step 3 may have been under way"
    assert torch.load(tmp_path / "ckpt" / "last.ckpt")["global_step"] == BATCHES


def test_a_run_that_died_in_its_first_save_of_a_last_file_goes_on(tmp_path: Path) -> None:
    """The save before, of the same step, was committed."""
    killed(KILLED, str(tmp_path), "2", "a last file")
    assert files(tmp_path) == ["last.ckpt", "step=1.ckpt"]
    net = fit(tmp_path, "last", last=True)
    assert [step for step, _ in net.seen] == [1, 2, 3, 4, 5]
    assert "last.ckpt.uncommitted" in files(tmp_path)


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


@pytest.mark.long
def test_an_absent_pool_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    killed_in_save(tmp_path, 3)
    (tmp_path / ".portus").rename(tmp_path / "elsewhere")
    before = files(tmp_path)
    with pytest.raises(portus.UsageError, match="not beside"):
        fit(tmp_path, "last")
    assert files(tmp_path) == before


@pytest.mark.long
def test_a_checkpoint_that_the_user_names_is_loaded_as_it_was(tmp_path: Path) -> None:
    killed_in_save(tmp_path, 3)
    net = fit(tmp_path, os.fspath(tmp_path / "ckpt" / "step=3.ckpt"))
    assert net.seen[0][0] == 2
