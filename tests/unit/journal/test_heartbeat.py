"""The page of a session: its bytes, and what a kill between any two of them leaves."""

from __future__ import annotations

import hashlib

import pytest

from portus.companions.journal.lines import (
    PLACES,
    SessionBegun,
    SessionEnded,
    beat,
    first_page,
    read_beat,
)
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, UsageError

BEGUN = SessionBegun(session="5e", at_s=1.5, time_ns=1, boot="b", process=3)


def ended(step: int, *, saves: int = 0, at_s: float | None = None) -> SessionEnded:
    asked = {f"{number:032x}": 1 for number in range(max(1, saves - 3), saves + 1)}
    at_s = float(step) if at_s is None else at_s
    return SessionEnded(
        session="5e", closed=False, steps=step, at_s=at_s, work_s=step / 2, asked=asked
    )


def beaten(steps: int) -> bytearray:
    page = bytearray(first_page(BEGUN))
    for step in range(1, steps + 1):
        beat(page, step, ended(step))
    return page


def test_a_page_of_this_format_has_these_bytes_for_ever() -> None:
    page = beaten(3)
    last = ended(3, saves=5, at_s=3.25)
    beat(page, 4, last)
    digest = "39ae303444bd824ef32105216810ff731dac324314b0b66122082d353e82d914"
    assert hashlib.sha256(page).hexdigest() == digest
    assert read_beat(bytes(page), "p") == (BEGUN, last)


def test_a_page_that_was_cut_off_in_a_store_says_the_step_before_or_after() -> None:
    for steps in range(4):
        before, after = beaten(steps), beaten(steps + 1)
        changed = [n for n in range(PAGE) if before[n] != after[n]]
        for stored in range(len(changed) + 1):
            torn = bytearray(before)
            for position in changed[:stored]:
                torn[position] = after[position]
            found = read_beat(bytes(torn), "p")[1].steps
            assert found == (steps + 1 if stored == len(changed) else steps)


def test_a_save_that_was_cut_off_in_its_store_is_none() -> None:
    before = beaten(1)
    for number in range(1, 6):
        beat(before, number + 1, ended(1, saves=number, at_s=1 + number / 8))
    after = bytearray(before)
    beat(after, 7, ended(1, saves=6, at_s=1.75))
    changed = [n for n in range(PAGE) if before[n] != after[n]]
    for stored in range(len(changed) + 1):
        torn = bytearray(before)
        for position in changed[:stored]:
            torn[position] = after[position]
        found = [int(token, 16) for token in read_beat(bytes(torn), "p")[1].asked]
        assert found == ([3, 4, 5, 6] if stored == len(changed) else [2, 3, 4, 5])


def test_every_damaged_byte_of_a_page_is_an_error_or_an_older_step() -> None:
    page = beaten(9)
    for position in (*range(300), *(p for place in PLACES for p in range(place, place + 300))):
        broken = bytearray(page)
        broken[position] ^= 0x41
        try:
            _, found = read_beat(bytes(broken), "p")
        except (CorruptionError, UsageError):
            continue
        assert found.steps in (8, 9)


@pytest.mark.parametrize("data", [b"", b"\0" * PAGE, beaten(2)[:-1], bytes(beaten(2)) + b"\n"])
def test_what_is_no_page_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(CorruptionError, match=r"expected a (heartbeat|journal)"):
        read_beat(bytes(data), "p")


def test_a_session_that_did_no_step_ends_when_it_began() -> None:
    found = SessionEnded(session="5e", closed=False, steps=0, at_s=1.5)
    assert read_beat(first_page(BEGUN), "p") == (BEGUN, found)
