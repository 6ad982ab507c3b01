"""What an address of storage hosts says, and what it may not."""

from __future__ import annotations

import pytest

from portus.errors import UsageError
from portus.reach.protocol.address import PORT, Address, Scheme, parse


@pytest.mark.parametrize(
    ("text", "host", "port", "second"),
    [
        ("portus://a", "a", PORT, None),
        ("portus://a:1", "a", 1, None),
        ("portus://a:1+b:2", "a", 1, ("b", 2)),
        ("portus://a+b", "a", PORT, ("b", PORT)),
        ("portus://[::1]:1+[::2]:2", "::1", 1, ("::2", 2)),
    ],
)
def test_an_address_names_a_host_and_its_replica_and_says_so_again(
    text: str, host: str, port: int, second: tuple[str, int] | None
) -> None:
    found = parse(text)
    assert (found.host, found.port, found.second) == (host, port, second)
    assert parse(str(found)) == found
    places = [(host, port), *([second] if second else [])]
    assert [(each.host, each.port, each.second) for each in found.each] == [
        (*place, None) for place in places
    ]


@pytest.mark.parametrize("text", ["portus://a+a", "portus://a+b+c", "portus://a+", "portus://+b"])
def test_more_than_two_hosts_or_one_twice_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse(text)


def test_a_replica_is_reached_as_the_first_host_is() -> None:
    found = parse("portus+tls://team@a+b")
    assert found == Address(Scheme.TLS, "team", "a", second=("b", PORT))
    assert {(each.scheme, each.tenant) for each in found.each} == {(Scheme.TLS, "team")}
