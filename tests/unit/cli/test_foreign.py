"""Names and texts of strangers, on their way to a terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from portus.errors import PortusError, UsageError, printable
from portus.reach.daemon.events import Lines, tell
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Fault, Said
from portus.reach.transport.stream import Link
from tests.hosts import serving, url
from tests.unit.cli.scene import COMMANDS, call_of, pointing, portus

EVIL = "\x1b]0;owned\x07\x1b[2J\r\nroot# \u202egnp.exe\x9b31m\x7f\u2028"
SEEN = r"\x1b]0;owned\x07\x1b[2J\r\nroot# \u202egnp.exe\x9b31m\x7f\u2028"


def is_harmless(text: str) -> bool:
    """Nothing but lines of what is seen as it is."""
    return all(line.isprintable() for line in text.split("\n")) and "\nroot# " not in text


def test_all_that_would_not_be_seen_as_it_is_is_escaped() -> None:
    assert printable(EVIL) == SEEN
    assert printable("a/\udcff \u00a0\u200b") == r"a/\udcff \xa0\u200b"
    assert printable("Öl in 日本 🙂") == "Öl in 日本 🙂"


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pool with names that nobody wants to see at a terminal, one version of which is rotten."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"pool{EVIL.replace('/', '')}.portus"
    with PoolCheckpointer(path, EVIL, keep=None) as run:
        for step in (1, 2):
            run.save({EVIL: torch.full((1000,), float(step))}, step).wait()
    with pointing(path, EVIL) as files:
        state = {EVIL: torch.full((1000,), 3.0)}
        files.save(state, str(tmp_path / f"{EVIL.replace('/', '')}3.ckpt"), 3).wait()
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((1000,), 2.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    return path


def test_no_command_prints_what_moves_a_cursor(pool: Path) -> None:
    commands = (
        ["ls"],
        ["show", EVIL],
        ["show", f"{EVIL}@1"],
        ["show", f"no such {EVIL}"],
        ["verify"],
        ["verify", "--rate", "1G/s"],
        ["gc", "--dry-run"],
        ["rm", f"{EVIL}@1"],
        ["export", f"{EVIL}@2", "out.pt"],
        ["gc", "--missing", "."],
        ["show", f"{EVIL}3.ckpt"],
        ["rm", f"{EVIL}3.ckpt"],
        ["rescue", str(pool)],
    )
    for command in commands:
        where = [] if command[0] == "rescue" else ["--pool", str(pool)]
        done = portus(*command, *where)
        assert SEEN[:20] in done.out + done.err, command
        assert is_harmless(done.out), (command, done.out)
        assert is_harmless(done.err), (command, done.err)
        assert portus(*command, *where, "--json").out.isascii()


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "serve"])
def test_what_a_command_is_given_moves_no_cursor(
    pool: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTUS_POOL", str(pool))
    monkeypatch.setattr("portus.cli.doctor.adapters", lambda _: ())  # they start processes
    done = portus(*call_of(command, EVIL))
    assert is_harmless(done.out), done.out
    assert is_harmless(done.err), done.err
    assert portus(*call_of(command, EVIL), "--json").out.isascii()


def test_what_a_host_logs_is_harmless_when_a_program_has_undone_its_json(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell(logging.WARNING, "committed", f"model {EVIL}", model=EVIL, step=3)
    [record] = caplog.records
    line = Lines().format(record)
    assert is_harmless(line)
    assert (
        json.loads(line).items() >= {"model": SEEN, "message": f"model {SEEN}", "step": 3}.items()
    )


@contextlib.contextmanager
def speaking(answer: Said) -> Iterator[str]:
    """The address of what answers every greeting so, and has proved nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            with contextlib.suppress(PortusError, OSError):
                while True:
                    plain, _ = listener.accept()
                    link = Link(plain, is_client=False, name="fake", silence_s=10)
                    link.receive()
                    link.send(answer)
                    link.close()

        threading.Thread(target=talk, daemon=True).start()
        yield f"portus://127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def test_what_refuses_a_greeting_has_proved_nothing_and_is_not_let_at_the_terminal() -> None:
    with speaking(said.Refused(Fault.USAGE, 0, EVIL)) as address:
        with pytest.raises(UsageError) as raised:
            PoolCheckpointer(address)
        assert SEEN in str(raised.value)
        assert is_harmless(str(raised.value))
        done = portus("ls", address)
        assert SEEN in done.err
        assert is_harmless(done.err)


def test_names_of_a_hosts_pool_and_its_notes_are_harmless_too(tmp_path: Path) -> None:
    with serving(tmp_path / "host") as server:
        with PoolCheckpointer(url(server), EVIL, keep=None) as run:
            run.save({EVIL: torch.zeros(9)}, 1).wait()
            run._steps.pool.open().note_failure(f"{EVIL} failed")  # type: ignore[union-attr]
        done = portus("ls", url(server))
        assert done.out.count(SEEN) == 1, "the model"
        assert r"the last save that failed: \x1b]0;owned\x07\x1b[2J root# \u202e" in done.out
        assert is_harmless(done.out)
