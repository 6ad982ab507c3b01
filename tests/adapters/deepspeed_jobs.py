"""Trainings with DeepSpeed on CPUs, in forks of a process that has imported it.

DeepSpeed is beside the environment of the tests, in ``.venv/deepspeed``: Accelerate and others
import it wherever they find it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import portus.reach.shards.arrival
from portus.engine.fence.fence import Fence
from portus.engine.writer.image_file import CommittedFile, FileDraft, ImageFile
from portus.errors import MediumError
from tests.adapters.kills import Kills
from tests.nursery import Say

FOLDER = Path(sys.executable).parents[1] / "deepspeed"

Spec = dict[str, Any]
"""What a training is: ``stage`` of ZeRO, ``kind`` ("fp32", "bf16"), ``last`` step, ``every`` how
many it saves; by "portus" or not; and what else ``train`` looks at."""


def warm_up() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path.insert(0, str(FOLDER))
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    # What the first engine imports, its first save with Portus, and Accelerate: 2 s, else, of each.
    import accelerate  # noqa: F401
    import deepspeed
    import torch._inductor.compile_fx  # noqa: F401

    import portus_accelerate.deepspeed  # noqa: F401


class Model(torch.nn.Module):
    """With a buffer that each forward writes, tied weights, and a part that is frozen."""

    def __init__(self, width: int, base: int = 0) -> None:
        """base: the width of a larger part that is frozen, and not used."""
        super().__init__()
        if base:
            self.base = torch.nn.Linear(base, base).requires_grad_(False)
        self.first = torch.nn.Linear(width, 4 * width)
        self.norm = torch.nn.LayerNorm(4 * width)
        self.last = torch.nn.Linear(4 * width, width)
        self.tied = torch.nn.Linear(4 * width, width, bias=False)
        self.tied.weight = self.last.weight
        self.frozen = torch.nn.Linear(width, width).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(1)
        found = torch.relu(self.norm(self.first(self.frozen(x))))
        both: torch.Tensor = self.last(found) + self.tied(found)
        return both


def engine_of(spec: Spec) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = Model(spec.get("width", 16))
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim == 1], "weight_decay": 0.0},
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    config = config_of(spec)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )[0]


def config_of(spec: Spec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": spec["stage"], **spec.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **spec.get("config", {}),
    }
    if spec["kind"] == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def start(root: str, environment: dict[str, str], spec: Spec) -> None:
    os.environ.update(environment)
    if "mirror" in spec:
        os.environ["PORTUS_MIRROR"] = spec["mirror"]
    for flag in ("PORTUS_DEEPSPEED", "PORTUS_ACCELERATE"):
        os.environ[flag] = "1" if spec.get("by") == "portus" else "0"
    if spec.get("apart"):  # a disk of each node
        root = f"{root}-{environment['RANK']}"
        setattr(portus.reach.shards.arrival, "SEEN_S", 0.3)  # noqa: B010
    Path(root).mkdir(exist_ok=True)
    os.chdir(root)
    errors = os.open(f"errors-{environment['RANK']}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    import portus_accelerate

    portus_accelerate.register()
    if spec.get("slow"):
        copy_late()
    if spec.get("full") == int(environment["RANK"]):
        fill_the_disk()


def copy_late() -> None:
    """What is copied behind the fence is copied long after the call, and of all that waits for it
    only the engine's own step does."""
    setattr(Fence, "_wait_for", lambda self, optimizer: None)  # noqa: B010
    real, main = ImageFile.copy, threading.current_thread()

    def copy(self: ImageFile, *given: Any) -> Any:
        if threading.current_thread() is not main:
            time.sleep(0.5)
        return real(self, *given)

    setattr(ImageFile, "copy", copy)  # noqa: B010


def fill_the_disk() -> None:
    """The second save fails."""
    real = ImageFile.finish

    def finish(self: ImageFile) -> None:
        if "global_step2" in self._path:
            raise MediumError(errno.ENOSPC, f"{self._path}: No space left on device")
        real(self)

    setattr(ImageFile, "finish", finish)  # noqa: B010


def seal(directory: str) -> None:
    """Nobody makes, renames or removes a name there any more, root included. On all ranks."""
    torch.distributed.barrier()
    subprocess.run(["chattr", "+i", directory], check=True)


def train(say: Say, root: str, environment: dict[str, str], spec: Spec) -> None:
    """Go on from the newest checkpoint in ``ckpt``, and tell how each step went."""
    start(root, environment, spec)
    engine = engine_of(spec)
    if spec.get("by") == "hand":
        import portus_accelerate

        portus_accelerate.enable(engine, fence_timeout=60)
    average = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
    path, client = engine.load_checkpoint("ckpt", spec.get("from"))
    done = 0
    if path is not None:
        done, average = client["step"], client["average"]
    say(f"from {done}")
    kills = None
    for step in range(done + 1, spec["last"] + 1):
        for micro in range(2):
            engine.backward(loss := loss_of(engine, step, micro, spec))
            engine.step()
        for name, each in engine.module.named_parameters():
            if each.shape == average[name].shape:  # not what ZeRO-3 took apart
                average[name].lerp_(each.detach(), 0.1)
        say(f"loss {step} {float(loss).hex()}")
        if step % spec["every"] == 0:
            kills = kills_of(spec, step)
            if spec.get("sealed") == step:
                seal("ckpt")
            state = {"step": step, "average": average}
            engine.save_checkpoint("ckpt", spec.get("tag"), state, save_latest=True)
    say(f"digest {digest_of(engine)}")
    engine.destroy()
    say(f"moments {spec['kill'] - kills.left if kills else 0}")
    sys.exit()


def convert(say: Say, root: str, environment: dict[str, str], spec: Spec) -> None:
    """By DeepSpeed's own tools: weights out of a checkpoint, and one for any number of ranks."""
    start(root, environment, spec)
    from deepspeed.checkpoint.ds_to_universal import (
        main,
        parse_arguments,
    )
    from deepspeed.utils.zero_to_fp32 import (
        get_fp32_state_dict_from_zero_checkpoint,
    )

    weights = get_fp32_state_dict_from_zero_checkpoint("ckpt", spec["from"])
    digest = hashlib.sha256()
    _add(digest, dict(weights))
    say(f"digest {digest.hexdigest()}")
    sys.argv = ["ds_to_universal", "--input_folder", f"ckpt/{spec['from']}", "--output_folder"]
    sys.argv += [f"ckpt/{spec['from']}_universal", "--inject_missing_state"]
    sys.argv += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    main(parse_arguments())


def kills_of(spec: Spec, step: int) -> Kills | None:
    """From the last save on, in the process that is to die."""
    if step < spec["last"] or torch.distributed.get_rank() != spec.get("who"):
        return None
    return Kills(spec["kill"])


def loss_of(engine: Any, step: int, micro: int, spec: Spec) -> torch.Tensor:
    rank = torch.distributed.get_rank()
    numbers = torch.Generator().manual_seed(step * 1000 + micro * 100 + rank)
    batch = torch.rand(2, spec.get("width", 16), generator=numbers)
    if spec["kind"] == "bf16":
        batch = batch.to(torch.bfloat16)
    found: torch.Tensor = engine(batch).float().pow(2).mean()
    return found


def digest_of(engine: Any) -> str:
    """Of all weights, whole, and of the state of the optimizer on this rank."""
    import deepspeed

    digest = hashlib.sha256()
    parameters = list(engine.module.parameters())
    is_apart = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(parameters, enabled=is_apart):
        for name, each in engine.module.state_dict().items():
            digest.update(name.encode() + each.float().numpy().tobytes())
    _add(digest, engine.optimizer.state_dict())
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().float().numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            _add(digest, each)
    elif isinstance(value, (int, float, str)):
        digest.update(repr(value).encode())


def accelerate(say: Say, root: str, environment: dict[str, str], spec: Spec) -> None:
    """The same under Accelerate, which names the directories."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as its launcher does
    start(root, environment, spec)
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, ProjectConfiguration

    import portus_accelerate

    torch.manual_seed(0)
    model = Model(16, spec.get("base", 0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    plugin = DeepSpeedPlugin(hf_ds_config=config_of(spec))
    project = ProjectConfiguration(
        project_dir=".", automatic_checkpoint_naming=True, total_limit=spec.get("limit")
    )
    backend = InitProcessGroupKwargs(backend="gloo")  # else there is one process, on CPUs
    accelerator = Accelerator(
        deepspeed_plugin=plugin, project_config=project, kwargs_handlers=[backend]
    )
    data = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)  # Accelerate wants one
    model, optimizer, _ = accelerator.prepare(model, optimizer, loader)
    say(f"count {accelerator.num_processes} {accelerator.distributed_type} {accelerator.device}")
    done, folder, kills = 0, Path("checkpoints"), None
    if folder.exists():
        if "from" in spec:
            accelerator.load_state(spec["from"])
        else:
            accelerator.load_state()
        done = int(model.module.get_buffer("seen")[0]) // 2
        accelerator.project_configuration.iteration = 1 + max(
            int(each.name.split("_")[1]) for each in folder.iterdir()
        )
    say(f"from {done}")
    if "base" in spec:
        tell_written(say)
    for step in range(done + 1, spec["last"] + 1):
        for micro in range(2):
            accelerator.backward(loss := loss_of(model, step, micro, spec))
            optimizer.step()
            optimizer.zero_grad()
        say(f"loss {step} {float(loss).hex()}")
        if step % spec["every"] == 0:
            kills = kills_of(spec, step)
            accelerator.save_state()
            if "base" in spec:
                portus_accelerate.wait(accelerator)  # what is removed then is used again
    say(f"digest {digest_of(accelerator.deepspeed_engine_wrapped.engine)}")
    accelerator.end_training()
    say(f"moments {spec['kill'] - kills.left if kills else 0}")
    sys.exit()


def lightning(say: Say, root: str, environment: dict[str, str], spec: Spec) -> None:
    """The same under Lightning, whose strategy insists on GPUs: its check is left out."""
    start(root, environment, spec)
    import warnings

    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DeepSpeedStrategy

    warnings.simplefilter("ignore")

    class OnProcessors(DeepSpeedStrategy):
        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", 0)  # DeepSpeed asks for the number

        def setup_environment(self) -> None:
            super(DeepSpeedStrategy, self).setup_environment()

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(16)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch).pow(2).mean()
            say(f"loss {self.global_step + 1} {float(loss.detach()).hex()}")
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            trained = [each for each in self.parameters() if each.requires_grad]
            return torch.optim.AdamW(trained, lr=1e-2)

    torch.manual_seed(0)
    config = config_of(spec)
    config.pop("gradient_accumulation_steps")  # Lightning has an argument for that
    trainer = Trainer(
        accelerator="cpu",
        devices=int(environment["WORLD_SIZE"]),
        strategy=OnProcessors(config=config, process_group_backend="gloo"),
        max_steps=spec["last"],
        callbacks=[ModelCheckpoint("ckpt", every_n_train_steps=spec["every"], save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.rand(64, 16, generator=torch.Generator().manual_seed(1))
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    trainer.fit(Module(), loader, ckpt_path=spec.get("from"))
    strategy: Any = trainer.strategy
    say(f"digest {digest_of(strategy.deepspeed_engine)}")
    sys.exit()


def tell_written(say: Say) -> None:
    """Say of each save how many bytes it has, and how many of these it wrote."""
    commit = FileDraft.commit

    def told(draft: FileDraft, *arguments: Any) -> CommittedFile:
        found = commit(draft, *arguments)
        say(f"written {found.info.size} {found.info.size - draft.kept_bytes}")
        return found

    setattr(FileDraft, "commit", told)  # noqa: B010


def trainer(say: Say, root: str, environment: dict[str, str], spec: Spec) -> None:
    """The same under ``transformers.Trainer``."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as its launcher does
    start(root, environment, spec)
    from accelerate import DistributedType, PartialState
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Killing(TrainerCallback):
        kills: Kills | None = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.kills = self.kills or kills_of(spec, state.global_step)

    backend = ("gloo", DistributedType.NO)  # else there is one process, on CPUs
    setattr(PartialState, "_prepare_backend", lambda *_: backend)  # noqa: B010
    arguments = TrainingArguments(
        output_dir="run",
        deepspeed=config_of(spec),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=spec["last"],
        save_steps=spec["every"],
        save_total_limit=spec.get("limit"),
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=8,
            vocab_size=32,
            resid_pdrop=0,  # a process that is killed right after the others saved
            embd_pdrop=0,  # leaves no random states
            attn_pdrop=0,
        )
    )
    numbers = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 32, (8,), generator=numbers) for _ in range(64)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    killing = Killing()
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[killing])
    is_there = Path("run").exists() and any(Path("run").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=spec.get("from", is_there))
    for line in trainer.state.log_history:
        if "loss" in line:
            say(f"loss {line['step']} {line['loss'].hex()} {line['grad_norm']}")
    say(f"digest {digest_of(trainer.model_wrapped)}")
    say(f"moments {spec['kill'] - killing.kills.left if killing.kills else 0}")
    sys.exit()


def recipe(say: Say, root: str, environment: dict[str, str], arguments: list[str]) -> None:
    """The recipe, as a program."""
    start(root, environment, {"by": "portus"})
    path = Path(__file__).parents[2] / "recipes" / "gpt_deepspeed.py"
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")
    sys.exit()
