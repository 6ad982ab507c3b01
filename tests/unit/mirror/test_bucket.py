"""``Bucket`` without a server: causes by their names, secrets that stay secret, and its thread.

Against a real server: ``tests/s3``.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from portus.errors import MediumError, PortusError, TransportError, UsageError
from portus.reach.mirror.address import parse
from portus.reach.mirror.bucket import Bucket, BucketTimeouts
from portus.reach.mirror.causes import translate
from portus.reach.mirror.opening import open_store
from portus.reach.mirror.store import MissingError, Store
from tests.certificates import LEAF
from tests.simulation.proxy import ConnectionCut, RequestFault, RequestProxy
from tests.unit.daemon.test_main import certificate

QUICK = BucketTimeouts(connect_s=30, request_s=30, retries=0, retry_s=1)
HASTY = BucketTimeouts(connect_s=1, request_s=1, retries=0, retry_s=1)
CANARY = "canary-5f2e9c"
CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("a", b"xy"),
    "create": lambda store: store.create("a", b"x"),
    "get": lambda store: store.get("a"),
    "get a": lambda store: store.get_range("a", 0, 1),
    "list": lambda store: list(store.list("a/")),
    "delete": lambda store: store.delete(["a"]),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"id-{CANARY}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"secret-{CANARY}")
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"token-{CANARY}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestProxy]:
    """A proxy before nothing."""
    with RequestProxy("127.0.0.1", 1) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def store(proxy: RequestProxy) -> Iterator[Bucket]:
    store = Bucket(parse("s3://bucket/runs/gpt"), QUICK)
    yield store
    store.close()


def told(store: Store, call: str) -> PortusError:
    """What a call raises; nothing in it, or in what it came from, is a secret."""
    with pytest.raises(PortusError) as raised:
        CALLS[call](store)
    whole = "".join(traceback.format_exception(raised.value))
    assert CANARY not in whole + repr(raised.value) + repr(store) + repr(raised.value.__dict__)
    assert raised.value.__context__ is raised.value.__cause__ is None
    assert "s3://bucket/runs/gpt: cannot " in str(raised.value)
    return raised.value


@pytest.mark.parametrize(
    ("status", "code", "kind", "cause"),
    [
        (403, "InvalidAccessKeyId", UsageError, "credentials are refused .*AWS_SECRET_ACCESS_KEY"),
        (403, "SignatureDoesNotMatch", UsageError, "the credentials are refused"),
        (400, "ExpiredToken", UsageError, "the credentials have expired .*renew"),
        (403, "RequestTimeTooSkewed", UsageError, "this machine's clock .*set the clock"),
        (403, "AccessDenied", UsageError, "permission is denied"),
        (404, "NoSuchBucket", UsageError, "there is no such bucket .*make bucket"),
        (301, "PermanentRedirect", UsageError, "another region.*AWS_REGION"),
        (400, "InvalidArgument", UsageError, "the server refuses the request"),
        (501, "NotImplemented", UsageError, "the store cannot do this"),
        (403, "QuotaExceeded", MediumError, "no space left"),
        (507, "Full", MediumError, "no space left"),
        (429, "TooManyRequests", TransportError, "fewer requests"),
        (500, "InternalError", TransportError, "the server failed"),
        (502, "BadGateway", TransportError, "the server failed"),
        (503, "SlowDown", TransportError, "busy or unavailable .*later"),
    ],
)
def test_what_a_server_answers_is_told_by_its_cause(
    store: Bucket, proxy: RequestProxy, status: int, code: str, kind: type, cause: str
) -> None:
    proxy.fail(RequestFault(status=status, code=code), times=100)
    for call in CALLS:
        error = told(store, call)
        assert isinstance(error, kind), error
        assert re.search(rf": cannot {call}.*: .*{cause}", str(error)), error


def test_an_object_and_a_range_that_are_missing_are_no_error_of_the_store(
    store: Bucket, proxy: RequestProxy
) -> None:
    proxy.fail(RequestFault(status=404, code="NoSuchKey"), times=100)
    for call in ("get", "get a"):
        assert isinstance(told(store, call), MissingError)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "patience", "cause"),
    [
        (RequestFault(cut=ConnectionCut.BEFORE), QUICK, "the connection was cut"),
        (RequestFault(status=200, delay_s=5), HASTY, "no answer within 1 s"),
    ],
    ids=["cut", "late"],
)
def test_a_server_that_does_not_answer_is_told_by_what_became_of_it(
    proxy: RequestProxy, fault: RequestFault, patience: BucketTimeouts, cause: str
) -> None:
    proxy.fail(fault, times=100)
    with (
        contextlib.closing(Bucket(parse("s3://bucket/runs/gpt"), patience)) as store,
        ThreadPoolExecutor(len(CALLS)) as pool,
    ):
        for error in pool.map(lambda call: told(store, call), CALLS):
            assert isinstance(error, TransportError)
            assert re.search(cause, str(error)), error


def test_nobody_who_listens_and_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint, cause in (
        ("http://127.0.0.1:1", "connection is refused: nothing listens there, at 127.0.0.1:1"),
        (f"http://me:{CANARY}@127.0.0.1:1", "nothing listens there, at 127.0.0.1:1"),
        ("http://nobody.invalid", r"cannot be resolved \(DNS\), at nobody.invalid"),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        patient = BucketTimeouts(connect_s=60, request_s=60, retries=0)  # of who is asked for names
        store = Bucket(parse("s3://bucket/runs/gpt"), patient)
        error = told(store, "put")
        assert isinstance(error, TransportError)
        assert re.search(cause, str(error)), error
        assert CANARY not in str(error)
        store.close()


def test_tls_that_is_not_believed_not_spoken_or_not_used(
    tmp_path: Path, proxy: RequestProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meets(endpoint: str, cause: str) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        store = Bucket(parse("s3://bucket/runs/gpt"), QUICK)
        error = told(store, "put")
        assert isinstance(error, UsageError)
        assert re.search(cause, str(error)), error
        store.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def shake_hands() -> None:
            connection, _ = listening.accept()
            with pytest.raises(OSError, match=r"(?i)ssl|tls|reset"), connection:
                context.wrap_socket(connection, server_side=True)

        def speak_plainly() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=shake_hands)
        thread.start()
        meets(f"https://127.0.0.1:{listening.getsockname()[1]}", "TLS: .* is not trusted")
        thread.join()
        thread = threading.Thread(target=speak_plainly)
        thread.start()
        meets(f"https://127.0.0.1:{listening.getsockname()[1]}", "does not use TLS")
        thread.join()
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    meets(proxy.endpoint, "set AWS_ALLOW_HTTP=true")


@pytest.mark.long
@pytest.mark.parametrize(
    ("scheme", "said", "is_signed"),
    [("http", None, True), ("https", None, False), ("https", "false", True), ("http", "1", False)],
)
def test_contents_are_in_the_signature_unless_tls_vouches_for_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    said: str | None,
    is_signed: bool,
) -> None:
    hashes: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            hashes.append(self.headers["x-amz-content-sha256"])
            self.send_response(200)
            self.send_header("ETag", '"x"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        if scheme == "https":
            own, key = certificate(tmp_path, LEAF)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(own, key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            monkeypatch.setenv("SSL_CERT_FILE", own)
        if said is not None:
            monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", said)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"{scheme}://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        store = Bucket(parse("s3://bucket/runs"), QUICK)
        try:
            store.put("a", b"contents")
            assert store.create("b", b"contents")
        finally:
            store.close()
            server.shutdown()
            thread.join()
    contents = hashlib.sha256(b"contents").hexdigest()
    assert hashes == [contents if is_signed else "UNSIGNED-PAYLOAD"] * 2


def test_without_credentials_it_says_which_are_missing(
    proxy: RequestProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # of no machine of Amazon's
    store = Bucket(parse("s3://bucket/runs/gpt"), QUICK)
    error = told(store, "list")
    assert isinstance(error, UsageError)
    assert re.search("no credentials were found.*set AWS_ACCESS_KEY_ID", str(error)), error
    store.close()


def test_no_log_and_no_process_title_holds_a_secret(
    store: Bucket, proxy: RequestProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    proxy.fail(RequestFault(status=403, code=f"x{CANARY}"), times=100)
    for call in CALLS:
        told(store, call)
    assert CANARY not in caplog.text


def told_by(url: str, name: str, said: str) -> PortusError:
    """What a put of an object raises, if obstore says that."""
    return translate(ValueError(said), parse(url), "put", name, connect_s=1, request_s=1)


def test_an_error_that_is_not_known_is_shown_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"https://me:{CANARY}@host/x?sig=signed"
    said = f"Nobody {{knows}} {url} id-{CANARY}\x1b[2J of a\nsecond line"
    error = told_by("gs://bucket/x", "a", said)
    assert isinstance(error, TransportError)
    assert "unknown error, Nobody {knows} https://host/x ...\\x1b[2J of a, at host;" in str(error)


def test_what_an_object_is_called_is_no_cause() -> None:
    said = (
        'Error performing PUT https://h/TimedOut/certificate in 1s - ?\n path: "ConnectionRefused"'
    )
    error = told_by("s3://bucket/x", "dns", said)
    assert "an unknown error" in str(error)


def test_a_process_that_was_forked_is_told_to_open_its_own(store: Bucket) -> None:
    told(store, "put")
    child = os.fork()
    if not child:
        try:
            CALLS["put"](store)
        except UsageError as error:
            os._exit(0 if "opened by another process" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_store_that_nobody_closed_ends_with_its_owner(proxy: RequestProxy) -> None:
    store = Bucket(parse("s3://bucket/runs/gpt"), QUICK)
    told(store, "put")
    (thread,) = (each for each in threading.enumerate() if each.name == "portus-store")
    del store
    until = time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < until:
        gc.collect()  # the thread may have held what it ran last
        thread.join(0.01)
    assert not thread.is_alive()


def test_without_obstore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match=r"pip install 'portus-checkpoint\[mirror\]'"):
        open_store(parse("s3://bucket/x"))
    open_store(parse("file:///nfs/x")).close()


def test_what_stores_need_is_imported_when_one_is_opened() -> None:
    program = (
        "import sys\n"
        "import portus, portus.reach.mirror.opening as opening\n"
        "assert not {'obstore', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_process_that_ends_in_the_middle_of_a_call_ends_at_once(proxy: RequestProxy) -> None:
    """What Rust still runs would meet an interpreter that is gone."""
    proxy.fail(RequestFault(status=200, delay_s=60), times=100)
    program = (
        "import threading, time\n"
        "from portus.reach.mirror.address import parse\n"
        "from portus.reach.mirror.bucket import Bucket\n"
        "store = Bucket(parse('s3://bucket/runs/gpt'))\n"
        "data = bytes(8 << 20)\n"
        "threading.Thread(target=store.put, args=('a', data), daemon=True).start()\n"
        "while not store._calls._thread: time.sleep(0.001)\n"
        "time.sleep(0.1)\n"
    )
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    "then",
    [
        "",
        # Ctrl-C in the close: what it cut short, the exit does.
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "try: signal.setitimer(signal.ITIMER_REAL, 0.05); store.close()\n"
        "except KeyboardInterrupt: sys.exit(0)\n"
        "sys.exit('it was closed before the timer')\n",
    ],
)
def test_a_process_ends_well_while_a_thread_of_the_client_still_returns(then: str) -> None:
    """Before Python 3.14 it died by SIGABRT, in one exit of twenty on a busy processor."""
    program = (
        "import asyncio, signal, sys, threading, time\n"
        "from portus.reach.mirror.address import parse\n"
        "from portus.reach.mirror.bucket import Bucket\n"
        "wake = asyncio.SelectorEventLoop._write_to_self\n"
        "def wake_slowly(loop):\n"
        "    wake(loop)\n"
        "    if isinstance(threading.current_thread(), threading._DummyThread):\n"
        "        for _ in range(1000): time.sleep(0.0001)\n"
        "asyncio.SelectorEventLoop._write_to_self = wake_slowly\n"
        "store = Bucket(parse('memory:a'))\n"
        "store.put('a', b'x')\n" + then
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
