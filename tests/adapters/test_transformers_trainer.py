"""``transformers.Trainer`` under the flag: its own files, in the background."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

import portus
import portus_accelerate
from portus.engine.fence import fence
from portus_accelerate import directories, patch, saver, settings, trainer, trainer_data
from tests.adapters import forked
from tests.adapters.launching import TWO

SCRIPT = Path(__file__).with_name("trainer_script.py")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def flag(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The flag is on in this process, for one test."""
    import transformers.trainer

    monkeypatch.setenv("PORTUS_ACCELERATE", "1")
    monkeypatch.setenv(settings.VARIABLE, "{}")
    changed = {
        transformers.trainer: ("torch", "rotate_checkpoints", "get_last_checkpoint"),
        transformers.trainer_utils: ("shutil", "get_last_checkpoint"),
        transformers.modeling_utils: ("safe_save_file",),
        safetensors.torch: ("save_file",),
    }
    for module, names in changed.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    own = ("_save_checkpoint", "_push_from_checkpoint", "train", "log")
    for name in (*own, *trainer._LOADS, *trainer_data.METHODS):
        method = getattr(transformers.trainer.Trainer, name)
        monkeypatch.setattr(transformers.trainer.Trainer, name, method)
    patch.install()
    directories.install()
    trainer.install()
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def trained(
    root: Path, steps: int, *, resume: bool | str = False, callbacks: Any = None, **changes: Any
) -> Any:
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
    model = GPT2LMHeadModel(config)
    made = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:1], callbacks=callbacks)
    made.train(resume_from_checkpoint=resume)
    return made


OF_STOCK = {
    *("config.json", "generation_config.json", "model.safetensors", "optimizer.pt"),
    *("rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin"),
}
"""The files of a checkpoint of ``trained``."""


@pytest.mark.usefixtures("flag")
def test_a_checkpoint_is_the_files_that_trainer_writes_and_resumes(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    first = trained(tmp_path, 3)
    out = tmp_path / "out"
    assert steps_of(tmp_path) == [2, 3]
    newest = out / "checkpoint-3"
    assert {path.name for path in newest.iterdir()} == OF_STOCK
    assert safetensors.torch.load_file(newest / "model.safetensors").keys()
    assert torch.load(newest / "optimizer.pt", weights_only=True)["state"]
    assert portus.load(newest / "training_args.bin", weights_only=False).max_steps == 3
    for path in newest.iterdir():
        if path.suffix != ".json":
            assert portus.read_note(path) == b'{"model": "out", "step": 3}', path.name
    weights = GPT2LMHeadModel.from_pretrained(newest).state_dict()
    for name, value in first.model.state_dict().items():
        assert torch.equal(weights[name], value)
    second = trained(tmp_path, 5, resume=True)
    assert second.state.global_step == 5
    moments = second.optimizer.state_dict()["state"][0]
    assert moments["step"] == 5


def test_states_of_optimizers_and_generators_go_to_the_pool_and_all_else_stays_files() -> None:
    there = ["optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_3.pth"]
    others = ["model.safetensors", "training_args.bin", "trainer_state.json", "my_optimizer.pt"]
    parts: dict[str, Any] = dict.fromkeys([*there, *others])
    pooled, files = saver._for_pool(parts, trainer._STORED)
    assert ([*pooled], [*files]) == (there, others)
    assert saver._for_pool(parts, trainer._NONE) == ({}, parts), "where all of it is uploaded"


@pytest.mark.long
@pytest.mark.usefixtures("flag")
def test_a_run_that_was_killed_as_it_ended_is_ended_by_the_next_start(tmp_path: Path) -> None:
    """Killed after its last commit, before it removed what is one too many: nothing is left to
    train, and nothing is saved any more."""
    trained(tmp_path, 4, save_total_limit=3)
    again = trained(tmp_path, 4, resume=True, save_total_limit=2)
    assert again.state.global_step == 4
    assert steps_of(tmp_path) == [3, 4]
    trained(tmp_path, 6, resume=True)
    assert steps_of(tmp_path) == [5, 6]


@pytest.mark.usefixtures("flag")
def test_a_training_that_saves_nothing_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    """There is room for one, and a newer one that was cut off."""
    made = trained(tmp_path, 2, save_total_limit=1)
    cut = tmp_path / "out" / "checkpoint-3"
    cut.mkdir()
    (cut / "trainer_state.json").write_text("{}")
    made.args.save_strategy = "no"
    made.train(resume_from_checkpoint=True)
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").exists(), "the same process"
    trained(tmp_path, 4, resume=True, save_total_limit=1, save_strategy="no")
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").exists(), "another one"


@pytest.mark.long
@pytest.mark.usefixtures("flag")
def test_a_training_that_starts_from_another_one_s_checkpoint_leaves_that_alone(
    tmp_path: Path,
) -> None:
    trained(tmp_path / "first", 2)
    theirs = tmp_path / "first" / "out" / "checkpoint-2"
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    trained(tmp_path / "second", 2, resume=str(theirs), save_total_limit=1)
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before
    assert (tmp_path / "first" / "out" / "checkpoint-1").is_dir()


@pytest.mark.usefixtures("flag")
def test_a_callback_that_is_told_of_a_save_finds_all_of_it(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    seen: list[set[str]] = []

    class Uploads(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            with os.scandir(Path(args.output_dir, f"checkpoint-{state.global_step}")) as found:
                seen.append({entry.name for entry in found})

    trained(tmp_path, 2, callbacks=[Uploads()])
    assert seen == [OF_STOCK, OF_STOCK]


@pytest.mark.usefixtures("flag")
def test_the_best_model_is_loaded_once_it_is_there(tmp_path: Path) -> None:
    usual: Any = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    made = trained(tmp_path, 3, **usual)
    best = safetensors.torch.load_file(f"{made.state.best_model_checkpoint}/model.safetensors")
    found = made.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in best.items())


def cut_off(root: Path, step: int) -> Path:
    """What a save leaves that was cut off."""
    made = root / f"out/checkpoint-{step}"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    return made


@pytest.mark.usefixtures("flag")
def test_a_save_that_was_cut_off_is_passed_over_and_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.trainer_utils import get_last_checkpoint

    look: Any = get_last_checkpoint
    trained(tmp_path, 2)
    out = str(tmp_path / "out")
    left = cut_off(tmp_path, 4)
    (left / "rng_state_1.pth").write_bytes(b"of a process that saves no more")
    assert look(out) == f"{out}/checkpoint-2"
    with pytest.raises(portus.UsageError, match=r"never complete.*before it, .*checkpoint-2"):
        trained(tmp_path, 4, resume=str(left))
    assert trained(tmp_path, 3, resume=True).state.global_step == 3
    assert f"{left} is not complete" in caplog.text
    assert f"FALLING BACK to {out}/checkpoint-2" in caplog.text
    assert trained(tmp_path, 4, resume=True).state.global_step == 4
    assert look(out) == os.fspath(left)


@pytest.mark.usefixtures("flag")
def test_where_nothing_was_ever_complete_training_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trained(tmp_path, 2, resume=True)
    cut_off(tmp_path, 1)
    assert trained(tmp_path, 2, resume=True).state.global_step == 2
    assert "STARTING FROM SCRATCH" in caplog.text


@pytest.mark.usefixtures("flag")
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth"])
def test_damage_is_found_as_a_checkpoint_is_loaded(tmp_path: Path, name: str) -> None:
    first = trained(tmp_path, 1)
    path = tmp_path / "out/checkpoint-1" / name
    data = bytearray(path.read_bytes())
    values = {
        "model.safetensors": first.model.lm_head.weight.detach(),
        "optimizer.pt": first.optimizer.state_dict()["state"][0]["exp_avg"],
        "rng_state.pth": torch.load(path, weights_only=False)["cpu"] if "rng" in name else None,
    }
    data[data.index(values[name].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(portus.CorruptionError, match=name):
        trained(tmp_path, 2, resume=True)


@pytest.mark.usefixtures("flag")
def test_the_model_alone_is_saved_the_same_way(tmp_path: Path) -> None:
    trained(tmp_path, 2, save_only_model=True)
    newest = tmp_path / "out/checkpoint-2"
    assert {path.name for path in newest.iterdir()} == OF_STOCK - {
        *("optimizer.pt", "rng_state.pth", "scheduler.pt")
    }
    assert portus.read_note(newest / "model.safetensors")


@pytest.mark.long
@pytest.mark.usefixtures("flag")
def test_a_run_whose_machine_was_lost_goes_on_from_the_mirror_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual: Any = {"lr_scheduler_type": "constant"}  # else it goes by the last step
    torch.manual_seed(7)
    whole = trained(tmp_path / "whole", 5, save_steps=5, **usual)
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.chdir(run)
    monkeypatch.setenv("PORTUS_MIRROR", f"file://{tmp_path}/bucket")
    torch.manual_seed(7)
    trained(run, 3, **usual)
    newest = run / "out" / "checkpoint-3"
    before = {each.name for each in newest.iterdir()}
    shutil.rmtree(run / "out")
    shutil.rmtree(run / ".portus", ignore_errors=True)
    found = trained(run, 5, resume=True, **usual)
    assert found.state.global_step == 5
    for name, value in whole.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value)
    shutil.rmtree(run / "out")
    shutil.rmtree(run / ".portus", ignore_errors=True)
    trained(run, 5, resume=True, **usual)
    assert {each.name for each in (run / "out" / "checkpoint-5").iterdir()} == before


def steps_of(root: Path) -> list[int]:
    """Of the checkpoints that there are."""
    return sorted(int(each.name.partition("-")[2]) for each in root.glob("out/checkpoint-*"))


@pytest.mark.long
@pytest.mark.usefixtures("flag")
def test_the_flag_makes_saves_follow_the_cadence_in_place_of_save_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = '{"every": "auto", "max_overhead": 0.5}'
    monkeypatch.setenv(settings.VARIABLE, said)
    usual: Any = {"save_steps": 3, "save_total_limit": None}
    first = trained(tmp_path, 5, **usual)
    # As if a save cost one step, a bound of one half is an interval of two; then it is measured.
    assert steps_of(tmp_path)[0] == 2
    assert 3 not in steps_of(tmp_path), "save_steps"
    assert steps_of(tmp_path)[-1] == 5, "the last one, as ever"
    assert fence._listeners == ()
    written = json.loads((tmp_path / "out/checkpoint-2/trainer_state.json").read_text())
    saved = written["stateful_callbacks"]["PortusCallback"]["attributes"]["saved"]
    assert saved["left"] == 2
    assert written["save_steps"] == 3, "a resume without it saves by steps again"
    assert first.state.global_step == 5

    monkeypatch.setenv(settings.VARIABLE, said.replace('"auto"', "4"))
    trained(tmp_path / "again", 6, **usual)
    trained(tmp_path / "again", 9, resume=True, **usual)
    assert steps_of(tmp_path / "again") == [4, 6, 8, 9], "as if it had not been interrupted"


@pytest.mark.long
@pytest.mark.usefixtures("flag")
def test_a_callback_of_ones_own_says_the_interval_and_others_ask_for_saves_too(
    tmp_path: Path,
) -> None:
    from transformers import TrainerCallback

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_save |= state.global_step == 5

    usual: Any = {"save_steps": 5, "save_total_limit": None}
    callback = portus_accelerate.PortusCallback(every=3)
    trained(tmp_path, 7, callbacks=[callback, Asks()], **usual)
    assert steps_of(tmp_path) == [3, 5, 6, 7]
    assert callback.cadence is None, "it counts no more"

    # From a checkpoint that knows nothing of it; and the best model needs its own saves.
    written = tmp_path / "out/checkpoint-7/trainer_state.json"
    state = json.loads(written.read_text())
    del state["stateful_callbacks"]["PortusCallback"]
    written.write_text(json.dumps(state))
    best: Any = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 5}
    callback = portus_accelerate.PortusCallback(every=4)
    trained(tmp_path, 12, resume=True, callbacks=[callback], **usual, **best)
    assert steps_of(tmp_path) == [3, 5, 6, 7, 10, 11, 12]


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"save_strategy": "no"}, {"save_strategy": "epoch"}])
@pytest.mark.usefixtures("flag")
def test_the_flag_leaves_other_strategies_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setenv(settings.VARIABLE, '{"every": 1}')
    trained(tmp_path, 5, **changes)
    assert steps_of(tmp_path) == ([] if changes["save_strategy"] == "no" else [4, 5])


@pytest.mark.long
@pytest.mark.usefixtures("flag")
def test_what_others_save_is_not_seen_so_auto_goes_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals: list[object] = []

    class Asks(portus_accelerate.PortusCallback):
        def on_step_end(self, *given: Any, **more: Any) -> Any:
            assert self.cadence is not None
            intervals.append(self.cadence.every)
            return super().on_step_end(*given, **more)

    trained(tmp_path / "seen", 1, callbacks=[Asks()])
    trained(tmp_path / "weights", 1, callbacks=[Asks()], save_only_model=True)
    monkeypatch.setenv("PORTUS_DISABLE", "1")
    trained(tmp_path / "off", 1, callbacks=[Asks()])
    assert intervals == ["auto", "auto", 600.0]


@pytest.mark.long
def test_without_the_flag_auto_is_refused_and_steps_are_not(tmp_path: Path) -> None:
    with pytest.raises(portus.UsageError, match="set PORTUS_ACCELERATE=1, or every='5min'"):
        trained(tmp_path, 2, callbacks=[portus_accelerate.PortusCallback()])
    with pytest.raises(portus.UsageError, match="max_overhead: expected a share"):
        portus_accelerate.PortusCallback(max_overhead=0)
    trained(tmp_path, 4, callbacks=[portus_accelerate.PortusCallback(3)], save_steps=2)
    assert steps_of(tmp_path) == [3, 4]


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
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        env={**clean, "PYTHONPATH": path, **({"PORTUS_ACCELERATE": "1"} if flag else {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == ends_with, done.stdout[-2000:] + done.stderr[-8000:]
    return done.stdout


LOST = """
import sys
from types import SimpleNamespace
from accelerate import Accelerator
from portus_accelerate import settings, trainer
from portus_accelerate.saver import Saver
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
args = SimpleNamespace(output_dir=f"{sys.argv[1]}/{rank}", world_size=2, process_index=rank)
saver = Saver(accelerator, settings.Settings(journal=False))
found = trainer._choose(SimpleNamespace(args=args), saver, True)
open(f"{sys.argv[1]}/{rank}.txt", "w").write(str(found))
accelerator.end_training()
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_process_that_lost_its_checkpoints_holds_up_no_other(
    tmp_path: Path, installed: Path
) -> None:
    there = tmp_path / "0/checkpoint-1"
    there.mkdir(parents=True)
    for name in ("trainer_state.json", "model.safetensors", "rng_state_0.pth"):
        (there / name).touch()
    (tmp_path / "lost.py").write_text(LOST)
    said([sys.executable, *TWO, str(tmp_path / "lost.py"), str(tmp_path)], installed, flag=False)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["None", "None"]


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
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_fsdp_leaves_what_stock_leaves_and_goes_on_after_a_kill(kind: str, tmp_path: Path) -> None:
    def train(root: Path, *more: str, **how: Any) -> None:
        asked = ("--root", root, "--fsdp", kind, *more)
        forked.script(SCRIPT, root, *asked, processes=2, **how)

    stock, root = tmp_path / "stock", tmp_path / "on"
    train(stock)
    train(root, "--kill-after", "3", flag=True, ends="killed")
    train(root, flag=True)
    expected = (stock / "losses-0.txt").read_text()
    assert set((root / "losses-0.txt").read_text().splitlines()) == set(expected.splitlines())
    for rank in (0, 1):
        assert (root / f"end-{rank}.txt").read_text() == (stock / f"end-{rank}.txt").read_text()
    names = [names_in(which / "out/checkpoint-4") for which in (root, stock)]
    assert names[0] == names[1]
    assert any("pytorch_model_fsdp_0/" in name for name in names[0]) == (kind[0] == "S")


def names_in(checkpoint: Path) -> list[str]:
    """All that is in it, the number of a save left out."""
    names = [str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*")]
    return sorted(re.sub(r"_\d+\.distcp", "_N.distcp", name) for name in names)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [1, 2])
def test_killed_at_any_moment_of_a_save_it_resumes_with_the_same_bits(
    tmp_path: Path, installed: Path, step: int
) -> None:
    program = str(SCRIPT.with_name("killed_trainer.py"))
    count = int(os.environ.get("PORTUS_TEST_KILLS", "8"))
    command = [sys.executable, program, str(tmp_path), str(step), str(count)]
    found = json.loads(said(command, installed, flag=True).splitlines()[-1])
    assert found["moments"] > 40
    assert len(found["same"]) == count
    assert all(found["same"].values()), found


def telling(hook: str, at: int) -> Any:
    """A callback that tells this process to go in one hook, the ``at``th time."""
    from transformers import TrainerCallback

    left = iter(range(at - 1, -1, -1))
    callback = TrainerCallback()

    def tell(*_: Any, **__: Any) -> None:
        if next(left, None) == 0:
            signal.raise_signal(signal.SIGTERM)

    setattr(callback, hook, tell)
    return callback


def evaluated(made: Any) -> list[int]:
    return [each["step"] for each in made.state.log_history if "eval_loss" in each]


@pytest.mark.usefixtures("flag")
@pytest.mark.parametrize(
    ("hook", "at"),
    [
        pytest.param("on_step_begin", 2, id="before an evaluation"),
        pytest.param("on_prediction_step", 1, id="in an evaluation", marks=pytest.mark.long),
    ],
)
def test_a_job_that_is_told_to_go_goes_on_at_that_step_with_what_was_left_out(
    tmp_path: Path, hook: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.VARIABLE, "{}")
    usual: Any = {"save_steps": 100, "eval_strategy": "steps", "eval_steps": 2}
    before = signal.getsignal(signal.SIGTERM)
    first = trained(tmp_path, 4, callbacks=[telling(hook, at)], **usual)
    assert first.state.global_step == 2
    assert evaluated(first) == []
    assert signal.getsignal(signal.SIGTERM) is before
    assert (tmp_path / "out/checkpoint-2/optimizer.pt").exists()
    second = trained(tmp_path, 4, resume=True, **usual)
    assert second.state.global_step == 4
    assert evaluated(second) == [2, 4]
    assert steps_of(tmp_path) == [2, 4]


@pytest.mark.long
@pytest.mark.usefixtures("flag")
def test_the_handler_that_trainer_has_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit = pytest.importorskip("transformers.trainer_jit_checkpoint")
    monkeypatch.setattr(jit.CheckpointManager.__init__, "__defaults__", (0,))
    telling_ = telling("on_step_begin", 2)
    first = trained(
        tmp_path, 400, callbacks=[telling_], save_steps=1000, enable_jit_checkpoint=True
    )
    step = first.state.global_step
    assert 2 <= step < 400
    assert steps_of(tmp_path) == [step], "the step that it left after"
