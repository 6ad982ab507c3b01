from __future__ import annotations

import pytest

from docs._site.protocol import PAGE, page
from portus.engine.format import checksum
from portus.errors import UsageError
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import Address, Scheme, is_address, parse
from portus.reach.protocol.proof import prove
from portus.reach.protocol.vocabulary import Phase
from tests.unit.protocol.examples import NEXT


def test_the_document_holds_the_messages_and_their_order() -> None:
    assert PAGE.read_text() == page(), "make it again: python -m docs._site.protocol"


def test_every_message_and_every_state_is_in_the_table() -> None:
    assert {kind for _, kind in NEXT} == set(said.MESSAGES)
    reached = {Phase.NEW, *NEXT.values()}
    assert reached == set(Phase)


def test_every_request_can_be_answered_and_none_is_left_without_end() -> None:
    ends = {Phase.READY, Phase.CLOSED}
    for start in Phase:
        seen, todo = {start}, [start]
        while todo:
            here = todo.pop()
            for (before, _), after in NEXT.items():
                if before is here and after not in seen:
                    seen.add(after)
                    todo.append(after)
        assert seen & ends, start


def test_a_state_waits_for_one_side_alone_but_where_payload_is_sent() -> None:
    """Otherwise both might speak, and neither knew the other's state."""
    both = {
        state
        for state in Phase
        if len({kind.from_client for before, kind in NEXT if before is state}) == 2
    }
    # The client sends what was asked for, and nothing else; the host ends it.
    assert both == {Phase.PULLING}
    assert [kind for before, kind in NEXT if before is Phase.PULLING and kind.from_client] == [
        said.DATA
    ]


def test_units_are_those_of_the_format() -> None:
    assert (said.UNIT, said.DIGEST_SIZE) == (checksum.UNIT, checksum.DIGEST_SIZE)


def test_a_proof_depends_on_all_that_was_said() -> None:
    args = (b"s" * 32, "tenant", b"a" * 16, b"b" * 16)
    proofs = {
        prove("client", *args),
        prove("host", *args),
        prove("client", b"t" * 32, *args[1:]),
        prove("client", args[0], "tenan", *args[2:]),
        prove("client", *args[:2], b"c" * 16, args[3]),
        prove("client", *args[:3], b"c" * 16),
        prove("client", *args[:2], args[3], args[2]),
    }
    assert len(proofs) == 7
    assert prove("client", *args) == prove("client", *args)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("portus://store-1", Address(Scheme.TCP, host="store-1")),
        ("portus://store-1:7", Address(Scheme.TCP, host="store-1", port=7)),
        ("portus://a@[::1]:7", Address(Scheme.TCP, "a", "::1", 7)),
        ("portus+tls://store-1.x.org", Address(Scheme.TLS, host="store-1.x.org")),
        ("portus+unix:///run/p.sock", Address(Scheme.UNIX, path="/run/p.sock")),
        ("portus+unix://a@/run/p.sock", Address(Scheme.UNIX, "a", path="/run/p.sock")),
    ],
)
def test_an_address_is_read_and_written(text: str, address: Address) -> None:
    assert is_address(text)
    assert parse(text) == address
    assert parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "portus://",
        "portus://a b",
        "portus://h:99999",
        "portus://h:x",
        "portus://h/../etc",
        "portus://../x@h",
        "portus://.h@h",
        "portus+unix://relative",
        "portus+rdma://h",
        "portus://a@b@c",
    ],
)
def test_no_address_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse(text)


@pytest.mark.parametrize("path", ["/data/pool", "portus", ".portus", "a/portus:/b", "s3://x"])
def test_a_path_is_no_address(path: str) -> None:
    assert not is_address(path)
