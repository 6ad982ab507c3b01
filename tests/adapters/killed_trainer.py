"""Trainings that are killed at one moment of a save after another, and resumed.

python killed_trainer.py ROOT STEP COUNT

Prints a JSON object: how many moments there are in the save of step STEP, and for COUNT of them,
spread over all, whether the resumed run ended with the same state as an uninterrupted one. A
moment is when a name or a file is about to be made, opened to write, replaced or removed. Each
training is a fork of this process, which imports what they need once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import portus_accelerate

STEPS = 4
_EVENTS = {"open", "os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


class Moments:
    """Counts the moments of a save, and kills the process at one of them."""

    def __init__(self, root: Path, step: int, kill_at: int | None) -> None:
        self.step = step
        self.root = os.fspath(root)
        self.kill_at = kill_at
        self.count = 0
        self.is_on = False
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or event not in _EVENTS:
            return
        if not self.is_below(event, arguments):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def is_below(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """Whether it is below the root: by its path, or by an open directory."""
        names = [each for each in arguments if isinstance(each, str)]
        if any(name.startswith(self.root) for name in names):
            return True
        if event == "open":  # it is not told of the directory; others open by absolute paths
            return not any(map(os.path.isabs, names))
        for number in (each for each in arguments if isinstance(each, int)):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith(self.root):
                    return True
        return False


def train(root: Path, resume: bool | str, moments: Moments | None = None) -> str:
    """A digest of the state at the end."""
    config = GPT2Config(
        n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=4, bos_token_id=0, eos_token_id=0
    )
    settings = TrainingArguments(
        output_dir=str(root),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_steps=1,
        save_total_limit=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data: Any = [
        {"input_ids": torch.arange(4) + number, "labels": torch.arange(4)} for number in range(12)
    ]
    torch.manual_seed(1)
    trainer: Any = Trainer(GPT2LMHeadModel(config), settings, train_dataset=data)
    if moments is not None:
        save = trainer._save_checkpoint

        def watched(*positional: Any, **named: Any) -> None:
            # Until it is over: most of a save is after the call.
            portus_accelerate.wait(trainer.accelerator)
            moments.is_on = trainer.state.global_step == moments.step
            save(*positional, **named)

        trainer._save_checkpoint = watched
    trainer.train(resume_from_checkpoint=resume)
    values = [*trainer.model.state_dict().values()]
    values += [each for one in trainer.optimizer.state.values() for each in one.values()]
    values += [torch.get_rng_state(), torch.tensor(trainer.state.global_step)]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


def forked(act: Callable[[], Any], said: Path) -> Any:
    """What ``act`` returns in a process of its own; None if it was killed. Its output is in
    ``said``."""
    answer = said.with_suffix(".json")
    child = os.fork()
    if child == 0:
        with open(said, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        answer.write_text(json.dumps(act()))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    if status:
        sys.exit(f"{said.read_text()[-4000:]}\n{said} ended with {status}")
    return json.loads(answer.read_text())


def killed_and_resumed(root: Path, step: int, moment: int) -> str:
    """The digest of a run that was killed at this moment, and resumed. Threads make some of a
    save's moments, so there may be fewer than last time: then at an earlier one."""
    out = root / f"out-{moment}"

    def killed() -> bool:
        train(out, False, Moments(out, step, moment))
        return False

    if forked(killed, root / f"killed-{moment}.txt") is not None:
        assert moment > 1, "no moment was reached"
        again = root / f"before-{moment}"
        again.mkdir()
        return killed_and_resumed(again, step, moment - 1)
    # As scripts do that look for the newest by themselves, too.

    def resumed() -> str:
        look: Any = get_last_checkpoint
        return train(out, (look(os.fspath(out)) or False) if moment % 2 else True)

    digest: str = forked(resumed, root / f"resumed-{moment}.txt")
    return digest


def main() -> None:
    root, step, count = Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)

    def whole() -> tuple[str, int]:
        moments = Moments(root / "whole", step, None)
        return train(root / "whole", False, moments), moments.count

    expected, moments = forked(whole, root / "whole.txt")
    chosen = sorted({round(1 + number * (moments - 1) / (count - 1)) for number in range(count)})
    same = {moment: killed_and_resumed(root, step, moment) == expected for moment in chosen}
    print(json.dumps({"moments": moments, "same": same}))


if __name__ == "__main__":
    main()
