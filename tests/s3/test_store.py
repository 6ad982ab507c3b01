"""``Bucket`` against a real S3 server: the contract, and every request that fails."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import obstore
import pytest
from obstore.store import S3Store

from portus.errors import PortusError, TransportError, UsageError
from portus.reach.mirror.address import parse
from portus.reach.mirror.bucket import Bucket, BucketTimeouts
from portus.reach.mirror.store import MissingError, Store
from tests.contract.stores import StoreContract
from tests.s3.conftest import BUCKET, STRANGER
from tests.s3.server import Server
from tests.simulation.proxy import ConnectionCut, RequestFault, RequestProxy

pytestmark = pytest.mark.s3

QUICK = BucketTimeouts(connect_s=5, request_s=5, retries=2, retry_s=10)
HASTY = BucketTimeouts(connect_s=1, request_s=1, retries=2, retry_s=10)
MIB = 1 << 20


class TestBucket(StoreContract):
    many = 1100

    @pytest.fixture(autouse=True)
    def place(self, server: Server, url: str) -> None:
        self.url = url
        self.behind = S3Store(BUCKET, prefix=url.removeprefix(f"s3://{BUCKET}/"))

    def open(self) -> Store:
        return Bucket(parse(self.url))

    def read_behind(self, name: str) -> bytes | None:
        try:
            return bytes(obstore.get(self.behind, name).bytes())
        except FileNotFoundError:
            return None

    def write_behind(self, name: str, data: bytes) -> None:
        obstore.put(self.behind, name, data, use_multipart=False)


@pytest.fixture
def direct(url: str) -> Iterator[Store]:
    """The place of this test, without the proxy."""
    store = Bucket(parse(url))
    yield store
    store.close()


@pytest.fixture
def store(direct: Store, proxy: RequestProxy, url: str) -> Iterator[Store]:
    """The same through the proxy, with little patience."""
    store = Bucket(parse(url), QUICK)
    yield store
    store.close()


@pytest.fixture
def hasty(direct: Store, proxy: RequestProxy, url: str) -> Iterator[Store]:
    """The same with less."""
    store = Bucket(parse(url), HASTY)
    yield store
    store.close()


@dataclass(frozen=True)
class Call:
    """One call, the method by which obstore asks, and what may be there after it."""

    method: str
    run: Callable[[Store], object]
    result: object
    after: tuple[list[tuple[str, bytes]], ...]


OLD = [("a", b"old" * 1000), ("b", b"b")]
NEW = [("a", b"new" * 1000), ("b", b"b")]
CREATED = [*OLD, ("c", b"created")]


CALLS = {
    "put": Call("PUT", lambda store: store.put("a", b"new" * 1000), None, (OLD, NEW)),
    "create": Call("PUT", lambda store: store.create("c", b"created"), True, (OLD, CREATED)),
    "get": Call("GET", lambda store: store.get("a"), b"old" * 1000, (OLD,)),
    "get_range": Call("GET", lambda store: bytes(store.get_range("a", 3, 6)), b"oldold", (OLD,)),
    "list": Call("GET", lambda store: [e.name for e in store.list("")], ["a", "b"], (OLD,)),
    "delete": Call("POST", lambda store: store.delete(["a", "b"]), None, (OLD, [])),
}
FAULTS = {
    "500": (RequestFault(status=500, code="InternalError"), "the server failed .500"),
    "503": (RequestFault(status=503, code="SlowDown"), "busy or unavailable .503"),
    "403": (
        RequestFault(status=403, code="AccessDenied"),
        "permission is denied .403 AccessDenied",
    ),
    "cut before": (RequestFault(cut=ConnectionCut.BEFORE), "the connection was cut"),
    "cut within": (RequestFault(cut=ConnectionCut.WITHIN), "the connection was cut"),
    "cut after": (RequestFault(cut=ConnectionCut.AFTER), "the connection was cut"),
    "cut answer": (RequestFault(cut=ConnectionCut.ANSWER), "the connection was cut"),
    "late": (RequestFault(delay_s=HASTY.request_s + 0.3), "no answer within 1 s"),
    "slow": (RequestFault(bytes_s=20_000), "no answer within 1 s"),
}


def content(store: Store) -> list[tuple[str, bytes]]:
    return [(each.name, store.get(each.name)) for each in store.list("")]


def outcome(run: Callable[[], object]) -> object:
    """What it gave, or the error of ours that it raised."""
    try:
        return run()
    except PortusError as error:
        return error


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_request_that_fails_once_is_repeated_or_told_by_its_cause(
    direct: Store, store: Store, hasty: Store, proxy: RequestProxy, call: str, fault: str
) -> None:
    for name, data in OLD:
        direct.put(name, data)
    what, (failing, cause) = CALLS[call], FAULTS[fault]
    proxy.fail(failing, method=what.method)
    result = outcome(lambda: what.run(hasty if fault in ("late", "slow") else store))
    if isinstance(result, PortusError):
        assert re.match(rf"s3://portus/test-\d+: cannot .*{cause}", str(result))
        assert isinstance(result, UsageError) == (fault == "403")
        is_told = (call, fault) == ("list", "cut answer") or fault == "403"
        assert call in ("create", "delete") or is_told, "all others are repeated"
    else:
        assert result == what.result
        assert fault == "slow" or (fault != "403" and call != "create")
    assert content(direct) in what.after


@pytest.mark.parametrize("fault", ["500", "403", "cut before", "cut within", "cut after"])
@pytest.mark.parametrize("call", CALLS)
def test_a_request_that_always_fails_is_told_by_its_cause(
    direct: Store, store: Store, proxy: RequestProxy, call: str, fault: str
) -> None:
    for name, data in OLD:
        direct.put(name, data)
    what, (failing, cause) = CALLS[call], FAULTS[fault]
    proxy.fail(failing, times=1000)
    with pytest.raises(UsageError if fault == "403" else TransportError, match=cause):
        what.run(store)
    sent = 1 if call == "create" or fault == "403" else QUICK.retries + 1
    assert len(proxy.requests) <= sent
    assert content(direct) in what.after


def test_a_create_whose_answer_was_lost_is_found_out_by_reading(
    direct: Store, store: Store, proxy: RequestProxy
) -> None:
    proxy.fail(RequestFault(cut=ConnectionCut.AFTER), method="PUT")
    with pytest.raises(TransportError, match="create log/1: the connection was cut"):
        store.create("log/1", b"mine")
    assert proxy.count("PUT") == 1, "a create is sent once"
    assert direct.get("log/1") == b"mine"
    assert store.create("log/1", b"mine") is False
    proxy.fail(RequestFault(cut=ConnectionCut.BEFORE), method="PUT")
    with pytest.raises(TransportError):
        store.create("log/2", b"mine")
    with pytest.raises(MissingError):
        store.get("log/2")
    assert store.create("log/2", b"mine") is True


def test_a_store_that_is_closed_ends_the_calls_of_other_threads(
    url: str, proxy: RequestProxy
) -> None:
    proxy.fail(RequestFault(bytes_s=10_000), times=1000)
    store = Bucket(parse(url))
    with ThreadPoolExecutor(2) as pool:
        put = pool.submit(store.put, "a", bytes(8 * MIB))
        got = pool.submit(store.get, "b")
        while len(proxy.requests) < 2:
            time.sleep(0.01)
        begun = time.monotonic()
        store.close()
        for each in (put, got):
            with pytest.raises(TransportError, match="closed"):
                each.result()
    assert time.monotonic() - begun < 60, "the upload takes 800 s"


def test_uploads_outlive_a_server_that_is_killed(server: Server, url: str) -> None:
    """Whatever was told as put is there; the rest is whole or not there, and can be put again."""
    store = Bucket(parse(url), BucketTimeouts(retries=20, retry_s=60))
    data = [bytes([number]) * (2 * MIB) for number in range(24)]
    with ThreadPoolExecutor(4) as pool:
        puts = [
            pool.submit(store.put, f"unit/{number:02}", each) for number, each in enumerate(data)
        ]
        puts[3].result()
        server.kill_gateway()
        server.start()
        failed = [number for number, each in enumerate(puts) if each.exception() is not None]
    for number in failed:
        assert isinstance(puts[number].exception(), TransportError)
    names = [each.name for each in store.list("unit/")]
    for number in range(len(data)):
        name = f"unit/{number:02}"
        if number not in failed:
            assert name in names
        if name in names:
            assert store.get(name) == data[number]
    for number in failed:
        store.put(f"unit/{number:02}", data[number])
    assert [each.size for each in store.list("unit/")] == [2 * MIB] * len(data)
    store.close()


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("AWS_SECRET_ACCESS_KEY", "canary-7", "the credentials are refused .403 SignatureDoesNot"),
        ("AWS_ACCESS_KEY_ID", "nobody", "the credentials are refused .403 InvalidAccessKeyId"),
    ],
)
def test_wrong_credentials_are_refused_by_name(
    url: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str, cause: str
) -> None:
    monkeypatch.setenv(name, value)
    store = Bucket(parse(url))
    for call in CALLS.values():
        with pytest.raises(UsageError, match=cause) as refused:
            call.run(store)
        assert "canary" not in str(refused.value) + repr(store)
    store.close()


def test_who_has_no_right_to_a_bucket_is_told_which(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", STRANGER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", STRANGER[1])
    store = Bucket(parse(url))
    rights = ("PutObject", "PutObject", "GetObject", "GetObject", "ListBucket", "DeleteObject")
    for call, right in zip(CALLS.values(), rights, strict=True):
        with pytest.raises(UsageError, match=f"permission is denied .*s3:{right} on {BUCKET}"):
            call.run(store)
    store.close()


def test_a_bucket_that_is_gone_is_no_object_that_is_missing(environment: dict[str, str]) -> None:
    store = Bucket(parse("s3://no-such-bucket/x"))
    for call in CALLS.values():
        with pytest.raises(UsageError, match=r"there is no such bucket .404 NoSuchBucket.*make"):
            call.run(store)
    store.close()


def test_each_call_costs_one_request(url: str, proxy: RequestProxy) -> None:
    store = Bucket(parse(url))
    for number in range(5):
        store.put(f"a/{number}", b"x" * 1000 + b"y" * number)
    assert [store.create("log/1", b"1"), store.create("log/1", b"2")] == [True, False]
    store.get("a/1")
    store.get_range("a/2", 10, 500)
    list(store.list("a/"))
    store.delete(["a/1", "a/2"])
    assert [proxy.count(method) for method in ("PUT", "GET", "POST")] == [7, 3, 1]
    assert sum(each.length for each in proxy.requests if each.method == "PUT") == 5010 + 2
    got = [each.answered for each in proxy.requests if each.method == "GET"]
    assert got[:2] == [1001, 500]
    store.close()


def test_a_long_list_costs_a_request_for_each_thousand(url: str, proxy: RequestProxy) -> None:
    behind = S3Store(BUCKET, prefix=url.removeprefix(f"s3://{BUCKET}/"))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: obstore.put(behind, f"many/{n:04}", b""), range(1001)))
    before = proxy.count("GET")
    store = Bucket(parse(url))
    assert next(store.list("many/")).name == "many/0000"
    assert proxy.count("GET") - before == 1
    assert len(list(store.list("many/"))) == 1001
    assert proxy.count("GET") - before == 3
    store.close()
