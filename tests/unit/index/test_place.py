"""Where a pool is: one parser, and every place where a user names one goes through it."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.cli.output import USAGE
from portus.cli.pools import find_pool
from portus.errors import UsageError
from portus.reach.daemon.pools import Pools as HostPools
from portus.reach.index.place import Place, PlaceKind, local_path
from portus_accelerate.settings import VARIABLE, from_environment, to_text
from portus_lightning import PortusIO
from tests.unit.cli.scene import portus as command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_place_is_a_file_a_directory_or_a_host(here: Path) -> None:
    (here / "old").write_bytes(b"x")
    (here / "dir.portus").mkdir()
    kinds = {
        "pools": PlaceKind.DIRECTORY,
        "run.portus": PlaceKind.FILE,
        "old": PlaceKind.FILE,
        "dir.portus": PlaceKind.DIRECTORY,
        ".portus": PlaceKind.DIRECTORY,
        "portus://store": PlaceKind.HOST,
    }
    assert {name: Place.parse(name).kind for name in kinds} == kinds
    assert Place.parse("portus://store").path == "portus://store:7117"
    assert Place.parse(None) == Place.parse(here / ".portus")


def test_a_place_is_absolute_whatever_becomes_of_the_working_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = [Place.parse("pools"), Place.parse(Path("pools")), Place.parse(None)]
    monkeypatch.setenv("PORTUS_POOL", "by/variable")
    named.append(Place.parse(None))
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    assert [os.path.relpath(place, here) for place in named] == [
        "pools",
        "pools",
        ".portus",
        "by/variable",
    ]
    assert pickle.loads(pickle.dumps(named[0])) == named[0]
    assert Place.parse(named[0]) is named[0]
    monkeypatch.setenv("HOME", str(here / "me"))
    assert Place.parse("~/pools").path == str(here / "me" / "pools")


def test_a_plugin_saves_where_it_was_made_not_where_training_starts(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = pickle.loads(pickle.dumps(PortusIO("pool.portus")))
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    plugin.run.begin(None)
    plugin.save_checkpoint({"global_step": 1, "weight": torch.ones(3)}, here / "run" / "1.ckpt")
    plugin.teardown()
    assert (here / "pool.portus").is_file()
    assert not list((here / "other").iterdir())


FOREIGN = [
    "s3://bucket/pools",
    "gs://bucket",
    "memory://x",
    "hdfs://name/x",
    "PORTUS://store",
    "Portus+tls://store",
    "portus+quic://store",
    "portus:/store",
    "file:///pools",
    "simplecache::s3://bucket",
]


@pytest.mark.parametrize("other", [5, 1.5, b"x", "\0", "a\0b", {"path": "x"}, {"x"}])
def test_what_is_no_path_is_refused_as_it_was_given(other: Any, here: Path) -> None:
    with pytest.raises(UsageError, match="pool: expected a path") as caught:
        Place.parse(other)
    assert repr(other) in str(caught.value)


@pytest.mark.parametrize("url", FOREIGN)
def test_a_url_that_is_none_of_ours_is_an_error_and_never_a_directory(url: str, here: Path) -> None:
    with pytest.raises(UsageError, match="expected") as caught:
        Place.parse(url)
    assert url in str(caught.value)
    with pytest.raises(UsageError, match="expected a path"):
        local_path(url, "to")
    assert not list(here.iterdir())


def _by_variable(url: str) -> Any:
    os.environ["PORTUS_POOL"] = url
    return portus.PoolCheckpointer()


def _by_yaml(url: str) -> Any:
    os.environ[VARIABLE] = json.dumps({"pool": url})
    return from_environment()


def _exported(url: str) -> Any:
    said = command("export", "m", f"{url}/out.pt")
    assert said.code == USAGE
    raise UsageError(said.err)


WAYS: dict[str, Callable[[str], Any]] = {
    "Checkpointer": lambda url: portus.PoolCheckpointer(url),
    "PortusIO": lambda url: PortusIO(url),
    "variable": _by_variable,
    "yaml": _by_yaml,
    "serve": lambda url: HostPools(url),
    "open": lambda url: portus.open(url),
    "allow": lambda url: portus.allow(url),
    "check": lambda url: portus.check(url),
    "export": _exported,
    "TrainingFiles": lambda url: portus.TrainingFiles(portus.Settings(), pool=Place.parse(url)),
    "--pool": lambda url: find_pool(url),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("url", ["s3://bucket", "memory://x", "PORTUS://store:7117"])
def test_wherever_a_place_is_named_such_a_url_is_refused(
    way: str, url: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTUS_POOL", "")
    monkeypatch.setenv(VARIABLE, "")
    (here / "run.ckpt").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"found a URL\. \w+|is the address of a mirror, .* pull"):
        WAYS[way](url)
    assert [path.name for path in here.iterdir()] == ["run.ckpt"]


def test_settings_say_the_place_to_other_processes_whole(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"pool": "pools", "max_bytes": 5}))
    settings = from_environment()
    assert json.loads(to_text(settings))["pool"] == str(here / "pools")
    monkeypatch.setenv(VARIABLE, to_text(settings))
    assert from_environment() == settings
