"""Names that others chose: of directories, files and models, in every script and in none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import portus
from portus.client.run import Run
from portus.errors import UsageError
from portus.index.directory import pools_at
from portus.index.place import Place, quoted
from portus.media.names import NAME_MAX, fitting, hidden
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
each_name = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


@each_name
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_run_saves_and_loads_in_a_directory_of_any_name(
    tmp_path: Path, name: str, is_shared: bool
) -> None:
    directory = os.path.join(tmp_path, name)
    os.mkdir(directory)
    path = os.path.join(directory, "a.ckpt")
    pool = Place.named(tmp_path / "pool") if is_shared else None
    run = Run.beside(directory, roots=[str(tmp_path)], otherwise=str(tmp_path), pool=pool)
    run.use(lambda to: to.save({"w": torch.ones(3)}, 1, reference=path)).wait()
    run.close()
    assert torch.equal(torch.load(path)["w"], torch.ones(3))
    again = Run.beside(directory, roots=[str(tmp_path)], otherwise=str(tmp_path), pool=pool)
    assert again.name == run.name
    assert again.use(lambda of: [each.step for each in of.versions()]) == [1]
    again.close()


def test_a_run_says_of_directories_that_are_no_utf8_which_is_which(tmp_path: Path) -> None:
    names = [
        Run.beside(
            os.path.join(tmp_path, os.fsdecode(each)), roots=[str(tmp_path)], otherwise="/"
        ).name
        for each in (b"\xff", b"\xfe", rb"\xff", b"a\xff" * 100, b"b\xff" * 100)
    ]
    assert len({*names}) == len(names)
    assert all(len(quoted(each)) < 220 and each.encode() for each in names)


@each_name
def test_commands_print_any_name_and_their_json_is_json(tmp_path: Path, name: str) -> None:
    directory = os.path.join(tmp_path, name)
    os.mkdir(directory)
    path = os.path.join(directory, "a.ckpt")
    run = Run.beside(directory, roots=[str(tmp_path)], otherwise=str(tmp_path))
    run.use(lambda to: to.save({"w": torch.ones(3)}, 1, reference=path)).wait()
    run.close()
    pool = ["--pool", str(run.place)]
    version = f"{run.name}@1"
    for words in (
        ["ls"],
        ["show", "--", version],
        ["show", "--", path],
        ["report", "--", run.name],
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
def test_a_pool_directory_has_files_for_the_longest_names(tmp_path: Path, model: str) -> None:
    other = model[:-1]
    for each in (model, other, f"{other[:40]}/rank-1-of-4"):
        with portus.PoolCheckpointer(tmp_path / "pool", each) as to:
            to.save({"w": torch.ones(3)}, 1).wait()
            assert [info.model for info in to.versions()] == [each]
    assert len(pools_at(Place.named(tmp_path / "pool"))) == 3


def test_a_model_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1 to 200 bytes"):
        portus.PoolCheckpointer(tmp_path / "pool", os.fsdecode(b"\xff"))


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
    assert len(os.fsencode(hidden(name, ".1-2.new"))) <= NAME_MAX
