"""A Trainer meets what goes wrong on real machines: it is said, and older versions load (V8)."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import portus
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.errors import BusyError, CorruptionError, MediumError, PortusError
from portus.index import directory, roots
from portus.index.directory import create_pool
from portus.media.local import LocalFiles
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
    """Takes all the space there is after a step; then it is as full as a disk gets."""

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
                    pass


def _newest(trainer: Trainer) -> str:
    callback = trainer.checkpoint_callback
    assert callback is not None
    return str(getattr(callback, "_last_checkpoint_saved"))  # noqa: B009


def fit(
    root: Path,
    pool: Path | None,
    *callbacks: Callback,
    saves: ModelCheckpoint | None = None,
    width: int = WIDTH,
    **settings: Any,
) -> Net:
    """Train for one epoch and save every step, or as ``saves`` says; the trained network."""
    net = Net(width)
    plugin = PortusIO(pool=pool, materialize="none", **settings)
    made = trainer(root, plugin=plugin, callbacks=[*callbacks, saves or every_step(root)])
    made.fit(net, loader())
    made.strategy.teardown()
    return net


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("portus")]


def test_a_state_that_never_fits_ends_the_training_at_the_next_call(
    tmp_path: Path, small: Path
) -> None:
    """Six epochs, exit 0 and nothing saved: nobody would look."""
    (small / "full").write_bytes(bytes(MOUNT_BYTES - (6 << 20)))
    with pytest.raises(MediumError, match=r"the pool needs space for .* No space left on device"):
        fit(tmp_path, small / "pool")
    assert not threads()


def test_one_save_at_the_end_that_fails_ends_the_training_as_a_failure(
    tmp_path: Path, small: Path
) -> None:
    (small / "full").write_bytes(bytes(MOUNT_BYTES - (6 << 20)))
    saves = every_step(tmp_path, every_n_train_steps=BATCHES)
    with pytest.raises(MediumError, match="No space left on device"):
        fit(tmp_path, small / "pool", saves=saves)
    assert not threads()


@pytest.mark.long
def test_an_error_of_the_training_is_not_hidden_by_a_save_that_failed(
    tmp_path: Path, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                raise ZeroDivisionError("mine")

    (small / "full").write_bytes(bytes(MOUNT_BYTES - (6 << 20)))
    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(tmp_path, small / "pool", Breaks())
    assert "Portus: a save failed" in caplog.text
    assert not threads()


@pytest.mark.long
def test_a_tmpfs_that_fills_up_in_training_costs_the_saves_and_not_the_run(
    tmp_path: Path, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "portus"):
        net = fit(tmp_path, small / "pool", FillsUp(small, 2))
    assert len(net.seen) == BATCHES
    assert "training continues" in "\n".join(caplog.messages)
    loaded = []
    for step in range(1, BATCHES + 1):
        path = tmp_path / "ckpt" / f"step={step}.ckpt"
        if path.exists():
            try:
                loaded.append(torch.load(path, weights_only=True)["global_step"])
            except portus.PortusError:
                continue
    assert loaded[0] == 1
    assert not threads()


def newest_step(root: Path) -> int:
    """The newest step that a checkpoint file leads to by itself, not as a way out."""
    found = [0]
    for path in (root / "ckpt").iterdir():
        with contextlib.suppress(portus.PortusError):
            reference, state = portus.read_reference(path), portus.load_reference(path)
            assert reference is not None
            assert isinstance(state, dict)
            if state["global_step"] == reference.step:
                found.append(reference.step)
    return max(found)


class Grows(Callback):
    """From step 3 on, what is saved takes more space than there is in the pool."""

    def on_save_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_step > 2:
            checkpoint["more"] = torch.zeros(MOUNT_BYTES, dtype=torch.uint8)


@pytest.mark.long
@pytest.mark.parametrize("top_k", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_full_disk_never_empties_the_checkpoint_directory(
    tmp_path: Path, small: Path, top_k: int
) -> None:
    saves = every_step(tmp_path, monitor="step", mode="max", save_top_k=top_k)
    fills = FillsUp(small, 3)
    fit(tmp_path, small / "pool", fills, Grows(), saves=saves, width=WIDTH // 2)
    assert newest_step(tmp_path) == 2


@pytest.mark.long
def test_a_pool_that_may_not_grow_never_empties_the_checkpoint_directory(tmp_path: Path) -> None:
    saves = every_step(tmp_path, monitor="step", mode="max", save_top_k=2, save_last="link")
    fit(tmp_path, tmp_path / "pool", Grows(), saves=saves, max_bytes=2 * MOUNT_BYTES)
    assert newest_step(tmp_path) == 2
    last = Path(saves.last_model_path)
    assert last.is_symlink()
    assert torch.load(last)["global_step"] == 2


FDATASYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int fails;  /* which of the next calls for a pool file: the first is 1 */

int fdatasync(int number) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", number);
    if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, ".portus") && fails > 0
        && --fails == 0) {
        errno = EIO;
        return -1;
    }
    return real(number);
}
"""

TRAINS = """
import ctypes, os, signal, sys
from pathlib import Path
from lightning.pytorch import Callback
from portus_lightning import PortusIO
from tests.adapters.tiny import Net, every_step, loader, trainer

root, shim = Path(sys.argv[1]), ctypes.CDLL(sys.argv[2])

class Breaks(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            path = trainer.checkpoint_callback._last_checkpoint_saved
            trainer.strategy.checkpoint_io.load_checkpoint(path)  # saves are over
            ctypes.c_int.in_dll(shim, "fails").value = 3  # of last.ckpt, not of step=2.ckpt
        if trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

saves = every_step(root, monitor="step", mode="max", save_top_k=2, save_last=True)
plugin = PortusIO(pool=root / "pools")
trainer(root, plugin=plugin, callbacks=[Breaks(), saves]).fit(Net(), loader())
"""


@pytest.mark.long
def test_one_failed_sync_and_a_kill_leave_the_newest_checkpoint_that_was_told(
    tmp_path: Path,
) -> None:
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(FDATASYNC)
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    ended = subprocess.run(
        [sys.executable, "-c", TRAINS, str(tmp_path), str(shim)],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert "persist failed" in ended.stderr
    assert newest_step(tmp_path) >= 2


@pytest.mark.long
def test_a_failed_save_ends_the_training_if_asked_to(tmp_path: Path, small: Path) -> None:
    (small / "full").write_bytes(bytes(MOUNT_BYTES - (6 << 20)))
    with pytest.raises(MediumError, match="No space left on device"):
        fit(tmp_path, small / "pool", on_error="raise")
    assert not threads()


def test_a_file_system_that_is_read_only_is_said_before_training(
    tmp_path: Path, small: Path
) -> None:
    (small / "pool").mkdir()
    assert _mount("-o", "remount,ro", str(small)) == 0
    with pytest.raises(MediumError, match="Read-only file system"):
        fit(tmp_path, small / "pool")
    assert not threads()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A pool file with one version, and a reference file beside its directory."""
    path = tmp_path / "pool" / "run.portus"
    with PoolCheckpointer(path) as checkpointer:
        state = {"weight": torch.arange(300_000.0)}
        checkpointer.save(state, 1, reference=tmp_path / "old.ckpt").wait()
    return path


def refused(tmp_path: Path, pool: Path, error: type[PortusError], *words: str) -> None:
    """A training on the pool is refused, by these words, and leaves its bytes alone."""
    before = pool.read_bytes()
    with pytest.raises(error) as raised:
        fit(tmp_path, pool)
    for word in (str(pool), *words):
        assert word in str(raised.value)
    assert pool.read_bytes() == before
    assert not threads()


def test_a_truncated_pool_is_refused_and_its_references_say_so(tmp_path: Path, saved: Path) -> None:
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
def test_a_pool_that_is_deleted_under_a_training_is_said_and_saves_go_on_in_a_successor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Deletes(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.strategy.checkpoint_io.load_checkpoint(_newest(trainer))  # saves are over
                (tmp_path / "run.portus").unlink()

    with caplog.at_level(logging.WARNING, "portus"):
        net = fit(tmp_path, tmp_path / "run.portus", Deletes())
    assert len(net.seen) == BATCHES
    assert "the file was deleted" in caplog.text
    newest = max(tmp_path.rglob("*.ckpt"), key=os.path.getmtime)
    assert torch.load(newest, weights_only=False)["global_step"] == BATCHES


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
        fit(tmp_path, saved)
    assert not threads()


@pytest.mark.long
def test_a_second_run_in_the_same_directory_gets_a_pool_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "HELD_S", 1.0)
    pools = tmp_path / ".portus"
    with held_by_another(pools / "ckpt.portus"):
        net = fit(tmp_path, None)
    assert len(net.seen) == BATCHES
    assert sorted(each.name for each in pools.glob("*.portus")) == ["ckpt.portus", "ckpt~2.portus"]
    with portus.open(pools) as view:
        assert view.steps("ckpt~2") == list(range(1, BATCHES + 1))
        assert view.steps("default") == [1]
    assert torch.load(tmp_path / "ckpt" / f"step={BATCHES}.ckpt")["global_step"] == BATCHES


def test_an_error_of_the_module_reaches_the_user_as_it_is(tmp_path: Path) -> None:
    class Breaks(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 3:
                raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(tmp_path, tmp_path / "pool", Breaks())
    assert not threads()
    assert torch.load(tmp_path / "ckpt" / "step=2.ckpt", weights_only=True)["global_step"] == 2
