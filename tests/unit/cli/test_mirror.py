"""Commands on mirrors: what they say, and what they leave behind."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import portus as face
from portus.engine.copying.segments import Stop
from portus.engine.loading.open_file import open_file
from portus.errors import CorruptionError, NoCheckpointError, UsageError
from portus.reach.index.directory import open_reader
from portus.reach.mirror.address import parse
from portus.reach.mirror.files import MirroredFiles
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.objects import Added, State
from portus.reach.mirror.opening import key_from_environment, open_store
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.moments import until
from tests.same import assert_same
from tests.unit.cli.scene import portus, portus_json, state


@dataclass(frozen=True)
class Scene:
    """A pool, ``net`` with steps 10, 20 and 30, and its mirror, as a storage host makes one."""

    run: Path
    url: str

    @property
    def pool(self) -> Path:
        return self.run / ".portus" / "net.portus"

    def trainer(self) -> PoolCheckpointer:
        return PoolCheckpointer(self.pool, "net", keep=None, on_error="raise")

    def mirror(self) -> None:
        """Upload what the pool has."""
        store = open_store(parse(self.url))
        to = Mirror(store, "net", key=key_from_environment())
        known = {each.token for each in to.claim("a test", bytes(16), 0).added}
        with contextlib.closing(open_reader(str(self.pool))) as reader:
            for entry in reader.catalogue().entries():
                if entry.info.token not in known:
                    to.copy(reader, entry.info.id, Stop())

    def state(self) -> State:
        return Mirror(open_store(parse(self.url)), "net").read()

    def steps(self) -> list[int]:
        return sorted(each.step for each in self.state().added)

    def objects(self, kind: str) -> list[Path]:
        there = Path(parse(self.url).prefix) / "net"
        found = (there / kind if kind == "versions" else there / "_portus" / kind).rglob("*")
        return sorted(each for each in found if each.is_file())

    def files(self) -> list[Path]:
        """Those of the versions, as anybody would use them."""
        return [each for each in self.objects("versions") if each.suffix == ".pt"]

    def file_of(self, added: Added) -> Path:
        [file] = added.files.values()
        return Path(parse(self.url).prefix) / "net" / file.name

    def lose(self) -> None:
        for each in self.run.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(tmp_path / "run", f"file://{tmp_path}/bucket/runs")
    made.run.mkdir()
    monkeypatch.chdir(made.run)
    with made.trainer() as run:
        for step in (10, 20, 30):
            run.save(state(step), step).wait()
    made.mirror()
    return made


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ls_lists_what_a_mirror_has(scene: Scene) -> None:
    said = portus("ls", scene.url)
    assert said.code == 0
    assert f"{scene.url}: 3 versions" in said.out
    assert said.out.splitlines()[1].split() == ["MODEL", "STEP", "SAVED", "SIZE"], "no empty ones"
    document = portus_json("ls", "--pool", scene.url)
    [model] = document["pools"][0]["models"]
    assert model["name"] == "net"
    assert [each["step"] for each in model["versions"]] == [10, 20, 30]
    assert model["term"] == 2


def test_ls_passes_over_a_model_that_cannot_be_read_and_says_why(scene: Scene) -> None:
    prefix = Path(parse(scene.url).prefix)
    shutil.copytree(prefix / "net", prefix / "other")  # whose log is not its own
    said = portus("ls", scene.url)
    assert said.code == 1
    assert "portus: other: " in said.err
    assert f"{scene.url}: 3 versions" in said.out
    net, other = portus_json("ls", scene.url, code=1)["pools"][0]["models"]
    assert [each["step"] for each in net["versions"]] == [10, 20, 30]
    assert (other["name"], "versions" in other) == ("other", False)
    assert other["error"]


def test_show_and_export_read_a_version_of_a_mirror_as_of_a_pool(scene: Scene) -> None:
    assert [each["step"] for each in portus_json("show", f"{scene.url}/net")["versions"]] == [
        10,
        20,
        30,
    ]
    [here] = portus_json("show", "net@20", "--pool", scene.pool)["versions"]
    [there] = portus_json("show", f"{scene.url}/net@20")["versions"]
    for name in ("model", "step", "token", "size", "files", "metrics"):
        assert there[name] == here[name], name
    heads = portus("show", f"{scene.url}/net").out.splitlines()[1].split()
    assert heads == ["STEP", "ID", "COMMIT", "SAVED", "SIZE"], "no empty ones"
    assert portus("export", "net@20", "here.pt").code == 0
    whole = Path("here.pt").read_bytes()
    scene.lose()
    assert portus("export", f"{scene.url}/net@20", "out.pt").code == 0
    assert Path("out.pt").read_bytes() == whole
    assert (
        portus("export", f"{scene.url}/net", "new.safetensors", "--names", "model.weight").code == 0
    )
    assert portus("show", "net@11", "--pool", scene.url).code == 2
    assert "model 'net' has steps 10, 20, 30" in portus("show", "net@11", "--pool", scene.url).err
    assert "it holds the models 'net'" in portus("show", "other", "--pool", scene.url).err


def test_load_takes_a_version_straight_out_of_a_mirror(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.lose()
    assert same(face.load(f"{scene.url}/net@20"), state(20))
    assert same(face.load(f"{scene.url}/net"), state(30))
    assert same(face.load(scene.url), state(30)), "it has one model"
    weight = face.load(f"{scene.url}@10", names="model.weight")
    assert same(weight, {"model": {"weight": state(10)["model"]["weight"]}})
    assert os.listdir(scene.run) == []
    with pytest.raises(NoCheckpointError, match=r"has no step 11, but \[10, 20, 30\]"):
        face.load(f"{scene.url}/net@11")
    with pytest.raises(UsageError, match="has mirrors of 'net'"):
        face.load(f"{scene.url}/others")
    with pytest.raises(UsageError, match=r"portus\.open reads a pool"):
        face.load(os.curdir)
    with pytest.raises(UsageError, match="a user or a password") as told:
        face.load("s3://me:secret@bucket/x")
    assert "secret" not in str(told.value)
    newest = scene.state().newest
    assert newest is not None
    damage(scene.file_of(newest))
    with caplog.at_level(logging.ERROR, "portus"):
        assert same(face.load(f"{scene.url}/net"), state(20))
    assert "FALLING BACK to step 20" in caplog.text
    with pytest.raises(CorruptionError, match="not those that were saved"):
        face.load(f"{scene.url}/net@30")


def test_verify_reads_every_byte_of_a_mirror_and_names_what_is_damaged(scene: Scene) -> None:
    said = portus("verify", scene.url)
    assert (said.code, said.out.count("healthy")) == (0, 3)
    damage(scene.files()[0])
    damage(scene.files()[-1])
    document = portus_json("verify", "--pool", scene.url, code=1)
    assert not document["healthy"]
    assert not all(each["healthy"] for each in document["pools"])
    assert any(each["error"] for each in document["pools"])
    assert portus("verify", scene.url, "--rate", "1G/s").code == 2


def test_verify_names_a_file_that_portus_could_do_without_and_others_could_not(
    scene: Scene,
) -> None:
    """The last byte is in no storage."""
    path = scene.files()[0]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    said = portus("verify", scene.url)
    assert said.code == 1
    assert path.name in said.err
    assert said.out.count("healthy") == 2


def test_rm_takes_the_term_and_what_the_pool_has_is_mirrored_again(scene: Scene) -> None:
    term = scene.state().term
    removed = portus_json("rm", f"{scene.url}/net@10")["removed"]
    assert [each["step"] for each in removed] == [10]
    assert scene.steps() == [20, 30]
    assert scene.state().term > term
    scene.mirror()
    assert scene.steps() == [10, 20, 30]
    said = portus("rm", "net@10", "--pool", scene.url)
    assert (said.code, scene.steps()) == (0, [20, 30]), said.err
    assert "their objects are deleted" in said.out
    assert portus("rm", f"{scene.url}/net", "--keep", "1").code == 0
    assert scene.steps() == [30]
    assert portus("rm", f"{scene.url}/net").code == 2, "use --yes"


def test_gc_deletes_what_never_counted_a_day_later_and_disturbs_nobody_for_nothing(
    scene: Scene,
) -> None:
    shutil.rmtree(scene.pool.parent)
    before = scene.state().term
    assert "net: nothing to do" in portus("gc", scene.url).out
    assert scene.state().term == before
    left = scene.files()[0].parent.with_name("step-00000009-000000000000") / "part.pt"
    left.parent.mkdir()
    left.write_bytes(b"cut off")
    os.utime(left, (left.stat().st_mtime - 80_000,) * 2)
    assert portus_json("gc", scene.url, "--dry-run")["mirrors"][0]["objects"] == 0
    os.utime(left, (left.stat().st_mtime - 20_000,) * 2)
    would = portus_json("gc", scene.url, "--dry-run")
    assert would["dry_run"]
    assert (would["mirrors"][0]["objects"], would["mirrors"][0]["size"]) == (1, 7)
    assert left.exists()
    assert portus_json("gc", scene.url)["mirrors"] == would["mirrors"]
    assert not left.exists()
    assert portus("verify", scene.url).code == 0
    assert same(face.load(f"{scene.url}/net"), state(30))
    assert portus("gc", scene.url, "--missing", ".").code == 2


def test_pull_makes_the_pool_of_a_fresh_node(scene: Scene, tmp_path: Path) -> None:
    scene.lose()
    said = portus("pull", scene.url)
    assert said.code == 0, said.err
    assert "net: 3 versions" in said.out
    assert portus_json("pull", scene.url)["pulled"][0]["versions"] == [], "it is all there"
    with scene.trainer() as run:
        assert [each.step for each in run.versions()] == [10, 20, 30]
        assert same(run.load(20), state(20))
        run.save(state(40), 40).wait()
    scene.mirror()
    other = tmp_path / "new" / "other"
    document = portus_json("pull", f"{scene.url}/net", other)["pulled"][0]
    assert document["pool"] == str(other / ".portus" / "net.portus")
    assert [each["step"] for each in document["versions"]] == [10, 20, 30, 40]
    with PoolCheckpointer(document["pool"], "net", keep=None) as run:
        run.save(state(50), 50).wait()
    said = portus("pull", scene.url, other)
    assert said.code == 2
    assert "lacks, the newest of step 50" in said.err


def test_a_pull_that_fails_leaves_nothing_and_one_that_was_cut_off_goes_on(scene: Scene) -> None:
    scene.lose()
    added = scene.state().newest
    assert added is not None
    newest = scene.file_of(added)
    whole = newest.read_bytes()
    damage(newest)
    said = portus("pull", scene.url)
    assert said.code == 1
    assert [v["step"] for v in portus_json("show", "net")["versions"]] == [10, 20]
    newest.write_bytes(whole)
    assert [each["step"] for each in portus_json("pull", scene.url)["pulled"][0]["versions"]] == [
        30
    ]
    for each in scene.files():
        damage(each)
    scene.lose()
    assert portus("pull", scene.url).code == 1
    assert not list(scene.run.rglob("*.portus"))
    assert portus("pull", f"{scene.url}/nothing/here", "elsewhere").code == 2
    assert not Path("elsewhere").exists()
    Path("a-file").touch()
    assert "not a directory" in portus("pull", scene.url, "a-file").err


def test_files_of_a_mirror_are_verified_exported_and_removed_as_versions_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket"
    with face.Checkpointer("checkpoints", mirror=url, keep=None) as run:
        for step in (1, 2):
            run.save(state(step), step).wait()
    [model] = portus_json("ls", url)["pools"][0]["models"]
    name = model["name"]
    assert [each["path"] for each in model["files"]] == ["step-00000001.pt", "step-00000002.pt"]
    assert portus("verify", f"{url}/{name}@2").out.count("healthy") == 1
    said = portus("export", f"{url}/{name}@2", "out.pt")
    assert said.code == 0, said
    assert Path("out.pt").read_bytes() == Path("checkpoints/step-00000002.pt").read_bytes()
    [shown] = portus_json("show", f"{url}/{name}@2")["versions"]
    assert [each["name"] for each in shown["files"]] == ["step-00000002.pt"]
    damage(tmp_path / "bucket" / name / "step-00000001.pt")
    assert portus("verify", f"{url}/{name}@2").code == 0
    assert portus("verify", f"{url}/{name}@1").code == 1
    assert portus("export", f"{url}/{name}@1", "damaged.pt").code == 1
    assert not Path("damaged.pt").exists()
    assert portus("rm", f"{url}/{name}@1").code == 0
    [model] = portus_json("ls", url)["pools"][0]["models"]
    assert [each["step"] for each in model["files"]] == [2]


def test_links_and_parts_of_checkpoints_in_a_mirror_are_no_checkpoints_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket"
    store = open_store(parse(url))
    files = MirroredFiles(store, "gpt", url)

    def upload(step: int, *paths: str) -> None:
        files.claim("a test", bytes(16))
        sent = {}
        for path in paths:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(path.encode() * 9)
            with open_file(path) as file:
                sent[path] = files.upload(path, file, Stop(), time_ns=step)
        files.count([files.checkpoint(os.path.commonpath(paths), sent, step)])

    upload(1, "1.pt")
    upload(2, "2.pt")
    files.claim("a test", bytes(16))
    files.link("last.pt", "2.pt")
    assert portus("export", f"{url}/gpt", "out.pt").code == 0
    assert Path("out.pt").read_bytes() == b"2.pt" * 9, "the link came later"
    assert portus("show", f"{url}/gpt@0").code == 2
    said = portus("rm", f"{url}/gpt@2")
    assert (said.code, "last.pt points to it" in said.err) == (2, True)
    assert portus("rm", f"{url}/gpt@1").code == 0
    upload(3, "c-3/model.safetensors", "c-3/rest/optimizer.bin")
    for options in ((), ("--force",)):
        assert portus("export", f"{url}/gpt@3", "out", *options).code == 0
        assert Path("out/rest/optimizer.bin").read_bytes() == b"c-3/rest/optimizer.bin" * 9
        assert sorted(os.listdir("out")) == ["model.safetensors", "rest"]
    upload(4, "4.pt")
    said = portus("rm", f"{url}/gpt", "--keep", "2")
    assert (said.code, "last.pt points to it" in said.err) == (2, True)
    assert portus("rm", f"{url}/gpt", "--keep", "2", "--force").code == 0
    paths = {each.path for each in files.read().added}
    assert paths == {"last.pt", "c-3", "4.pt"}
    upload(2, "2.pt")
    assert portus("rm", f"{url}/gpt@2", "--force").code == 0
    assert portus("rm", f"{url}/gpt", "--yes").code == 0
    assert files.read().added == ()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": damage,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "deleted": lambda path: path.unlink(),
    "without its digest": lambda path: path.with_name(f"{path.name}.xxh128").unlink(),
}


def save_mirrored(url: str, *steps: int) -> None:
    """Save steps of the run in the directory ``run``, each of them mirrored at the end."""
    with face.Checkpointer("run", keep=None, mirror=url, on_error="raise") as checkpointer:
        for step in steps:
            checkpointer.save(state(step), step).wait()


@pytest.mark.parametrize("kind", DAMAGES)
def test_repair_sends_a_damaged_file_of_a_run_again_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket"
    save_mirrored(url, 1, 2)
    objects = tmp_path / "bucket" / "run"
    before = {each.name: each.read_bytes() for each in objects.glob("*.*")}
    assert len(before) == 4
    DAMAGES[kind](objects / "step-00000001.pt")
    said = portus("mirror", "repair", url)
    assert (said.code, "step-00000001.pt is DAMAGED" in said.out) == (1, True)
    kept = Path("run/step-00000001.pt").read_bytes()
    Path("run/step-00000001.pt").write_bytes(kept[:-1] + b"x")
    assert portus("mirror", "repair", url, "--files", "run").code == 1, "it is not what was sent"
    Path("run/step-00000001.pt").write_bytes(kept)
    said = portus("mirror", "repair", url, "--files", "run")
    assert (said.code, "is repaired from the directory" in said.out) == (0, True)
    assert {each.name: each.read_bytes() for each in objects.glob("*.*")} == before
    assert portus("verify", url).code == 0
    results = portus_json("mirror", "repair", url)["versions"]
    names = ("step-00000001.pt", "step-00000002.pt")  # in any order: newest first if both wait
    assert {each["file"]: each["result"] for each in results} == dict.fromkeys(names, "whole")


@pytest.mark.parametrize("kind", ["flipped", "cut", "deleted"])
def test_repair_brings_back_the_newest_file_whose_entry_of_the_log_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket"
    save_mirrored(url, 1)
    save_mirrored(url, 2)
    DAMAGES[kind](min((tmp_path / "bucket/run/_portus/log").iterdir()))
    said = portus("verify", url)
    assert said.code == (0 if kind == "deleted" else 1)
    assert "step-00000002.pt is in no entry of the log" in said.err
    said = portus("mirror", "repair", url, "--files", "run")
    assert (said.code, "step-00000002.pt had no entry of the log" in said.out) == (0, True), said
    assert "2 files read, 0 damaged" in said.out
    said = portus("verify", url)
    assert (said.code, "entry" in said.err) == (0, False), said
    shutil.rmtree("run")
    with face.Checkpointer("run", mirror=url) as checkpointer:
        assert same(checkpointer.load(), state(2))


@pytest.mark.parametrize("kind", ["flipped", "deleted"])
def test_pull_leaves_out_what_is_damaged_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket"
    save_mirrored(url, 1, 2, 3)
    DAMAGES[kind](tmp_path / "bucket/run/step-00000001.pt")
    assert portus("pull", url, "fresh").code == 1
    there = {each.name for each in Path("fresh").glob("*.pt")}
    assert there == {"step-00000002.pt", "step-00000003.pt"}
    damage(max((tmp_path / "bucket/run/_portus/log").iterdir()))
    assert portus("pull", url, "again").code == 1, "the log had more, perhaps"


def test_a_mirror_without_its_log_says_how_to_get_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket"
    save_mirrored(url, 1)
    shutil.rmtree("bucket/run/_portus")
    for command in (
        *(["pull", url, "fresh"], ["pull", f"{url}/run", "fresh"], ["verify", url]),
        ["mirror", "status", url],
    ):
        said = portus(*command)
        assert (said.code, "with any client" in said.err) == (1, True), said
    Path("run").rename("kept")
    with pytest.raises(CorruptionError, match="with any client"):
        face.Checkpointer("run", mirror=url, on_error="raise")
    assert Path("bucket/run/step-00000001.pt").exists()
    Path("kept").rename("run")
    with face.Checkpointer("run", keep=None, mirror=url, on_error="raise") as checkpointer:
        assert same(checkpointer.load(), state(1))
        checkpointer.save(state(2), 2).wait()
    assert portus("verify", url).code == 0
    assert portus("pull", url, "fresh").code == 0
    assert len(list(Path("fresh").glob("*.pt"))) == 2


def test_verify_names_a_run_whose_log_is_lost_beside_one_that_has_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket"
    save_mirrored(url, 1)
    shutil.copytree("bucket/run", "bucket/lost")
    shutil.rmtree("bucket/lost/_portus")
    for command in (["verify", url], ["verify", "--pool", url]):
        said = portus(*command)
        assert (said.code, "lost: there are files of a run here" in said.err) == (1, True), said
        assert "healthy" in said.out, "the other one is read too"
    assert portus_json("verify", url, code=1)["healthy"] is False
    assert portus("verify", f"{url}/run").code == 0
    assert portus("mirror", "repair", url).code == 0
    assert portus("verify", url).code == 0


def restored(tmp_path: Path, url: str, expected: int) -> str:
    """What repair says on a machine without the files of the run, whose log is lost. A fresh
    machine then continues from step ``expected``."""
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    said = portus("mirror", "repair", url, "--files", fresh)
    assert "its log was LOST" in said.out, said
    fresh.rmdir()
    with face.Checkpointer(fresh / "run", mirror=url, keep=None, on_error="raise") as checkpointer:
        assert same(checkpointer.load(), state(expected))
        checkpointer.save(state(9), 9).wait()
    return said.out


def test_repair_makes_a_lost_log_anew_from_the_digests_beside_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, there = f"file://{tmp_path}/bucket", tmp_path / "bucket/run"
    save_mirrored(url, 1, 2, 3)
    shutil.rmtree("run")
    shutil.rmtree(there / "_portus")
    os.utime(there / "step-00000001.pt")  # an upload that waited for later ones
    (there / "notes.txt").write_text("not of Portus")
    DAMAGES["without its digest"](there / "step-00000003.pt")
    out = restored(tmp_path, url, 2)
    files = MirroredFiles(open_store(parse(url)), "run", url).read().added
    times = {each.path: each.time_ns for each in files}
    assert times["step-00000001.pt"] < times["step-00000002.pt"], "the newest is that of step 2"
    for name, result in (
        *(("step-00000001.pt", "counts again"), ("step-00000002.pt", "counts again")),
        *(("step-00000003.pt", "is in no entry"), ("notes.txt", "is in no entry")),
    ):
        assert f"{name} {result}" in out.replace("had no entry of the log, and ", "")
    assert "2 files read, 2 damaged" in out
    said = portus("verify", url)
    assert (said.code, said.out.count("healthy")) == (0, 3), said


def test_a_run_that_mirrors_while_its_lost_log_is_made_anew_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the number of its next entry free, behind those of the repair."""
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket"
    log = tmp_path / "bucket/run/_portus/log"
    with face.Checkpointer("run", keep=None, mirror=url, on_error="raise") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state(step), step).wait()
            until(lambda step=step: len(list(log.iterdir())) == 1 + step)  # type: ignore[misc]
        shutil.rmtree(log)
        assert portus("mirror", "repair", url, "--files", "run").code == 0
        checkpointer.save(state(4), 4).wait()
    shutil.rmtree("run")
    with face.Checkpointer("run", mirror=url) as fresh:
        assert_same(fresh.load(), state(4))


def test_a_damaged_file_of_a_lost_log_is_named_and_an_earlier_one_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, there = f"file://{tmp_path}/bucket", tmp_path / "bucket/run"
    save_mirrored(url, 1, 2)
    shutil.rmtree("run")
    shutil.rmtree(there / "_portus")
    damage(there / "step-00000002.pt")
    assert "step-00000002.pt is DAMAGED" in restored(tmp_path, url, 1)


def test_an_old_file_whose_entry_is_lost_does_not_become_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket"
    save_mirrored(url, 1)
    save_mirrored(url, 2)
    os.utime("bucket/run/step-00000001.pt")
    damage(sorted((tmp_path / "bucket/run/_portus/log").iterdir())[-2])
    shutil.rmtree("run")
    said = portus("mirror", "repair", url)
    assert (said.code, "step-00000001.pt had no entry of the log" in said.out) == (0, True), said
    newest = MirroredFiles(open_store(parse(url)), "run", url).read().newest
    assert newest is not None
    assert newest.step == 2


def test_repair_sends_the_version_whose_entry_of_the_log_is_lost(scene: Scene) -> None:
    damage(scene.objects("log")[0])
    assert scene.steps() == [10, 20]
    assert portus("verify", scene.url).code == 1
    said = portus("mirror", "repair", scene.url)
    assert (said.code, "net@30 was not there, and is sent" in said.out) == (0, True), said
    assert (scene.steps(), portus("verify", scene.url).code) == ([10, 20, 30], 0)


def test_what_is_said_of_a_lost_log_of_a_host_makes_it_anew(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, advice = scene.url, "portus mirror repair --pool POOL"
    shutil.rmtree(tmp_path / "bucket/runs/net/_portus")
    for command in (
        *(["verify", url], ["verify", f"{url}/net"], ["pull", url, "fresh"]),
        *(["mirror", "status", url], ["mirror", "repair", url]),
    ):
        said = portus(*command)
        assert (said.code, advice in said.err) == (1, True), said
    save_mirrored(url, 1)
    for command in (["verify", url], ["mirror", "status", url], ["mirror", "repair", url]):
        said = portus(*command)
        lines = said.out + said.err
        assert (said.code, lines.count("net: there are versions of a storage host")) == (1, 1), said
        assert advice in lines
    assert portus("verify", f"{url}/run").code == 0, "the other run is not asked for"
    assert portus_json("mirror", "repair", url, code=1)["versions"][0]["model"] == "net"
    said = portus("mirror", "repair", url, "--pool", scene.pool)
    assert (said.code, said.out.count("was not there, and is sent from the pool")) == (0, 3), said
    assert (scene.steps(), portus("verify", url).code) == ([10, 20, 30], 0)


def test_repair_refuses_an_address_without_a_mirror(scene: Scene, tmp_path: Path) -> None:
    save_mirrored(scene.url, 1)
    before = set(tmp_path.rglob("*"))
    for url in (f"file://{tmp_path}/typo", f"file://{tmp_path}/bucket"):  # above two mirrors
        said = portus("mirror", "repair", url)
        assert (said.code, "there is no mirror to repair" in said.err) == (2, True), said
    assert set(tmp_path.rglob("*")) == before


def test_status_says_what_of_the_pool_is_not_mirrored(scene: Scene) -> None:
    assert "everything is mirrored" in portus("mirror", "status", scene.url).out
    with scene.trainer() as run:
        run.save(state(40), 40).wait()
    said = portus("mirror", "status", scene.url)
    assert "1 version not mirrored, the newest of step 40" in said.out
    document = portus_json("mirror", "status", scene.url)
    [model] = document["models"]
    assert (model["newest"], model["not_mirrored"], model["versions"]) == (30, [40], 3)
    assert portus("mirror", "status").code == 2
    assert portus("mirror", "status", "somewhere").code == 2


def test_repair_mends_from_the_pool_and_names_what_it_cannot(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTUS_MIRROR", scene.url)
    assert {each["result"] for each in portus_json("mirror", "repair")["versions"]} == {"whole"}
    before_all = [each.read_bytes() for each in scene.files()]
    scene.files()[0].with_name(scene.files()[0].name + ".xxh128").unlink()
    damage(scene.files()[1])
    scene.files()[2].unlink()
    before = {(each.token, each.term, each.commit) for each in scene.state().added}
    said = portus("mirror", "repair")
    assert said.code == 0, said
    assert "is repaired from the pool" in said.out
    assert portus("verify", scene.url).code == 0
    assert {*before_all} <= {each.read_bytes() for each in scene.files()}
    assert {(each.token, each.term, each.commit) for each in scene.state().added} == before
    newest = scene.state().newest
    assert newest is not None
    damage(scene.file_of(newest))
    scene.lose()
    said = portus("mirror", "repair")
    assert said.code == 1
    assert "net@30 is DAMAGED, and the pool has no intact copy" in said.out


def test_every_command_needs_the_key_that_a_mirror_was_made_with(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/keyed"
    monkeypatch.setenv("PORTUS_MIRROR_KEY", "a secret of some length")
    Scene(scene.run, url).mirror()
    assert same(face.load(f"{url}/net"), state(30))
    commands = (
        *(("ls", url), ("show", f"{url}/net"), ("verify", url), ("rm", f"{url}/net@10")),
        *(("gc", url), ("pull", url), ("mirror", "status", url), ("mirror", "repair", url)),
        ("export", f"{url}/net", "out.pt"),
    )
    objects = {path: path.read_bytes() for path in (tmp_path / "keyed").rglob("*-*-*-*")}
    for key, message in ((None, "it is keyed"), ("another", "none of the")):
        monkeypatch.delenv("PORTUS_MIRROR_KEY")
        if key:
            monkeypatch.setenv("PORTUS_MIRROR_KEY", key)
        for command in commands:
            said = portus(*command)
            assert said.code == 2, (command, said)
            assert message in said.err
            assert "PORTUS_MIRROR_KEY" in said.err
            assert "a secret" not in said.err
        with pytest.raises(UsageError, match="PORTUS_MIRROR_KEY"):
            face.load(f"{url}/net")
        monkeypatch.setenv("PORTUS_MIRROR_KEY", "")
    assert all(path.read_bytes() == data for path, data in objects.items())
    monkeypatch.setenv("PORTUS_MIRROR_KEY", "a secret of some length")
    assert portus("verify", url).code == 0
    assert portus("verify", scene.url).code == 2, "it was made without one"


# Runs that save files.


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a mirror that has steps 10 and 20 of ``gpt``."""
    url = f"file://{tmp_path}/bucket/runs"
    monkeypatch.chdir(tmp_path)
    with face.Checkpointer("gpt", mirror=url) as checkpointer:
        for step in (10, 20):
            checkpointer.save(state(step), step)
    return url


def test_ls_and_status_name_the_files_of_a_run(files: str) -> None:
    said = portus("ls", files)
    assert said.code == 0
    assert "2 files" in said.out
    assert [line.split()[:3] for line in said.out.splitlines()[2:]] == [
        ["gpt", "step-00000010.pt", "10"],
        ["gpt", "step-00000020.pt", "20"],
    ]
    [model] = portus_json("ls", files)["pools"][0]["models"]
    assert [each["object"] for each in model["files"]] == [
        "step-00000010.pt",
        "step-00000020.pt",
    ]
    [shown] = portus_json("mirror", "status", files)["models"]
    assert (shown["newest"], shown["files"], shown["versions"]) == (20, 2, 0)


def test_of_each_run_ls_names_the_newest_files(files: str) -> None:
    with face.Checkpointer("zebra", mirror=files, keep=None) as checkpointer:
        for step in range(12):
            checkpointer.save(state(step), step)
    said = portus("ls", files).out
    assert [line.split()[:2] for line in said.splitlines()[2:6]] == [
        ["gpt", "step-00000010.pt"],
        ["gpt", "step-00000020.pt"],
        ["zebra", "2"],
        ["zebra", "step-00000002.pt"],
    ]
    assert "2 older: --all" in said
    assert "older" not in portus("ls", files, "--all").out


def test_verify_reads_every_byte_of_the_files_and_names_the_damaged_one(files: str) -> None:
    assert portus("verify", files).code == 0
    damage(Path(parse(files).prefix) / "gpt/step-00000010.pt")
    said = portus("verify", files)
    assert said.code == 1
    assert "step-00000010.pt" in said.err
    assert "step-00000020.pt: healthy" in said.out
    (Path(parse(files).prefix) / "gpt/step-00000020.pt").unlink()
    assert "step-00000020.pt is missing" in portus("verify", files).err


def test_pull_fetches_the_files_that_are_not_there(files: str) -> None:
    [pulled] = portus_json("pull", files, "fresh")["pulled"]
    assert len(pulled["files"]) == 2
    for step in (10, 20):
        assert same(torch.load(f"fresh/step-000000{step}.pt"), state(step))
    assert sorted(os.listdir("fresh")) == ["step-00000010.pt", "step-00000020.pt"]
    os.unlink("fresh/step-00000010.pt")
    [again] = portus_json("pull", f"{files}/gpt", "fresh")["pulled"]
    assert list(map(os.path.basename, again["files"])) == ["step-00000010.pt"]


def test_a_pull_writes_nothing_outside_of_its_directory(files: str, tmp_path: Path) -> None:
    mirror = MirroredFiles(open_store(parse(files)), "gpt", files)
    mirror.claim("somebody else", bytes(16))
    for path in ("../evil", "a/../../evil", f"{tmp_path}/evil"):
        with open_file("gpt/step-00000010.pt") as file:
            sent = mirror.upload("evil", file, Stop(), time_ns=1)
        mirror.count([mirror.checkpoint(path, {path: sent}, 1)])
    for link, target in (("up", ".."), ("root", "/"), ("../evil", "run/step-00000010.pt")):
        mirror.link(link, target)
    assert portus("pull", files, "fresh/run").code == 1
    assert sorted(os.listdir("fresh")) == ["run"]
    assert sorted(os.listdir("fresh/run")) == ["step-00000010.pt", "step-00000020.pt"]
    assert not Path("evil").exists()


def test_gc_leaves_the_files_of_a_run_alone(files: str) -> None:
    assert portus("gc", files).code == 0
    assert portus("verify", files).code == 0


def test_nothing_is_deleted_while_an_entry_of_the_log_is_damaged(
    files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.mirror.writer.GRACE_S", -10.0)
    there = Path(parse(files).prefix) / "gpt"
    damage(min((there / "_portus/log").iterdir()))
    before = {each for each in there.rglob("*") if each.is_file()}
    for command in (["gc", files], ["gc", files, "--dry-run"], ["rm", f"{files}/gpt@10"]):
        said = portus(*command)
        assert (said.code, "mirror repair" in said.err) == (1, True), said
    assert {each for each in there.rglob("*") if each.is_file()} == before
    assert portus("mirror", "repair", files).code == 0
    assert portus("gc", files).code == 0
    assert set(there.glob("step-*")) == {each for each in before if "step-" in each.name}
