"""The configurations of the recipes are read by their frameworks, and what the page says of their
checkpoints is computed. Nothing is trained, and models are on the meta device."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands import launch
from accelerate.commands.config import config_args
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy

import train_lightning
import train_torchrun
from checkpoint_bytes import KEPT, TABLE, Checkpoint, checkpoint_of, row
from gpt import GPT, SIZES
from portus_accelerate import settings
from portus_accelerate.settings import VARIABLE, from_environment
from portus_lightning import PortusIO

RECIPES = Path(train_torchrun.__file__).parent
CONFIGS = RECIPES / "configs"
FRAMEWORKS = ("accelerate", "lightning", "torchrun")


@pytest.fixture(scope="module")
def computed() -> dict[str, Checkpoint]:
    return {name: checkpoint_of(SIZES[name]) for name in TABLE}


@pytest.mark.long
def test_the_page_holds_what_is_computed() -> None:
    lines = (RECIPES / "README.md").read_text().splitlines()
    assert [row(name) for name in TABLE if row(name) not in lines] == []


@pytest.mark.parametrize("name", TABLE)
def test_a_checkpoint_is_twelve_bytes_for_each_parameter(
    computed: dict[str, Checkpoint], name: str
) -> None:
    size, found = SIZES[name], computed[name]
    layers, width = size.layers, size.width
    block = 12 * width * width + 13 * width  # GPT-2's: four matrices with biases, two norms
    assert found.parameters == (layers * block + (size.vocabulary + size.context + 2) * width), (
        "the head is the embedding, and is counted once"
    )
    assert found.state == 12 * found.parameters + 4 * (12 * layers + 4)


@pytest.mark.parametrize("name", [name for name in TABLE if SIZES[name].ranks > 1])
def test_no_shard_is_padded_and_together_they_are_the_state(
    computed: dict[str, Checkpoint], name: str
) -> None:
    found, ranks = computed[name], SIZES[name].ranks
    scalars = found.state - 12 * found.parameters
    assert (found.rank - scalars) * ranks == found.state - scalars
    with torch.device("meta"):
        model = GPT(SIZES[name])
    assert all(each.shape[0] % ranks == 0 for each in model.parameters())


def test_every_size_has_a_configuration_for_every_framework() -> None:
    for framework in FRAMEWORKS:
        names = {path.stem for path in (CONFIGS / framework).glob("*.yaml")}
        assert names == set(TABLE), framework


@pytest.mark.parametrize("name", TABLE)
def test_lightning_reads_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")  # Lightning sets it for good
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # it is Lightning that calls it
    config = CONFIGS / "lightning" / f"{name}.yaml"
    monkeypatch.setattr("sys.argv", ["_", "--config", str(config), "--trainer.accelerator=cpu"])
    made = train_lightning.main(run=False)
    trainer: Any = made.trainer
    size = SIZES[name]
    assert made.model.hparams["size"] == name
    assert isinstance(made.datamodule, train_lightning.TextModule)
    assert made.datamodule.size is size
    assert isinstance(trainer.strategy.checkpoint_io, PortusIO)
    assert trainer.num_devices * trainer.num_nodes == size.ranks
    (saving,) = (each for each in trainer.callbacks if isinstance(each, ModelCheckpoint))
    assert saving.save_top_k == KEPT
    if size.ranks > 1:
        assert isinstance(trainer.strategy, ModelParallelStrategy)
        assert trainer.strategy._data_parallel_size == size.ranks
    else:
        assert isinstance(trainer.strategy, SingleDeviceStrategy)


@pytest.mark.parametrize("name", TABLE)
def test_accelerate_reads_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PORTUS_ACCELERATE", VARIABLE):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(
        config_args.BaseConfig, "process_config", config_args.BaseConfig.process_config
    )
    settings.install()
    config = CONFIGS / "accelerate" / f"{name}.yaml"
    parser: Any = launch.launch_command_parser()
    arguments, _, _ = launch._validate_launch_command(
        parser.parse_args(["--config_file", str(config), "train_accelerate.py"])
    )
    size = SIZES[name]
    assert arguments.num_processes == size.ranks
    assert arguments.use_fsdp == (size.ranks > 1)
    if arguments.use_fsdp:
        assert int(arguments.fsdp_version) == 2
        assert arguments.fsdp_transformer_layer_cls_to_wrap == "Block"
    assert os.environ[VARIABLE]
    from_environment()  # raises for a key that it does not know


@pytest.mark.parametrize("name", TABLE)
def test_torchrun_reads_it(name: str) -> None:
    config = CONFIGS / "torchrun" / f"{name}.yaml"
    settings, tiny = train_torchrun.settings_of(["--config", str(config)])
    assert (settings.size, settings.keep, tiny) == (name, KEPT, False)
    settings, tiny = train_torchrun.settings_of(["--config", str(config), "--tiny", "--steps=7"])
    assert (settings.size, settings.steps, tiny) == ("tiny", 7, True)
    told = re.search(r"--nnodes (\d+) --nproc-per-node (\d+)", config.read_text())
    assert told
    assert int(told[1]) * int(told[2]) == SIZES[name].ranks


def test_torchrun_says_which_key_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("size: tiny\nsafe_every: 5\n")
    with pytest.raises(SystemExit):
        train_torchrun.settings_of(["--config", str(config)])
    assert "unknown keys ['safe_every']" in capsys.readouterr().err
