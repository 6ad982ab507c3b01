"""Objects of registered classes, and streams, in what Accelerate saves."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

import portus
import portus_accelerate
from portus.client.state import codecs
from tests.unit.client.kinds import Replay
from tests.unit.client.same import assert_same


def state_of(step: int) -> dict[str, Any]:
    return {
        "buffer": Replay(torch.full((5,), float(step)), [step]),
        "log": io.BytesIO(b"%d" % step),
    }


class Held:
    """An object that a script registers for checkpointing."""

    def __init__(self) -> None:
        self.state: Any = state_of(1)

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_accelerate_saves_them_and_goes_on_from_references_and_from_real_files(
    tmp_path: Path,
) -> None:
    for end in (False, True):
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
        portus_accelerate.enable(accelerator, model="net")
        accelerator.prepare(torch.nn.Linear(2, 2))
        held = Held()
        accelerator.register_for_checkpointing(held)
        file = tmp_path / "one" / "custom_checkpoint_0.pkl"
        if not file.exists():
            accelerator.save_state(str(tmp_path / "one"))
            assert portus.is_reference(file)
        assert portus.is_reference(file) is not end
        held.state = None
        accelerator.load_state(str(tmp_path / "one"))
        assert_same(state_of(1), held.state)
        accelerator.end_training()
    assert codecs.is_stand_in(torch.load(file, weights_only=False)["buffer"])
