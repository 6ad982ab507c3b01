"""Who has a place, and who makes room for whom."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from portus.errors import TransportError
from portus.reach.daemon import places as module
from portus.reach.daemon.places import ConnectionSlot, Places


class Coming:
    """Connections that come to 16 places."""

    def __init__(self) -> None:
        self.places = Places(16)
        self._ends: list[socket.socket] = []

    def stranger(self, address: str) -> ConnectionSlot:
        near, far = socket.socketpair()
        self._ends += [near, far]
        return self.places.come(address, near)

    def proven(self, address: str, tenant: str, *, waits: bool = False) -> ConnectionSlot:
        place = self.stranger(address)
        self.places.prove(place, tenant)
        if waits:
            place.note_answer()
        return place

    def close(self) -> None:
        for each in self._ends:
            each.close()


@pytest.fixture
def coming(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coming]:
    monkeypatch.setattr(module, "UNUSED_S", 0.0)
    made = Coming()
    yield made
    made.close()


def test_strangers_make_room_for_each_other_and_those_of_the_busiest_address_first(
    coming: Coming,
) -> None:
    assert coming.places.strangers_max == 4
    alone = coming.stranger("a")
    flood = [coming.stranger("b") for _ in range(6)]
    assert [bool(each.why) for each in flood] == [True, True, True, False, False, False]
    assert not alone.why
    coming.places.prove(alone, "t")
    assert not alone.why


def test_a_stranger_has_his_place_for_a_while(
    coming: Coming, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, proven = coming.stranger("a"), coming.proven("a", "t")
    coming.places.sweep()
    assert not silent.why
    monkeypatch.setattr(module, "STRANGER_S", -1.0)
    coming.places.sweep()
    assert "did not prove its secret" in silent.why
    assert not proven.why


def test_a_tenant_and_an_address_have_their_share_and_all_have_all(coming: Coming) -> None:
    for number in range(8):
        coming.proven("a", f"t{number % 4}")
    with pytest.raises(TransportError, match="8 from this address are the most"):
        coming.proven("a", "other")
    for number in range(4):
        coming.proven(f"b{number}", "t0")
    for number in range(4):
        coming.proven(f"c{number}", "t1")
    with pytest.raises(TransportError, match="16 in all are the most"):
        coming.proven("d", "other")


def test_a_tenant_has_three_quarters(coming: Coming) -> None:
    for number in range(12):
        coming.proven(f"{number}", "greedy")
    with pytest.raises(TransportError, match="12 of this tenant are the most"):
        coming.proven("12", "greedy")
    coming.proven("12", "other")


def test_unix_sockets_have_no_address(coming: Coming) -> None:
    for _ in range(12):
        coming.proven("", "t")


def test_one_that_nobody_uses_ends_for_another_of_who_has_most(coming: Coming) -> None:
    few = [coming.proven("x", "few", waits=True) for _ in range(4)]
    many = [coming.proven(f"{number % 3}", "many", waits=True) for number in range(12)]
    many[1].waits = False
    coming.proven("y", "new")
    assert [bool(each.why) for each in many] == [True, *[False] * 11], "the longest unused"
    coming.proven("z", "newer")
    assert [number for number, each in enumerate(many) if each.why] == [0, 2]
    assert not any(each.why for each in few)


def test_who_has_most_takes_nothing_from_who_has_less(coming: Coming) -> None:
    few = [coming.proven("x", "few", waits=True) for _ in range(5)]
    for number in range(11):
        coming.proven(f"{number}", "many")
    with pytest.raises(TransportError, match="16 in all"):
        coming.proven("new", "many")
    assert not any(each.why for each in few)


def test_what_was_used_just_now_is_not_unused(
    coming: Coming, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNUSED_S", 60.0)
    for number in range(16):
        coming.proven(f"{number % 4}", f"t{number % 2}", waits=True)
    with pytest.raises(TransportError, match="16 in all"):
        coming.proven("new", "new")
