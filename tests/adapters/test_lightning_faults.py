"""A Trainer meets what goes wrong on real machines: it is said, and older versions load (V8)."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import portus
from portus.errors import BusyError, CorruptionError, MediumError, PortusError
from portus.reach.index import directory, roots
from portus.reach.index.directory import create_pool
from portus.reach.media.local import LocalFiles
from portus_lightning import PortusIO
from tests.adapters.tiny import BATCHES, NO_FUSS, Net, every_step, loader, trainer

pytestmark = NO_FUSS

MOUNT_BYTES = 24 << 20
WIDTH = 80_000
"""Of the network: about 7 MiB with the state of its optimizer."""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of ``MOUNT_BYTES``."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0 or _mount("-t", "tmpfs", "-o", f"size={MOUNT_BYTES}", "test", str(place)):
        pytest.skip("only root can mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def _mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode


class FillsUp(Callback):
    """Takes all the space there is after a step, but for 128 KiB."""

    def __init__(self, place: Path, step: int) -> None:
        self._place, self._step = place, step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.strategy.checkpoint_io.load_checkpoint(_newest(trainer))  # saves are over
            with open(self._place / "other", "wb") as file:
                try:
                    while True:
                        os.write(file.fileno(), bytes(64 << 10))
                except OSError:
                    file.truncate(max(0, os.fstat(file.fileno()).st_size - (128 << 10)))


def _newest(trainer: Trainer) -> str:
    callback = trainer.checkpoint_callback
    assert callback is not None
    return str(getattr(callback, "_last_checkpoint_saved"))  # noqa: B009


def fit(
    root: Path,
    *callbacks: Callback,
    pool: Path | None = None,
    saves: ModelCheckpoint | None = None,
    width: int = WIDTH,
    **settings: Any,
) -> Net:
    """Train for one epoch and save every step, or as ``saves`` says; the trained network."""
    net = Net(width)
    plugin = PortusIO(pool=pool, **settings)
    made = trainer(root, plugin=plugin, callbacks=[*callbacks, saves or every_step(root)])
    made.fit(net, loader())
    made.strategy.teardown()
    return net


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("portus")]


def test_a_state_that_never_fits_ends_the_training_at_the_next_call(small: Path) -> None:
    """Six epochs, exit 0 and nothing saved: nobody would look."""
    (small / "full").write_bytes(bytes(MOUNT_BYTES - (6 << 20)))
    with pytest.raises(MediumError, match="No space left on device; free space"):
        fit(small)
    assert not threads()
    assert os.listdir(small / "ckpt") == []


def test_one_save_at_the_end_that_fails_ends_the_training_as_a_failure(small: Path) -> None:
    (small / "full").write_bytes(bytes(MOUNT_BYTES - (6 << 20)))
    with pytest.raises(MediumError, match="No space left on device"):
        fit(small, saves=every_step(small, every_n_train_steps=BATCHES))
    assert not threads()


@pytest.mark.long
def test_an_error_of_the_training_is_not_hidden_by_a_save_that_failed(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                raise ZeroDivisionError("mine")

    (small / "full").write_bytes(bytes(MOUNT_BYTES - (6 << 20)))
    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(small, Breaks())
    assert "Portus: a save failed" in caplog.text
    assert not threads()


def steps(root: Path) -> list[int]:
    """Those of the files that are there, all of which load and are whole."""
    found = []
    for path in (root / "ckpt").iterdir():
        assert zipfile.ZipFile(path).testzip() is None
        found.append(torch.load(path, weights_only=True)["global_step"])
    return sorted(set(found))


@pytest.mark.long
def test_a_tmpfs_that_fills_up_in_training_costs_the_saves_and_not_the_run(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "portus"):
        net = fit(small, FillsUp(small, 2))
    assert len(net.seen) == BATCHES
    assert "training continues" in "\n".join(caplog.messages)
    assert steps(small) in ([1], [1, 2])
    assert not threads()


@pytest.mark.long
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("last", [None, True, "link"])
def test_a_full_disk_never_empties_the_checkpoint_directory(
    small: Path, top_k: int, last: Any
) -> None:
    saves = every_step(small, monitor="step", mode="max", save_top_k=top_k, save_last=last)
    fit(small, FillsUp(small, 3), saves=saves, width=WIDTH // 4)
    found = steps(small)
    assert max(found) > 2, "the space of what was removed is used again"
    link = small / "ckpt" / "last.ckpt"
    assert last is None or link.exists()


class Grows(Callback):
    """From step 4 on, what is saved needs the space of all that was saved before but the newest."""

    def on_save_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_step >= 4:
            checkpoint["more"] = torch.zeros(7 << 20, dtype=torch.uint8)


@pytest.mark.long
def test_on_a_full_disk_what_is_to_be_removed_goes_first_if_a_newer_one_is_there(
    small: Path,
) -> None:
    """Two of 7 MiB are kept, and a third one of 14 MiB fits once one of them is gone."""
    saves = every_step(small, monitor="step", mode="max", save_top_k=2)
    fit(small, Grows(), saves=saves, on_error="warn")
    found = steps(small)
    assert max(found) >= 4, "or a disk of this size would never see a newer one again"


@pytest.mark.long
def test_a_failed_save_ends_the_training_if_asked_to(small: Path) -> None:
    (small / "full").write_bytes(bytes(MOUNT_BYTES - (6 << 20)))
    with pytest.raises(MediumError, match="No space left on device"):
        fit(small, on_error="raise")
    assert not threads()


def test_a_file_system_that_is_read_only_is_said_at_the_first_save(small: Path) -> None:
    assert _mount("-o", "remount,ro", str(small)) == 0
    with pytest.raises(MediumError, match="Read-only file system"):
        fit(small)
    assert not threads()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A pool file with one version, and a pointer beside its directory."""
    path = tmp_path / "pool" / "run.portus"
    files = portus.TrainingFiles(portus.Settings(), pool=portus.Place.parse(path))
    files.save({"weight": torch.arange(300_000.0)}, str(tmp_path / "old.ckpt"), 1).wait()
    files.close()
    return path


def refused(tmp_path: Path, pool: Path, error: type[PortusError], *words: str) -> None:
    """A training on the pool is refused, by these words, and leaves its bytes alone."""
    before = pool.read_bytes()
    with pytest.raises(error) as raised:
        fit(tmp_path, pool=pool)
    for word in (str(pool), *words):
        assert word in str(raised.value)
    assert pool.read_bytes() == before
    assert not threads()


def test_a_truncated_pool_is_refused_and_its_pointers_say_so(tmp_path: Path, saved: Path) -> None:
    os.truncate(saved, 700_000)
    refused(tmp_path, saved, CorruptionError, "truncated")
    with pytest.raises(CorruptionError, match="truncated"):
        torch.load(tmp_path / "old.ckpt", weights_only=True)


def test_a_pool_of_a_newer_format_is_refused_and_the_way_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pool" / "run.portus"
    with monkeypatch.context() as newer:
        newer.setattr(roots, "FORMAT_VERSION", 2)
        path.parent.mkdir()
        create_pool(str(path), LocalFiles())
    refused(tmp_path, path, portus.UsageError, "newer Portus", "Upgrade")


def test_a_pool_that_cannot_be_opened_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    pool = tmp_path / "run.portus"
    pool.write_bytes(b"no pool" * 10_000)
    net = Net(WIDTH)
    made = trainer(tmp_path, plugin=PortusIO(pool=pool), callbacks=[every_step(tmp_path)])
    with pytest.raises(CorruptionError, match="not a Portus pool"):
        made.fit(net, loader())
    assert net.seen == []
    assert not threads()


@pytest.mark.long
def test_a_pool_that_is_deleted_under_a_training_fails_its_saves_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Deletes(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.strategy.checkpoint_io.load_checkpoint(_newest(trainer))  # saves are over
                (tmp_path / "run.portus").unlink()

    with caplog.at_level(logging.WARNING, "portus"):
        net = fit(tmp_path, Deletes(), pool=tmp_path / "run.portus")
    assert len(net.seen) == BATCHES
    assert "the file was deleted" in caplog.text
    assert "training continues" in caplog.text
    assert not (tmp_path / "ckpt" / f"step={BATCHES}.ckpt").exists(), "no pointer leads nowhere"
    assert not threads()


@contextlib.contextmanager
def held_by_another(pool: Path) -> Iterator[int]:
    """The pool file is open for saving in another process; its pid."""
    program = f"""
import sys, portus, torch
with portus.PoolCheckpointer({str(pool)!r}) as checkpointer:
    checkpointer.save({{"x": torch.zeros(3)}}, 1).wait()
    print("open", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "open\n"
        yield holder.pid
        holder.stdin.close()
        assert holder.wait(60) == 0


@pytest.mark.long
def test_a_pool_that_another_training_holds_is_refused_by_name(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "HELD_S", 1.0)
    with held_by_another(saved) as pid, pytest.raises(BusyError, match=f"pid {pid}"):
        fit(tmp_path, pool=saved)
    assert not threads()


def test_an_error_of_the_module_reaches_the_user_as_it_is(tmp_path: Path) -> None:
    class Breaks(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 3:
                raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(tmp_path, Breaks())
    assert not threads()
    assert torch.load(tmp_path / "ckpt" / "step=2.ckpt", weights_only=True)["global_step"] == 2
