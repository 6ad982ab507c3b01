"""A training of each framework, as a user's script has it: it goes on from the newest checkpoint
below its directory, and saves after every step. Each runs in a fork of a warm process."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.nursery import Say

TITAN: Final = Path(sys.executable).parents[1] / "torchtitan"

ROWS: Final = 12
"""Of the data: an epoch is one step, on any number of ranks."""


class Run:
    """One process of a training. ``portus``: it saves and loads, not the framework alone."""

    def __init__(
        self, say: Say, root: Path, *, portus: bool, until: int, kill_at: int | None
    ) -> None:
        self.root = root
        self.portus = portus
        self.until = until
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._say = say
        self._kill_at = kill_at

    def goes_on(self, step: int) -> None:
        """So many steps are done, a save was asked for after the last one, and one more begins."""
        self._say(f"done {step}")
        if step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def newest(self, pattern: str) -> Path | None:
        """The checkpoint of the last step, where names end with the step."""
        return max(self.root.glob(pattern), default=None)


def start(
    say: Say,
    name: str,
    root: str,
    portus: bool,
    until: int,
    kill_at: int | None,
    environment: dict[str, str],
) -> None:
    """Train, and say a digest of the state at the end."""
    os.environ.update(environment)
    os.chdir(root)
    if portus:
        import portus_accelerate

        os.environ[portus_accelerate.FLAG] = "1"
        portus_accelerate.register()
    torch.manual_seed(1)
    run = Run(say, Path(root), portus=portus, until=until, kill_at=kill_at)
    found = hashlib.sha256()
    for value in _tensors(TRAININGS[name](run)):
        found.update(value.detach().numpy().tobytes())
    say(f"end {found.hexdigest()}")


def warm_up() -> None:
    """What they import, all but Portus."""
    import accelerate  # noqa: F401
    import lightning.fabric.strategies
    import lightning.pytorch.strategies  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.gpt2  # noqa: F401
    import trl  # noqa: F401


def _tensors(state: object) -> Iterator[torch.Tensor]:
    """All of it, whole."""
    if isinstance(state, DTensor):
        yield state.full_tensor()
    elif isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for each in state.values():
            yield from _tensors(each)
    elif isinstance(state, list | tuple):
        for each in state:
            yield from _tensors(each)


def _network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def _loss(model: Any, step: int) -> torch.Tensor:
    batch = torch.arange(20.0).reshape(5, 4) / (20 + step)
    loss: torch.Tensor = model(batch).pow(2).mean()
    return loss


def _plain(run: Run) -> object:
    import portus

    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step, newest = 0, run.newest("step-*.pt")
    if newest is not None:
        state = portus.load(newest) if run.portus else torch.load(newest)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < run.until:
        run.goes_on(step)
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        if run.portus:
            portus.save(state, run.root / f"step-{step}.pt", wait=step == run.until)
        else:
            torch.save(state, run.root / f"step-{step}.pt")
    return model.state_dict(), optimizer.state_dict()


def _lightning(run: Run, **settings: Any) -> object:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from portus_lightning import PortusIO

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _network()

        def configure_model(self) -> None:
            sharded = isinstance(next(self.layers.parameters()), DTensor)
            if self.device_mesh is not None and not sharded:
                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return _loss(self.layers, self.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    class Begins(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            run.goes_on(trainer.global_step)

    keep = ModelCheckpoint(
        run.root, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=run.ranks,
        max_epochs=-1,
        max_steps=run.until,
        callbacks=[Begins(), keep],
        plugins=[PortusIO()] if run.portus else [],
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **settings,
    )
    module = Module()
    rows: Any = torch.zeros(ROWS, 1)
    last = run.newest("last.ckpt")
    trainer.fit(module, DataLoader(rows, ROWS // run.ranks), ckpt_path=last and "last")
    return module.state_dict(), _moments(trainer.optimizers[0])


def _lightning_sharded(run: Run) -> object:
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=run.ranks, tensor_parallel_size=1)
    return _lightning(run, strategy=strategy)


def _moments(optimizer: Any) -> list[Any]:
    """In the order of the parameters."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return [optimizer.state[each] for each in parameters if each in optimizer.state]


def _fabric(run: Run) -> object:
    from lightning.fabric import Fabric

    from portus_lightning import PortusIO

    fabric = Fabric(accelerator="cpu", devices=1, plugins=[PortusIO()] if run.portus else [])
    module = _network()
    adam = torch.optim.AdamW(module.parameters(), 1e-2)
    model, optimizer = fabric.setup(module, adam)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    newest = run.newest("step-*.ckpt")
    if newest is not None:
        fabric.load(newest, state)
    while state["step"] < run.until:
        run.goes_on(state["step"])
        fabric.backward(_loss(model, state["step"]))
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        fabric.save(run.root / f"step-{state['step']}.ckpt", state)
    return module.state_dict(), _moments(adam)


def _accelerate(run: Run, kind: str | None = None) -> object:
    """kind: of FSDP's states. Accelerate takes FSDP for GPUs only: the model is sharded here, and
    Accelerate is told so; ``save_state`` and ``load_state`` are its own."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=str(run.root), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model: Any = _network()
    if kind is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        _tell_of_fsdp(accelerator, plugin)
        fully_shard(model, mesh=init_device_mesh("cpu", (run.ranks,)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        accelerator._models.append(model)
        accelerator._optimizers.append(optimizer)
    progress = _Progress()
    accelerator.register_for_checkpointing(progress)
    saved = run.root / "checkpoints"
    if saved.is_dir() and os.listdir(saved):
        accelerator.load_state()
    accelerator.project_configuration.iteration = progress.step
    while progress.step < run.until:
        run.goes_on(progress.step)
        accelerator.backward(_loss(model, progress.step))
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        accelerator.save_state()
    adam = getattr(optimizer, "optimizer", optimizer)
    state = list(_tensors((model.state_dict(), _moments(adam))))
    accelerator.end_training()  # the processes know each other no more
    return state


class _Progress:
    """How many steps a script has done."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def _tell_of_fsdp(accelerator: Any, plugin: Any) -> None:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def _accelerate_sharded(run: Run) -> object:
    return _accelerate(run, "SHARDED_STATE_DICT")


def _accelerate_full(run: Run) -> object:
    return _accelerate(run, "FULL_STATE_DICT")


def _transformers(run: Run, kind: str = "") -> object:
    """kind: what trains, or FSDP's kind of states."""
    import transformers
    from accelerate import FullyShardedDataParallelPlugin

    class Begins(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            run.goes_on(state.global_step)

    usual: dict[str, Any] = {
        "output_dir": str(run.root / "out"),
        "max_steps": run.until,
        "per_device_train_batch_size": ROWS // run.ranks,
        "save_steps": 1,
        "save_total_limit": 2,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    model: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1,
            n_embd=16,
            n_head=2,
            vocab_size=16,
            n_positions=4,
            bos_token_id=0,
            eos_token_id=0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    )
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True
        )
        model = get_peft_model(model, lora)
    if kind == "sft":
        trainer = _sft(model, usual)
    else:
        data: Any = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * ROWS
        arguments = transformers.TrainingArguments(**usual)
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
    if kind.endswith("STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type=kind,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
        )
        _tell_of_fsdp(trainer.accelerator, plugin)
        trainer.is_fsdp_enabled = True
    trainer.add_callback(Begins())
    out = run.root / "out"
    trainer.train(resume_from_checkpoint=out.is_dir() and any(out.iterdir()))
    assert trainer.state.global_step == run.until
    return trainer.model.state_dict(), _moments(trainer.optimizer)


def _sft(model: Any, usual: dict[str, Any]) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    words = models.WordLevel({f"t{each}": each for each in range(16)}, unk_token="t0")
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=Tokenizer(words), pad_token="t0", eos_token="t0", unk_token="t0"
    )
    more: dict[str, Any] = {
        "bf16": False,
        "gradient_checkpointing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "remove_unused_columns": False,
    }
    data = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * ROWS})
    arguments = SFTConfig(**usual, **more)
    return SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)


def _lora(run: Run) -> object:
    return _transformers(run, "lora")


def _supervised(run: Run) -> object:
    return _transformers(run, "sft")


def _transformers_sharded(run: Run) -> object:
    return _transformers(run, "SHARDED_STATE_DICT")


def _transformers_full(run: Run) -> object:
    return _transformers(run, "FULL_STATE_DICT")


def _dcp(run: Run) -> object:
    import torch.distributed.checkpoint as dcp

    import portus.dcp

    torch.distributed.init_process_group("gloo")
    model = _network()
    fully_shard(model, mesh=init_device_mesh("cpu", (run.ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    step, newest = 0, run.newest("step-*/.metadata")
    if newest is not None:
        found = state(0)
        (portus.dcp.load if run.portus else dcp.load)(found, checkpoint_id=newest.parent)
        parts = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
        set_state_dict(model, optimizer, **parts)
        step = found["step"]
    writer = portus.dcp.PortusStorageWriter() if run.portus else None
    while step < run.until:
        run.goes_on(step)
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        place = run.root / f"step-{step}"
        if writer is not None:
            writer.save(state(step), place)
        else:
            dcp.save(state(step), checkpoint_id=place)
    if writer is not None:
        writer.close()
    return model.state_dict(), _moments(optimizer)


class TitanProgress:
    """How many steps a training with TorchTitan has done."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def _torchtitan(run: Run) -> object:
    """Its manager, with its own container of optimizers; the loop is as its trainer's."""
    sys.path.insert(0, str(TITAN))
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    from portus_accelerate.torchtitan import PortusCheckpoints

    torch.distributed.init_process_group("gloo")
    model = _network()
    fully_shard(model, mesh=init_device_mesh("cpu", (run.ranks,)))
    adamw = ParamGroupConfig(
        pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.01}
    )
    config = OptimizersContainer.Config(param_groups=[adamw], implementation="for-loop")
    optimizers = OptimizersContainer(config, model_parts=[model])
    progress = TitanProgress()
    kind = PortusCheckpoints if run.portus else CheckpointManager
    manager = kind(
        kind.Config(enable=True, interval=1, keep_latest_k=2, last_save_model_only=False),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=TitanProgress(),
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(run.root),
    )
    manager.states.pop("dataloader")
    manager.load()
    while progress.step < run.until:
        run.goes_on(progress.step)
        _loss(model, progress.step).backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        optimizers.zero_grad()
        progress.step += 1
        manager.save(progress.step)
    manager.close()
    return model.state_dict(), [_moments(each) for each in optimizers]


TRAININGS: Final[dict[str, Callable[[Run], object]]] = {
    "plain": _plain,
    "lightning": _lightning,
    "lightning-sharded": _lightning_sharded,
    "fabric": _fabric,
    "accelerate": _accelerate,
    "accelerate-fsdp-full": _accelerate_full,
    "accelerate-fsdp-sharded": _accelerate_sharded,
    "trainer": _transformers,
    "trainer-fsdp-full": _transformers_full,
    "trainer-fsdp-sharded": _transformers_sharded,
    "peft": _lora,
    "trl-sft": _supervised,
    "dcp": _dcp,
    "torchtitan": _torchtitan,
}
"""By name. Each returns what its state is at the end."""

SHARDED: Final = (
    "lightning-sharded",
    "accelerate-fsdp-full",
    "accelerate-fsdp-sharded",
    "trainer-fsdp-full",
    "trainer-fsdp-sharded",
    "dcp",
    "torchtitan",
)
"""Those that shard their model over ranks."""
