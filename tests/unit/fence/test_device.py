"""Tensors on a CUDA device. Run where there is one; elsewhere skipped, with the reason."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Literal

import pytest
import torch

import portus
from portus.companions.job.clock import Clock
from tests.unit.pools.test_checkpointer import same

pytestmark = pytest.mark.gpu


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3000, 3000), torch.nn.Linear(3000, 10)).cuda()
    return model, torch.optim.AdamW(model.parameters())


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(64, 3000, device="cuda")).pow(2).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("snapshot", ["auto", "sync", "device"])
def test_a_version_holds_what_was_on_the_device_at_its_call(
    tmp_path: Path, snapshot: Literal["auto", "sync", "device"]
) -> None:
    model, optimizer = _training()
    with portus.PoolCheckpointer(
        tmp_path / "a.portus", snapshot=snapshot, keep=None
    ) as checkpointer:
        expected = {}
        for step in range(8):
            _step(model, optimizer)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpointer.save(state, step)
            torch.cuda.synchronize()
            expected[step] = copy.deepcopy(state)
        for step, state in expected.items():
            loaded = checkpointer.load(step)
            assert same(loaded, _on_cpu(state))


def test_a_save_in_the_default_mode_adds_no_device_memory(tmp_path: Path) -> None:
    model, optimizer = _training()
    with portus.PoolCheckpointer(tmp_path / "a.portus") as checkpointer:
        _step(model, optimizer)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        checkpointer.save({"model": model.state_dict()}, 0).wait()
        assert torch.cuda.max_memory_allocated() == before


def test_a_copy_to_the_host_that_stalls_steps_becomes_one_on_the_device(tmp_path: Path) -> None:
    model, optimizer = _training()
    with portus.PoolCheckpointer(tmp_path / "a.portus") as checkpointer:
        peaks = []
        for step in range(12):
            for _ in range(4):
                _step(model, optimizer)  # far shorter than a copy of 108 MB to the host
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            handle = checkpointer.save(state, step)
            peaks.append(torch.cuda.max_memory_allocated() - before)
            _step(model, optimizer)
            handle.wait()
        assert peaks[0] == 0, "nothing is known yet"
        assert max(peaks) >= 100 << 20, "a second copy, once"


def test_steps_are_timed_by_what_the_device_takes_and_nothing_waits_for_it() -> None:
    _, optimizer = _training()
    seen = Clock()
    cycles = 50_000_000
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    torch.cuda._sleep(cycles)
    second.record()
    second.synchronize()
    took_s = first.elapsed_time(second) / 1e3
    start = time.perf_counter()
    for _ in range(6):
        optimizer.step()
        torch.cuda._sleep(cycles)
    assert time.perf_counter() - start < 3 * took_s, "it was only asked for"
    torch.cuda.synchronize()
    seen.tick()
    seen.close()
    assert seen.step_s == pytest.approx(took_s, rel=0.2)


def test_restore_into_fills_device_tensors(tmp_path: Path) -> None:
    model, optimizer = _training()
    with portus.PoolCheckpointer(tmp_path / "a.portus") as checkpointer:
        _step(model, optimizer)
        checkpointer.save(model.state_dict(), 0).wait()
        saved = copy.deepcopy(model.state_dict())
        _step(model, optimizer)
        checkpointer.restore_into(model.state_dict())
        assert same(model.state_dict(), saved)


def _on_cpu(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return type(value)((key, _on_cpu(item)) for key, item in value.items())
    if isinstance(value, list):
        return [_on_cpu(item) for item in value]
    return value
