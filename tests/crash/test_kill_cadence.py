"""A training that saves when ``portus.Cadence`` says is killed again and again, by SIGKILL."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.bench import killed
from tests.nursery import nursery

STEPS_A_LIFE = 150


@pytest.mark.long
@pytest.mark.timeout(600)
def test_at_most_two_intervals_are_lost_at_a_kill_and_the_loss_is_the_same(tmp_path: Path) -> None:
    whole = killed.lived("plain", tmp_path / "plain", itertools.repeat(500.0), 500)
    place = tmp_path / "killed"
    place.mkdir()
    seen = place / "seen"
    seen.write_bytes(bytes(killed._SEEN.size))
    warm, lost, said = nursery("tests.bench.killed"), [], ""
    while not said:
        done, longest = killed._SEEN.unpack(seen.read_bytes())
        with warm.start("by_cadence", str(place)) as child:
            first = int(child.until("from").split()[1])
            if done:
                lost.append((done - first, 2 * longest))
            while not said and not _is_to_die(seen, first):
                try:
                    said = child.line(0.02)
                except AssertionError:
                    continue  # it has said nothing
            child.kill()
    assert said == f"loss {whole.loss}"
    assert len(lost) >= 2
    assert all(0 <= steps <= most for steps, most in lost), lost


def _is_to_die(seen: Path, first: int) -> bool:
    """True after so many steps, or two intervals: a busy machine may have longer ones, and a job
    that never comes to a save does not get on."""
    done, longest = killed._SEEN.unpack(seen.read_bytes())
    return bool(done >= first + max(STEPS_A_LIFE, 2 * longest))
