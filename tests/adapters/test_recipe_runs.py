"""The recipes as users run them, with ``--tiny``: in processes of their own, killed and resumed."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import portus
from checkpoint_bytes import Checkpoint, checkpoint_of
from gpt import SIZES
from tests.adapters.launching import TWO

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CONFIGS = RECIPES / "configs"
LAUNCH = ("-m", "accelerate.commands.accelerate_cli", "launch", "--config_file")

OF_THE_FRAMEWORK_MAX = 64 << 10
"""Bytes that a framework adds to a checkpoint: random states, schedules, loops."""

GROWTH = 2 << 20
STEP = re.compile(r"^step +(\d+)  loss (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def expected() -> Checkpoint:
    return checkpoint_of(SIZES["tiny"])


def start(root: Path, site: Path, *command: object) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PORTUS")}
    more = {"PYTHONPATH": str(site), "HF_HOME": str(root / "hf")}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**clean, **more, "PYTHONWARNINGS": "ignore"},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(root: Path, site: Path, *command: object) -> str:
    """What it printed."""
    process = start(root, site, *command)
    try:
        printed, errors = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    assert process.returncode == 0, errors
    return printed


def kill(process: subprocess.Popen[str]) -> str:
    """Kill it, and all that it started: torchrun gives each rank a session of its own. Return what
    it had still printed."""
    launched = psutil.Process(process.pid)
    for each in [*launched.children(recursive=True), launched]:
        each.kill()
    assert process.stdout is not None
    printed = process.stdout.read()
    process.communicate()
    return printed


def killed(root: Path, site: Path, *command: object, at: int) -> str:
    """What it printed until it was killed, with all its processes, after step ``at`` or a little
    later."""
    process = start(root, site, *command)
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if (step := STEP.match(line)) and int(step[1]) == at:
            break
    printed += kill(process)
    assert at <= int(STEP.findall(printed)[-1][0]) < 20, "it ended before"
    return printed


def assert_goes_on(before: str, after: str) -> None:
    """The steps that both runs took have the same losses to the last digit printed."""
    losses = dict(STEP.findall(before))
    at = max(map(int, losses))
    again = dict(STEP.findall(after))
    first = int(next(iter(again)))
    assert 1 < first <= at + 1, f"resumed from step {first - 1}"
    both = losses.keys() & again.keys()
    assert len(both) == at - first + 1
    assert {step: again[step] for step in both} == {step: losses[step] for step in both}
    assert list(again)[-1] == "20"


def assert_stored(pool: Path, each: int, expected_pool: int) -> None:
    """The newest version of a pool has the computed bytes, and the pool did not grow beyond what
    was computed."""
    with portus.open(pool) as view:
        newest = view.versions()[-1]
    assert each <= newest.size < each + OF_THE_FRAMEWORK_MAX
    assert pool.stat().st_size <= expected_pool + GROWTH


OF_AN_ITEM_MAX = 4 << 10
"""Bytes of a shard beside its own: the zip that it is in, and torch's metadata of it."""


@pytest.mark.long
def test_torchrun_killed_and_resumed_stores_what_was_computed(
    tmp_path: Path, installed: Path, expected: Checkpoint
) -> None:
    config = CONFIGS / "torchrun" / "22B.yaml"
    command = (
        *TWO,
        RECIPES / "train_torchrun.py",
        "--config",
        config,
        "--tiny",
        "--checkpoints=ckpt",
    )
    before = killed(tmp_path, installed, *command, at=13)
    after = run(tmp_path, installed, *command)
    assert_goes_on(before, after)
    newest = tmp_path / "ckpt" / "step_20"
    assert len(list(newest.glob("__*_*.distcp"))) == 2
    noted = FileSystemReader(newest).read_metadata()
    shards = [
        each
        for each in noted.state_dict_metadata.values()
        if isinstance(each, TensorStorageMetadata)
    ]
    stored = sum(
        math.prod(chunk.sizes) * each.properties.dtype.itemsize
        for each in shards
        for chunk in each.chunks
    )
    assert stored == expected.state
    files = [each.stat().st_size for each in newest.iterdir()]
    count = sum(len(each.chunks) for each in shards)
    assert stored < sum(files) < stored + count * OF_AN_ITEM_MAX + OF_THE_FRAMEWORK_MAX


@pytest.mark.long
def test_lightning_stores_what_was_computed(
    tmp_path: Path, installed: Path, expected: Checkpoint
) -> None:
    config = CONFIGS / "lightning" / "124M.yaml"
    script = RECIPES / "train_lightning.py"
    run(tmp_path, installed, script, "fit", "--config", config, "--tiny")
    folder = tmp_path / "runs/lightning-124M"
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["last.ckpt", "step=15.ckpt", "step=20.ckpt"]
    for name in names:
        with zipfile.ZipFile(folder / "checkpoints" / name) as archive:
            sizes = [each.file_size for each in archive.infolist() if "/data/" in each.filename]
        assert expected.state <= sum(sizes) < expected.state + OF_THE_FRAMEWORK_MAX


@pytest.mark.long
def test_lightning_trains_the_sharded_recipe_on_two_processes(
    tmp_path: Path, installed: Path
) -> None:
    config = CONFIGS / "lightning" / "22B.yaml"
    run(tmp_path, installed, RECIPES / "train_lightning.py", "fit", "--config", config, "--tiny")
    names = sorted(path.name for path in (tmp_path / "runs/lightning-22B/checkpoints").iterdir())
    assert names == ["last.ckpt", "step=15.ckpt", "step=20.ckpt"]


def accelerate(name: str, config: Path | None = None) -> tuple[object, ...]:
    config = config or CONFIGS / "accelerate" / f"{name}.yaml"
    one = ("--num_machines=1", "--num_processes=1")
    return (*LAUNCH, config, *one, RECIPES / "train_accelerate.py", "--tiny")


@pytest.mark.long
def test_accelerate_stores_what_was_computed(
    tmp_path: Path, installed: Path, expected: Checkpoint
) -> None:
    run(tmp_path, installed, *accelerate("124M"))
    folder = tmp_path / "runs/accelerate-tiny"
    checkpoints = list((folder / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    for checkpoint in checkpoints:
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        assert expected.state <= size < expected.state + OF_THE_FRAMEWORK_MAX
    assert not list(folder.rglob("?*.portus")), "no pool"


@pytest.mark.long
@pytest.mark.parametrize("name", ["124M", "22B"])
def test_accelerate_killed_and_resumed(tmp_path: Path, installed: Path, name: str) -> None:
    before = killed(tmp_path, installed, *accelerate(name), at=13)
    assert_goes_on(before, run(tmp_path, installed, *accelerate(name)))


@pytest.mark.long
def test_lora_writes_what_is_frozen_once(tmp_path: Path, installed: Path) -> None:
    printed = run(tmp_path, installed, RECIPES / "lora.py")
    rows = [tuple(int(word.replace(",", "")) for word in line.split())
            for line in printed.splitlines()[1:]]  # fmt: skip
    frozen = 4 * checkpoint_of(SIZES["tiny"]).parameters
    (state, *_), *_ = [row[1:] for row in rows]
    assert rows == [
        (1, state, state, 0),
        (2, state, state - frozen, frozen),
        (3, state, state - frozen, frozen),
    ]
    assert printed.rstrip() in (RECIPES / "README.md").read_text()
