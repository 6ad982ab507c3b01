"""The page of a session: its bytes, and what a kill between any two of them leaves."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from portus.companions.journal import heartbeat
from portus.companions.journal.heartbeat import ASKED, BEAT, HEAD
from portus.companions.journal.lines import SaveRequested, SessionBegun
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, UsageError

BEGUN = SessionBegun(session="5e", at_s=1.5, time_ns=1, boot="b", process=3)
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "report.md"


def beaten(steps: int) -> bytearray:
    page = bytearray(heartbeat.page(BEGUN))
    for step in range(1, steps + 1):
        heartbeat.beat(page, step, step * 1_000_000_000, step * 500_000_000)
    return page


def test_a_page_of_this_format_has_these_bytes_for_ever() -> None:
    page = beaten(3)
    heartbeat.ask(page, 5, SaveRequested(token="0123456789abcdef" * 2, step=-4, steps=2))
    digest = "06265abd8eac782414fcb5a0d4fba7350cb7491b499fc66473fc3225e161fe1b"
    assert hashlib.sha256(page).hexdigest() == digest
    begun, ended = heartbeat.read(bytes(page), "p")
    assert begun == BEGUN
    assert (ended.steps, ended.at_s, ended.work_s) == (3, 3.0, 1.5)
    assert ended.asked == (SaveRequested(token="0123456789abcdef" * 2, step=-4, steps=2),)
    assert not ended.closed


def test_a_page_that_was_cut_off_in_a_store_says_the_step_before_or_after() -> None:
    for steps in range(4):
        before, after = beaten(steps), beaten(steps + 1)
        changed = [n for n in range(PAGE) if before[n] != after[n]]
        for stored in range(len(changed) + 1):
            torn = bytearray(before)
            for position in changed[:stored]:
                torn[position] = after[position]
            found = heartbeat.read(bytes(torn), "p")[1].steps
            assert found == (steps + 1 if stored == len(changed) else steps)


def test_a_save_that_was_cut_off_in_its_store_is_none() -> None:
    before = beaten(1)
    for number in range(1, 6):
        heartbeat.ask(before, number, SaveRequested(token=f"{number:032x}", step=number, steps=1))
    after = bytearray(before)
    heartbeat.ask(after, 6, SaveRequested(token=f"{6:032x}", step=6, steps=1))
    changed = [n for n in range(PAGE) if before[n] != after[n]]
    for stored in range(len(changed)):
        torn = bytearray(before)
        for position in changed[:stored]:
            torn[position] = after[position]
        found = [each.step for each in heartbeat.read(bytes(torn), "p")[1].asked]
        assert found == ([2, 3, 4, 5] if not stored else [3, 4, 5])


def test_every_damaged_byte_of_a_page_is_an_error_or_an_older_step() -> None:
    page = beaten(9)
    for position in range(heartbeat.LINE + 300):
        broken = bytearray(page)
        broken[position] ^= 0x41
        try:
            _, ended = heartbeat.read(bytes(broken), "p")
        except (CorruptionError, UsageError):
            continue
        assert ended.steps in (8, 9)


@pytest.mark.parametrize("data", [b"", b"\0" * PAGE, b"PORTUS HEARTBEAT", b"x" * (PAGE + 1)])
def test_what_is_no_page_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="expected a heartbeat"):
        heartbeat.read(data, "p")


def test_a_newer_page_is_refused() -> None:
    page = beaten(1)
    page[16] = 2
    with pytest.raises(UsageError, match=r"format 2, and this Portus knows 1.*Upgrade"):
        heartbeat.read(bytes(page), "p")


def test_the_document_holds_the_tables() -> None:
    text = DOCUMENT.read_text()
    for record in (HEAD, BEAT, ASKED):
        assert record.table() in text
