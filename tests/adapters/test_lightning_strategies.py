"""Several processes, Fabric, the other copy of Lightning, the command line of Lightning."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from portus_lightning import PortusIO
from portus_lightning.companion import KEY
from tests.adapters.tiny import NO_FUSS, same

pytestmark = [*NO_FUSS, pytest.mark.timeout(300)]
REPOSITORY = Path(__file__).resolve().parents[2]


def script(root: Path, installed: Path, text: str, *arguments: str) -> str:
    """What a program prints, run in ``root`` as a user would."""
    path = root / "train.py"
    path.write_text(textwrap.dedent(text))
    places = [str(installed), str(REPOSITORY), *sys.path]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done.stdout


DDP = """
    import sys, torch, random
    from pathlib import Path
    from lightning.pytorch import Callback, seed_everything
    from tests.adapters.tiny import Net, every_step, loader, trainer
    from portus_lightning import PortusCheckpoint, PortusIO

    resume = sys.argv[1] if len(sys.argv) > 1 else None  # spawned processes need it too

    class Draws(Callback):
        def __init__(self): self.drawn, self.next = [], []
        def on_fit_start(self, trainer, *_):
            seed = (900 if resume else 100) + trainer.global_rank  # Lightning seeds all ranks alike
            random.seed(seed)
            torch.manual_seed(seed)
        def on_train_batch_start(self, trainer, *_):
            self.drawn.append((trainer.global_step, random.random(), torch.rand(1).item()))
            [auto] = [each for each in trainer.callbacks if isinstance(each, PortusCheckpoint)]
            self.next.append(auto.cadence._next)

    class Look(Callback):
        # Another rank than the one that saves looks at the path at once.
        def on_train_batch_end(self, trainer, *_):
            path = Path(f"looks/{trainer.global_step}.ckpt")
            trainer.save_checkpoint(path)
            assert torch.load(path)["global_step"] == trainer.global_step
            trainer.strategy.barrier()

    if __name__ == "__main__":
        seed_everything(1, verbose=False)  # Lightning's sampler takes its order from this seed
        root = Path("resumed") if resume else Path(".")
        draws = Draws()
        keep = every_step(root.absolute(), every_n_train_steps=3, save_last=True)
        auto = PortusCheckpoint(max_overhead=0.5, dirpath=root.absolute() / "auto",
                                filename="{step}", save_top_k=-1)
        callbacks = [draws, keep, auto] + ([] if resume else [Look()])
        fit = trainer(root.absolute(), strategy=STRATEGY, devices=2, max_epochs=2,
                      callbacks=callbacks, plugin=PortusIO())
        model = Net()
        fit.fit(model, loader(shuffle=False), ckpt_path=resume)
        if STRATEGY == "ddp":
            torch.save({"drawn": draws.drawn, "next": draws.next, "model": model.state_dict()},
                       f"{'resumed' if resume else 'whole'}-{fit.global_rank}.pt")
"""


@pytest.mark.long
def test_two_processes_save_once_and_resume_exactly(tmp_path: Path, installed: Path) -> None:
    program = textwrap.dedent(DDP).replace("STRATEGY", '"ddp"')
    script(tmp_path, installed, program)
    names = ["last.ckpt", "step=3.ckpt", "step=6.ckpt"]
    assert sorted(os.listdir(tmp_path / "ckpt")) == names
    loaded = torch.load(tmp_path / "ckpt" / "step=3.ckpt")
    first, second = (each["random"] for each in loaded[KEY]["ranks"])
    assert not torch.equal(first, second)
    assert (tmp_path / ".portus" / "checkpoints.journal" / "ckpt.lines").exists()
    [left] = [
        state["portus_cadence"]["left"]
        for name, state in loaded["callbacks"].items()
        if name.startswith("PortusCheckpoint")
    ]
    script(tmp_path, installed, program, str(tmp_path / "ckpt" / "step=3.ckpt"))
    for rank in (0, 1):
        whole = torch.load(tmp_path / f"whole-{rank}.pt")
        resumed = torch.load(tmp_path / f"resumed-{rank}.pt")
        # As if a save cost one step, until one was measured; then what rank 0 says.
        assert whole["next"][:2] == [2, 2]
        assert whole["next"] == torch.load(tmp_path / "whole-0.pt")["next"]
        assert (tmp_path / "auto/step=2.ckpt").exists()
        assert resumed["next"][0] == left
        assert resumed["next"] == torch.load(tmp_path / "resumed-0.pt")["next"]
        assert resumed["drawn"] == [each for each in whole["drawn"] if each[0] >= 3]
        assert same(dict(resumed["model"]), dict(whole["model"]))


@pytest.mark.long
def test_spawned_processes_get_a_plugin_of_their_own(tmp_path: Path, installed: Path) -> None:
    script(tmp_path, installed, textwrap.dedent(DDP).replace("STRATEGY", '"ddp_spawn"'))
    assert torch.load(tmp_path / "ckpt" / "step=6.ckpt")["global_step"] == 6


OTHER_COPY = """
    import sys, torch
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader
    from portus_lightning import PortusIO
    import portus

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
        def training_step(self, batch, index):
            return self.layer(batch).pow(2).mean()
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    keep = ModelCheckpoint("ckpt", filename="{step}", every_n_train_steps=2, save_top_k=-1,
                           save_last=True)
    data = DataLoader(torch.rand(24, 4), batch_size=4)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, callbacks=[keep],
                         enable_progress_bar=False, plugins=[PortusIO()])
    names = [type(c).__name__ for c in trainer.callbacks]
    assert names.count("PortusCompanion") == 1, names
    assert all(isinstance(c, pl.Callback) for c in trainer.callbacks)
    trainer.fit(Net(), data)
    assert not portus.is_reference("ckpt/step=2.ckpt")
    assert not portus.is_reference("ckpt/last.ckpt")
    assert "portus_resume" in torch.load("ckpt/step=2.ckpt")
    Net.load_from_checkpoint("ckpt/step=2.ckpt")
    again = pl.Trainer(accelerator="cpu", max_epochs=2, logger=False, callbacks=[keep],
                       enable_progress_bar=False, plugins=[PortusIO()])
    again.fit(Net(), data, ckpt_path="ckpt/step=4.ckpt")
    assert again.global_step == 12
    assert "lightning.pytorch" not in sys.modules
    print("done")
"""


@pytest.mark.long
def test_the_other_copy_of_lightning_works_the_same(tmp_path: Path, installed: Path) -> None:
    assert script(tmp_path, installed, OTHER_COPY).endswith("done\n")


CLI = """
    import sys
    from lightning.pytorch.cli import LightningCLI
    from tests.adapters.tiny import Net, loader

    class Trained(Net):
        def train_dataloader(self):
            return loader()

    LightningCLI(Trained, save_config_callback=None, parser_kwargs={"parser_mode": "yaml"})
"""

YAML = """
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  plugins:
    - class_path: portus_lightning.PortusIO
      init_args:
        model: from-yaml
        snapshot: sync
        fixed_batch: global
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: ckpt, filename: "{step}", every_n_train_steps: 3, save_top_k: -1}
"""


@pytest.mark.long
def test_the_plugin_is_configured_from_yaml(tmp_path: Path, installed: Path) -> None:
    pytest.importorskip("jsonargparse")
    (tmp_path / "config.yaml").write_text(YAML)
    script(tmp_path, installed, CLI, "fit", "--config", "config.yaml")
    assert sorted(os.listdir(tmp_path / "ckpt")) == ["step=3.ckpt", "step=6.ckpt"]
    assert (tmp_path / ".portus" / "checkpoints.journal" / "from-yaml.lines").exists()
    # The command line reads the checkpoint itself, with weights_only=True, before it resumes.
    resume = ["--ckpt_path", "ckpt/step=6.ckpt", "--trainer.max_epochs", "2"]
    script(tmp_path, installed, CLI, "fit", "--config", "config.yaml", *resume)
    assert "step=12.ckpt" in os.listdir(tmp_path / "ckpt")


def test_fabric_saves_and_loads_and_needs_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    io = PortusIO()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    model = torch.nn.Linear(4, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "iteration": 0}
    expected = {}
    for _ in range(5):
        fabric.backward(model(torch.rand(8, 4)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        state["iteration"] += 1
        fabric.save(f"ckpt/{state['iteration']}.ckpt", state)
        expected[state["iteration"]] = model.weight.detach().clone()
    for step, weight in expected.items():
        loaded = fabric.load(f"ckpt/{step}.ckpt")
        assert loaded["iteration"] == step
        assert torch.equal(loaded["model"]["weight"], weight)
        assert torch.equal(torch.load(f"ckpt/{step}.ckpt")["model"]["weight"], weight)
    remainder = fabric.load("ckpt/2.ckpt", state)
    assert state["iteration"] == 2
    assert remainder == {}
    assert torch.equal(model.weight, expected[2])
    assert sorted(os.listdir(tmp_path)) == ["ckpt"]
    assert len(os.listdir(tmp_path / "ckpt")) == 5
    io.teardown()


FABRIC_END = """
    import torch
    from lightning.fabric import Fabric
    from portus_lightning import PortusIO
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[PortusIO()])
    fabric.save("ckpt/a.ckpt", {"big": torch.arange(2e6), "step": 1})
"""


@pytest.mark.long
def test_a_fabric_program_that_just_ends_has_saved(tmp_path: Path, installed: Path) -> None:
    script(tmp_path, installed, FABRIC_END)
    assert torch.equal(torch.load(tmp_path / "ckpt" / "a.ckpt")["big"], torch.arange(2e6))
