"""``portus serve`` as a process: how it starts, is reached, and ends."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

import portus
from portus.errors import BusyError, MediumError, UsageError
from portus.reach.daemon.counters import TIMED
from portus.reach.daemon.main import parse_listen, prepare
from portus.reach.daemon.options import ServeOptions
from portus.reach.daemon.pools import parse_size
from portus.reach.daemon.server import _is_dead_socket, open_listener
from portus.reach.index.directory import open_reader
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import Address, Scheme, parse
from portus.reach.transport.dial import Credentials, dial
from tests import certificates
from tests.hosts import Host, connect_again_at_once, free_port, serving, url

STATE = {"x": torch.arange(100_000)}


def saved(address: str, step: int = 1) -> None:
    with portus.PoolCheckpointer(address, keep=None) as checkpointer:
        checkpointer.save(STATE, step).wait()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.long
def test_it_ends_clean_in_time_and_starts_again_without_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_again_at_once(monkeypatch)
    with Host(tmp_path / "pools") as host:
        with portus.PoolCheckpointer(host.url, keep=None) as checkpointer:
            checkpointer.save(STATE, 1).wait()
            assert host.stop() == 0, "not in the time that is promised"  # a client is connected
            assert "Traceback" not in host.log
            host.start()
            checkpointer.save(STATE, 2).wait()
        assert host.stop() == 0
    assert portus.check(tmp_path / "pools" / "default.portus") == []


def test_signals_count_whichever_thread_the_system_gives_them_to(tmp_path: Path) -> None:
    with Host(tmp_path / "pools") as host:
        other = max(map(int, os.listdir(f"/proc/{host.process.pid}/task")))
        assert other != host.process.pid
        assert ctypes.CDLL(None).tgkill(host.process.pid, other, signal.SIGHUP) == 0
        host.until("reloaded")
        assert ctypes.CDLL(None).tgkill(host.process.pid, other, signal.SIGTERM) == 0
        assert host.ended() == 0


LATE = """
import os, signal, sys

class Late:
    def __del__(self, send=os.kill, process=os.getpid(), numbers=(1, 2, 15)):
        for number in numbers:
            send(process, number)

late = Late()  # until the interpreter clears its modules
sys.argv = sys.argv[3:]
from portus.cli.main import main
main()
"""


def test_signals_that_come_as_a_host_ends_do_not_change_its_exit_code(tmp_path: Path) -> None:
    with Host(tmp_path / "pools", under=[sys.executable, "-c", LATE]) as host:
        assert host.stop() == 0


@pytest.mark.long
def test_every_medium_is_served(tmp_path: Path) -> None:
    for place in (tmp_path / "pools", tmp_path / "one.portus", "memory:64M"):
        with Host(place) as host:
            saved(host.url)
            with portus.open(host.url) as pool:
                assert pool.steps() == [1]
    assert (tmp_path / "one.portus").is_file()


def test_what_a_host_makes_is_its_own(tmp_path: Path) -> None:
    with Host(tmp_path / "made" / "pools") as host:
        saved(host.url)
        assert host.stop() == 0
    modes: dict[int, set[int]] = {stat.S_IFDIR: set(), stat.S_IFREG: set()}
    for path in [tmp_path / "made", *(tmp_path / "made").rglob("*")]:
        modes[stat.S_IFMT(path.stat().st_mode)].add(stat.S_IMODE(path.stat().st_mode))
    assert modes == {stat.S_IFDIR: {0o700}, stat.S_IFREG: {0o600}}


def test_a_second_host_of_one_directory_is_told_of_the_first_at_once(tmp_path: Path) -> None:
    place = tmp_path / "pools"
    with Host(place) as host:
        match = f"process {host.process.pid} of this machine already serves it"
        with pytest.raises(BusyError, match=match):
            prepare(ServeOptions(place=str(place), listen=["127.0.0.1:0"]))
        host.kill()
        server = prepare(ServeOptions(place=str(place), listen=["127.0.0.1:0"]))
        assert server.stop()


def test_strangers_cost_so_many_lines_of_log_at_most(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s" * 32)
    count = 60
    with Host("memory:1M", "--secret-file", str(secret)) as host:
        for number in range(count):
            with socket.create_connection(("127.0.0.1", host.port)) as plain:
                if number % 2:
                    plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    with contextlib.suppress(ConnectionError):
                        plain.recv(100)
        assert host.stop() == 0
    found = logged(host)
    told = sum(len(found.pop(event, [])) for event in ("turned_away", "disconnected"))
    [left_out] = found.pop("left_out")
    assert told + int(left_out["count"]) >= count
    assert told <= 20
    assert found.keys() == {"serving", "ending"}


def test_one_pool_file_has_one_tenant(tmp_path: Path) -> None:
    match = "serve a directory for more"
    with Host(tmp_path / "one.portus") as host, pytest.raises(UsageError, match=match):
        portus.PoolCheckpointer(f"portus://other@127.0.0.1:{host.port}")


def test_a_host_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from portus.reach.daemon.main import prepare\n"
        "from portus.reach.daemon.options import ServeOptions\n"
        "server = prepare(ServeOptions(place=sys.argv[1], listen=['127.0.0.1:0']))\n"
        "server.start(); server.house.pools.of('default'); assert server.stop()\n"
        "import portus.cli.main, portus.cli.app\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)


def test_a_pool_that_somebody_writes_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.daemon.pools.BUSY_S", 0.1)
    with portus.PoolCheckpointer(tmp_path / "one.portus") as checkpointer:
        checkpointer.save(STATE, 1).wait()
        with pytest.raises(BusyError, match="another writer has held it"):
            prepare(ServeOptions(place=str(tmp_path / "one.portus"), listen=["127.0.0.1:0"]))


def test_systemd_is_told_when_it_is_ready_and_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind("notify")
        channel.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with Host("memory:1M") as host:
            assert channel.recv(100) == b"READY=1"
            host.stop()
            assert channel.recv(100) == b"STOPPING=1"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_all_of_it_may_be_at_an_address_of_ipv6(tmp_path: Path) -> None:
    port, page_port = free_port(), free_port()
    options = ("--listen", f"[::1]:{port}", "--metrics", f"[::1]:{page_port}")
    with Host(tmp_path / "pools", *options):
        # All listeners listen before the first is told of.
        saved(f"portus://[::1]:{port}")
        with urllib.request.urlopen(f"http://[::1]:{page_port}/metrics", timeout=60) as page:
            assert "portus_saves_total 1" in page.read().decode()


def test_prometheus_reads_what_was_counted(tmp_path: Path) -> None:
    port = free_port()
    options = ("--metrics", str(port), "--quota", "64M")
    with (
        Host(tmp_path / "pools", *options) as host,
        portus.PoolCheckpointer(host.url) as checkpointer,
    ):
        for step in (1, 2):
            checkpointer.save({"same": STATE["x"], "step": torch.tensor(step)}, step).wait()
        with portus.open(host.url) as pool:
            pool.load()
        with pytest.raises(portus.MediumError):
            checkpointer.save({"x": torch.empty(20_000_000)}, 3).wait()
        found = scraped(port)
        host.stop()
    tenant = '{tenant="default"}'
    size = found[f"portus_pool_bytes{tenant}"]
    assert found["portus_saves_total"] == 2
    assert found["portus_abandoned_total"] == 0
    assert found["portus_shared_bytes_total"] == 800_000
    # The rest of the two files: what is new in each, and the bytes around their storages.
    assert 800_016 < found["portus_pulled_bytes_total"] < 808_000
    assert found["portus_read_bytes_total"] > 800_000
    assert 0 < found["portus_hash_seconds_total"] < found["portus_pull_seconds_total"]
    assert 0 < found[f"portus_persist_seconds_total{tenant}"] < found["portus_commit_seconds_total"]
    assert found[f"portus_versions{tenant}"] == 2
    assert found[f"portus_saves_in_flight{tenant}"] == 0
    assert found[f"portus_commits_total{tenant}"] == 2
    assert size - 800_000 > found[f"portus_free_bytes{tenant}"] > 0
    room = (64 << 20) - size + found[f"portus_free_bytes{tenant}"]
    assert found[f"portus_room_bytes{tenant}"] == room, "the quota is less than the disk has"
    assert found['portus_failures_total{fault="medium"}'] >= 1
    assert found['portus_failures_total{fault="usage"}'] == 0
    assert found["portus_connections_total"] >= found["portus_connections_open"] >= 1
    for name in TIMED:
        series = f"portus_{name}_duration_seconds"
        buckets = [value for key, value in found.items() if key.startswith(f"{series}_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == found[f"{series}_count"] > 0
        assert found[f"{series}_sum"] > 0
    page = (Path(__file__).parents[3] / "docs/deploying.md").read_text()
    names = {re.sub(r"(_bucket|_sum|_count)?({.*)?$", "", key) for key in found}
    assert {name for name in names if f"`{name}`" not in page} == set(), "not in the document"


def scraped(port: int) -> dict[str, float]:
    """The numbers of a page for Prometheus, each of whose metrics says what it is."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        assert page.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = page.read().decode().splitlines()
    told = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert told == {line.split()[2] for line in lines if line.startswith("# HELP")}
    rows = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    found = {name: float(value) for name, value in rows}
    assert len(found) == len(rows), "no series twice"
    names = {name.partition("{")[0] for name in found}
    assert all(re.sub("_(bucket|sum|count)$", "", n) in told or n in told for n in names)
    return found


Event = dict[str, str | int | float]


def logged(host: Host) -> dict[str, list[Event]]:
    """What a host that ended has logged, by event. Every line is an object of JSON."""
    found: dict[str, list[Event]] = {}
    for line in host.log.splitlines():
        event = json.loads(line)
        assert event.keys() >= {"time", "level", "logger", "event", "message"}
        found.setdefault(event["event"], []).append(event)
    return found


def test_the_log_has_fields_for_who_came_what_was_saved_and_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    for file in (secret, wrong):
        file.touch(mode=0o600)
        file.write_text(file.name * 8)
    options = ("--quota", "8M", "--secret-file", str(secret))
    with Host(tmp_path / "pools", *options) as host:
        monkeypatch.setenv("PORTUS_SECRET_FILE", str(wrong))
        with pytest.raises(UsageError, match="wrong secret"):
            portus.PoolCheckpointer(host.url)
        monkeypatch.setenv("PORTUS_SECRET_FILE", str(secret))
        with portus.PoolCheckpointer(host.url, "a run", keep=1) as checkpointer:
            for step in (10, 20):
                new = torch.tensor(step)
                saved = checkpointer.save({"same": STATE["x"], "new": new}, step).wait()
            with pytest.raises(portus.MediumError):
                checkpointer.save({"x": torch.empty(4_000_000)}, 30).wait()
        link, _ = dial(parse(host.url), Credentials.from_environment(), 60)
        with contextlib.closing(link):
            link.ask(said.Claim("raw", b"c" * 16))
            link.ask(said.Begin("raw", 7, b"t" * 16, said.pack_column([5])))
            link.ask(said.Abandon())
            link.ask(said.Begin("raw\nline", 8, b"t" * 16, said.pack_column([5])))
            link.ask(said.Retire(saved.token))
        assert host.stop() == 0
    found = logged(host)
    assert found["serving"][0]["address"] == host.url
    [away] = found["turned_away"]
    assert away["level"] == "warning"
    assert away["tenant"] == "default"
    assert "wrong secret" in str(away["why"])
    first, second = found["committed"]
    assert {event["level"] for event in (first, second)} == {"info"}
    expected = {"tenant": "default", "model": "a run", "step": 20, "version": 2, "commit": 3}
    assert second.items() >= {**expected, "shared_bytes": 800_000}.items()
    assert 800_008 < int(second["bytes"]) < 804_000, "that of the file"
    assert (first["retired"], second["retired"]) == (0, 1)
    assert 0 < float(second["commit_seconds"]) < float(second["seconds"]) < 60
    peers = {event["peer"]: event for event in found["connected"]}
    assert second["peer"] in peers
    assert peers.keys() == {event["peer"] for event in found["disconnected"]} != set()
    *full, unclaimed = found["refused"]
    assert {(event["level"], event["fault"]) for event in full} == {("error", "medium")}
    assert (unclaimed["level"], unclaimed["fault"]) == ("info", "usage")
    assert unclaimed["request"] == "begin"
    assert "is not claimed" in str(unclaimed["why"])
    gone = found["abandoned"][-1]
    expected = {"model": "raw", "step": 7, "bytes": 5, "why": "the client abandoned it"}
    assert gone.items() >= expected.items()
    assert found["retired"][0]["versions"] == 1
    page = (Path(__file__).parents[3] / "docs/deploying.md").read_text()
    fields = {name for events in found.values() for event in events for name in event}
    assert {name for name in {*found, *fields} if f"`{name}`" not in page} == set()


def test_each_event_is_in_the_page_with_its_fields() -> None:
    root = Path(__file__).parents[3]
    rows = re.findall(r"^\| (`.*?) \| (.*)\|$", (root / "docs/deploying.md").read_text(), re.M)
    calls = [
        node
        for path in (root / "core/portus/reach/daemon").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and re.search(r"(^|\.)tell$", ast.unparse(node.func))
    ]
    told = [each for each in calls if isinstance(each.args[1], ast.Constant)]
    assert len(told) > 20
    for each in told:
        event, fields = ast.literal_eval(each.args[1]), {part.arg for part in each.keywords}
        [known] = [last for first, last in rows if f"`{event}`" in first]
        assert {name for name in fields if name and f"`{name}`" not in known} == set(), event


def test_what_the_floors_below_log_is_an_event_too(tmp_path: Path) -> None:
    path = tmp_path / "one.portus"
    saved(str(path))
    with contextlib.closing(open_reader(str(path))) as pool:
        [entry] = pool.catalogue().entries()
    data = bytearray(path.read_bytes())
    for place in entry.pointer.extents:
        data[place.offset] ^= 1
    path.write_bytes(data)
    with Host(path) as host:
        host.stop()
    [lost] = logged(host)["log"]
    assert (lost["level"], lost["logger"]) == ("error", "portus")
    assert "version 1 is lost" in str(lost["message"])


@pytest.mark.long
def test_who_hangs_up_on_the_metrics_is_no_news(tmp_path: Path) -> None:
    port = free_port()
    with Host("memory:1M", "--metrics", str(port)) as host:
        for request in (b"GET / HTTP/1.1\r\n\r\n", b"GET /metrics HTTP/1.0\r\n\r\n", b"\0") * 5:
            with socket.create_connection(("127.0.0.1", port)) as reader:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                reader.sendall(request)
        assert scraped(port)["portus_connections_total"] == 0
        host.stop()
    assert logged(host).keys() == {"serving", "ending"}


def test_what_ends_a_thread_of_the_host_is_a_line_too() -> None:
    program = (
        "import threading\n"
        "from portus.reach.daemon.events import log_to_stderr\n"
        "log_to_stderr()\n"
        "thread = threading.Thread(target=[].pop, name='portus-session')\n"
        "thread.start(); thread.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    [line] = done.stderr.splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"]) == ("log", "critical")
    assert "portus-session ended by a bug in portus: IndexError" in event["message"]
    assert event["exception"].startswith("Traceback")


def certificate(folder: Path, *extensions: str) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that signed itself, and its key, or the test is skipped.
    extensions: of openssl's."""
    try:
        return certificates.certificate(folder, *extensions)
    except FileNotFoundError:
        pytest.skip("openssl is not installed: no certificate can be made")


def test_tls_is_spoken_and_strangers_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    with Host("memory:64M", "--tls-cert", cert, "--tls-key", key) as host:
        address = f"portus+tls://127.0.0.1:{host.port}"
        with pytest.raises(UsageError, match=r"TLS failed.*PORTUS_TLS_CA"):
            portus.PoolCheckpointer(address)
        with pytest.raises(portus.TransportError, match=r"portus\+tls://"):
            portus.PoolCheckpointer(host.url)
        for path in (str(tmp_path / "nothing.pem"), key):
            monkeypatch.setenv("PORTUS_TLS_CA", path)
            with pytest.raises(
                UsageError, match=f"{path}: cannot read certificates.*PORTUS_TLS_CA"
            ):
                portus.PoolCheckpointer(address)
        monkeypatch.setenv("PORTUS_TLS_CA", cert)
        saved(address)
        with portus.open(address) as pool:
            loaded = pool.load()
        assert isinstance(loaded, dict)
        assert torch.equal(loaded["x"], STATE["x"])


def test_who_begins_no_tls_is_ended_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.daemon.session.GREETING_S", 0.2)
    cert, key = certificate(tmp_path)
    options = ServeOptions(place="memory:1M", listen=["127.0.0.1:0"], cert_path=cert, key_path=key)
    server = prepare(options)
    server.start()
    try:
        for said_first in (b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", server.listeners[0].port)) as plain:
                plain.settimeout(60)
                plain.sendall(said_first)
                with contextlib.suppress(ConnectionError):
                    while plain.recv(100):
                        pass
    finally:
        assert server.stop()


def test_a_host_without_tls_says_how_it_is_reached(tmp_path: Path) -> None:
    with serving(tmp_path / "pools") as server:
        address = url(server).replace("portus:", "portus+tls:")
        with pytest.raises(UsageError, match=r"TLS failed.*--tls-cert, use portus://"):
            portus.PoolCheckpointer(address)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1", Address(Scheme.TCP, host="127.0.0.1")),
        ("store:9", Address(Scheme.TCP, host="store", port=9)),
        (":9", Address(Scheme.TCP, host="0.0.0.0", port=9)),
        ("unix:/run/p.sock", Address(Scheme.UNIX, path="/run/p.sock")),
        ("portus+tls://[::1]:9", Address(Scheme.TLS, host="::1", port=9)),
        ("[::1]:9", Address(Scheme.TCP, host="::1", port=9)),
        ("[::1]", Address(Scheme.TCP, host="::1")),
        ("::1", Address(Scheme.TCP, host="::1")),
        ("::", Address(Scheme.TCP, host="::")),
    ],
)
def test_where_to_listen_is_said_in_short_or_in_full(text: str, address: Address) -> None:
    assert parse_listen(text, tls=False) == address


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"listen": ["0.0.0.0:0"]}, "--secret-file"),
        ({"tls": "cert.pem"}, "go together"),
        ({"quota": "much"}, "expected a size"),
        ({"secret_path": "missing"}, "cannot be read"),
        ({"metrics": "port"}, "expected a port"),
        ({"place": "memory:x"}, "expected a size"),
        ({"place": "memory:4K"}, "bytes or more"),
        ({"place": ""}, "cannot be served"),
        ({"place": "portus://store-1:7117"}, "cannot be served"),
    ],
)
def test_a_senseless_wish_is_refused_and_nothing_listens(
    tmp_path: Path, options: dict[str, object], match: str
) -> None:
    made = ServeOptions(
        place=str(options.get("place", tmp_path / "pools")),
        listen=options.get("listen", ["127.0.0.1:0"]),  # type: ignore[arg-type]
        cert_path=options.get("tls"),  # type: ignore[arg-type]
        quota=options.get("quota"),  # type: ignore[arg-type]
        secret_path=options.get("secret_path"),  # type: ignore[arg-type]
        metrics=options.get("metrics"),  # type: ignore[arg-type]
    )
    with pytest.raises(UsageError, match=match):
        prepare(made)


def test_an_address_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MediumError, match=f"portus://127.0.0.1:{port}: cannot listen"):
            prepare(ServeOptions(place=str(tmp_path), listen=[f"127.0.0.1:{port}"]))


def test_a_start_that_fails_leaves_no_socket(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listen = [f"unix:{tmp_path / 'socket'}"]
        with pytest.raises(MediumError, match=f"127.0.0.1:{port}: cannot listen"):
            prepare(ServeOptions(place="memory:1M", listen=listen, metrics=str(port)))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MediumError, match="cannot make the pool directory"):
        prepare(ServeOptions(place=str(tmp_path / "file" / "pools"), listen=["127.0.0.1:0"]))


def listening_at(path: Path) -> contextlib.closing[socket.socket]:
    return contextlib.closing(open_listener(Address(Scheme.UNIX, path=str(path)), None).socket)


def test_a_socket_that_a_killed_host_left_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with pytest.raises(MediumError, match="cannot listen: Address already in use"):
            listening_at(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"
    with listening_at(tmp_path / "socket"):
        assert not _is_dead_socket(str(tmp_path / "socket"))
    assert (tmp_path / "socket").is_socket()
    with listening_at(tmp_path / "socket"):
        pass


def test_a_path_too_long_for_a_socket_is_said(tmp_path: Path) -> None:
    with pytest.raises(MediumError, match="cannot listen: AF_UNIX path too long"):
        listening_at(tmp_path / ("x" * 120))


def test_sizes_are_read() -> None:
    assert [parse_size(text) for text in ("4096", "2K", "3MiB", "64G", "1t")] == [
        *(4096, 2048, 3 << 20, 64 << 30, 1 << 40)
    ]


def test_the_unit_file_is_one(tmp_path: Path) -> None:
    unit = Path(portus.__file__).parent / "reach" / "daemon" / "portus.service"
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        [tool, "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "portus.service" in line]
    assert ours == []
    assert "Type=notify" in unit.read_text()
