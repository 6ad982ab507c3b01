"""Trainings of each kind that run while a system call fails; for the nursery.

Each saves ``STEPS`` times, at a place of its own, and keeps the last two and, where the framework
has such a thing, "last". A ``Report`` says what became of it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import portus
from portus.engine.pipeline.handle import SaveHandle
from portus.reach.training.training_files import TrainingFiles
from portus_lightning.of_lightning import PortusCompanion
from tests.adapters import tiny
from tests.faults import calls
from tests.faults.calls import Call, Fault
from tests.nursery import Say
from tests.packages import ADAPTERS, FOLDERS

STEPS = 5
THREAD_END_S_MAX = 5.0

_SEEN_AS = {Call.CLOSE: errno.EBADF, Call.STAT: errno.EEXIST}
"""What a framework raises after its own call failed: where it closes twice, or where os.makedirs
cannot see that a directory is there."""

_OURS = ("core/portus/", *(f"{name}/" for name in ADAPTERS))
_STOCK = tuple(
    f"/site-packages/{name}/"
    for name in ("lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers")
)


@dataclass
class Report:
    """What became of a run. Paths are below its root."""

    fault: str
    counts: list[tuple[int, int, int]] = field(default_factory=list)
    hit: str = ""
    stopped: str = ""
    """What ended it before its time, if anything did."""
    stopped_by: str = ""
    """"portus": by an error of ours. "stock": the framework's own call failed. "error": neither."""
    told: list[int] = field(default_factory=list)
    """Steps whose save was told committed, before the fault or in spite of it."""
    told_in_time: int = 0
    """How many of them when it was stopped."""
    failed: dict[int, str] = field(default_factory=dict)
    """Steps whose save was told failed, and how."""
    found: dict[str, int | str] = field(default_factory=dict)
    """What loading each checkpoint gave: its step, or the error."""
    names: dict[str, int] = field(default_factory=dict)
    """The step that each path is named after; not for "last"."""
    logged: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Threads that did not end."""
    seconds: float = 0.0


class Told(logging.Handler):
    """What a run was told: by handles, and in the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.handles: list[tuple[int, SaveHandle]] = []
        self.messages: list[str] = []
        for name in FOLDERS:
            logging.getLogger(name).addHandler(self)
            logging.getLogger(name).propagate = False
        to_file = TrainingFiles.save

        def save_file(own: TrainingFiles, state: object, path: str, step: int) -> SaveHandle:
            handle = to_file(own, state, path, step)
            self.handles.append((step, handle))
            return handle

        setattr(TrainingFiles, "save", save_file)  # noqa: B010 - it only listens

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def committed(self) -> list[int]:
        return sorted({step for step, handle in self.handles if handle.committed})


def by_hand(root: Path) -> None:
    """A loop by hand, whose states are in a pool: a pointer for each step and one called "last"."""
    folder = root / "ckpt"
    weight = torch.nn.Parameter(torch.zeros(3000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    pool = portus.Place.parse(root / ".portus" / "run.portus")
    files = TrainingFiles(portus.Settings(), pool=pool)
    try:
        files.begin("run", str(root / ".portus"), str(folder))
        for step in range(1, STEPS + 1):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            state = {"weight": weight.detach(), "step": step}
            files.save(state, str(folder / "last.ckpt"), step)
            files.save(state, str(folder / f"step={step}.ckpt"), step)
            if step > 2:
                files.remove(str(folder / f"step={step - 2}.ckpt"))
    finally:
        files.close()


def lightning(root: Path) -> None:
    net = tiny.Net()
    keep = ModelCheckpoint(
        dirpath=root / "ckpt", filename="{step}", every_n_train_steps=1, monitor="step",
        mode="max", save_top_k=2, save_last=True,
    )  # fmt: skip
    made = tiny.trainer(root, callbacks=[keep, PortusCompanion()], max_steps=STEPS)
    made.fit(net, tiny.loader())
    assert len(net.seen) == STEPS


class _Count:
    """Registered for checkpointing, so that a checkpoint says its step."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def accelerate(root: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(
        project_dir=str(root), automatic_checkpoint_naming=True, total_limit=2, iteration=1
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(4, 700)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    count = _Count()
    accelerator.register_for_checkpointing(count)
    for step in range(1, STEPS + 1):
        accelerator.backward(model(torch.ones(4)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        count.step = step
        accelerator.save_state()
    accelerator.end_training()


def transformers(root: Path) -> None:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        PrinterCallback,
        Trainer,
        TrainingArguments,
    )

    settings = TrainingArguments(
        output_dir=str(root / "checkpoints"), max_steps=STEPS, save_steps=1, save_total_limit=2,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    config = GPT2Config(
        n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=4, bos_token_id=0, eos_token_id=0
    )
    row = torch.arange(4)
    data: Any = [{"input_ids": row, "labels": row}] * 32
    trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=data)
    trainer.remove_callback(PrinterCallback)  # it writes to where reports go
    trainer.train()
    assert trainer.state.global_step == STEPS


def run(say: Say, kind: str, root: str, plain: list[int] | None) -> None:
    """Train, and say a ``Report``."""
    shutil.rmtree(root, ignore_errors=True)
    place = Path(os.path.realpath(root))
    place.mkdir(parents=True)
    os.chdir(place)
    fault = Fault.of(plain) if plain else None
    report, told, start = Report(str(fault)), Told(), time.monotonic()
    calls.begin(str(place))
    if fault:
        calls.arm(fault)
    try:
        KINDS[kind](place)
    except BaseException as error:
        _note_stop(report, error, fault)
        report.told_in_time = len(told.committed())
    report.hit = calls.hit().replace(f"{place}/", "")
    if fault is None:
        report.counts = [(call, where, count) for call, where, count in calls.counts()]
    _note_threads(report)
    calls.end()
    _note_saves(report, told)
    report.found, report.names = _found(place)
    report.logged = [message.replace(f"{place}/", "") for message in told.messages]
    report.seconds = time.monotonic() - start
    say(json.dumps(asdict(report)))


def _note_stop(report: Report, error: BaseException, fault: Fault | None) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{each.filename}:{each.lineno} {each.name}" for each in frames]
    named = [each for each in places if any(part in each for part in (*_OURS, *_STOCK))]
    innermost = named[-1] if named else "the run itself"
    report.stopped = " <- ".join([_text(error), *named[:-6:-1]])
    if isinstance(error, portus.PortusError):
        report.stopped_by = "portus"
    elif any(part in innermost for part in _STOCK) and fault and _tells(error, fault):
        report.stopped_by = "stock"
    else:
        report.stopped_by = "error"


def _tells(error: BaseException, fault: Fault) -> bool:
    """True for what a framework raises after a call of its own failed so, be it in Rust, or as
    something else."""
    numbers = {fault.error, *(n for c, n in _SEEN_AS.items() if fault.call in (c, Call.ANY))}
    own = isinstance(error, OSError) and (error.errno in numbers or error.filename == _hit_path())
    before = error.__context__
    return (
        own or f"(os error {fault.error})" in str(error) or bool(before and _tells(before, fault))
    )


def _hit_path() -> str:
    return calls.hit().partition(" ")[2]


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _note_threads(report: Report) -> None:
    until = time.monotonic() + THREAD_END_S_MAX
    while time.monotonic() < until:
        report.left = [e.name for e in threading.enumerate() if e.name.startswith("portus")]
        if not report.left:
            return
        time.sleep(0.01)


def _note_saves(report: Report, told: Told) -> None:
    report.told = told.committed()
    for step, handle in told.handles:
        if handle.committed:
            continue
        try:
            handle.wait(0)
        except BaseException as error:
            # An error that nobody expected was given up for, and is its cause.
            ours = isinstance(error, portus.PortusError) and not (
                isinstance(error, portus.AbandonedError) and error.__cause__
            )
            report.failed[step] = _text(error) if ours else f"NOT OURS {_text(error)}"


def _found(root: Path) -> tuple[dict[str, int | str], dict[str, int]]:
    found: dict[str, int | str] = {}
    names: dict[str, int] = {}
    for path in _checkpoints(root):
        name = str(path.relative_to(root))
        try:
            found[name] = _step_in(torch.load(path, weights_only=False))
        except BaseException as error:
            ours = isinstance(error, portus.PortusError)
            found[name] = _text(error) if ours else f"NOT OURS {_text(error)}"
        if "last" not in name:
            own = path.stem if path.suffix == ".ckpt" else path.parent.name
            names[name] = int(re.sub(r"\D", "", own))
    return found, names


def _checkpoints(root: Path) -> list[Path]:
    folders = [root / "ckpt", *(root / "checkpoints").glob("checkpoint*")]
    wanted = ("*.ckpt", "custom_checkpoint_0.pkl", "scheduler.pt")
    return sorted(path for folder in folders for name in wanted for path in folder.glob(name))


def _step_in(state: Any) -> int:
    for key in ("global_step", "step", "last_epoch"):
        if key in state:
            return int(state[key])
    raise AssertionError(f"no step in {state}")


KINDS: dict[str, Callable[[Path], None]] = {
    each.__name__: each for each in (by_hand, lightning, accelerate, transformers)
}


def warm_up() -> None:
    """What each kind imports when it first runs. No thread stays."""
    import transformers.trainer  # noqa: F401

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "accelerate", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    made = tiny.trainer(Path(os.devnull), plugin=None, max_steps=1, enable_checkpointing=False)
    made.fit(tiny.Net(), tiny.loader())
