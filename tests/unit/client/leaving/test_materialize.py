"""Real torch files in place of reference files: what is in them, and what it takes to make them."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import portus
from portus.client.files import fate
from portus.client.files import reference as ref
from portus.client.leaving.materialize import in_place, materialize
from portus.client.loading.resolve import POOLS
from portus.index.directory import links_directory
from portus.media.local import LocalFiles

Pair = namedtuple("Pair", "left right")


class Run:
    """A training run with its checkpoints in ``ckpt``, saved by a real PoolCheckpointer."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.ckpt = home / "ckpt"
        self.pool = home / ".portus" / "m.portus"
        self.steps = 0

    def save(self, name: str, state: object) -> Path:
        path = self.ckpt / name
        self.steps += 1
        with portus.PoolCheckpointer(self.pool, keep=None) as made:
            made.save(state, self.steps, reference=path, synchronous=True).wait()
        return path

    def links(self) -> list[fate.Fate]:
        directory = links_directory(str(self.pool))
        return [link.state for link in fate.links(directory, LocalFiles())]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    portus.register_reference_loader()
    return Run(tmp_path)


def numbers(step: int = 1) -> dict[str, object]:
    shared = torch.arange(1000.0) + step
    return {"w": shared, "tied": shared, "view": shared[3:9], "step": step, "rng": (1, [2])}


def everything() -> dict[Any, Any]:
    """All kinds of tensors and of values that ``torch.save`` takes too."""
    base = torch.arange(60.0)
    complex_one = torch.randn(3, 4, dtype=torch.complex64)
    buffer = torch.nn.Buffer(torch.ones(3)) if hasattr(torch.nn, "Buffer") else torch.ones(3)
    return {
        "views": [base, base[5:], base.view(6, 10).t(), base[::2], base[:1].expand(4)],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "frozen": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "buffer": buffer,
        "leaf": torch.randn(2, requires_grad=True),
        "conjugate": complex_one.conj(),
        "negative": torch._neg_view(base),
        "imaginary": torch.randn(3, 4, dtype=torch.complex64).conj().imag,
        "empty": [torch.empty(0), torch.empty(0, 3, dtype=torch.int32)],
        "scalar": torch.tensor(3, dtype=torch.int64),
        "meta": torch.empty(3, device="meta"),
        "dtypes": [torch.zeros(5, dtype=dtype) for dtype in DTYPES],
        "large": torch.randint(0, 255, (17 << 20,), dtype=torch.uint8),
        "array": np.arange(40_000.0).reshape(200, 200),
        "bytes": bytes(range(256)) * 300,
        "random": np.random.get_state(),
        "plain": OrderedDict(a=1, b=(None, True, 2.5, "text", {3: [4]})),
        "pair": Pair(torch.ones(2), 7),
        7: {"same": base},
    }


DTYPES = (
    torch.bool,
    torch.int8,
    torch.uint16,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex128,
    torch.float8_e4m3fn,
)


def contents(file: Any) -> dict[str, bytes]:
    """What is in a torch file, by name; all of it is checked against its sum."""
    with zipfile.ZipFile(file) as archive:
        return {each.partition("/")[2]: archive.read(each) for each in archive.namelist()}


def as_torch_writes(state: object) -> dict[str, bytes]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return contents(buffer)


def same(file: Path, state: object) -> bool:
    """True if ``file`` holds just what torch would have written for ``state``."""
    found, expected = contents(file), as_torch_writes(state)
    of_the_state = {"data.pkl", "byteorder", "version"}
    of_the_state |= {name for name in expected if name.startswith("data/")}
    return found == {name: expected[name] for name in of_the_state}


def test_a_materialised_file_is_what_torch_would_have_saved(run: Run) -> None:
    path = run.save("a.ckpt", numbers())
    loaded = portus.load_reference(path)
    os.chmod(path, 0o640)
    os.utime(path, ns=(5_000_000_000, 7_000_000_000))
    assert portus.materialize(path) == [str(path)]
    run.pool.unlink()
    assert same(path, loaded)
    assert torch.load(path, weights_only=True)["step"] == 1
    status = path.stat()
    assert (status.st_mode & 0o777, status.st_mtime_ns) == (0o640, 7_000_000_000)
    assert os.listdir(run.ckpt) == ["a.ckpt"]
    assert run.links() == [fate.Fate.DELETED]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_whatever_torch_can_write_is_written_as_torch_writes_it(run: Run) -> None:
    path = run.save("a.ckpt", everything())
    loaded: Any = portus.load_reference(path)
    assert portus.materialize(path) == [str(path)]
    assert same(path, loaded)
    for mapped in (False, True):
        found = torch.load(path, weights_only=False, mmap=mapped)
        assert torch.equal(found["large"], loaded["large"])
        assert found["views"][0].data_ptr() == found[7]["same"].data_ptr()
        assert found["large"].data_ptr() % 64 == 0


def test_a_part_of_a_state_is_written_without_the_rest(run: Run) -> None:
    state = {"model.bin": {"w": torch.ones(9)}, "other": numbers()}
    places = {str(run.ckpt / name): name for name in state}
    with portus.PoolCheckpointer(run.pool) as made:
        made.save(state, 1, reference=places, synchronous=True).wait()
    assert sorted(portus.materialize(run.ckpt)) == sorted(places)
    assert same(run.ckpt / "model.bin", state["model.bin"])
    assert same(run.ckpt / "other", state["other"])


@pytest.mark.long
def test_it_takes_no_memory_for_the_state(run: Run) -> None:
    state = {str(i): torch.full((16 << 20,), i, dtype=torch.float32) for i in range(4)}
    path = run.save("a.ckpt", state)
    program = """
        import sys, torch, portus
        from portus.client.leaving import torch_file
        from portus.client.loading import view
        torch.use_deterministic_algorithms(True)  # then torch fills what it sets aside
        def kilobytes(name):
            lines = open("/proc/self/status").read().splitlines()
            return int(next(line for line in lines if line.startswith(name)).split()[1])
        open("/proc/self/clear_refs", "w").write("5")
        before = kilobytes("VmRSS:")
        portus.materialize(sys.argv[1])
        print(kilobytes("VmHWM:") - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert int(done.stdout) < 64 << 10  # of 256 MiB
    assert path.stat().st_size > 256 << 20


def test_materialising_a_directory_replaces_references_and_nothing_else(run: Run) -> None:
    for step, name in enumerate(["a.ckpt", "b.ckpt"], 1):
        run.save(name, numbers(step))
    (run.ckpt / "0-last.ckpt").symlink_to("b.ckpt")
    real = run.ckpt / "real.ckpt"
    torch.save({"a": 1}, real)
    before = real.stat().st_mtime_ns, real.stat().st_ino
    done = portus.materialize(run.ckpt)
    assert [os.path.basename(path) for path in done] == ["a.ckpt", "b.ckpt"]
    assert (real.stat().st_mtime_ns, real.stat().st_ino) == before
    assert (run.ckpt / "0-last.ckpt").is_symlink()
    assert torch.load(run.ckpt / "0-last.ckpt")["step"] == 2
    assert portus.materialize(run.ckpt) == []
    assert len(os.listdir(run.ckpt)) == 4


def test_directories_keep_the_order_in_which_they_were_saved(run: Run) -> None:
    """Whoever removes old checkpoints sorts directories by their times."""
    for step in (1, 2, 3):
        run.save(f"step-{step}/a.pt", numbers(step))
        run.save(f"step-{step}/b.pt", numbers(step))
        other = run.ckpt / f"step-{step}" / "other.txt"
        other.write_text("not ours")
        for path in (*other.parent.iterdir(), other.parent):
            os.utime(path, ns=(step * 10**9, step * 10**9))
    untouched = run.ckpt / "without"
    untouched.mkdir()
    (untouched / "x").write_text("x")
    before = untouched.stat().st_mtime_ns
    for step in (3, 1, 2):
        assert len(materialize(run.ckpt / f"step-{step}")) == 2
    materialize(untouched)
    found = [(run.ckpt / f"step-{step}").stat().st_mtime_ns for step in (1, 2, 3)]
    assert found == [10**9, 2 * 10**9, 3 * 10**9]
    assert untouched.stat().st_mtime_ns == before


def test_materialising_a_link_replaces_what_it_leads_to(run: Run) -> None:
    path = run.save("a.ckpt", numbers())
    (run.ckpt / "last.ckpt").symlink_to("a.ckpt")
    assert portus.materialize(run.ckpt / "last.ckpt") == [str(path)]
    assert (run.ckpt / "last.ckpt").is_symlink()
    assert not portus.is_reference(path)


def test_a_reference_is_copied_out_and_stays(run: Run) -> None:
    path = run.save("a.ckpt", numbers())
    target = run.home / "durable" / "newest.ckpt"
    for _ in range(2):
        assert portus.materialize(path, to=target) == [str(target)]
        assert same(target, portus.load_reference(path))
    assert portus.is_reference(path)
    assert os.listdir(target.parent) == ["newest.ckpt"]
    with pytest.raises(portus.UsageError, match="no Portus reference"):
        portus.materialize(target, to=path)


def test_without_room_nothing_is_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.save("a.ckpt", {"w": torch.ones(1000)})
    room = shutil.disk_usage(run.ckpt)._replace(free=4000)
    monkeypatch.setattr(shutil, "disk_usage", lambda where: room)
    with pytest.raises(portus.MediumError, match=r"\d+ bytes needed, 4000 bytes free"):
        portus.materialize(path)
    assert portus.is_reference(path)
    assert os.listdir(run.ckpt) == ["a.ckpt"]


def test_a_size_that_just_fits_is_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is little more than what is used."""
    states = [numbers(), everything(), {str(i): torch.ones(1) for i in range(500)}]
    for index, state in enumerate(states):
        path = run.save(f"{index}.ckpt", state)
        room = shutil.disk_usage(run.ckpt)._replace(free=0)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda where, room=room: room)
            with pytest.raises(portus.MediumError) as found:
                portus.materialize(path)
        needed = int(str(found.value).split(" bytes needed")[0].rpartition(" ")[2])
        portus.materialize(path)
        size = path.stat().st_size
        assert size <= needed <= size + 512 * (len(contents(path)) + 4)


def test_what_torch_cannot_write_stays_a_reference(run: Run) -> None:
    memory = torch.zeros(8)
    path = run.save("a.ckpt", {"a": memory, "b": memory.view(torch.int32)})
    with pytest.raises(portus.UsageError, match="share memory"):
        portus.materialize(path)
    assert portus.is_reference(path)
    assert os.listdir(run.ckpt) == ["a.ckpt"]
    with pytest.raises(portus.UsageError, match="nothing to materialise"):
        portus.materialize(path.parent / "missing")


def test_damage_is_found_on_the_way_and_nothing_is_left(run: Run) -> None:
    state = torch.randint(0, 255, (40 << 20,), dtype=torch.uint8)
    path = run.save("a.ckpt", {"w": state})
    with open(run.pool, "r+b") as pool:
        found = pool.read().index(bytes(state[33 << 20 : (33 << 20) + 4096].numpy()))
        pool.seek(found)
        pool.write(b"rot")
    with pytest.raises(
        portus.CorruptionError,
        match=r"model 'default', step 1 .*: w: .* damaged .* from byte 33554432",
    ):
        portus.materialize(path)
    assert portus.is_reference(path)
    assert os.listdir(run.ckpt) == ["a.ckpt"]


def test_what_a_killed_process_left_does_not_take_the_room(run: Run) -> None:
    path = run.save("a.ckpt", numbers())
    left = run.ckpt / f".{'0' * 32}.portus"
    own = run.ckpt / f".{ref.read(path).id}.portus"  # type: ignore[union-attr]
    left.write_bytes(bytes(1 << 20))
    own.write_bytes(b"PK")
    assert portus.materialize(path) == [str(path)]
    assert os.listdir(run.ckpt) == ["a.ckpt"]


def test_what_another_process_is_writing_is_left_to_it(run: Run) -> None:
    path = run.save("a.ckpt", numbers())
    own = run.ckpt / f".{ref.read(path).id}.portus"  # type: ignore[union-attr]
    own.write_bytes(bytes(100_000))
    with open(own) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(portus.BusyError, match="another process"):
            portus.materialize(path)
    assert portus.is_reference(path)
    assert own.exists()


def test_a_file_that_is_replaced_meanwhile_is_not_overwritten(run: Run) -> None:
    path = run.save("a.ckpt", numbers(1))
    newer = run.save("b.ckpt", numbers(2))

    def replaced(size: int) -> None:
        if size and newer.exists():
            os.replace(newer, path)

    with pytest.raises(portus.UsageError, match="was replaced while"):
        list(in_place(str(path), POOLS, replaced))
    assert portus.read_reference(path).step == 2  # type: ignore[union-attr]
    assert os.listdir(run.ckpt) == ["a.ckpt"]


def test_a_save_in_flight_is_waited_for(run: Run) -> None:
    path = run.ckpt / "a.ckpt"
    with portus.PoolCheckpointer(run.pool) as made:
        made.save(numbers(5), 5, reference=path)
        materialize(path)
    assert torch.load(path)["step"] == 5


# --- what torch.load is asked for ---


def test_on_the_meta_device_tensors_have_no_memory(run: Run) -> None:
    path = run.save("a.ckpt", everything())
    for location in ("meta", torch.device("meta")):
        found = torch.load(path, map_location=location, weights_only=False)
        tensors = [found["views"][1], found["parameter"], found["conjugate"], found["large"]]
        assert all(each.is_meta for each in tensors)
        assert found["views"][3].stride() == (2,)
        assert isinstance(found["parameter"], torch.nn.Parameter)
        assert found["conjugate"].is_conj()
        assert np.array_equal(found["array"], np.arange(40_000.0).reshape(200, 200))
        assert found["plain"]["a"] == 1
    assert not torch.load(path, map_location="cpu", weights_only=False)["large"].is_meta


def test_that_nothing_is_mapped_is_said_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    path = run.save("a.ckpt", numbers())
    for _ in range(2):
        assert torch.load(path, mmap=True)["step"] == 1
        torch.load(path)
    said = [each.getMessage() for each in caplog.records if "mmap=True" in each.getMessage()]
    assert said == [
        f"{path} is a reference: mmap=True has no effect, all of its state is read into memory. "
        "portus materialize makes a file that can be mapped"
    ]
