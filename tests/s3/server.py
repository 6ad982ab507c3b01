"""Ceph's S3 gateway on loopback: one monitor, one OSD on a file, one radosgw, all of this process.

Theory. Nothing of a system is used but the programs: no systemd, no manager, no keys between the
daemons. All is in one folder and ends with the process that started it, also by SIGKILL
(``setpriv --pdeathsig``). What made the difference is said beside the line of the configuration.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final
from urllib.request import Request, urlopen

import obstore
from obstore.store import S3Store

from tests.certificates import LEAF, certificate
from tests.s3.needs import ServerError

START_S_MAX: Final = 90.0
BLOCK_BYTES: Final = 16 << 30
"""Of the file that is the disk; sparse."""

_POLL_S: Final = 0.05
_PORTS: Final = (20000, 32000)
"""Below those that the system gives to clients, so none takes one between two starts."""

_TLS: Final = "ssl_endpoint=127.0.0.1:{secure} ssl_certificate={certificate} ssl_private_key={key}"
_CONFIGURATION: Final = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{monitor}
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
ms bind ipv6 = false
ms bind msgr1 = false
auth cluster required = none
auth service required = none
auth client required = none
# radosgw prefers the mode "secure", which needs a key; without one it never connects.
ms mon client mode = crc
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
crash dir = {folder}
keyring = {folder}/keyring
# One copy on one host, in a fixed number of placement groups.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 500
debug ms = 0

[mon]
mon data = {folder}/mon
# A disk that is merely rather full is no reason not to start.
mon data avail crit = 1
mon data avail warn = 2

[osd]
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = {block}
bluestore block create = true
# Left to itself it takes 4 GiB.
bluestore cache autotune = false
bluestore cache size = 67108864
osd max write size = 64
osd op num shards = 2
osd class update on start = false

[client.rgw]
# Without tcp_nodelay each error takes 43 ms.
rgw frontends = beast endpoint=127.0.0.1:{gateway} tcp_nodelay=1 {tls}
rgw data = {folder}/rgw
rgw thread pool size = 64
rgw enable usage log = false
rgw enable quota threads = false
rgw cache lru size = 1000
# What was deleted is freed after a minute, not after two hours.
rgw gc obj min wait = 60
rgw gc processor period = 60
"""


class Server:
    """An S3 server in ``folder``, which is its own. Use it as a context manager."""

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        """tls: at a second port it speaks TLS (``secure``)."""
        self._folder: Final = folder
        self._tls: Final = tls
        self._running: Final[dict[str, subprocess.Popen[bytes]]] = {}
        self._monitor_port, self._port, self._secure_port = _free_ports(3)
        self.access_key: Final = secrets.token_hex(10)
        self.secret_key: Final = secrets.token_hex(20)

    @property
    def port(self) -> int:
        """Of the gateway; the same after each start."""
        return self._port

    @property
    def endpoint(self) -> str:
        """The URL of the gateway."""
        return f"http://127.0.0.1:{self._port}"

    def secure(self) -> dict[str, str]:
        """As ``environment``, over TLS."""
        environment = self.environment(f"https://127.0.0.1:{self._secure_port}")
        return environment | {"SSL_CERT_FILE": str(self._folder / "cert.pem")}

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """What a client has to have in its environment. endpoint: of a proxy before it."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self) -> Server:
        try:
            self._make()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start what does not run; what was stored is there. Blocks until it answers. What is
        started ends with the thread that called, too."""
        self._spawn("mon", "ceph-mon", "-i", "a")
        self._spawn("osd", "ceph-osd", "-i", "0")
        self._spawn("rgw", "radosgw", "-n", "client.rgw")
        self._wait("the gateway", self._answers)

    def kill_gateway(self) -> None:
        """SIGKILL to the gateway alone; ``start`` brings it back."""
        gateway = self._running.pop("rgw")
        gateway.kill()
        gateway.wait()

    def stop(self) -> None:
        """Kill all. What was stored is of no use to anybody then."""
        for daemon in self._running.values():
            daemon.kill()
        for daemon in self._running.values():
            daemon.wait()
        self._running.clear()

    def make_user(self, name: str, access_key: str, secret_key: str) -> None:
        """A user who owns nothing yet."""
        self._tool(
            *("radosgw-admin", "-n", "client.rgw", "user", "create"),
            *("--uid", name, "--display-name", name),
            *("--access-key", access_key, "--secret-key", secret_key),
        )

    def make_reader(self, access_key: str, secret_key: str) -> None:
        """Credentials of the user of ``environment`` that have the right to read alone."""
        self._tool(
            *("radosgw-admin", "-n", "client.rgw", "subuser", "create", "--uid", "portus"),
            *("--subuser", "portus:reader", "--access", "read", "--key-type", "s3"),
            *("--access-key", access_key, "--secret-key", secret_key),
        )

    def make_bucket(self, name: str) -> None:
        """A bucket of the user of ``environment``. obstore makes none; a signed PUT of nothing
        does."""
        store = S3Store(
            name,
            endpoint=self.endpoint,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        signed = obstore.sign(store, "PUT", "", timedelta(minutes=1))
        with urlopen(Request(signed, method="PUT", data=b"")):
            pass

    def _make(self) -> None:
        for name in ("mon", "osd", "rgw"):
            (self._folder / name).mkdir(parents=True)
        tls = ""
        if self._tls:
            cert, key = certificate(self._folder, LEAF)
            tls = _TLS.format(secure=self._secure_port, certificate=cert, key=key)
        fsid, disk = str(uuid.uuid4()), str(uuid.uuid4())
        (self._folder / "ceph.conf").write_text(
            _CONFIGURATION.format(
                fsid=fsid,
                folder=self._folder,
                monitor=self._monitor_port,
                gateway=self._port,
                tls=tls,
                block=BLOCK_BYTES,
            )
        )
        keyring, monmap = str(self._folder / "keyring"), str(self._folder / "monmap")
        address = f"[v2:127.0.0.1:{self._monitor_port}]"
        _run("ceph-authtool", "-C", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        _run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
        self._tool("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
        self._spawn("mon", "ceph-mon", "-i", "a")
        self._wait("the monitor", lambda: self._asked("osd", "new", disk, "0"))
        self._tool("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        self.start()
        self.make_user("portus", self.access_key, self.secret_key)

    def _with_configuration(self, program: str, *arguments: str) -> list[str]:
        return [program, "-c", str(self._folder / "ceph.conf"), *arguments]

    def _tool(self, program: str, *arguments: str) -> None:
        _run(*self._with_configuration(program, *arguments))

    def _asked(self, *question: str) -> bool:
        command = self._with_configuration("ceph", "--connect-timeout", "10", *question)
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
        return done.returncode == 0

    def _spawn(self, name: str, *command: str) -> None:
        if name in self._running:
            return
        with open(self._folder / f"{name}.out", "ab") as output:
            self._running[name] = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *self._with_configuration(command[0], "-f", *command[1:]),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False

    def _wait(self, what: str, is_there: Callable[[], bool]) -> None:
        until = time.monotonic() + START_S_MAX
        while not is_there():
            for name, daemon in self._running.items():
                if daemon.poll() is not None:
                    raise ServerError(f"{name} ended with {daemon.returncode}: {self._last(name)}")
            if time.monotonic() > until:
                raise ServerError(f"waited {START_S_MAX:.0f} s for {what}: {self._last('mon')}")
            time.sleep(_POLL_S)

    def _last(self, name: str) -> str:
        lines = (self._folder / f"{name}.out").read_text(errors="replace").splitlines()
        return " | ".join(lines[-5:])


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ServerError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        return [_free_port(held) for _ in range(count)]


def _free_port(held: contextlib.ExitStack) -> int:
    for port in _candidates():
        with contextlib.suppress(OSError):
            listening = socket.create_server(("127.0.0.1", port))
            held.enter_context(listening)
            return port
    raise ServerError(f"no free port between {_PORTS[0]} and {_PORTS[1]}")


def _candidates() -> Iterator[int]:
    draw = random.SystemRandom()
    return (draw.randrange(*_PORTS) for _ in range(1000))
