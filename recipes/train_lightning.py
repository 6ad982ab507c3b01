"""A GPT under LightningCLI. Portus is one entry of the YAML: ``trainer.plugins``.

python recipes/train_lightning.py fit --config recipes/configs/lightning/124M.yaml
python recipes/train_lightning.py fit --config ... --ckpt_path last       continue
python recipes/train_lightning.py fit --config ... --tiny                 on a laptop
"""

from __future__ import annotations

from typing import Any, Final

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torchdata.stateful_dataloader import StatefulDataLoader

from gpt import GPT, SIZES, Text, adamw, shard, warm_then_cosine

LAPTOP: Final = {"accelerator": "cpu", "precision": "32-true", "num_nodes": 1, "max_steps": 20}
"""The settings of the Trainer with ``--tiny``, in place of the YAML's."""

LAPTOP_SAVE_EVERY: Final = 5


class GPTModule(LightningModule):
    """The GPT of ``gpt.py``.

    Args:
        size: One of the sizes in ``gpt.py``.
        learning_rate: The highest; it rises for a tenth of the steps, and falls to a tenth of it.
            By default that of the size.
    """

    def __init__(self, size: str = "tiny", learning_rate: float | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt: GPT | None = None
        self._size: Final = SIZES[size]
        self._learning_rate: Final = learning_rate or self._size.learning_rate

    def configure_model(self) -> None:
        """Shard the model from the meta device, if there is a mesh: no rank ever has all of it."""
        if self.gpt is not None:
            return
        mesh = self.device_mesh
        if mesh is None:
            self.gpt = GPT(self._size)
            return
        with torch.device("meta"):
            self.gpt = GPT(self._size)
        compute = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
        shard(self.gpt, mesh["data_parallel"], compute)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        assert self.gpt is not None
        loss: torch.Tensor = self.gpt(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self, self._learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warm_then_cosine(step, steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TextModule(LightningDataModule):
    """The text of ``gpt.py``. The shuffle and the position in it are part of a checkpoint.

    Args:
        size: That of the model.
        batch: Sequences of one process in a step. By default that of the size.
    """

    def __init__(self, size: str = "tiny", batch: int | None = None) -> None:
        super().__init__()
        self.size: Final = SIZES[size]
        self.batch: Final = batch or self.size.batch

    def train_dataloader(self) -> Any:
        return StatefulDataLoader(Text(self.size.context), batch_size=self.batch, shuffle=True)


class CLI(LightningCLI):
    """LightningCLI with ``--tiny``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--tiny", action="store_true", help="the tiny model, on the CPU")
        parser.link_arguments("model.size", "data.size")

    def before_instantiate_classes(self) -> None:
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        if config.tiny:
            _fit_on_a_laptop(config)


def _fit_on_a_laptop(config: Any) -> None:
    """Use the tiny model; the CPU; two processes if the recipe is sharded, else one."""
    ranks = min(2, SIZES[config.model.size].ranks)
    config.model.size = config.data.size = "tiny"
    for name, value in {**LAPTOP, "devices": ranks}.items():
        config.trainer[name] = value
    if ranks > 1:
        config.trainer.strategy.init_args.data_parallel_size = ranks
    for callback in config.trainer.callbacks or ():
        if callback.class_path.endswith("ModelCheckpoint"):
            callback.init_args.every_n_train_steps = LAPTOP_SAVE_EVERY


def main(*, run: bool = True) -> CLI:
    """Run the command line. run: False only makes the model and the Trainer."""
    return CLI(
        GPTModule,
        TextModule,
        run=run,
        seed_everything_default=1,
        save_config_callback=None,  # the YAML is in the repository
        load_from_checkpoint_support=False,  # the model saves its hyperparameters itself
    )


if __name__ == "__main__":
    main()
