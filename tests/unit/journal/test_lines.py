"""Lines of a journal: there and back, torn, damaged, of a newer Portus; and made fewer."""

from __future__ import annotations

import random
import zlib

import pytest

from portus.companions.cadence.bound import Costs, Decision, Rule, decide
from portus.companions.journal.account import account, sessions
from portus.companions.journal.lines import (
    Failed,
    Head,
    IntervalDecided,
    Line,
    Saved,
    SessionBegun,
    SessionEnded,
    cost_of,
    decode,
    encode,
    shorten,
)
from portus.errors import CorruptionError, UsageError

HEAD = Head(format=1, model="run")


def token(number: int) -> str:
    return f"{number:032x}"


def begun(name: str = "a", at_s: float = 100.0, resumed: int | None = None) -> SessionBegun:
    return SessionBegun(
        session=name,
        at_s=at_s,
        time_ns=int(at_s * 1e9),
        boot="boot",
        process=7,
        resumed=None if resumed is None else token(resumed),
        resumed_step=resumed,
    )


def saved(step: int, name: str = "a", at_s: float = 100.0, steps: int | None = None) -> Saved:
    steps = step if steps is None else steps
    return Saved(
        session=name, number=step, step=step, steps=steps,
        at_s=at_s + steps + 0.5, token=token(step), work_s=float(steps), cost_s=0.25,
        blocked_s=0.125, copy_s=0.5, copied_bytes=100, shared_bytes=10,
    )  # fmt: skip


LINES: list[Line] = [
    begun(),
    saved(1),
    Failed(session="a", step=2, steps=2, at_s=102.0, why="no space"),
    IntervalDecided(
        session="a", steps=2, at_s=102.0,
        decision=decide(Costs(step_s=1.0, cost_s=0.1, save_s=0.5), Rule()),
    ),
    saved(5),
    SessionEnded(
        session="a", closed=False, steps=7, at_s=107.0, work_s=6.5,
        asked={"00": 6},
    ),
]  # fmt: skip

GOLDEN = (
    b'998d6267 {"kind":"journal","format":1,"model":"run"}\n'
    b'2d62c21e {"kind":"failed","session":"a","step":2,"steps":2,"at_s":102.0,"why":"no space"}\n'
)


def journal(lines: list[Line]) -> bytes:
    return b"".join(map(encode, [HEAD, *lines]))


def test_a_journal_of_this_format_has_these_bytes_for_ever() -> None:
    assert journal([LINES[2]]) == GOLDEN
    assert decode(GOLDEN, "j").lines == (LINES[2],)


def test_every_line_comes_back_as_it_was_written() -> None:
    found = decode(journal(LINES), "j")
    assert (found.head, list(found.lines)) == (HEAD, LINES)
    assert not found.damaged


def test_every_cut_leaves_the_lines_before_it() -> None:
    data = journal(LINES)
    ends = [position for position, byte in enumerate(data) if byte == 10]
    for cut in range(ends[0] + 1, len(data)):
        found = decode(data[:cut], "j")
        assert list(found.lines) == LINES[: len([end for end in ends if end < cut]) - 1]
        assert found.damaged == 0


def test_every_damaged_byte_costs_its_line_alone_and_is_counted() -> None:
    data = journal(LINES)
    head = data.index(b"\n") + 1
    for position in range(head, len(data) - 1):
        broken = bytearray(data)
        broken[position] ^= 1 << position % 8
        found = decode(bytes(broken), "j")
        left = [line for line in LINES if line in found.lines]
        assert list(found.lines) == left
        assert len(left) >= len(LINES) - 2  # the end of a line joins two
        assert found.damaged > 0


def test_what_is_written_behind_a_torn_line_is_read() -> None:
    data = journal(LINES[:2])[:-30] + b"\n" + encode(LINES[4])
    found = decode(data, "j")
    assert found.lines == (LINES[0], LINES[4])
    assert found.damaged == 1


def test_a_newer_journal_is_refused_and_an_unknown_kind_of_line_counted() -> None:
    newer = encode(Head(format=2, model="run"))
    with pytest.raises(UsageError, match=r"format 2, and this Portus knows up to 1.*Upgrade"):
        decode(journal(LINES) + newer, "j")
    text = b'{"kind":"dreamt","of":"sheep"}'
    found = decode(journal(LINES) + b"%08x %s\n" % (zlib.crc32(text), text), "j")
    assert (list(found.lines), found.damaged) == (LINES, 1)


@pytest.mark.parametrize("data", [b"", b"\n", b"\0" * 4096, b"hello\n", b"[" * 9000 + b"\n"])
def test_what_is_no_journal_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="expected a journal"):
        decode(data, "j")


def test_rubbish_with_a_right_digest_is_damage_or_nothing() -> None:
    rng = random.Random(1)
    texts = [b"{}", b"[]", b"1", b'{"kind":7}', b'{"kind":"saved"}', b'{"kind":"begun","at_s":-1}']
    texts += [bytes(rng.randrange(256) for _ in range(rng.randrange(60))) for _ in range(300)]
    for text in texts:
        text = text.replace(b"\n", b" ")
        found = decode(journal(LINES[:1]) + b"%08x %s\n" % (zlib.crc32(text), text), "j")
        assert (found.lines, found.damaged) == (tuple(LINES[:1]), 1)


def long_run(count: int) -> list[Line]:
    """Three sessions, killed; each goes on from an older version of the one before."""
    lines: list[Line] = []
    start = 0
    for number in range(3):
        name, at_s = f"s{number}", 1000.0 + number * 10 * count
        lines.append(begun(name, at_s, start or None))
        for steps in range(10, 10 * count, 10):
            lines += [saved(start + steps, name, at_s, steps)] * (1 + steps % 3)
            lines.append(Failed(session=name, step=0, steps=steps, at_s=at_s + steps, why="full"))
            lines.append(
                IntervalDecided(
                    session=name,
                    steps=steps,
                    at_s=at_s + steps,
                    decision=Decision(steps=10, reason="first", rule=Rule()),
                )
            )
        steps = 10 * count - 3
        lines.append(
            SessionEnded(
                session=name, closed=False, steps=steps, at_s=at_s + steps, work_s=float(steps)
            )
        )
        start += 10 * (count // 2)
    return lines


def test_a_journal_that_is_made_shorter_says_the_same_of_the_whole() -> None:
    lines = long_run(60)
    size = len(journal(lines)) // 4
    made = shorten(HEAD, lines, size)
    assert len(made) <= size
    again = shorten(HEAD, decode(made, "j").lines, size // 2)
    assert len(again) <= size // 2
    whole = account(lines)
    assert whole is not None
    resumed = {each.resumed for each in lines if isinstance(each, SessionBegun) and each.resumed}
    assert len(resumed) == 2
    for data in (made, again):
        part = account(decode(data, "j").lines)
        assert part is not None
        assert len(part.saves) < len(whole.saves)
        for name in (
            "steps", "wall_s", "kept_s", "lost_s", "lost_steps", "down_s", "saves_s", "committed",
            "failed", "restarts", "pending_steps", "blocked_s", "copy_s", "copied_bytes",
            "shared_bytes",
        ):  # fmt: skip
            assert getattr(part, name) == pytest.approx(getattr(whole, name)), name
        costs = [sum(cost_of(each.line) for each in its.saves) for its in (part, whole)]
        assert costs[0] == pytest.approx(costs[1])
        assert resumed <= {each.line.token for each in part.saves}


def test_a_journal_of_many_sessions_lets_go_of_the_oldest() -> None:
    lines: list[Line] = []
    for number in range(500):
        name = f"s{number}"
        lines += [
            begun(name, 100.0 + number),
            SessionEnded(session=name, closed=False, steps=1, at_s=1e3),
        ]
    made = shorten(HEAD, lines, 20_000)
    left = sessions(decode(made, "j").lines)
    assert len(made) <= 20_000
    assert [each.begun.session for each in left] == [f"s{n}" for n in range(500 - len(left), 500)]
    assert len(left) > 20
