"""A small GPT, trained by Lightning on the source of Python's standard library, and killed.

    python recipes/gpt_tiny_lightning.py                  train; Portus is one line: plugins=[...]
    python recipes/gpt_tiny_lightning.py --resume PATH    continue from a checkpoint
    python recipes/gpt_tiny_lightning.py --demo           the story of the README, in four acts

The demo trains once without interruption; trains again and is killed (SIGKILL) in the middle of a
save; resumes from the newest file, and compares: weights, optimizer and loss curve must be
bit-identical. Then it trains with each way of checkpointing in turn, and shows the cost of each
one. At the end, a process that cannot import Portus loads the last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

from portus_lightning import PortusIO
from train_lightning import GPTModule, TextModule


class LossCurve(Callback):
    """A callback that writes every loss, with all its digits, to a CSV file, and prints some."""

    def __init__(self, path: Path, every: int = 10) -> None:
        self._path, self._every = path, every

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        loss = float(outputs["loss"])
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow([trainer.global_step, loss.hex()])
        if trainer.global_step % self._every == 0:
            print(f"    step {trainer.global_step:3d}  loss {loss:.4f}", flush=True)


class Announce(Callback):
    """A callback that prints that a save begins, so the demo can kill in the middle of it."""

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        print(f"    saving step {trainer.global_step}", flush=True)


def train(
    place: Path,
    io: CheckpointIO | None,
    *,
    steps: int,
    every: int,
    resume: str | None = None,
    callbacks: tuple[Callback, ...] = (),
    size: str = "demo",
) -> Trainer:
    """Train, with a checkpoint every ``every`` steps (0: none) below ``place``."""
    seed_everything(1, verbose=False)
    place.mkdir(parents=True, exist_ok=True)
    saving = ModelCheckpoint(
        place / "checkpoints", filename="{step}", every_n_train_steps=every, save_top_k=-1
    )
    trainer = Trainer(
        default_root_dir=place,
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=every > 0,
        callbacks=[*callbacks, *([saving] if every else [])],
        plugins=[io] if io else None,
    )
    trainer.fit(
        GPTModule(size),
        datamodule=TextModule(size),
        ckpt_path=resume,
        weights_only=False if resume else None,
    )
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt-tiny"))
    parser.add_argument("--resume", help="a checkpoint to continue from")
    parser.add_argument("--demo", action="store_true", help="kill, resume, compare, measure")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if arguments.demo:
        demo(arguments.out, arguments.steps, arguments.every)
        return
    callbacks = (LossCurve(_curve(arguments.out)), Announce())
    train(
        arguments.out,
        PortusIO(),
        steps=arguments.steps,
        every=arguments.every,
        resume=arguments.resume,
        callbacks=callbacks,
    )


# --- the demo -------------------------------------------------------------------------------


def demo(out: Path, steps: int, every: int) -> None:
    """Kill, resume, compare, measure. Exit with code 1 if anything is not bit-identical."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    kill_at = steps * 2 // 3 // every * every
    print(f"1. {steps} steps without interruption, a checkpoint every {every} steps")
    _run(out / "whole", steps, every)
    print(f"2. the same, killed (SIGKILL) in the middle of the save of step {kill_at}")
    _run(out / "killed", steps, every, kill_at=kill_at)
    newest = _say_what_is_left(out / "killed", kill_at)
    print(f"3. resumed from the newest: --resume {newest}")
    _run(out / "killed", steps, every, resume=newest)
    identical = _compare(out, steps)
    print("4. what each way of checkpointing costs a training of 100 MB, saved every 4th step")
    picture = out / "cost.png" if importlib.util.find_spec("matplotlib") else None
    _measure(out / "cost", picture)
    print("5. loaded by a process that cannot import Portus")
    _load_without_portus(_checkpoint(out / "killed", steps))
    print()
    print("What happened: a run was killed in the middle of a save. It resumed from the newest")
    print(f"checkpoint, and ended {'BIT-IDENTICAL to' if identical else 'DIFFERENT from'}"
          " a run that was never interrupted.")  # fmt: skip
    if picture:
        print(f"The plot:        {picture}")
    print(f"The checkpoints: {out / 'killed' / 'checkpoints'}")
    print(f"What it cost:    {Path(sys.executable).parent / 'portus'} report {out / 'killed'}")
    sys.exit(not identical)


def _run(
    place: Path, steps: int, every: int, *, resume: Path | None = None, kill_at: int = 0
) -> None:
    """Train in a new process; kill it as soon as it prints that it saves step ``kill_at``."""
    command = [sys.executable, __file__, "--out", str(place), "--steps", str(steps)]
    command += ["--every", str(every)] + (["--resume", str(resume)] if resume else [])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with _killed_with_us(process):
        for line in process.stdout:
            if "saving" not in line:
                print(line, end="", flush=True)
            elif kill_at and line.split()[-1] == str(kill_at):
                time.sleep(0.015)  # the save has begun
                process.kill()
                print(f"    killed: pid {process.pid}, in the save of step {kill_at}", flush=True)
        code = process.wait()
    if code not in (0, -signal.SIGKILL if kill_at else 0):
        sys.exit(f"the training ended with exit code {code}")


@contextlib.contextmanager
def _killed_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _say_what_is_left(place: Path, step: int) -> Path:
    """Return the newest complete checkpoint, and print what is left."""
    found = {int(path.stem.partition("=")[2]): path for path in place.glob("checkpoints/*.ckpt")}
    print(f"    checkpoints: steps {sorted(found)}")
    print(f"    the save of step {step} was {'just committed' if step in found else 'cut off'}")
    return found[max(found)]


def _compare(out: Path, steps: int) -> bool:
    """Print and return whether weights, optimizer and losses of the runs are equal bit for bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, killed = (
            torch.load(_checkpoint(out / name, steps), weights_only=False)
            for name in ("whole", "killed")
        )
    results = {
        "weights": _same(whole["state_dict"], killed["state_dict"]),
        "optimizer": _same(whole["optimizer_states"], killed["optimizer_states"]),
        "learning rate": _same(whole["lr_schedulers"], killed["lr_schedulers"]),
        "loss curve": _losses(out / "whole") == _losses(out / "killed"),
    }
    for name, equal in results.items():
        print(f"    {name}: {'bit-identical' if equal else 'DIFFERENT'}")
    return all(results.values())


def _same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(
            _same(left[key], right[key]) for key in left
        )  # fmt: skip
    if isinstance(left, (list, tuple)):
        return isinstance(right, (list, tuple)) and len(left) == len(right) and all(
            map(_same, left, right)
        )  # fmt: skip
    return left == right


def _losses(place: Path) -> dict[int, str]:
    """Return the exact loss of each step; of a step taken twice, that of the later run."""
    with _curve(place).open(newline="") as file:
        return {int(step): loss for step, loss in csv.reader(file)}


_ALONE = """
import sys
sys.modules["portus"] = sys.modules["portus_lightning"] = None
import torch
state = torch.load(sys.argv[1], weights_only=False)
tensors = state["state_dict"].values()
print(f"    step {state['global_step']}: {len(tensors)} tensors, "
      f"{sum(each.numel() for each in tensors):,} weights, by torch.load alone")
"""


def _load_without_portus(path: Path) -> None:
    alone = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", _ALONE, str(path)], check=True, env=alone)


def _measure(
    place: Path, picture: Path | None, steps: int = 16, rounds: int = 2, every: int = 4
) -> None:
    """Repeat the training with each way of checkpointing, in turn; make a table and a picture."""
    ways: dict[str, Callable[[], CheckpointIO | None]] = {
        "none": lambda: None,
        "Lightning default": TorchCheckpointIO,
        "AsyncCheckpointIO": AsyncCheckpointIO,
        "Portus": PortusIO,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            train(place, way(), steps=steps, every=0 if name == "none" else every, size="cost")
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
            shutil.rmtree(place, ignore_errors=True)
        print(f"    round {number} of {rounds}", flush=True)
    costs = {
        name: [
            1e3 * (mine - none) / (steps // every)
            for mine, none in zip(times, seconds["none"], strict=True)
        ]
        for name, times in seconds.items()
    }
    head = ("training", "cost of a checkpoint", "synced to the disk")
    print("    {:20s} {:>10s} {:>22s} {:>20s}".format("way", *head))
    for name, times in seconds.items():
        cost, synced = f"{statistics.median(costs[name]):.0f} ms", "no"
        if name == "none":
            cost = synced = "-"
        elif name == "Portus":
            synced = "yes, every one"
        print(f"    {name:20s} {statistics.median(times):8.2f} s {cost:>22s} {synced:>20s}")
    print("    Lightning's own two leave it to the system when their bytes reach the disk.")
    if picture:
        _plot(costs, picture)


def _plot(costs: dict[str, list[float]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {name: values for name, values in costs.items() if name != "none"}
    figure, axes = pyplot.subplots(figsize=(7, 3))
    axes.barh(list(shown), [statistics.median(values) for values in shown.values()])
    for index, values in enumerate(shown.values()):
        axes.plot(values, [index] * len(values), "k|", markersize=12)
    axes.set_xlabel("training time lost to one checkpoint (ms)")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def _checkpoint(place: Path, step: int) -> Path:
    return place / "checkpoints" / f"step={step}.ckpt"


def _curve(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    return place / "losses.csv"


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
