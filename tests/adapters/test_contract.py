"""The adapters of this package, held to the contract: every training of ``trainings``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest

from portus.testing.adapter import EVENTS, PLACES, AdapterContract, Case
from tests.adapters import trainings

TRAININGS = [
    each
    for each in vars(trainings).values()
    if isinstance(each, type) and isinstance(vars(each).get("train"), staticmethod)
]


class Covering(AdapterContract):
    """In short runs one case for each kind of place, and no two adapters have the same.

    skipped: the cases that a training does not have, as "event on place", and why.
    """

    number = 0
    skipped: Mapping[str, str] = {}

    def marks(self, case: Case) -> Collection[pytest.MarkDecorator]:
        place, event = PLACES.index(case[0]), EVENTS.index(case[1])
        reason = self.skipped.get(f"{case[1]} on {case[0]}")
        if reason:
            return [pytest.mark.skip(reason=reason)]
        is_short = event == (3 * place - self.number) % len(EVENTS)
        return () if is_short else (pytest.mark.long,)


for number, training in enumerate(TRAININGS):
    name = training.__name__
    places: Sequence[str] = getattr(training, "places", PLACES)
    skipped: Mapping[str, str] = getattr(training, "skipped", {})
    trains = f"{trainings.__name__}:{name}"
    declared = {"trains": trains, "places": places, "skipped": skipped, "number": number}
    globals()[f"Test{name}"] = type(f"Test{name}", (Covering,), declared)


def test_no_two_trainings_of_the_same_places_have_the_same_short_cases() -> None:
    assert 4 <= len(TRAININGS) <= len(EVENTS)
