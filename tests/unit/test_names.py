"""Names that others chose: of directories, files and models, in every script and in none."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch

import portus
from portus.companions.run import Run
from portus.errors import UsageError
from portus.reach.index.place import Place, quote
from portus.reach.media.names import NAME_MAX, fitting, hidden_name
from tests.unit.cli.scene import portus as command

NAMES = {
    "72 Chinese characters": "检" * 72,
    "85 Chinese characters": "查" * 85,
    "emoji": "🚀" * 63,
    "right to left": "\u202eabc\u05d0\u05d1",
    "combining": "e\u0301" * 85,
    "newline": "a\nb",
    "leading dash": "-x",
    "trailing spaces": "a  ",
    "no UTF-8": os.fsdecode(b"caf\xe9\xff"),
    "255 bytes that are no UTF-8": os.fsdecode(b"\xff" * 255),
    "percent": "%" * 255,
    "patterns": "?#*[x]",
    "like a second run": "x~2+2",
}


def saved(run: Run, path: str, pool: Place | None) -> None:
    """A checkpoint of the run at a path, or a pointer there into the pool."""
    portus.register_reference_loader()
    settings = portus.Settings(on_error="raise")
    with contextlib.closing(portus.TrainingFiles(settings, pool=pool)) as files:
        files.begin(run.name, run.links, os.path.dirname(path))
        files.save({"w": torch.ones(3)}, path, 1).wait()


each_name = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


@each_name
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_run_saves_and_loads_in_a_directory_of_any_name(
    tmp_path: Path, name: str, is_shared: bool
) -> None:
    directory = os.path.join(tmp_path, name)
    os.mkdir(directory)
    path = os.path.join(directory, "a.ckpt")
    pool = Place.parse(tmp_path / "pools" / "pool.portus") if is_shared else None
    run = Run.beside(directory, roots=[str(tmp_path)], otherwise=str(tmp_path), pool=pool)
    saved(run, path, pool)
    assert portus.is_reference(path) == is_shared
    for loaded in (portus.load(path), torch.load(path)):
        assert torch.equal(loaded["w"], torch.ones(3))
    again = Run.beside(directory, roots=[str(tmp_path)], otherwise=str(tmp_path), pool=pool)
    assert again.name == run.name
    if pool is not None:
        with portus.open(pool) as view:
            assert [(each.model, each.step) for each in view.versions()] == [(run.name, 1)]


def test_a_run_says_of_directories_that_are_no_utf8_which_is_which(tmp_path: Path) -> None:
    names = [
        Run.beside(
            os.path.join(tmp_path, os.fsdecode(each)), roots=[str(tmp_path)], otherwise="/"
        ).name
        for each in (b"\xff", b"\xfe", rb"\xff", b"a\xff" * 100, b"b\xff" * 100)
    ]
    assert len({*names}) == len(names)
    assert all(len(quote(each)) < 220 and each.encode() for each in names)


@each_name
def test_commands_print_any_name_and_their_json_is_json(tmp_path: Path, name: str) -> None:
    directory = os.path.join(tmp_path, name)
    os.mkdir(directory)
    path = os.path.join(directory, "a.ckpt")
    place = Place.parse(tmp_path / "pools" / "pool.portus")
    run = Run.beside(directory, roots=[str(tmp_path)], otherwise=str(tmp_path), pool=place)
    saved(run, path, place)
    pool = ["--pool", str(place)]
    version = f"{run.name}@1"
    for words in (
        ["ls"],
        ["show", "--", version],
        ["show", "--", path],
    ):
        words[1:1] = pool
        for said in (command(*words), command(words[0], "--json", *words[1:])):
            assert said.code == 0, said
            assert said.out.encode()
        assert json.loads(said.out)
    for each in (path, version):
        said = command("rm", "--json", "--force", *pool, "--", each)
        assert json.loads(said.out), said


@pytest.mark.parametrize("model", ["检" * 66, "%" * 200])
def test_a_pool_has_models_of_the_longest_names(tmp_path: Path, model: str) -> None:
    pool, names = tmp_path / "run.portus", [model, model[:-1], f"{model[:40]}/rank-1-of-4"]
    for each in names:
        with portus.PoolCheckpointer(pool, each) as to:
            to.save({"w": torch.ones(3)}, 1).wait()
            assert [info.model for info in to.versions()] == [each]
    with portus.open(pool) as view:
        assert sorted(view.models()) == sorted(names)


def test_a_model_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1 to 200 bytes"):
        portus.PoolCheckpointer(tmp_path / "run.portus", os.fsdecode(b"\xff"))


@each_name
def test_a_derived_name_has_room_whole_characters_and_is_unique(name: str) -> None:
    for room in (40, 41, 42, 43):
        made = fitting(name, room)
        assert len(os.fsencode(made)) <= room
        assert fitting(name + "x", room) != made
        if len(os.fsencode(name)) <= room:
            assert made == name
        else:
            stem = os.fsencode(made)[:-17]
            assert os.fsencode(name).startswith(stem)
            assert name.startswith(os.fsdecode(stem))
    assert len(os.fsencode(hidden_name(name, ".1-2.new"))) <= NAME_MAX
