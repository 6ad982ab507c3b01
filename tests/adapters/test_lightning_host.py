"""A Trainer whose checkpoints go to a storage host: one argument, and the rest stays as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import portus
from portus_lightning import PortusIO
from tests.adapters.tiny import NO_FUSS, Net, every_step, files, loader, same, trainer
from tests.hosts import serving, url

pytestmark = NO_FUSS

LOAD = "import sys, torch; print(torch.load(sys.argv[1], weights_only=True)['global_step'])"


def loaded_elsewhere(path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """What another process makes of the file; it has not configured anything but ``settings``."""
    return subprocess.run(
        [sys.executable, "-c", LOAD, str(path)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def best_two(run: Path) -> ModelCheckpoint:
    return every_step(run, save_top_k=2, monitor="step", mode="max")


@pytest.mark.long
def test_a_run_on_a_storage_host_keeps_resumes_and_is_loaded_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.chdir(run)
    with serving(tmp_path / "host") as server:
        plugin = PortusIO(pool=url(server))
        first = trainer(run, plugin=plugin, callbacks=[best_two(run)])
        net = Net()
        first.fit(net, loader(), loader(shuffle=False))
        names = files(run)
        assert len(names) == 2
        path = run / "ckpt" / names[-1]
        assert path.stat().st_size < 4096, "a reference, not the bytes"
        with portus.open(url(server)) as pool:
            assert len(pool.versions()) == 2, "removed ones left the pool too"
        assert not list(run.rglob("?*.portus")), "no pool on this machine"

        portus.allow(url(server))  # as each rank's plugin does
        state = torch.load(path, weights_only=True)
        plugin = PortusIO(pool=url(server))
        again = trainer(run, plugin=plugin, max_epochs=2, callbacks=[best_two(run)])
        other = Net()
        again.fit(other, loader(), loader(shuffle=False), ckpt_path=str(path))
        assert again.global_step > state["global_step"]

        found = loaded_elsewhere(path, PORTUS_POOL=url(server))
        assert found.stdout.strip() == str(state["global_step"]), found.stderr
        refused = loaded_elsewhere(path)
        assert refused.returncode
        assert "PORTUS_POOL=portus://" in refused.stderr, "a reference alone opens no host"


def test_at_the_end_what_leads_to_the_host_loads_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "host") as server:
        run = trainer(tmp_path, plugin=PortusIO(pool=url(server)), callbacks=[every_step(tmp_path)])
        net = Net()
        run.fit(net, loader(), loader(shuffle=False))
        last = tmp_path / "ckpt" / "step=6.ckpt"
        assert portus.is_reference(last)
        state = torch.load(last, weights_only=False)["state_dict"]
        assert same(dict(state), dict(net.state_dict()))
