"""From a pointer to what it leads to: what may be opened, what is read, and what is said."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch

import portus
from portus.engine.loading.checkpoint_file import (
    has_digests,
    load_file,
    read_note,
    restore_file,
    verify_file,
)
from portus.engine.loading.restore_over import RestoreOptions
from portus.engine.media.read_file import Pace
from portus.errors import CorruptionError, MediumError, TransportError, UsageError
from portus.reach.files import home
from portus.reach.files.reference import read_reference
from portus.reach.format.reference import Reference, encode
from portus.reach.index import roots
from portus.reach.index.directory import create_pool
from portus.reach.media.local import LocalFiles
from portus.reach.pools import resolve
from portus.reach.pools.resolve import load_text, use_reference
from portus.reach.training.safetensors import Safetensors
from portus.reach.training.training_files import TrainingFiles
from tests.hosts import free_port, serving, url
from tests.same import assert_same

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

MAY_NOT = "a pointer alone may not choose what is opened"


def state(step: int) -> dict[str, Any]:
    weight = torch.full((3000,), float(step))
    return {"step": step, "w": weight, "view": weight[3:9], "none": torch.zeros(0)}


class Run:
    """A training that saved to a pool: ``run/run.portus``, and pointers in ``run/ckpt``."""

    def __init__(self, home: Path, pool: str | None = None) -> None:
        self.home = home
        self.ckpt = home / "run" / "ckpt"
        self.ckpt.mkdir(parents=True)
        self.pool = home / "run" / "run.portus"
        self.place = portus.Place.parse(pool or self.pool)

    def save(self, name: str, step: int, **states: object) -> Path:
        """One more save, of ``state(step)`` if nothing else is said. The path of the pointer."""
        with self.training() as files:
            path = self.ckpt / name
            files.save(states.get("state", state(step)), str(path), step).wait()
            return path

    def training(self) -> TrainingFilesInBlock:
        return TrainingFilesInBlock(self.place)

    def reference(self, path: Path) -> Reference:
        found = read_reference(path)
        assert found is not None
        return found


class TrainingFilesInBlock:
    """Training files that are closed at the end of a block."""

    def __init__(self, place: portus.Place) -> None:
        self.files = TrainingFiles(portus.Settings(journal=False), pool=place)

    def __enter__(self) -> TrainingFiles:
        return self.files

    def __exit__(self, *_: object) -> None:
        self.files.close()


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process forgets which pools it saves to."""
    monkeypatch.setattr(resolve, "ALLOWED", [])
    portus.register_reference_loader()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def forget() -> None:
    """As in a process that did not save."""
    resolve.ALLOWED.clear()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places that are opened, in order."""
    seen: list[str] = []
    open_place = home.open_place

    def watched(place: portus.Place) -> Any:
        seen.append(place.path)
        return open_place(place)

    monkeypatch.setattr(home, "open_place", watched)
    return seen


def crafted(path: Path, like: Reference, **changes: object) -> Path:
    """A pointer as a stranger may write it."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encode(dataclasses.replace(like, **changes)))  # type: ignore[arg-type]
    return path


# --- what is where the pointer says (rule 2) ---


def test_a_pool_file_is_opened_where_the_pointer_says(run: Run, opened: list[str]) -> None:
    path = run.save("1.ckpt", 1)
    forget()
    assert_same(torch.load(path), state(1))
    assert opened == [str(run.pool)]


def test_a_run_that_was_moved_as_a_whole_still_loads(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save("1.ckpt", 1)
    forget()
    (run.home / "run").rename(run.home / "elsewhere")
    monkeypatch.chdir(run.home / "elsewhere")
    assert_same(torch.load("ckpt/1.ckpt"), state(1))
    (run.home / "link").symlink_to("elsewhere/ckpt")
    assert_same(torch.load(run.home / "link" / "1.ckpt"), state(1))


def test_a_copy_of_a_pointer_leads_where_the_pointer_does(run: Run, tmp_path: Path) -> None:
    copy = shutil.copy(run.save("1.ckpt", 1), tmp_path / "copy.ckpt")
    forget()
    assert_same(torch.load(copy), state(1))


def test_the_pool_must_have_the_identity_that_the_pointer_names(
    run: Run, opened: list[str]
) -> None:
    path = run.save("1.ckpt", 1)
    forget()
    run.pool.unlink()
    create_pool(str(run.pool), LocalFiles())
    with pytest.raises(UsageError, match=f"{MAY_NOT}, or another pool is there") as caught:
        torch.load(path)
    assert f"PORTUS_POOL={run.pool}" in str(caught.value)
    assert opened == [str(run.pool)]


def test_a_pool_of_another_training_in_its_place_gives_nothing(run: Run, tmp_path: Path) -> None:
    """Not even a version with the same token."""
    path = run.save("1.ckpt", 1)
    other = Run(tmp_path / "other")
    lies = other.save("1.ckpt", 2)
    forget()
    like = run.reference(path)
    crafted(path, like, token=other.reference(lies).token)
    shutil.copy(other.pool, run.pool)
    with pytest.raises(UsageError, match="another pool is there"):
        torch.load(path)


def test_a_crafted_pointer_opens_nothing_but_a_pool_file(
    run: Run, tmp_path: Path, opened: list[str]
) -> None:
    like = run.reference(run.save("1.ckpt", 1))
    forget()
    os.mkfifo(tmp_path / "pipe.portus")
    (tmp_path / "directory.portus").mkdir()
    (tmp_path / "link.portus").symlink_to("pipe.portus")
    shutil.copy(run.pool, tmp_path / "other.suffix")
    (tmp_path / "gone.portus").symlink_to("nowhere")
    stranger = tmp_path / "downloads" / "nice.ckpt"
    for named in (
        str(tmp_path / "pipe.portus"),
        str(tmp_path / "link.portus"),
        str(tmp_path / "directory.portus"),
        str(tmp_path / "gone.portus"),
        str(tmp_path / "other.suffix"),
        str(run.pool / "beyond.portus"),
        "/dev/zero",
        "/dev/null",
        "/dev/stdin",
        "/",
        f"/{run.pool}",
        "\\\\host\\share\\secret.portus",
        "run/run.portus",
        "a" * 4096,
        f"/{'a' * 300}.portus",
        "portus://127.0.0.1:9",
        "portus+unix:///run/portus.sock",
    ):
        crafted(stranger, like, pool_path=named, written_path="/no/where/nice.ckpt")
        with pytest.raises(UsageError, match=MAY_NOT):
            torch.load(stranger)
    for named in ("pipe.portus", "link.portus", "directory.portus", "gone.portus"):
        crafted(stranger, like, pool_path=f"/no/{named}", written_path="/no/where/nice.ckpt")
        with pytest.raises(UsageError, match=MAY_NOT):
            torch.load(stranger)
    assert opened == [] or set(opened) == {str(run.pool)}, "'//run' is a path from its directory"


def test_a_named_pipe_or_a_directory_at_the_path_is_no_pointer(run: Run) -> None:
    os.mkfifo(run.ckpt / "pipe.ckpt")
    for name in ("pipe.ckpt", "missing.ckpt", "."):
        assert not portus.is_reference(run.ckpt / name)
        with pytest.raises(UsageError, match="there is no pointer"):
            use_reference(run.ckpt / name, lambda *_: None)


def test_a_pool_that_a_pointer_names_is_only_read(run: Run) -> None:
    path = run.save("1.ckpt", 1)
    forget()
    before = run.pool.read_bytes()
    run.pool.chmod(0o444)
    assert torch.load(path)["step"] == 1
    assert run.pool.read_bytes() == before


def test_a_pool_that_cannot_be_read_is_named_with_what_is_wrong_with_it(run: Run) -> None:
    path = run.save("1.ckpt", 1)
    forget()
    os.truncate(run.pool, 4096)
    with pytest.raises(CorruptionError, match=rf"{run.pool}: .*found 4096"):
        torch.load(path)
    run.pool.write_bytes(b"x" * 100_000)
    with pytest.raises(CorruptionError, match="is not a Portus pool"):
        torch.load(path)


def test_a_pool_of_a_newer_portus_says_that_this_one_is_to_be_upgraded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.save("1.ckpt", 1)
    forget()
    monkeypatch.setattr(roots, "FORMAT_VERSION", 0)
    with pytest.raises(UsageError, match=r"newer Portus.*Upgrade"):
        torch.load(path)


# --- what is configured (rule 1) ---


@pytest.mark.parametrize("way", ["variable", "allow", "directory"])
def test_a_pool_that_was_moved_is_found_where_it_is_configured(
    run: Run, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path = run.save("1.ckpt", 1)
    forget()
    pools = run.home / "pools"
    pools.mkdir()
    create_pool(str(pools / "another.portus"), LocalFiles())
    (pools / "note.txt").write_text("text")
    moved = run.pool.rename(pools / "renamed.portus")
    with pytest.raises(UsageError, match=MAY_NOT):
        torch.load(path)
    if way == "allow":
        portus.allow(moved)
    else:
        monkeypatch.setenv("PORTUS_POOL", str(moved if way == "variable" else pools))
    assert_same(torch.load(path), state(1))


def test_a_configured_pool_of_another_identity_counts_if_it_has_the_version(
    run: Run, tmp_path: Path
) -> None:
    """As one that was filled from a mirror."""
    path = run.save("1.ckpt", 1)
    other = Run(tmp_path / "other")
    token = other.reference(other.save("1.ckpt", 5)).token
    crafted(path, run.reference(path), token=token)
    forget()
    with pytest.raises(UsageError):
        torch.load(path)
    portus.allow(other.pool)
    assert torch.load(path)["step"] == 5


def test_a_configured_pool_that_is_not_there_keeps_nobody_from_the_one_that_has_it(
    run: Run,
) -> None:
    """As that of a training that has not saved yet, and loads what another one saved."""
    path = run.save("1.ckpt", 1)
    forget()
    portus.allow(run.home / "not yet.portus")
    assert torch.load(path)["step"] == 1


def test_a_configured_pool_that_fails_keeps_nobody_from_the_one_that_has_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.save("1.ckpt", 1)
    forget()
    monkeypatch.setenv("PORTUS_POOL", f"portus://127.0.0.1:{free_port()}")
    assert torch.load(path)["step"] == 1
    run.pool.unlink()
    with pytest.raises(TransportError):
        torch.load(path)


def test_a_host_is_asked_only_if_its_address_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "host") as server:
        run = Run(tmp_path, url(server))
        path = run.save("1.ckpt", 1)
        assert torch.load(path)["step"] == 1, "who saves there may"
        forget()
        opened.clear()
        asked = server.house.counters.counts["connections"]
        with pytest.raises(UsageError, match=MAY_NOT) as caught:
            torch.load(path)
        assert f"PORTUS_POOL={url(server)}" in str(caught.value)
        assert opened == []
        assert server.house.counters.counts["connections"] == asked
        portus.allow(url(server))
        assert_same(torch.load(path), state(1))
        forget()
        monkeypatch.setenv("PORTUS_POOL", url(server))
        assert_same(torch.load(path), state(1))
        assert opened == [url(server)] * 2


def test_of_several_hosts_each_is_asked_until_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "a") as one, serving(tmp_path / "b") as two:
        path = Run(tmp_path, url(two)).save("1.ckpt", 1)
        forget()
        portus.allow([url(one), url(two)])
        assert_same(torch.load(path), state(1))


def test_what_a_host_does_not_have_any_more_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "host") as server:
        run = Run(tmp_path, url(server))
        path = run.save("1.ckpt", 1)
        copy = shutil.copy(path, tmp_path / "copy.ckpt")
        with run.training() as files:
            files.remove(str(path))
        with pytest.raises(UsageError, match=f"not in {url(server)} any more"):
            torch.load(copy)
    with pytest.raises(TransportError):
        torch.load(copy)


# --- what is not there any more, and what is damaged ---


def test_a_removed_version_is_said_with_its_step_and_where_it_was(run: Run) -> None:
    path = run.save("1.ckpt", 1)
    copy = shutil.copy(path, run.home / "copy.ckpt")
    with run.training() as files:
        files.remove(str(path))
    forget()
    loads: list[Callable[[], object]] = [
        lambda: torch.load(copy),
        lambda: torch.load(copy, weights_only=False),
        lambda: load_file(copy),
        lambda: portus.load(copy),
        lambda: verify_file(copy),
    ]
    for load in loads:
        with pytest.raises(UsageError) as caught:
            load()
        said = str(caught.value)
        assert f"copy.ckpt: step 1 of model 'default' is not in {run.pool} any more" in said
        assert f"portus ls {run.pool}" in said


def test_a_pointer_that_is_replaced_while_it_is_followed_is_read_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save that replaces it removes the version that it led to."""
    path = run.save("last.ckpt", 1)
    open_place = home.open_place
    saved = 1

    def replace_and_open(place: portus.Place) -> Any:
        nonlocal saved
        if saved < 3:
            saved += 1
            run.save("last.ckpt", saved)
        return open_place(place)

    monkeypatch.setattr(home, "open_place", replace_and_open)
    assert torch.load(path)["step"] == 3
    saved = 1
    assert load_file(path)["step"] == 3


def test_every_byte_of_a_pointer_that_is_damaged_is_refused_or_harmless(run: Run) -> None:
    path = run.save("1.ckpt", 1)
    forget()
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        for load in (torch.load, load_file):
            try:
                assert_same(load(path), state(1))
            except AssertionError:
                raise
            except Exception:  # what torch raises for a damaged file is of any kind
                refused += 1
        with pytest.raises(CorruptionError):
            portus.read_reference(path)
    assert refused > len(whole) // 3
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptionError, match=r"1\.ckpt: pointer: damaged"):
        portus.is_reference(path)


def test_a_text_that_was_changed_is_damage(run: Run) -> None:
    path = run.save("1.ckpt", 1)
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":2'))
    for weights_only in (True, False):
        with pytest.raises(CorruptionError, match="checksum"):
            torch.load(path, weights_only=weights_only)
    with pytest.raises(CorruptionError):
        load_text("")


def test_damage_in_the_pool_is_never_handed_out(run: Run) -> None:
    path = run.save("1.ckpt", 1)
    forget()
    data = bytearray(run.pool.read_bytes())
    at = data.index(state(1)["w"].numpy().tobytes())
    data[at + 4000] ^= 1
    run.pool.write_bytes(data)
    loads: list[Callable[[Path], object]] = [torch.load, load_file, verify_file]
    for load in loads:
        with pytest.raises(CorruptionError, match="are not those that were saved"):
            load(path)
    assert load_file(path, verify=False)["step"] == 1
    assert load_file(path, "step") == {"step": 1}, "of what else there is nothing is read"


def test_a_pointer_to_a_file_that_its_version_lacks_is_damage(run: Run) -> None:
    path = run.save("1.ckpt", 1)
    crafted(path, run.reference(path), written_path=str(path.with_name("2.ckpt")))
    for load in (torch.load, load_file):
        with pytest.raises(
            CorruptionError, match=r"expected a file '2\.ckpt', found \['1\.ckpt'\]"
        ):
            load(path)


# --- through torch.load ---

MODES: list[dict[str, Any]] = [
    {},
    {"weights_only": True},
    {"weights_only": True, "mmap": True},
    {"weights_only": False},
    {"weights_only": False, "mmap": True},
    {"map_location": "cpu"},
    {"map_location": "cpu", "mmap": True},
    {"map_location": torch.device("cpu"), "weights_only": False},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_torch_load_gives_the_state_in_every_mode(run: Run, mode: dict[str, Any]) -> None:
    found = torch.load(run.save("1.ckpt", 1), **mode)
    assert_same(found, state(1))
    found["w"][4] = 9
    assert found["view"][1] == 9, "views stay views of one storage"


def test_torch_load_on_meta_reads_no_storage(run: Run) -> None:
    path = run.save("1.ckpt", 1)
    data = bytearray(run.pool.read_bytes())
    data[data.index(state(1)["w"].numpy().tobytes())] ^= 1
    run.pool.write_bytes(data)
    for device in ("meta", torch.device("meta")):
        found = torch.load(path, map_location=device)
        assert found["w"].is_meta
        assert found["view"].is_meta
        assert (found["w"].shape, found["step"]) == (torch.Size([3000]), 1)
    with pytest.raises(CorruptionError):
        torch.load(path)


class Own:
    """What only a pickle that is trusted brings back."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_objects_load_only_as_torch_allows_it(run: Run) -> None:
    path = run.save("1.ckpt", 1, state={"own": Own(7), "w": torch.ones(3)})
    assert torch.load(path, weights_only=False)["own"].number == 7
    for load in (torch.load, load_file):
        with pytest.raises(Exception, match=r"Weights only load failed|Unsupported|weights_only"):
            load(path)
        with pytest.raises(Exception, match=r"Weights only load failed|Unsupported|weights_only"):
            load(path, weights_only=True)


def test_torch_load_gives_the_state_from_every_kind_of_file(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.save("1.ckpt", 1)
    forget()
    monkeypatch.chdir(path.parent)
    for named in (path, str(path), "1.ckpt"):
        assert_same(torch.load(named), state(1))
    with open(path, "rb") as file, fsspec.open(f"file://{path}", "rb") as remote:
        assert_same(torch.load(file), state(1))
        assert_same(torch.load(remote), state(1))
    with open(path, "rb", buffering=0) as raw, io.BufferedReader(raw) as wrapped:
        assert_same(torch.load(wrapped), state(1))


def test_bytes_without_a_path_lead_where_the_pointer_says_and_to_what_is_configured(
    run: Run,
) -> None:
    data = run.save("1.ckpt", 1).read_bytes()
    forget()
    assert_same(torch.load(io.BytesIO(data)), state(1))
    moved = run.pool.rename(run.home / "moved.portus")
    with pytest.raises(UsageError, match="this pointer refers to pool"):
        torch.load(io.BytesIO(data))
    portus.allow(moved)
    assert_same(torch.load(io.BytesIO(data)), state(1))


def test_what_cannot_be_mapped_is_said_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    path = run.save("once.ckpt", 1)
    for _ in range(2):
        assert torch.load(path, mmap=True)["step"] == 1
    assert caplog.text.count("once.ckpt is a pointer: mmap=True has no effect") == 1


# --- through what else reads files ---


class Told(Pace):
    """Waits for nothing, and counts what is read."""

    size = 0

    def take(self, size: int) -> None:
        self.size += size


def test_all_that_reads_a_file_follows_a_pointer(run: Run) -> None:
    with run.training() as files:
        handle = files.save_directory(str(run.ckpt), {"a.bin": state(3)}, 3, note=b"a note")
        handle.wait()
    path = run.ckpt / "a.bin"
    forget()
    assert_same(load_file(path), state(3))
    assert_same(portus.load(path), state(3))
    assert list(load_file(path, ["w"])) == ["w"]
    assert load_file(path, map_location="meta")["w"].is_meta
    assert read_note(path) == portus.read_note(path) == b"a note"
    assert has_digests(path)
    assert verify_file(path) > state(3)["w"].nbytes
    pace = Told(1)
    assert verify_file(path, pace) == verify_file(path)
    assert pace.size >= state(3)["w"].nbytes
    target = state(0)
    assert restore_file(path, target, RestoreOptions()) == ((), ())
    assert_same(target, state(3))


def test_a_pointer_to_safetensors_is_read_as_such(run: Run) -> None:
    tensors = {"b": torch.arange(9), "a": torch.ones(3)}  # as they are in the file
    with run.training() as files:
        path = run.ckpt / "model.safetensors"
        files.save(Safetensors(tensors, {"format": "pt"}), str(path), 1).wait()
    forget()
    assert_same(load_file(path), tensors)
    assert_same(torch.load(io.BytesIO(path.read_bytes())), tensors)
    assert has_digests(path)
    verify_file(path)


def test_a_file_that_is_missing_or_a_directory_is_said_as_torch_does(run: Run) -> None:
    with pytest.raises(FileNotFoundError):
        load_file(run.ckpt / "missing.ckpt")
    with pytest.raises(MediumError):
        verify_file(run.ckpt / "missing.ckpt")
    with pytest.raises(UsageError, match="found a directory"):
        load_file(run.ckpt)


# --- where Portus is not imported, or not there ---

WITHOUT_ENTRY_POINTS = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def fresh(program: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | environment,
    )


@pytest.mark.long
def test_a_machine_without_portus_is_told_what_to_do(run: Run) -> None:
    path = run.save("1.ckpt", 1)
    told = fresh("import torch, sys; torch.load(sys.argv[1])", path, **WITHOUT_ENTRY_POINTS)
    assert "portus.this_is_a_pointer_run_portus_export" in told.stderr


@pytest.fixture
def site(tmp_path: Path) -> str:
    """A path for modules on which Portus is installed, as far as torch can tell."""
    information = tmp_path / "site" / "portus_checkpoint-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: portus-checkpoint\n")
    (information / "entry_points.txt").write_text(
        "[torch.backends]\nportus = portus_in_torch:allow_references\n"
    )
    core = str(Path(portus.__file__).parents[1])
    return f"{tmp_path / 'site'}{os.pathsep}{core}"


@pytest.mark.long
def test_torch_loads_a_pointer_where_only_the_entry_point_ran(run: Run, site: str) -> None:
    path = run.save("1.ckpt", 1)
    told = fresh(
        "import sys, torch\n"
        "assert 'portus.engine' not in sys.modules, 'too much was imported'\n"
        "print('step', torch.load(sys.argv[1])['step'])\n",
        path,
        PYTHONPATH=site,
    )
    assert told.stdout == "step 1\n", told.stderr


def test_registering_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.serialization", None)
    portus.register_reference_loader()
