"""A host and clients that do what they may not, or end where they should not."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from portus.engine.copying.local import copy
from portus.engine.copying.segments import Column, Digests, Sources, Stop
from portus.engine.format.checksum import UNIT, digest
from portus.errors import (
    BusyError,
    CorruptionError,
    MediumError,
    PortusError,
    TransportError,
    UsageError,
)
from portus.reach.daemon.fabric import Fabric
from portus.reach.daemon.pools import HASHERS
from portus.reach.daemon.requests.saves import memory_of
from portus.reach.daemon.secrets import read_secrets
from portus.reach.daemon.server import Server
from portus.reach.daemon.shared_state import ClientTimeouts
from portus.reach.index.check import check
from portus.reach.index.directory import create_pool, open_reader, open_writer
from portus.reach.index.file_table import decode_table
from portus.reach.index.pool import PoolWriter
from portus.reach.media.local import LocalFiles
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import Address, Scheme, Transport, parse
from portus.reach.protocol.messages import Said, error_of, pack_column, pack_map, pack_pairs
from portus.reach.protocol.proof import prove
from portus.reach.protocol.vocabulary import MessageKind, Phase
from portus.reach.transport.budget import FREE
from portus.reach.transport.dial import Credentials, dial, read_secret
from portus.reach.transport.one_sided import TransferResult
from portus.reach.transport.stream import Link
from tests.contents import table
from tests.hosts import serving, url
from tests.unit.protocol.examples import EXAMPLES, LEAST, header

TOKEN = b"t" * 16
SECRET = b"a secret of sixteen bytes and more"
DATA = [bytes([1]) * 100_000, b"", bytes([2]) * 5000]
LENGTHS = pack_column([len(each) for each in DATA])
CONTENTS = table([len(each) for each in DATA])
ALL = pack_column([0, 1, 2])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "pools", patience=ClientTimeouts(claim_s=1.0)) as made:
        yield made


@contextlib.contextmanager
def client(
    server: Server, tenant: str = "", secret: bytes | None = None, model: str | None = "m"
) -> Iterator[Link]:
    """A connection that is ready, and has claimed a model."""
    link, _ = dial(parse(url(server, tenant)), Credentials(secret), 10)
    try:
        if model is not None:
            asked(link, said.Claim(model, b"c" * 16), said.Done)
        yield link
    finally:
        link.close()


def asked(link: Link, message: Said, expected: type[Said]) -> Said:
    answer = link.ask(message)
    if isinstance(answer, said.Refused):
        raise error_of(answer)
    assert isinstance(answer, expected), answer
    return answer


def units(data: list[bytes] = DATA) -> bytes:
    return b"".join(
        digest(each[start : start + UNIT])
        for each in data
        for start in range(0, max(1, len(each)), UNIT)
    )


def ready(link: Link) -> None:
    """It is, and says nothing."""


def begun(link: Link) -> None:
    asked(link, said.Begin("m", 1, TOKEN, LENGTHS), said.Done)


def offered(link: Link) -> None:
    begun(link)
    asked(link, said.Offer(ALL), said.Pull)


def half_sent(link: Link) -> None:
    offered(link)
    link.send_payload(said.DATA, memoryview(DATA[0][:60_000]))


def pulled(link: Link) -> None:
    offered(link)
    link.send_payload(said.DATA, memoryview(b"".join(DATA)))
    answer = link.hear()
    assert isinstance(answer, said.Hashed), answer
    assert answer.digests == units()


def confirm(link: Link, digests: bytes | None = None) -> said.Committed:
    message = said.Confirm(digests or units(), CONTENTS, b"")
    answer = asked(link, message, said.Committed)
    assert isinstance(answer, said.Committed)
    return answer


def confirmed(link: Link, digests: bytes | None = None) -> said.Committed:
    pulled(link)
    return confirm(link, digests)


STATES: list[Callable[[Link], object]] = [ready, begun, offered, half_sent, pulled]


def pool_of(server: Server, tenant: str = "default") -> object:
    return server.house.pools.of(tenant)


def versions(server: Server, tenant: str = "default") -> int:
    return len(server.house.pools.of(tenant).writer.catalogue().ids())


def settled(server: Server, truth: Callable[[], bool]) -> None:
    """Wait until the host has seen what happened to it."""
    until = time.monotonic() + 20
    while not truth():
        assert time.monotonic() < until
        time.sleep(0.01)


REQUESTS = [kind for kind in said.MESSAGES if kind.is_request]


@pytest.mark.parametrize("examples", [EXAMPLES, LEAST], ids=["much", "least"])
@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.name)
def test_whatever_a_request_says_within_its_limits_is_answered_and_others_save(
    server: Server, kind: MessageKind, examples: Mapping[MessageKind, Said]
) -> None:
    for prepare in (ready, begun):
        with client(server) as link:
            prepare(link)
            link.ask(examples[kind])  # or it raises
    with client(server) as link:
        confirmed(link)


def test_a_save_goes_through(server: Server) -> None:
    with client(server) as link:
        confirmed(link)
    assert versions(server) == 1
    writer = server.house.pools.of("default").writer
    assert check(writer) == []


@pytest.mark.parametrize("where", STATES, ids=lambda state: state.__name__)
def test_a_client_that_vanishes_anywhere_leaves_nothing(
    server: Server, where: Callable[[Link], object]
) -> None:
    hosted = server.house.pools.of("default")
    with client(server) as link:
        where(link)
    settled(server, lambda: server.connections() == 0)
    assert hosted.saves == 0
    assert versions(server) == 0
    assert not hosted.writer._space._held, "its space is free again"
    with client(server) as link:  # and its model too
        confirmed(link)
    assert versions(server) == 1


@pytest.mark.parametrize("where", [ready, begun, pulled], ids=lambda state: state.__name__)
def test_an_abandoned_save_leaves_nothing_and_the_connection_goes_on(
    server: Server, where: Callable[[Link], object]
) -> None:
    hosted = server.house.pools.of("default")
    with client(server) as link:
        where(link)
        asked(link, said.Abandon(), said.Done)
        assert link.connection.state is Phase.READY
        assert hosted.saves == 0
        assert not hosted.writer._space._held
        confirmed(link)
    assert versions(server) == 1


def refused(
    server: Server, error: type[PortusError], match: str, *messages: tuple[Said, type[Said]]
) -> None:
    """The last message is refused; nothing is left, and the connection goes on."""
    with client(server) as link:
        for message, answer in messages[:-1]:
            asked(link, message, answer)
        with pytest.raises(error, match=match):
            asked(link, *messages[-1])
        assert link.connection.state is Phase.READY
        asked(link, said.Status(), said.Standing)
    assert versions(server) == 0
    assert server.house.pools.of("default").saves == 0


BEGIN = (said.Begin("m", 1, TOKEN, LENGTHS), said.Done)


def test_a_storage_that_is_not_there_is_refused(server: Server) -> None:
    offer = (said.Offer(pack_column([3])), said.Pull)
    refused(server, UsageError, "not there", BEGIN, offer)


def test_a_storage_that_comes_twice_is_refused(server: Server) -> None:
    offer = (said.Offer(pack_column([1, 1])), said.Pull)
    refused(server, UsageError, "twice", BEGIN, offer)


def test_a_storage_that_has_a_place_already_is_refused(server: Server) -> None:
    with client(server) as link:
        pulled(link)
        with pytest.raises(UsageError, match="have a place already"):
            asked(link, said.Offer(pack_column([1])), said.Pull)
        assert link.connection.state is Phase.READY
    assert versions(server) == 0


def test_a_confirmation_of_what_was_not_pulled_is_refused(server: Server) -> None:
    message = (said.Confirm(units(), CONTENTS, b""), said.Committed)
    refused(server, UsageError, "3 storages were neither", BEGIN, message)


@pytest.mark.parametrize(
    ("contents", "match"),
    [
        (b"", "no table of files of these storages"),
        (b"{}", "no table of files of these storages"),
        (b'{"a":{"$tensor":[0,"uint8",[100000]]}}', "no table of files of these storages"),
        (b"\x80\x02}.", "no table of files of these storages"),
        (table([100_000, 0, 4999]), "no table of files of these storages"),
        (table([100_000, 5000, 0]), "no table of files of these storages"),
        (table([100_000, 0]), "no table of files of these storages"),
        (b'{"$files":[]}', "table of files: KeyError"),
        (b'{"$files":', "table of files: JSONDecodeError"),
        (b'{"$files":"\xff"}', "table of files: UnicodeDecodeError"),
        (CONTENTS.replace(b":105000", b":1e999"), "not the size of a file"),
        (CONTENTS.replace(b":105000", b":9223372036854775808"), "not the size of a file"),
        (CONTENTS.replace(b'"a"', b'"../a"'), "not the name of a file"),
        (CONTENTS.replace(b'"a"', b'"\\ud800"'), "table of files: UnicodeEncodeError"),
        (table([100_000, 0, 5000], "\udcff").replace(b":105000", b":1"), "is not within its 1 b"),
        (b'{"$files":' + b"[" * 100_000, "nested deeper than 400"),
        (b'{"$files":[' + b"[]," * 20 + b"1]}", "of more than 20 values"),
    ],
)
def test_contents_of_other_storages_are_not_committed_and_the_pool_stays_whole(
    server: Server, monkeypatch: pytest.MonkeyPatch, contents: bytes, match: str
) -> None:
    """Whoever could, would have `portus verify` call the pool damaged from then on."""
    if match.startswith("of more"):
        monkeypatch.setattr("portus.reach.daemon.requests.saves.VALUES_MAX", 20)
    with client(server) as link:
        confirmed(link)
        asked(link, said.Begin("m", 2, b"u" * 16, LENGTHS), said.Done)
        asked(link, said.Share(TOKEN, ALL), said.Done)
        with pytest.raises(UsageError, match=match):
            asked(link, said.Confirm(units(), contents, b""), said.Committed)
    assert versions(server) == 1
    assert check(server.house.pools.of("default").writer) == []


MANY = 20_000


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    "contents",
    [
        b'{"$files":[' + b",".join([entry] * MANY) + b'],"directory":""}'
        for entry in (
            b'{"name":"a","size":0,"offset":"","length":""}',
            b'{"name":"a","size":9,"offset":"AAAAAAAAAAA=","length":"CQAAAAAAAAA="}',
            *(b"{}", b'{"a":1}', b"[]", b"[1]", b"1.5", b"999", b'"ab"', b'"\\u0101"'),
        )
    ]
    + [
        b'{"$files":[],"directory":"",' + b",".join(b'"%d":1' % n for n in range(MANY)) + b"}",
        b'{"$files":[],"directory":"' + b"a" * MANY + b'\\ud83d\\ude00"}',
        table([1] * MANY),
    ],
    ids=lambda contents: contents[:40].decode(),
)
def test_what_contents_take_while_they_are_looked_at_is_known_before(contents: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(CorruptionError):
            found = decode_table(contents)
            assert found is not None
            assert len(found.lengths) <= 2 * MANY
        assert tracemalloc.get_traced_memory()[1] <= memory_of(contents)
    finally:
        tracemalloc.stop()


def test_a_save_does_without_a_version_before_whose_record_is_damaged(server: Server) -> None:
    with client(server) as link:
        confirmed(link)
        writer = server.house.pools.of("default").writer
        entry = writer.catalogue().of_token(TOKEN)
        assert entry is not None
        for place in entry.pointer.extents:
            writer.medium.store(place.offset + 100, b"\xff" * 8)
        asked(link, said.Begin("m", 2, b"u" * 16, LENGTHS), said.Done)
        assert asked(link, said.Share(TOKEN, ALL), said.Done) == said.Done(False)
        asked(link, said.Offer(ALL), said.Pull)
        link.send_payload(said.DATA, memoryview(b"".join(DATA)))
        assert isinstance(link.hear(), said.Hashed)
        asked(link, said.Confirm(units(), CONTENTS, b""), said.Committed)
    assert versions(server) == 2


@pytest.mark.parametrize(
    ("lengths", "indices", "match"),
    [
        ([99_999, 0, 5000], [0], "another length"),
        ([100_000, 0], [0], "not storages of both"),
        ([100_000, 0, 5000], [2, 0], "not storages of both"),
        ([100_000, 0, 5000], [3], "not storages of both"),
    ],
)
def test_sharing_what_cannot_be_shared_is_refused(
    server: Server, lengths: list[int], indices: list[int], match: str
) -> None:
    with client(server) as link:
        confirmed(link)
        asked(link, said.Begin("m", 2, b"u" * 16, pack_column(lengths)), said.Done)
        if len(lengths) == 3:
            asked(link, said.Share(TOKEN, pack_column([2])), said.Done)
        with pytest.raises(UsageError, match=match):
            asked(link, said.Share(TOKEN, pack_column(indices)), said.Done)
        assert link.connection.state is Phase.READY
    assert versions(server) == 1


def test_columns_that_are_none_are_refused(server: Server) -> None:
    refused(
        server, TransportError, "not a column", (said.Begin("m", 1, TOKEN, b"12345"), said.Done)
    )


def test_lengths_that_wrap_around_are_refused(server: Server) -> None:
    lengths = pack_column([1 << 61] * 8)
    refused(server, TransportError, "too large", (said.Begin("m", 1, TOKEN, lengths), said.Done))


def test_a_model_that_was_not_claimed_is_refused(server: Server) -> None:
    begin = (said.Begin("other", 1, TOKEN, LENGTHS), said.Done)
    refused(server, UsageError, "not claimed", begin)


def test_reading_beyond_the_pool_is_refused(server: Server) -> None:
    ranges = pack_column([0, 1 << 50])
    refused(server, UsageError, "the pool has", (said.Read(ranges), said.Done))


def test_a_request_for_no_bytes_is_answered(server: Server) -> None:
    with client(server) as link:
        asked(link, said.Read(b""), said.Done)
        asked(link, said.Read(pack_column([5, 0, 9, 0])), said.Done)


def test_a_pin_that_is_not_held_cannot_be_taken_back(server: Server) -> None:
    refused(server, UsageError, "not pinned", (said.Unpin(5), said.Done))


def test_a_pin_lives_as_long_as_its_connection(server: Server) -> None:
    locks = server.house.pools.of("default").writer.locks
    with client(server) as link:
        confirmed(link)
        asked(link, said.Pin(1), said.Done)
        asked(link, said.Pin(1), said.Done)
        asked(link, said.Unpin(1), said.Done)
        assert locks.pins() == {1}
    settled(server, lambda: locks.pins() == set())


def test_other_digests_than_the_hosts_make_no_version(server: Server) -> None:
    with client(server) as link:
        with pytest.raises(CorruptionError, match="nothing was committed"):
            confirmed(link, bytes(len(units())))
        assert link.connection.state is Phase.READY
    assert versions(server) == 0


def test_a_token_that_a_version_has_makes_no_other(server: Server) -> None:
    with client(server) as link, client(server) as late:
        pulled(late)
        confirmed(link)
        with pytest.raises(UsageError, match="is that of a version that is there"):
            confirm(late)
        with pytest.raises(UsageError, match="is that of a version that is there"):
            asked(link, BEGIN[0], said.Done)
    assert versions(server) == 1
    assert check(server.house.pools.of("default").writer) == []


def test_ten_terabytes_are_refused_and_others_save(tmp_path: Path) -> None:
    lengths = pack_column([10 << 40])
    with serving(tmp_path / "pools", quota=64 << 20) as server, client(server) as link:
        with pytest.raises(MediumError, match="quota is 67108864 bytes"):
            asked(link, said.Begin("m", 1, TOKEN, lengths), said.Done)
        confirmed(link)
        assert versions(server) == 1


@pytest.mark.parametrize(("place", "quota"), [("memory:1M", None), ("memory:64M", 1 << 20)])
def test_memory_is_taken_up_to_its_size_and_the_quota(place: str, quota: int | None) -> None:
    with serving(place, quota=quota) as server, client(server) as link:
        with pytest.raises(MediumError, match=r"max_bytes|quota"):
            asked(link, said.Begin("m", 1, TOKEN, pack_column([2 << 20])), said.Done)
        asked(link, said.Begin("m", 1, TOKEN, pack_column([1 << 19])), said.Done)


def test_ten_terabytes_do_not_fit_without_a_quota_either(server: Server) -> None:
    lengths, one = pack_column([10 << 40]), pack_column([0])
    with client(server) as link:
        asked(link, said.Begin("m", 1, TOKEN, lengths), said.Done)
        for _ in range(2):  # it may be offered again
            full = link.ask(said.Offer(one))
            assert isinstance(full, said.Refused)
            assert (full.fault, full.errno) == (said.Fault.FULL, errno.ENOSPC)
        asked(link, said.Abandon(), said.Done)
        confirmed(link)


@pytest.mark.parametrize("size", ["0", "", "x", "-1", "1.5G", "G"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    from portus.reach.daemon.pools import parse_size

    with pytest.raises(UsageError, match="expected a size"):
        parse_size(size)


# --- verbs, where there are none ---

PAIR = said.Connect(1, 2, bytes(15) + b"1", 0, 3, 4)


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("portus.reach.transport.verbs._SYS", str(tmp_path / "none"))
    monkeypatch.setattr("portus.reach.transport.verbs._FOUND", {})


@pytest.mark.usefixtures("no_devices")
def test_connecting_without_a_device_is_refused(server: Server) -> None:
    refused(server, TransportError, "has no RDMA device", (PAIR, said.Connected))


@pytest.mark.usefixtures("no_devices")
def test_a_host_that_is_to_have_verbs_does_not_start_without(server: Server) -> None:
    with pytest.raises(UsageError, match="verbs cannot be served: this machine has no RDMA"):
        Fabric(Transport.VERBS)


def test_a_push_without_a_queue_pair_is_refused(server: Server) -> None:
    handles = pack_pairs([4096], [1])
    message = said.Push(pack_column([10]), pack_column([0, 10]), handles)
    refused(server, UsageError, "not connected by verbs", (message, said.Hashed))


def test_a_push_from_beyond_the_pool_is_refused(server: Server) -> None:
    ranges = pack_column([1 << 50, 10])
    message = said.Push(pack_column([10]), ranges, pack_pairs([4096], [1]))
    refused(server, UsageError, "the pool has", (message, said.Hashed))


@pytest.mark.parametrize(
    "handles",
    [
        b"1234",
        pack_pairs([1, 2], [3, 4]),
        pack_pairs([-1] * 3, [0] * 3),
        pack_pairs([0] * 3, [1 << 32] * 3),
    ],
)
def test_handles_that_are_none_are_refused(server: Server, handles: bytes) -> None:
    begin = said.Begin("m", 1, TOKEN, LENGTHS, handles)
    refused(server, TransportError, "handles|out of range", (begin, said.Done))


class Lane:
    """The host's end of a queue pair whose other end is in this process."""

    closed = False
    endpoint = msgspec.structs.astuple(PAIR)

    def __init__(self, server: Server) -> None:
        self.pulled: list[list[int]] = []
        self._medium = server.house.pools.of("default").writer.medium

    @property
    def pair(self) -> Lane:
        return self

    def transfer(self, moved: Sources, key: Column, *, is_pull: bool) -> TransferResult:
        assert is_pull
        self.pulled.append(key.tolist())
        digests = copy(self._medium, moved, Stop())
        return TransferResult(digests, np.zeros(len(digests), np.uint32), 0, 0.0)

    def close(self) -> None:
        self.closed = True


def test_each_save_is_pulled_from_where_its_begin_said(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is offered together, in whatever order; and nothing is from where one before was."""
    lane = Lane(server)
    monkeypatch.setattr(server.house.fabric, "lane", lambda *_: lane)
    with client(server) as link:
        asked(link, PAIR, said.Connected)
        for step, token in ((1, TOKEN), (2, b"u" * 16)):
            memory = [np.frombuffer(bytes([step]) + each[1:], np.uint8) for each in DATA]
            memory[1] = memory[1][:0]
            handles = pack_pairs(
                [memory[0].ctypes.data, 0, memory[2].ctypes.data], [10 * step, 0, 10 * step + 2]
            )
            asked(link, said.Begin("m", step, token, LENGTHS, handles), said.Done)
            for indices in ([2, 1], [0]):
                answer = asked(link, said.Offer(pack_column(indices)), said.Hashed)
                assert isinstance(answer, said.Hashed)
                assert answer.digests == units([memory[each].tobytes() for each in indices])
            confirmed = units([each.tobytes() for each in memory])
            asked(link, said.Confirm(confirmed, CONTENTS, b""), said.Committed)
        asked(link, said.Begin("m", 3, b"v" * 16, LENGTHS), said.Done)
        asked(link, said.Offer(ALL), said.Pull)  # it said nowhere
    assert lane.pulled == [[12, 0], [10], [22, 0], [20]]
    settled(server, lambda: lane.closed)


def test_handles_without_a_queue_pair_mean_the_socket(server: Server) -> None:
    with client(server) as link:
        handles = pack_pairs([4096, 0, 4096], [1, 0, 1])
        asked(link, said.Begin("m", 1, TOKEN, LENGTHS, handles), said.Done)
        asked(link, said.Offer(ALL), said.Pull)


# --- who may come in ---


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Server]:
    secrets = {"default": SECRET, "other": SECRET[::-1]}
    with serving(tmp_path / "pools", secrets=secrets) as made:
        yield made


def test_the_right_secret_is_let_in(guarded: Server) -> None:
    with client(guarded, secret=SECRET) as link:
        confirmed(link)


@pytest.mark.parametrize(
    ("tenant", "secret", "match"),
    [
        ("", b"another secret of this length too", "wrong secret for tenant 'default'"),
        ("other", SECRET, "wrong secret for tenant 'other'"),
        ("nobody", SECRET, "wrong secret for tenant 'nobody', or no such tenant"),
        ("nobody", b"", "wrong secret for tenant 'nobody', or no such tenant"),
        ("", None, "needs a secret"),
    ],
)
def test_a_wrong_secret_is_turned_away(
    guarded: Server, tenant: str, secret: bytes | None, match: str
) -> None:
    with pytest.raises(UsageError, match=match), client(guarded, tenant, secret):
        pass
    assert guarded.house.pools.all() == [], "no pool is made for strangers"


@pytest.mark.parametrize("size", [0, 1, 31])
def test_a_part_of_a_proof_is_none(guarded: Server, size: int) -> None:
    with stranger(guarded) as link:
        challenge = link.ask(said.Hello(said.MAGIC, said.VERSION, "default", TOKEN))
        assert isinstance(challenge, said.Challenge)
        proof = prove("client", SECRET, "default", TOKEN, challenge.nonce)
        answer = link.ask(said.ClientProof(proof[:size]))
        assert isinstance(answer, said.Refused)


def test_a_unix_socket_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with serving(tmp_path / "pools", address=Address(Scheme.UNIX, path=str(path))):
        assert path.stat().st_mode & 0o077 == 0


def test_a_host_that_does_not_know_the_secret_is_not_believed(server: Server) -> None:
    with (
        pytest.raises(UsageError, match="this is not the storage host"),
        client(server, "", SECRET),
    ):
        pass


def test_a_proof_cannot_be_used_again(guarded: Server) -> None:
    """Who recorded a greeting gets nowhere with it: the host's nonce is another one."""
    hello, recorded = said.Hello(said.MAGIC, said.VERSION, "default", b"n" * 16), b""
    with stranger(guarded) as link:
        challenge = asked(link, hello, said.Challenge)
        assert isinstance(challenge, said.Challenge)
        recorded = prove("client", SECRET, "default", b"n" * 16, challenge.nonce)
        asked(link, said.ClientProof(recorded), said.Welcome)
    with stranger(guarded) as link:
        asked(link, hello, said.Challenge)
        with pytest.raises(UsageError, match="wrong secret"):
            asked(link, said.ClientProof(recorded), said.Welcome)


def test_a_welcome_cannot_be_used_again() -> None:
    """The same for who recorded a host: the client's nonce is another one."""
    nonce, recorded = b"h" * 16, list[said.Welcome]()

    def welcome(listener: socket.socket) -> None:
        with contextlib.closing(accepted(listener)) as link:
            hello = link.hear()
            assert isinstance(hello, said.Hello)
            link.ask(said.Challenge(nonce, True))
            if not recorded:
                proof = prove("host", SECRET, "default", hello.nonce, nonce)
                recorded.append(said.Welcome(proof, bytes(16), "pool", False, 4096, False))
            link.send(recorded[0])
            with contextlib.suppress(TransportError):
                link.hear()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = parse(f"portus://127.0.0.1:{listener.getsockname()[1]}")
        hosts = [threading.Thread(target=welcome, args=(listener,)) for _ in range(2)]
        hosts[0].start()
        dial(place, Credentials(SECRET), 10)[0].close()
        hosts[0].join()
        hosts[1].start()
        with pytest.raises(UsageError, match="this is not the storage host"):
            dial(place, Credentials(SECRET), 10)[0].close()
        hosts[1].join()


def accepted(listener: socket.socket) -> Link:
    listener.settimeout(60)
    return Link(listener.accept()[0], is_client=False, name="client", silence_s=60)


@contextlib.contextmanager
def stranger(server: Server) -> Iterator[Link]:
    plain = socket.create_connection(("127.0.0.1", server.listeners[0].port))
    link = Link(plain, is_client=True, name="host", silence_s=10)
    yield link
    link.close()


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("metrics", b"\xc1"),
        ("metrics", pack_map({str(n): 1.0 for n in range(said.METRICS_MAX + 1)})),
        ("metrics", pack_map({"": 1.0})),
        ("metrics", pack_map({"a" * 201: 1.0})),
        ("metrics", pack_map({"a": {}})),
        ("keep", b"\xc1"),
        ("keep", pack_map({"last": 0})),
        ("keep", pack_map({"oldest": 1})),
        ("keep", pack_map({"best": ["loss", "least", 1]})),
        ("keep", pack_map({"within": float("nan")})),
    ],
)
def test_metrics_and_a_keep_that_are_none_are_refused(
    server: Server, field: str, wrong: bytes
) -> None:
    with client(server) as link:
        pulled(link)
        right = said.Confirm(units(), CONTENTS, b"")
        confirm = msgspec.structs.replace(right, **{field: wrong})
        with pytest.raises((UsageError, TransportError), match=field):
            asked(link, confirm, said.Committed)
        assert versions(server) == 0
        confirmed(link)
    assert versions(server) == 1


@pytest.mark.parametrize(
    ("hello", "match"),
    [
        (said.Hello("http", said.VERSION, "default", b"n" * 16), "is not spoken here"),
        (said.Hello(said.MAGIC, said.VERSION, "../other", b"n" * 16), "tenant"),
    ],
)
def test_a_greeting_that_is_not_ours_is_told_why(
    server: Server, hello: said.Hello, match: str
) -> None:
    with stranger(server) as link, pytest.raises(UsageError, match=match):
        asked(link, hello, said.Challenge)


@pytest.mark.parametrize("version", [0, said.VERSION - 1, said.VERSION + 1, said.SIZE_MAX])
def test_a_client_of_another_version_hears_which_one_the_host_speaks(
    server: Server, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.transport.dial.VERSION", version)
    named = f"{url(server)}: the storage host says: protocol version {version}: "
    match = f"{named}this host speaks {said.VERSION}; upgrade the older"
    with pytest.raises(UsageError, match=match), client(server):
        pass


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(100),
        header(0xFFFFFFFF, said.Hello.kind.number),
        header(20, said.Confirm.kind.number) + bytes(36),
        header(5, said.Hello.kind.number) + bytes(21),
    ],
)
def test_rubbish_ends_its_own_connection_and_no_other(server: Server, data: bytes) -> None:
    with client(server) as link:
        with socket.create_connection(("127.0.0.1", server.listeners[0].port)) as plain:
            plain.settimeout(20)
            plain.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                assert plain.recv(100) == b""
        confirmed(link)


def test_tenants_see_their_own_pools_alone(guarded: Server) -> None:
    with client(guarded, secret=SECRET) as link:
        confirmed(link)
    with client(guarded, "other", SECRET[::-1]) as link:
        standing = asked(link, said.Status(), said.Standing)
        assert isinstance(standing, said.Standing)
        assert versions(guarded, "other") == 0
    assert versions(guarded) == 1


@pytest.fixture
def busy(guarded: Server, tmp_path: Path) -> Iterator[PoolWriter]:
    """Somebody else who writes the pool of the default tenant."""
    path = str(tmp_path / "pools" / "default.portus")
    create_pool(path, LocalFiles())
    with contextlib.closing(open_writer(path, LocalFiles())) as holder:
        yield holder


def test_a_tenant_whose_pool_cannot_be_opened_is_told(
    guarded: Server, busy: PoolWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.daemon.pools.BUSY_S", 0.1)
    with pytest.raises(BusyError, match="another writer"), client(guarded, secret=SECRET):
        pass
    busy.close()
    with client(guarded, secret=SECRET) as link:
        confirmed(link)


def test_while_a_pool_is_waited_for_other_tenants_are_served(
    guarded: Server, busy: PoolWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.daemon.pools.BUSY_S", 60.0)
    served: list[said.Committed] = []

    def come() -> None:
        with client(guarded, secret=SECRET) as link:
            served.append(confirmed(link))

    waiting = threading.Thread(target=come)
    waiting.start()
    settled(guarded, lambda: "default" in guarded.house.pools._opening)
    with client(guarded, "other", SECRET[::-1]) as link:
        confirmed(link)
    assert served == []
    busy.close()
    waiting.join()
    assert len(served) == 1


def test_a_model_has_one_client_at_a_time(server: Server) -> None:
    with client(server) as link:
        with client(server, model=None) as same:
            asked(same, said.Claim("m", b"c" * 16), said.Done)
        with client(server, model=None) as other, pytest.raises(BusyError, match="another client"):
            asked(other, said.Claim("m", b"d" * 16), said.Done)
        asked(link, said.Status(), said.Standing)
    settled(server, lambda: server.connections() == 0)
    with client(server, model=None) as other:
        asked(other, said.Claim("m", b"d" * 16), said.Done)


def test_a_door_that_others_reach_needs_a_secret(tmp_path: Path) -> None:
    from portus.reach.protocol.address import Address, Scheme

    address = Address(Scheme.TCP, host="0.0.0.0", port=0)
    with pytest.raises(UsageError, match="--secret-file"), serving(tmp_path, address=address):
        pass


# --- who says nothing ---


def impatient(tmp_path: Path, **changes: float) -> contextlib.AbstractContextManager[Server]:
    return serving(tmp_path / "pools", patience=ClientTimeouts(**changes))


def test_an_idle_reader_is_ended(tmp_path: Path) -> None:
    with impatient(tmp_path, idle_s=0.3) as server, client(server, model=None) as link:
        settled(server, lambda: server.connections() == 0)
        assert not link.is_alive()


def test_who_claims_a_model_may_be_idle(tmp_path: Path) -> None:
    with impatient(tmp_path, idle_s=1.0) as server, client(server) as link:
        with client(server, model=None):
            settled(server, lambda: server.connections() == 1)  # the other one was ended
        confirmed(link)


def test_who_is_idle_within_a_save_is_ended(tmp_path: Path) -> None:
    with impatient(tmp_path, idle_s=1.0) as server, client(server) as link:
        begun(link)
        settled(server, lambda: server.connections() == 0)
        assert server.house.pools.of("default").saves == 0


def test_a_client_that_stops_in_the_middle_of_its_payload_is_ended(tmp_path: Path) -> None:
    with impatient(tmp_path, silent_s=1.0) as server, client(server) as link:
        half_sent(link)
        with client(server, model="n") as other:
            asked(other, said.Status(), said.Standing)
        settled(server, lambda: server.connections() == 0)
        assert versions(server) == 0
        assert server.house.pools.of("default").saves == 0


@pytest.mark.long
def test_a_client_that_stops_reading_is_ended_and_holds_nobody_up(tmp_path: Path) -> None:
    with impatient(tmp_path, silent_s=1.0) as server, client(server, model=None) as deaf:
        with client(server) as link:
            size, writer = 32 << 20, server.house.pools.of("default").writer
            writer.release(writer.reserve(2 * size))  # so large is it now
            deaf.send(said.Read(pack_column([0, size, 0, size])))
            confirmed(link)
        settled(server, lambda: server.connections() == 0)


def test_a_stranger_that_says_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.daemon.session.GREETING_S", 0.3)
    with (
        serving(tmp_path / "pools") as server,
        socket.create_connection(("127.0.0.1", server.listeners[0].port)) as plain,
    ):
        plain.settimeout(100)
        assert plain.recv(1) == b""


def test_a_stranger_that_says_a_byte_now_and_then_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.daemon.session.GREETING_S", 1.0)
    with (
        serving(tmp_path / "pools") as server,
        socket.create_connection(("127.0.0.1", server.listeners[0].port)) as plain,
    ):
        plain.sendall(header(said.Hello.kind.body_size_max, said.Hello.kind.number))
        settled(server, lambda: server.connections() == 1)
        begun_s = time.monotonic()
        while server.connections():
            assert time.monotonic() - begun_s < 60
            with contextlib.suppress(ConnectionError):
                plain.sendall(b"a")  # hundreds of them would be a message
            time.sleep(0.2)


def test_who_may_be_idle_may_not_stop_within_a_message(tmp_path: Path) -> None:
    with impatient(tmp_path, idle_s=3600, silent_s=1.0) as server, client(server) as link:
        frame = link.connection.send(said.Status())
        link._socket.sendall(frame[:5])
        settled(server, lambda: server.connections() == 0)


def test_no_more_are_let_in_than_the_most_and_they_are_told(tmp_path: Path) -> None:
    with serving(tmp_path / "pools", connections=1) as server:
        with client(server) as link:
            with pytest.raises(TransportError, match="1 from this address are the most"):
                dial(parse(url(server)), Credentials(), 10)
            confirmed(link)
        settled(server, lambda: server.connections() == 0)
        with client(server) as link:
            asked(link, said.Begin("m", 2, b"u" * 16, LENGTHS), said.Done)


def test_a_host_has_so_many_tenants_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.daemon.pools.TENANTS_MAX", 1)
    with serving(tmp_path / "pools") as server:
        with client(server, "one"), pytest.raises(BusyError, match="the limit is 1 tenants"):
            dial(parse(url(server, "other")), Credentials(), 10)
        with client(server, "one") as link:
            confirmed(link)


def test_a_client_has_so_many_pins_and_claims_at_most(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.daemon.requests.pool.PINS_MAX", 2)
    monkeypatch.setattr("portus.reach.daemon.requests.saves.CLAIMS_MAX", 2)
    with client(server) as link:
        for version in range(1, 6):  # those that were taken back do not count
            asked(link, said.Pin(version), said.Done)
            asked(link, said.Unpin(version), said.Done)
        for version in (1, 2):
            asked(link, said.Pin(version), said.Done)
        with pytest.raises(UsageError, match="more than 2 versions"):
            asked(link, said.Pin(3), said.Done)
        asked(link, said.Claim("n", b"c" * 16), said.Done)
        with pytest.raises(UsageError, match="more than 2 models"):
            asked(link, said.Claim("o", b"c" * 16), said.Done)
        confirmed(link)


def test_both_ends_ask_after_a_peer_that_vanished(server: Server) -> None:
    with client(server) as link:
        for each in (link, *(served.link for served in server._served)):
            assert each._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            told = [
                each._socket.getsockopt(socket.IPPROTO_TCP, name)
                for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            assert told[0] + told[1] * told[2] <= 80, "docs/deploying.md says so"
            unacknowledged_ms = each._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert 0 < unacknowledged_ms <= 80_000, "of what was said to it no less"


# --- what fails on the host ---


def test_a_host_that_may_start_no_thread_turns_away_and_goes_on(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    usual = threading.stack_size(1 << 46)
    try:
        with pytest.raises(TransportError), client(server):
            raise AssertionError("it was let in")
    finally:
        threading.stack_size(usual)
    assert "turned away: can't start new thread" in caplog.text
    assert server.connections() == 0
    with client(server) as link:
        confirmed(link)


def test_a_medium_that_fails_is_said_to_the_client_and_ends_no_connection(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    medium = server.house.pools.of("default").writer.medium
    with client(server) as link:
        offered(link)
        medium._poison = "worn out"  # type: ignore[attr-defined]
        link.send_payload(said.DATA, memoryview(b"".join(DATA)))
        with caplog.at_level(logging.ERROR, "portus.daemon"):
            answer = link.hear()
            assert isinstance(answer, said.Refused), answer
        assert isinstance(error_of(answer), MediumError)
        assert "refused" in caplog.text
        assert link.connection.state is Phase.READY
    assert np.all([versions(server) == 0])


def test_big_messages_wait_for_memory_and_small_ones_do_not(server: Server) -> None:
    budget = server.house.budget
    first, others = budget.account(), budget.account()
    assert first.take(1, 0)
    others.tenant = "default"
    others.keep(budget.tenant_max - budget.connection_max + FREE)
    lengths = pack_column([0] * (2 * FREE // 8))
    with client(server) as link:
        confirmed(link)
        link.send(said.Begin("m", 2, b"u" * 16, lengths))
        time.sleep(0.3)
        assert server.connections() == 1
        assert not link.has_word()
        others.close()
        assert isinstance(link.hear(), said.Done)
        first.close()
        link.close()
        settled(server, lambda: budget.taken_bytes == 0)


def test_what_takes_more_than_a_connection_may_have_is_refused_and_it_goes_on(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "pools", memory=1 << 20) as server, client(server) as link:
        with pytest.raises(UsageError, match=r"524288 at most: raise `portus serve --mem"):
            asked(link, said.Begin("m", 1, TOKEN, pack_column([0] * (1 << 16))), said.Done)
        confirmed(link)
        asked(link, said.Begin("m", 2, b"u" * 16, LENGTHS), said.Done)
        asked(link, said.Share(TOKEN, ALL), said.Done)
        contents = b'{"$files":[' + b",".join([b"{}"] * 2000) + b"]}"
        with pytest.raises(UsageError, match="--memory"):
            asked(link, said.Confirm(units(), contents, b""), said.Committed)
        assert server.house.pools.of("default").saves == 0
        asked(link, said.Begin("m", 2, b"u" * 16, LENGTHS), said.Done)


def test_a_big_message_that_never_comes_holds_nobody_up(server: Server) -> None:
    with client(server, model="hanging") as hanging, client(server) as link:
        asked(hanging, said.Begin("hanging", 1, TOKEN, LENGTHS), said.Done)
        whole = server.house.budget.connection_max // 2 - 16 * said.DIGEST_SIZE
        hanging._socket.sendall(
            hanging.connection._begin_frame(said.Confirm.kind, whole) + bytes([0x95])
        )
        settled(server, lambda: 0 < server.house.budget.taken_bytes <= 4 << 20)
        asked(link, said.Begin("m", 1, TOKEN, pack_column([0] * (1 << 18))), said.Done)


def test_a_check_of_more_than_the_pool_has_is_refused(server: Server) -> None:
    """One message could name one range so often that a host hashed for an hour."""
    with client(server) as link:
        confirmed(link)
        again = 1 << 15
        ranges = pack_column([0, 1 << 16] * again)
        with pytest.raises(UsageError, match="bytes, of a pool of"):
            asked(link, said.Check(pack_column([(1 << 16) * again]), ranges), said.Hashed)
        found = asked(link, said.Check(pack_column([0]), b""), said.Hashed)
        assert found == said.Hashed(digest(b""))


@pytest.mark.parametrize("request_of", ["check", "share"])
def test_the_end_does_not_wait_for_what_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_of: str
) -> None:
    ends: list[bool] = []

    def endless(medium: object, moved: Sources, stop: Stop) -> None:
        ending.start()
        while True:  # as who hashes terabytes
            stop.check()
            time.sleep(0.001)

    with serving(tmp_path / "pools") as server, client(server) as link:
        ending = threading.Thread(target=lambda: ends.append(server.stop(20)))
        confirmed(link)
        for module in ("daemon.requests.pool", "versions.pool_draft"):
            monkeypatch.setattr(f"portus.reach.{module}.check", endless)
        if request_of == "check":
            link.send(said.Check(pack_column([0]), b""))
        else:
            asked(link, said.Begin("m", 2, b"u" * 16, LENGTHS), said.Done)
            link.send(said.Share(TOKEN, ALL))
        with pytest.raises(TransportError):
            link.hear()
        ending.join()
        assert ends == [True]


def test_a_client_that_hangs_up_is_hashed_for_no_more(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), threading.Event()

    def endless(medium: object, moved: Sources, stop: Stop) -> None:
        began.set()
        try:
            while True:
                stop.check()
                time.sleep(0.001)
        finally:
            ended.set()

    monkeypatch.setattr("portus.reach.daemon.requests.pool.check", endless)
    with client(server) as link:
        link.send(said.Check(pack_column([0]), b""))
        assert began.wait(20)
        assert not ended.wait(0.05), "it is waited for"
    assert ended.wait(20)
    settled(server, lambda: server.connections() == 0)


def test_so_many_are_hashed_for_at_once_and_other_tenants_too(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, working, go_on = max(1, HASHERS // 2), threading.Semaphore(0), threading.Event()

    def hashed(medium: object, moved: Sources, stop: Stop) -> Digests:
        working.release()
        assert go_on.wait(20)
        return np.zeros((1, 16), np.uint8)

    monkeypatch.setattr("portus.reach.daemon.requests.pool.check", hashed)
    with contextlib.ExitStack() as stack:
        tenants = ["one"] * (most + 1) + ["two"]
        links = [stack.enter_context(client(server, name, model=None)) for name in tenants]
        for link in links[:-1]:
            link.send(said.Check(pack_column([0]), b""))
        assert all(working.acquire(timeout=20) for _ in range(most))
        assert not working.acquire(timeout=0.2), "one tenant has half of the turns"
        links[-1].send(said.Check(pack_column([0]), b""))
        assert working.acquire(timeout=20)
        go_on.set()
        for link in links:
            assert isinstance(link.hear(), said.Hashed)


def test_the_end_does_not_wait_for_those_who_wait(tmp_path: Path) -> None:
    with serving(tmp_path / "pools", patience=ClientTimeouts(claim_s=3600)) as server:

        def come() -> None:
            with contextlib.suppress(TransportError), client(server, model=None) as link:
                asked(link, said.Claim("m", b"d" * 16), said.Done)

        with client(server):
            waiting = threading.Thread(target=come)
            waiting.start()
            settled(server, lambda: server.connections() == 2)
            assert server.stop(), "it waited for another client's model"
        waiting.join()


@contextlib.contextmanager
def in_a_commit(server: Server) -> Iterator[None]:
    """A client has confirmed, and its commit waits for the end of this."""
    writer = server.house.pools.of("default").writer
    with client(server) as link:
        pulled(link)
        with writer._committing:
            link.send(said.Confirm(units(), CONTENTS, b""))
            settled(server, lambda: writer._line.waiting == 1)
            yield


def test_the_end_waits_for_a_commit_that_is_under_way(tmp_path: Path) -> None:
    ends: list[bool] = []
    with serving(tmp_path / "pools") as server:
        ending = threading.Thread(target=lambda: ends.append(server.stop(60)))
        with in_a_commit(server):
            ending.start()
            settled(server, server._ending.is_set)
            assert ends == []
        ending.join()
        assert ends == [True]
    with contextlib.closing(open_reader(str(tmp_path / "pools/default.portus"))) as pool:
        assert len(pool.catalogue().ids()) == 1
        assert check(pool) == []


def test_an_end_that_is_not_clean_in_time_is_said_and_closes_no_pool(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path / "pools") as server:
        with in_a_commit(server):
            assert not server.stop(0.1)
            assert "connections did not end within 0.1 s" in caplog.text
        settled(server, lambda: server.connections() == 0)
        assert versions(server) == 1, "the pool was still there to commit to"


def test_a_secret_that_could_be_guessed_is_none(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_bytes(b" " + b"s" * 15 + b"\n")
    with pytest.raises(UsageError, match=r"at least 16 bytes, found 15; make one: openssl"):
        read_secret(str(file))
    with pytest.raises(UsageError, match=r"at least 16 bytes, found 15; make one: openssl"):
        read_secrets(str(file))
    file.write_bytes(b"s" * 16)
    assert read_secret(str(file)) == b"s" * 16
