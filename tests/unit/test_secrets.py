"""No message has the user information of an address, whatever is wrong with the address."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

import portus
import portus.dcp
import portus.embedding
from portus.cli.app import app
from portus.errors import MediumError, PortusError, mask

SECRET = "S3CRET"

ADDRESSES = (
    "portus://user:S3CRET@host:7117",
    "portus+tls://user:S3CRET@host",
    "portus+unix://user:S3CRET@/run/x.sock",
    "portus+ftp://user:S3CRET@host",
    "PORTUS://user:S3CRET@host",
    "portus://user:S3CRET@a+user:S3CRET@b",
    "portus://user:S3CRET@host:99999",
    "portus://user:S3CRET@[::1]:7117",
    "portus://:S3CRET@host",
    "portus:/user:S3CRET@host",
    "s3://KEY:S3CRET@bucket/x",
    "s3://KEY:S3C/S3CRET@bucket/x",
    "s3://KEY:S3CRET%40bucket/x",
    "s3://KEY:a@S3CRET@bucket",
    "s3://KEY:a S3CRET@bucket",
    "s3://KEY:a'S3CRET@bucket",
    "s3://S3CRET@bucket/x/model@12",
    "s3://bucket/x?token=S3CRET",
    "s3://bucket/x#S3CRET",
    "s3:/KEY:S3CRET@bucket/x",
    "S3://KEY:S3CRET@bucket/x",
    "gs://KEY:S3CRET@bucket",
    "az://KEY:S3CRET@bucket",
    "file://user:S3CRET@host/x",
    "https://user:S3CRET@host/x",
    "https://S3CRET@host/x",
    "HTTPS://user:S3CRET@host/x",
    "https://host/x?a=1&key=S3CRET",
    "postgres://user:S3CRET@host",
    "user:S3CRET@host",
    "user:S3CRET@host:7117",
    "s3://KEY:S3CRET@" + "b" * 300,
    "s3://KEY:" + "x" * 300 + "S3CRET@bucket",
)


def _protect(address: Any) -> object:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return portus.embedding.protect(model, optimizer, pool=address)


def _lightning(**named: Any) -> object:
    from portus_lightning import PortusIO

    return PortusIO(**named)


def _accelerate(**named: Any) -> None:
    from accelerate import Accelerator

    import portus_accelerate

    portus_accelerate.enable(Accelerator(cpu=True), **named)


CALLS: dict[str, Callable[[Any], Any]] = {
    "Checkpointer": lambda it: portus.PoolCheckpointer(it, "m"),
    "Checkpointer, a list": lambda it: portus.PoolCheckpointer(cast(str, [it, it]), "m"),
    "Checkpointer, mirror": lambda it: portus.PoolCheckpointer("p.portus", "m", mirror=it),
    "Settings": lambda it: repr(portus.Settings(mirror=it)),
    "open": lambda it: portus.open(it),
    "load": lambda it: portus.load(it),
    "read_reference": lambda it: portus.read_reference(it),
    "is_reference": lambda it: portus.is_reference(it),
    "allow": lambda it: portus.allow(it),
    "check": lambda it: list(portus.check(it)),
    "Place": lambda it: portus.Place.parse(it),
    "local_path": lambda it: portus.local_path(it, "path"),
    "Shelf": lambda it: portus.Shelf(it),
    "protect": _protect,
    "dcp writer": lambda it: portus.dcp.PortusStorageWriter(it),
    "dcp reader": lambda it: portus.dcp.PortusStorageReader(it),
    "PortusIO": lambda it: _lightning(pool=it),
    "PortusIO, mirror": lambda it: _lightning(mirror=it),
    "Accelerate": lambda it: _accelerate(pool=it),
    "Accelerate, mirror": lambda it: _accelerate(mirror=it),
}

COMMANDS = (
    ["ls", "{}"],
    ["ls", "--pool", "{}"],
    ["ls", "a", "{}"],
    ["{}"],
    ["show", "{}"],
    ["show", "m@1", "--pool", "{}"],
    ["report", "{}"],
    ["verify", "{}"],
    ["verify", "--pool", "{}"],
    ["export", "{}", "out"],
    ["export", "m", "out", "--pool", "{}"],
    ["gc", "--pool", "{}"],
    ["rm", "m@1", "--pool", "{}"],
    ["rm", "{}"],
    ["pull", "{}", "out"],
    ["mirror", "status", "{}"],
    ["mirror", "verify", "{}"],
    ["mirror", "repair", "{}"],
    ["admin", "{}"],
    ["admin", "show", "{}"],
    ["rescue", "{}"],
    ["nothing", "{}"],
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", CALLS)
def test_no_call_says_a_secret(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for address in ADDRESSES:
        for given in (address, Path(address), address.encode()):
            caplog.clear()
            said = ""
            try:
                found = CALLS[name](given)
                with contextlib.suppress(AttributeError):
                    found.close()
            except PortusError as error:
                said = "".join(traceback.format_exception(error)) + repr(error)
                said = "\n".join(line for line in said.split("\n") if not _is_foreign(line))
            except (OSError, TypeError, ValueError, AttributeError) as error:
                said = str(error) if _is_ours(error) else ""
            assert SECRET not in said, f"{name}({given!r})"
            assert SECRET not in caplog.text, f"{name}({given!r})"


def _is_foreign(line: str) -> bool:
    """True for a line of this test, or what the system says of a file of that name."""
    return "address" in line or line.startswith(
        ("FileNotFoundError", "NotADirectoryError", "OSError")
    )


def _is_ours(error: BaseException) -> bool:
    """True if the text is one of Portus; that of the system has the name of the file."""
    return isinstance(error, PortusError)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_says_a_secret(command: list[str]) -> None:
    for address in ADDRESSES:
        result = CliRunner().invoke(app, [word.format(address) for word in command])
        assert SECRET not in result.output, f"{command}: {address}"


@pytest.mark.long
def test_doctor_says_no_secret_of_any_place() -> None:
    """All in one call: it measures the machine each time."""
    result = CliRunner().invoke(app, ["doctor", *ADDRESSES])
    assert SECRET not in result.output
    said = " ".join(result.output.split())
    assert [address for address in ADDRESSES if mask(address) not in said] == []


@pytest.mark.timeout(400)  # each of hundreds of addresses is tried by a command
@pytest.mark.parametrize("name", ["PORTUS_POOL", "PORTUS_MIRROR"])
def test_no_variable_is_said_with_its_secret(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ADDRESSES:
        monkeypatch.setenv(name, address)
        said = ""
        try:
            with portus.PoolCheckpointer("p.portus" if name == "PORTUS_MIRROR" else None, "m"):
                pass
        except PortusError as error:
            said = f"{error!r} {error}"
        assert SECRET not in said, address
        assert SECRET not in CliRunner().invoke(app, ["ls"]).output, address


@pytest.mark.long
@pytest.mark.parametrize("option", ["--listen", "--replica", "--mirror", "--metrics"])
def test_no_host_says_a_secret(option: str, tmp_path: Path) -> None:
    for address in ADDRESSES[:: 4 if option == "--listen" else 11]:
        command = [sys.executable, "-m", "portus", "serve", str(tmp_path / "p"), option, address]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except subprocess.TimeoutExpired as late:  # it serves
            text = f"{late.stdout!r} {late.stderr!r}"
        else:
            text = ended.stdout + ended.stderr
        assert SECRET not in text, address


def test_errors_keep_their_number_and_what_is_no_secret() -> None:
    error = MediumError(28, "s3://a:b@c/d: no space")
    assert (error.errno, error.strerror) == (28, "s3://***@c/d: no space")
    same = (
        "portus://team@host:7117/x is away",
        "portus://[::1]:7117+b:7118",
        "s3://bucket/runs/net@12",
        "a@b.c and C:/x: y",
        "/data/a@b/file: model net:v1@12",
    )
    for text in same:
        assert mask(text) == text
    assert mask("user:S3CRET@host", is_address=True) == "***@host"
