"""Tensors on a CUDA device. Run where there is one; elsewhere skipped, with the reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import pytest
import torch

import portus
from tests.unit.client.test_checkpointer import same

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
    with portus.Checkpointer(tmp_path, snapshot=snapshot, keep=None) as checkpointer:
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
    with portus.Checkpointer(tmp_path) as checkpointer:
        _step(model, optimizer)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        checkpointer.save({"model": model.state_dict()}, 0).wait()
        assert torch.cuda.max_memory_allocated() == before


def test_restore_into_fills_device_tensors(tmp_path: Path) -> None:
    model, optimizer = _training()
    with portus.Checkpointer(tmp_path) as checkpointer:
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
