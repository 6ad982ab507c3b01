"""Where memory of a device is copied first, by numbers; with devices: ``test_device``."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from portus.companions.job.clock import Clock, HostTimeline, Placing
from portus.engine.fence import fence
from portus.engine.pipeline.handle import SaveStats
from tests.unit.job.flight import Flight

ROOM = 10, 11
"""Bytes to copy, and bytes of the device that are free."""


@dataclass
class Moment:
    """Seconds, that pass when the test says so."""

    s: float = 0.0


class Training:
    """Steps of 1 s, of which what is before the call of save takes 0.25 s. Each save is copied to
    the host in ``host_s`` and, where that is chosen, on the device in ``device_s``."""

    def __init__(self, host_s: float, device_s: float) -> None:
        moment = self.now = Moment()
        self.host_s, self.device_s = host_s, device_s
        self.placing = Placing(now=lambda: moment.s)
        parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([parameter], lr=0.1)

    def save(self, room: tuple[int, int] = ROOM) -> bool:
        for _ in range(4):
            self.optimizer.step()
            self.now.s += 1.0
        self.optimizer.step()
        self.now.s += 0.25
        is_on_device = self.placing.on_device(*room)
        if is_on_device:
            self.placing.note_copy(HostTimeline(lambda: 0.0), 0.0, self.device_s)
        made = Flight(SaveStats(copy_s=self.host_s, total_s=self.host_s), over=True)
        fence.began(made, "memory")
        self.placing.begins(made)
        self.now.s += 0.75
        return is_on_device


@pytest.mark.parametrize(
    ("host_s", "device_s", "room", "expected"),
    [
        (0.75, 0.0, ROOM, [False, False, False, False]),  # done before the next update
        (1.0, 0.05, ROOM, [False, True, True, True]),  # 0.25 s too late, once that is known
        (1.0, 0.3, ROOM, [False, True, False, False]),  # tried once, and dearer than the stall
        (1.0, 0.25, ROOM, [False, True, True, True]),  # of two alike the one on the device
        (9.0, 0.01, (10, 10), [False] * 4),  # no room for another
    ],
)
def test_the_device_is_chosen_where_a_copy_there_stalls_less(
    host_s: float, device_s: float, room: tuple[int, int], expected: list[bool]
) -> None:
    training = Training(host_s, device_s)
    assert [training.save(room) for _ in expected] == expected


def test_the_choice_follows_what_a_copy_to_the_host_takes_now() -> None:
    training = Training(host_s=2.0, device_s=0.05)
    assert [training.save() for _ in range(3)] == [False, True, True]
    training.host_s = 0.5
    assert [training.save() for _ in range(3)] == [True, False, False]
    training.host_s = 2.0
    assert [training.save() for _ in range(3)] == [False, True, True]


def test_nothing_stays_behind() -> None:
    before = fence._listeners
    training = Training(1.0, 1.0)
    assert fence._listeners != before
    del training
    gc.collect()
    assert fence._listeners == before
    assert not fence._hooks


class Behind:
    """A timeline whose moments come when the test says so, as those of a device do."""

    def __init__(self) -> None:
        self.marks = 0
        self.reached = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def between(self, first: int, second: int) -> float | None:
        return float(second - first) if second <= self.reached else None


@pytest.fixture
def behind() -> Iterator[tuple[Clock, Behind]]:
    made, timeline = Clock(), Behind()
    made._timeline = timeline
    yield made, timeline
    made.close()


def test_steps_of_a_device_are_timed_when_they_have_come(behind: tuple[Clock, Behind]) -> None:
    seen, timeline = behind
    for _ in range(6):
        seen.tick()
    assert not seen._untouched, "they were asked for, and none is done"
    made = Flight(SaveStats(total_s=2.0))
    seen.began(made, "memory")
    seen.tick()
    assert seen.take() is None
    seen.began(made, "memory")
    timeline.reached = 99
    seen.tick()
    assert seen.step_s == 1.0
    assert seen.called_after_s == 1.0
    costs = seen.take()
    assert costs is not None
    assert costs.cost_s == 2.0, "two steps with a mark of save each: 2 s instead of 1 s"
