"""The adapters of this package, held to the contract."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from portus.testing.adapter import EVENTS, PLACES, AdapterContract, Case


class Covering(AdapterContract):
    """In short runs one case for each kind of place, and no two adapters have the same."""

    first = 0

    def marks(self, case: Case) -> Collection[pytest.MarkDecorator]:
        place, event = PLACES.index(case[0]), EVENTS.index(case[1])
        is_short = event == (3 * place + self.first) % len(EVENTS)
        return () if is_short else (pytest.mark.long,)


class TestByHand(Covering):
    trains = "tests.adapters.trainings:ByHand"
    first = 0


class TestLightning(Covering):
    trains = "tests.adapters.trainings:Lightning"
    first = 5

    def marks(self, case: Case) -> Collection[pytest.MarkDecorator]:
        place, event = case
        if event == "copied" and place != "files":
            reason = "the original replaces last.ckpt, and the version that its copy leads to goes"
            return [pytest.mark.skip(reason=reason)]
        return super().marks(case)


class TestAccelerate(Covering):
    trains = "tests.adapters.trainings:Accelerate"
    first = 4


class TestShards(Covering):
    trains = "tests.adapters.trainings:Shards"
    places = ("files", "host")  # one pool, and many ranks
    first = 3
