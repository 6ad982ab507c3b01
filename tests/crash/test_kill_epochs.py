"""Trainings that are killed in the middle of epochs, and go on with the same or other ranks."""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.crash.epoch_trainer import SAMPLES
from tests.nursery import nursery

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.timeout(600),
]

_MODULE = "tests.crash.epoch_trainer"
_TRAINS = {"lightning": "train", "accelerate": "tests.crash.epoch_script:train"}
_HUGGING = "tests.crash.epoch_hugging"
_NAMES = {
    "lightning": "step=*.ckpt",
    "accelerate": "step_*/random_states_0.pkl",
    "transformers": "checkpoint-*/optimizer.pt",
}
_MEETINGS = itertools.count()

KILLS = -(-int(os.environ.get("PORTUS_TEST_KILLS", "8")) // 8)
"""For each framework, number of ranks and workers."""

DELAY_S_MAX = 0.02


@dataclass
class History:
    """What a training did, over all restarts: what was done again counts as it was done last."""

    steps: dict[tuple[int, int], dict[int, list[int]]] = field(default_factory=dict)
    """(epoch, batch of it): by rank, the samples."""
    validated: list[int] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)

    def note(self, rank: int, line: str) -> None:
        word, *rest = line.split()
        if word == "step":
            _, epoch, index, *rows = map(int, rest)
            self.steps.setdefault((epoch, index), {}).setdefault(rank, []).extend(rows)
        elif word == "validated" and rank == 0:
            self.validated.append(int(rest[0]))
        elif word == "ended":
            self.ended.add(line)

    def forget_from(self, batches: int) -> None:
        """Go back to a checkpoint that was made after so many batches."""
        for each in sorted(self.steps)[batches:]:
            del self.steps[each]

    def samples(self, epoch: int) -> Counter[int]:
        return Counter(
            row
            for (each, _), ranks in self.steps.items()
            for rows in ranks.values()
            for row in rows
            if each == epoch
        )


def newest(root: Path, framework: str) -> tuple[int, str | None]:
    """The newest checkpoint that was committed: how many batches it was after, and its path."""
    files = Path(root, "ckpt").glob(_NAMES[framework])
    found = {
        int(re.findall(r"(?:step[=_]|checkpoint-)(\d+)", str(each))[-1]): each for each in files
    }
    if not found:
        return 0, None
    step = max(found)  # the files of a directory appear together
    return step, os.fspath(found[step] if framework == "lightning" else found[step].parent)


def run(
    history: History,
    root: Path,
    framework: str = "lightning",
    *,
    ranks: int = 1,
    workers: int = 0,
    batch: int = 3,
    until: int | None = None,
    delay_s: float = 0.0,
    of_portus: Mapping[str, Any] | None = None,
    **settings: Any,
) -> int:
    """Train on from the newest checkpoint, to the end, or until the ranks are killed some time
    after step ``until`` began; the step that it resumed from."""
    step, resume = newest(root, framework)
    history.forget_from(step)
    if framework == "transformers":
        children = nursery(_HUGGING, PORTUS_ACCELERATE="1")
    else:
        children = nursery(_MODULE)
    root.mkdir(exist_ok=True)
    common = (ranks, workers, batch, of_portus or {}, settings)
    meeting = os.fspath(root / f"meeting-{next(_MEETINGS)}")
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                children.start(
                    _TRAINS.get(framework, "train"), os.fspath(root), resume, meeting, rank, *common
                )
            )
            for rank in range(ranks)
        ]
        if until is not None:
            line = ""
            while not line.startswith(f"step {until} "):
                history.note(0, line := started[0].line())
            time.sleep(delay_s)
        for rank, child in enumerate(started):
            for line in child.rest() if until is None else child.kill():
                history.note(rank, line)
            assert until is not None or child.wait() == 0
    return step


def check_samples(history: History, epoch: int, step: int) -> None:
    """Each sample came once, but that the last step of ``step`` samples was filled up."""
    repeated = history.samples(epoch) - Counter(range(SAMPLES))
    assert set(history.samples(epoch)) == set(range(SAMPLES))
    assert repeated.total() == -SAMPLES % step
    last = max(index for each, index in history.steps if each == epoch)
    at_the_end = [row for rows in history.steps[epoch, last].values() for row in rows]
    assert set(repeated) <= set(at_the_end), "only there"


@pytest.mark.parametrize(
    ("framework", "ranks", "workers", "kills"),
    [
        pytest.param("lightning", 1, 0, 1, marks=pytest.mark.long),
        pytest.param("accelerate", 1, 0, 1, marks=pytest.mark.long),
        *(
            pytest.param(framework, ranks, workers, KILLS, marks=pytest.mark.long)
            for framework in _TRAINS
            for ranks in (1, 2)
            for workers in (0, 2)
        ),
    ],
)
def test_a_killed_training_gets_each_sample_once_and_ends_with_the_same_bits(
    framework: str, ranks: int, workers: int, kills: int, tmp_path: Path, seed: int
) -> None:
    whole, settings = History(), dict[str, Any]()
    if framework == "accelerate":
        settings["skip"] = workers == 0
    run(whole, tmp_path / "whole", framework, ranks=ranks, workers=workers, **settings)
    assert len(whole.ended) == 1
    for epoch in (0, 1):
        check_samples(whole, epoch, 6 if framework == "accelerate" and ranks == 2 else 1)
    chance, made, steps = random.Random(seed), 0, len(whole.steps)
    while made < kills:
        killed, root = History(), tmp_path / f"killed-{made}"
        while made < kills and (done := newest(root, framework)[0]) + 2 < steps:
            run(
                killed,
                root,
                framework,
                ranks=ranks,
                workers=workers,
                until=chance.randrange(done + 1, min(done + 6, steps)),
                delay_s=chance.uniform(0, DELAY_S_MAX),
                **settings,
            )
            made += 1
        run(killed, root, framework, ranks=ranks, workers=workers, **settings)
        assert killed.steps == whole.steps
        assert killed.ended == whole.ended
    assert made == kills


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("stateful", 0),
        ("stateful", 2),
        ("part", 0),
    ],
)
def test_loaders_with_a_state_go_on_in_two_processes_within_an_epoch_and_from_its_end(
    kind: str, workers: int, tmp_path: Path
) -> None:
    whole, cut = History(), History()
    run(whole, tmp_path / "whole", ranks=2, workers=workers, kind=kind)
    for until in (2, 4, -1):
        run(cut, tmp_path / "cut", ranks=2, workers=workers, kind=kind, max_steps=until)
    assert len(whole.samples(0)) == len(whole.samples(1)) == SAMPLES
    assert cut.steps == whole.steps
    assert whole.ended < cut.ended


@pytest.mark.long
@pytest.mark.parametrize(
    ("fixed", "kind"),
    [
        ("global", "plain"),
        pytest.param("local", "plain", marks=pytest.mark.long),
        pytest.param("local", "stateful", marks=pytest.mark.long),
    ],
)
def test_each_sample_comes_once_with_two_one_three_and_two_ranks(
    fixed: str, kind: str, tmp_path: Path
) -> None:
    history = History()
    begun = []
    for ranks, until in ((2, 1), (1, 2), (3, 3), (2, -1)):
        batch = 3 if ranks == 2 or fixed == "global" else 2
        named: dict[str, Any] = {"of_portus": {"fixed_batch": fixed}, "max_steps": until}
        named |= {"val_check_interval": 0.5, "limit_val_batches": 1, "kind": kind}
        begun.append(run(history, tmp_path, ranks=ranks, batch=batch, **named))
    assert begun == [0, 1, 2, 3]
    steps = [sum(map(len, ranks.values())) for ranks in history.steps.values()]
    if fixed == "local":
        assert steps == [6, 2, 6, 6, 2, *(6, 6, 6, 4)]
    else:
        assert steps == [6, 6, 6, 4, *(6, 6, 6, 4)]
    for epoch in (0, 1):
        assert history.samples(epoch) == Counter(range(SAMPLES))
    first = steps[4:].index(4) + 4 - 3  # of the second epoch
    assert history.validated[-2:] == [first + 2, first + 4], "twice in an epoch of four batches"
    state: Any = torch.load(newest(tmp_path, "lightning")[1] or "", weights_only=False)
    assert state["lr_schedulers"][0]["last_epoch"] == 2, "one step for each epoch"


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [6, 3, 9, 6, *(6, 6, 6, 6)]),
        (
            {"split_batches": True, "batch": 6, "use_seedable_sampler": True},
            [6, 6, 6, 6, *(6, 6, 6, 6)],
        ),
        ({"fixed": "global", "skip": False, "even_batches": False}, [6, 6, 6, 4, *(6, 6, 6, 4)]),
        ({"dispatch_batches": True}, [6, 3, 9, 4, *(6, 6, 6, 4)]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_sample_comes_once_under_accelerate_with_two_one_three_and_two_processes(
    settings: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    history = History()
    more = dict(settings)
    fixed, batch = more.pop("fixed", "local"), more.pop("batch", 3)
    for step, (ranks, until) in enumerate(((2, 1), (1, 2), (3, 3), (2, -1))):
        named: dict[str, Any] = {"of_portus": {"fixed_batch": fixed}, "stop": until}
        assert step == run(
            history, tmp_path, "accelerate", ranks=ranks, batch=batch, **named, **more
        )
    assert [sum(map(len, ranks.values())) for ranks in history.steps.values()] == steps
    for epoch in (0, 1):
        check_samples(history, epoch, 6 if steps[-1] == 6 else 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "settings", "steps"),
    [
        ("2:1 1:2 3:3 2", {}, [6, 3, 9, 6, *(6, 6, 6, 6)]),
        ("2:1 1:2 3:3 2", {"fixed": "global"}, [6, 6, 6, 6, *(6, 6, 6, 6)]),
        ("1:2 2", {"gradient_accumulation_steps": 2}, [6, 6, 12, *(12, 12)]),
        ("1:9 2", {}, [3, 3, 3, 3, 3, 3, 3, 1, *(3, 6, 6, 6, 6)]),
        ("2:5 1", {"max_steps": 8}, [6, 6, 6, 6, *(6, 3, 3, 3)]),
        ("2:3 1:9 1", {}, [6, 6, 6, 3, 1, *(3, 3, 3, 3, 3, 3, 3, 1)]),
    ],
    ids=str,
)
def test_each_sample_comes_once_under_trainer_with_other_numbers_of_processes(
    path: str, settings: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    """path: numbers of processes, each with the step that it stops after."""
    history, before = History(), 0
    named = dict(settings)
    of_portus = {"fixed_batch": named.pop("fixed", "local")}
    for each in path.split():
        ranks, _, until = each.partition(":")
        named["stop"] = int(until or -1)
        begun = run(
            history, tmp_path, "transformers", ranks=int(ranks), of_portus=of_portus, **named
        )
        assert begun == before
        before = named["stop"]
    assert [sum(map(len, ranks.values())) for ranks in history.steps.values()] == steps
    for epoch in (0, 1) if "max_steps" not in settings else (0,):
        assert set(history.samples(epoch)) == set(range(SAMPLES))
