"""``transformers.Trainer`` under the flag: weights stay real files, the rest is in the pool."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

import portus
from portus_accelerate import patch, settings, trainer
from tests.adapters.launching import TWO

SCRIPT = Path(__file__).with_name("trainer_script.py")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def flag(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The flag is on in this process, for one test."""
    import transformers.trainer

    monkeypatch.setenv("PORTUS_ACCELERATE", "1")
    monkeypatch.setenv(settings.VARIABLE, '{"materialize": "none"}')
    for name in ("torch", "rotate_checkpoints"):
        monkeypatch.setattr(transformers.trainer, name, getattr(transformers.trainer, name))
    for name in ("_save_checkpoint", "train"):
        method = getattr(transformers.trainer.Trainer, name)
        monkeypatch.setattr(transformers.trainer.Trainer, name, method)
    patch.install()
    trainer.install()
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def trained(root: Path, steps: int, *, resume: bool = False, **changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    usual: dict[str, Any] = {"save_steps": 1, "save_total_limit": 2, "report_to": []}
    arguments = TrainingArguments(
        output_dir=str(root / "out"), max_steps=steps, use_cpu=True, **{**usual, **changes}
    )
    config = GPT2Config(
        n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=4, bos_token_id=0, eos_token_id=0
    )
    row = torch.arange(4)
    data: Any = [{"input_ids": row, "labels": row}] * 32
    made = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
    made.train(resume_from_checkpoint=resume)
    return made


@pytest.mark.usefixtures("flag")
def test_weights_stay_real_and_the_rest_is_in_the_pool_and_resumes(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    first = trained(tmp_path, 3)
    out = tmp_path / "out"
    assert sorted(each.name for each in out.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    newest = out / "checkpoint-3"
    kept = {path.name for path in newest.iterdir() if portus.is_reference(path)}
    assert kept == {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    weights = GPT2LMHeadModel.from_pretrained(newest).state_dict()
    for name, value in first.model.state_dict().items():
        assert torch.equal(weights[name], value)
    second = trained(tmp_path, 5, resume=True)
    assert second.state.global_step == 5
    moments = second.optimizer.state_dict()["state"][0]
    assert moments["step"] == 5


@pytest.mark.usefixtures("flag")
def test_saving_the_model_only_leaves_portus_out(tmp_path: Path) -> None:
    trained(tmp_path, 2, save_only_model=True)
    assert not (tmp_path / "out/checkpoint-2/optimizer.pt").exists()
    assert not list((tmp_path / "out").glob(".portus/*.portus"))


def run(
    root: Path,
    site: Path,
    *more: str,
    flag: bool,
    launcher: tuple[str, ...] = (),
    ends_with: int = 0,
) -> None:
    """The script in ``root``; what it said is part of the failure if it ends otherwise."""
    root.mkdir(exist_ok=True)
    command = [sys.executable, *launcher, str(SCRIPT), "--root", str(root), *more]
    said(command, site, flag=flag, ends_with=ends_with)


def said(command: list[str], site: Path, *, flag: bool, ends_with: int = 0) -> str:
    """What a program printed, run with the entry points of this tree."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PORTUS")}
    extra = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    done = subprocess.run(
        command,
        env={**clean, **extra, **({"PORTUS_ACCELERATE": "1"} if flag else {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == ends_with, done.stdout[-2000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
def test_losses_are_the_same_bits_also_killed_in_a_save_and_resumed(
    tmp_path: Path, installed: Path
) -> None:
    run(tmp_path / "stock", installed, flag=False)
    run(tmp_path / "on", installed, flag=True)
    expected = (tmp_path / "stock/losses-0.txt").read_text()
    assert (tmp_path / "on/losses-0.txt").read_text() == expected
    kill = ("--kill-after", "3")
    run(tmp_path / "killed", installed, *kill, flag=True, ends_with=-signal.SIGKILL)
    run(tmp_path / "killed", installed, flag=True)
    found = (tmp_path / "killed/losses-0.txt").read_text()
    assert set(found.splitlines()) == set(expected.splitlines())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_processes_killed_in_a_save_and_resumed_end_with_the_same_bits(
    tmp_path: Path, installed: Path
) -> None:
    run(tmp_path / "stock", installed, flag=False, launcher=TWO)
    # The launcher ends the other process, at whatever it is: perhaps in the save before.
    run(tmp_path / "on", installed, "--kill-after", "2", flag=True, launcher=TWO, ends_with=1)
    run(tmp_path / "on", installed, flag=True, launcher=TWO)
    expected = (tmp_path / "stock/losses-0.txt").read_text()
    found = (tmp_path / "on/losses-0.txt").read_text()
    assert set(found.splitlines()) == set(expected.splitlines())
    for rank in (0, 1):
        end = (tmp_path / f"on/end-{rank}.txt").read_text()
        assert end == (tmp_path / f"stock/end-{rank}.txt").read_text()
    newest = tmp_path / "on/out/checkpoint-4"
    names = {"optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"}
    assert names <= {path.name for path in newest.iterdir()}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [1, 2])
def test_killed_at_any_moment_of_a_save_it_resumes_with_the_same_bits(
    tmp_path: Path, installed: Path, step: int
) -> None:
    program = str(SCRIPT.with_name("killed_trainer.py"))
    command = [sys.executable, program, str(tmp_path), str(step), "5"]
    found = json.loads(said(command, installed, flag=True).splitlines()[-1])
    assert found["moments"] > 20
    assert len(found["same"]) == 5
    assert all(found["same"].values()), found
