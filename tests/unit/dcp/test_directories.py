"""Checkpoint directories of torch.distributed.checkpoint: what stock writes and reads, in the
background, whole or absent, every byte verified."""

from __future__ import annotations

import io
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorProperties

import portus
import portus.dcp
from portus.dcp import PortusStorageReader, PortusStorageWriter
from portus.engine.files.pending import PENDING
from portus.engine.image.integrity import is_whole
from portus.engine.loading.checkpoint_file import has_digests, verify_file
from portus.engine.writer.image_file import ImageFile
from portus.errors import (
    BusyError,
    CorruptionError,
    MediumError,
    NoCheckpointError,
    PortusError,
    UsageError,
)
from portus.reach.dcp import whole_calls
from tests.unit.dcp.running import run
from tests.unit.dcp.written_over import written_over
from tests.warm import in_process

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # stock torch 2.6 itself
    pytest.mark.usefixtures("own_writer"),
]

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "6"))


@pytest.fixture
def own_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The test has a writer of its own, and works in its directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(whole_calls, "_writers", [])
    yield
    for each in whole_calls._writers:
        each.close()


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("ranks", [2, 3])
def test_late_saves_of_what_looks_the_same_are_planned_once_and_others_anew(
    tmp_path: Path, ranks: int
) -> None:
    run(tmp_path, f"dirs_again:{ranks}")


@pytest.mark.long
def test_a_late_save_that_one_rank_does_not_begin_costs_that_save_alone(tmp_path: Path) -> None:
    run(tmp_path, "dirs_unbegun:2", "dirs_load:2:call:6", "dirs_load:1:stock:4")


def state_of(seed: int) -> dict[str, Any]:
    """One of each kind."""
    torch.manual_seed(seed)
    base = torch.rand(6, 5)
    return {
        "model": {
            "weight": torch.rand(4, 3),
            "transposed": torch.rand(3, 4).t(),
            "view": base[1:3],
            "half": torch.rand(7).to(torch.bfloat16),
            "scalar": torch.tensor(float(seed)),
            "empty": torch.empty(0, 3),
            "numbers": torch.arange(seed, seed + 5),
            "complex": torch.rand(3, dtype=torch.complex64),
            "flags": torch.rand(9) > 0.5,
        },
        "step": seed,
        "more": {"text": "a" * seed, "bytes": io.BytesIO(b"xyz" * seed).getvalue()},
    }


def assert_same(found: Any, expected: Any) -> None:
    """The same values; a tensor that torch copied into has the memory that it had."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, each in expected.items():
            assert_same(found[key], each)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


def emptied() -> dict[str, Any]:
    return state_of(0)


def names(place: str | Path) -> list[str]:
    return sorted(os.listdir(place))


def test_a_directory_has_what_stock_writes_and_nothing_else(tmp_path: Path) -> None:
    dcp.save(state_of(1), checkpoint_id="stock/step_1", storage_writer=FileSystemWriter(""))
    portus.dcp.save(state_of(1), "ours/step_1")
    assert names("stock/step_1") == [".metadata", "__0_0.distcp"]
    found = names("ours/step_1")
    assert found[0] == ".metadata"
    assert len(found) == 2
    assert found[1].startswith("__0_")
    assert found[1].endswith(".distcp")


@pytest.mark.long
def test_stock_torch_reads_it_without_portus(tmp_path: Path) -> None:
    portus.dcp.save(state_of(3), "step_3")
    dcp_to_torch_save("step_3", "whole.pt")
    program = (
        "import sys; sys.modules['portus'] = None\n"
        "import torch, torch.distributed.checkpoint as dcp\n"
        "found = torch.load('whole.pt', weights_only=False)\n"
        "assert found['step'] == 3, found['step']\n"
        "state = {'model': {'weight': torch.zeros(4, 3), 'view': torch.zeros(2, 5)}}\n"
        "dcp.load(state, checkpoint_id='step_3')\n"
        "assert torch.equal(state['model']['weight'], found['model']['weight'])\n"
        "assert torch.equal(state['model']['view'], found['model']['view'])\n"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, env=environment)
    assert_same(torch.load("whole.pt", weights_only=False), state_of(3))


@pytest.mark.parametrize("writer", ["stock", "ours"])
@pytest.mark.parametrize("reader", ["stock", "ours", "call"])
def test_each_reads_what_the_other_wrote(writer: str, reader: str) -> None:
    state = state_of(2)
    to = FileSystemWriter("") if writer == "stock" else PortusStorageWriter()
    dcp.save(state, checkpoint_id="step_2", storage_writer=to)
    if isinstance(to, PortusStorageWriter):
        to.close()
    found = emptied()
    if reader == "call":
        portus.dcp.load(found, "step_2")
    else:
        source = FileSystemReader("") if reader == "stock" else PortusStorageReader()
        dcp.load(found, checkpoint_id="step_2", storage_reader=source)
    assert_same(found, state)


def test_a_tensor_is_stock_s_bytes_to_the_end_of_its_storage() -> None:
    tensor = torch.rand(5, 4)
    portus.dcp.save({"weight": tensor}, "step_1")
    stream = io.BytesIO()
    torch.save(tensor, stream)
    data = tensor.numpy().tobytes()
    end = stream.getvalue().index(data) + len(data)
    name = next(name for name in names("step_1") if name.endswith(".distcp"))
    assert Path("step_1", name).read_bytes()[:end] == stream.getvalue()[:end]


def test_some_keys_of_it_and_parts_of_a_block_are_loaded_alone() -> None:
    state = state_of(4)
    portus.dcp.save(state, "step_4")
    found = {"model": {"weight": torch.zeros(4, 3)}, "step": 0}
    portus.dcp.load(found, "step_4")
    assert torch.equal(found["model"]["weight"], state["model"]["weight"])  # type: ignore[index]
    assert found["step"] == 4


def test_training_may_go_on_at_once_and_what_is_saved_is_of_the_call() -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    with_hook = PortusStorageWriter()
    expected = []
    for step in range(5):
        model(torch.rand(3, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append({name: each.clone() for name, each in model.state_dict().items()})
        with_hook.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, f"s{step}")
    with_hook.close()
    for step, whole in enumerate(expected):
        found = {"model": torch.nn.Linear(300, 300).state_dict()}
        portus.dcp.load(found, f"s{step}")
        assert_same(dict(found["model"]), whole)


def _files(place: str) -> list[Path]:
    return [Path(place, name) for name in names(place)]


def _try(place: str, expected: dict[str, Any]) -> bool:
    """Whether it loads; then it is what was saved."""
    found = emptied()
    try:
        portus.dcp.load(found, place)
    except (CorruptionError, UsageError, NoCheckpointError):
        return False
    assert_same(found, expected)
    return True


SMALL = {"weight": torch.arange(6.0).reshape(2, 3), "turned": torch.rand(2, 3).t(), "step": 7}


def _loads_small(place: str) -> bool:
    found = {"weight": torch.zeros(2, 3), "turned": torch.zeros(3, 2), "step": 0}
    try:
        portus.dcp.load(found, place)
    except PortusError:
        return False
    assert_same(found, SMALL)
    return True


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("which", [0, 1], ids=["metadata", "rank file"])
def test_no_flipped_byte_is_handed_out_and_a_look_at_the_file_finds_it(which: int) -> None:
    portus.dcp.save(SMALL, "step_1")
    file = _files("step_1")[which]
    whole = file.read_bytes()
    assert _loads_small("step_1")
    assert has_digests(file)
    assert verify_file(file) == len(whole)
    handed_out = 0
    for at in range(len(whole)):
        damaged = whole[at] ^ 1 << at % 8
        with written_over(file, at, bytes([damaged])):
            with pytest.raises((CorruptionError, UsageError)):
                verify_file(file)
            if at % 16 == 0:
                handed_out += _loads_small("step_1")
    assert file.read_bytes() == whole
    assert handed_out <= 8, "but for bytes that are part of nothing"


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("which", [0, 1], ids=["metadata", "rank file"])
def test_no_file_that_was_cut_off_is_handed_out(which: int) -> None:
    portus.dcp.save(SMALL, "step_1")
    file = _files("step_1")[which]
    whole = file.read_bytes()
    for length in range(len(whole) - 1, -1, -1 if which == 0 else -7):
        os.truncate(file, length)
        if _loads_small("step_1"):
            assert which == 0, "the pickle is whole, and what is missing is its digest"
            assert pickle.loads(whole[:length])
        with open(file) as opened:
            assert not is_whole(opened.fileno(), file.name) or which == 0


def test_what_is_missing_or_of_another_save_is_named() -> None:
    portus.dcp.save(state_of(1), "step_1")
    portus.dcp.save(state_of(2), "step_2")
    with pytest.raises(NoCheckpointError, match="no such directory"):
        portus.dcp.load(emptied(), "step_9")
    first, second = (_files(f"step_{step}")[1] for step in (1, 2))
    shutil.copy(second, first)
    with pytest.raises(CorruptionError, match="is that of the save"):
        portus.dcp.load(emptied(), "step_1")
    second.unlink()
    with pytest.raises(CorruptionError, match="the file of a rank is missing"):
        portus.dcp.load(emptied(), "step_2")
    portus.dcp.save(state_of(3), "step_3")
    portus.dcp.save(state_of(4), "step_4")
    Path("step_4", ".metadata").unlink()
    with pytest.raises(NoCheckpointError, match=r"cut off.*newest complete one .*step_3"):
        portus.dcp.load(emptied(), "step_4")


def test_a_state_that_does_not_fit_is_named() -> None:
    portus.dcp.save({"weight": torch.rand(2, 3)}, "step_1")
    with pytest.raises(UsageError, match=r"step_1 was not loaded: .*other"):
        portus.dcp.load({"other": torch.zeros(1)}, "step_1")
    with pytest.raises(UsageError, match="step_1"):
        portus.dcp.load({"weight": torch.zeros(5)}, "step_1")


def test_the_newest_or_none_and_one_that_is_damaged_is_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert portus.dcp.load_newest(emptied(), "run") is None
    for step in (1, 2, 10):
        portus.dcp.save(state_of(step), f"run/step_{step}")
    portus.dcp.save(state_of(5), "run/step_5")  # the run went back, and this is the newest
    found = emptied()
    assert portus.dcp.load_newest(found, "run") == os.path.realpath("run/step_5")
    assert_same(found, state_of(5))
    shutil.copytree("run", "copy")
    assert portus.dcp.load_newest(found, "copy") == os.path.realpath("copy/step_5")
    damaged = _files("run/step_5")[1]
    data = bytearray(damaged.read_bytes())
    data[data.index(state_of(5)["model"]["weight"].numpy().tobytes())] ^= 1
    damaged.write_bytes(data)
    with caplog.at_level(logging.ERROR, "portus"):
        assert portus.dcp.load_newest(found, "run") == os.path.realpath("run/step_10")
    assert_same(found, state_of(10))
    assert "step_5 is passed over" in caplog.text
    for step in (1, 2, 10):
        _files(f"run/step_{step}")[1].unlink()
    with pytest.raises(CorruptionError):
        portus.dcp.load_newest(found, "run")


def test_a_directory_that_is_saved_to_again_has_the_old_or_the_new_one_and_no_old_files() -> None:
    writer = PortusStorageWriter()
    for step in range(1, 6):
        writer.save(state_of(step), "last")
        found = emptied()
        portus.dcp.load(found, "last")
        assert_same(found, state_of(step))
    writer.close()
    assert len(names("last")) == 2
    dcp.save(state_of(7), checkpoint_id="last", storage_writer=FileSystemWriter(""))
    portus.dcp.save(state_of(8), "last")
    whole_calls._writers[0].close()
    assert len(names("last")) == 2, "what stock wrote went too"


def test_so_many_stay_as_were_asked_for() -> None:
    writer = PortusStorageWriter(keep=2)
    for step in range(6):
        writer.save(state_of(step), f"run/step_{step}")
    writer.close()
    assert sorted(name for name in names("run") if name != ".portus") == ["step_4", "step_5"]


def test_nothing_of_ours_is_left_beside_the_checkpoints() -> None:
    writer = PortusStorageWriter(journal=False)
    writer.save(state_of(1), "run/step_1")
    writer.close()
    assert names("run") == ["step_1"]


@pytest.mark.long
def test_another_job_with_such_names_is_told_before_it_replaces_anything() -> None:
    writer = PortusStorageWriter()
    writer.save(state_of(1), "run/step_1").wait()
    program = (
        "import torch, portus, portus.dcp\n"
        "try:\n"
        "    portus.dcp.save({'a': torch.zeros(3)}, 'run/step_1')\n"
        "except portus.BusyError as error:\n"
        f"    assert 'process {os.getpid()}' in str(error), error\n"
        "    portus.dcp.save({'a': torch.zeros(3)}, 'run/other-1')\n"
        "    print('refused')\n"
    )

    def other() -> str:
        done = in_process(program)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert other() == "refused\n"
    found = emptied()
    portus.dcp.load(found, "run/step_1")
    assert_same(found, state_of(1))
    writer.close()
    assert other() == "", "the job has ended"
    assert issubclass(BusyError, MediumError)


def test_what_makes_no_checkpoint_is_refused_with_what_to_do() -> None:
    for place in (None, ""):
        with pytest.raises((UsageError, CheckpointException), match="checkpoint_id"):
            portus.dcp.save(state_of(1), place)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="keep"):
        PortusStorageWriter(keep=0)
    with pytest.raises(UsageError, match="torch cannot save it"):
        portus.dcp.save({"f": lambda: 0}, "step_1")


def test_a_writer_may_name_the_directory_as_stock_s_does() -> None:
    writer = PortusStorageWriter("ckpt/step_1")
    dcp.save(state_of(1), storage_writer=writer)
    writer.close()
    found = emptied()
    dcp.load(found, storage_reader=PortusStorageReader("ckpt/step_1"))
    assert_same(found, state_of(1))


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("how", ["late", "async_call"])
def test_saved_at_two_ranks_it_is_bit_equal_by_portus_and_by_stock(
    how: str, tmp_path: Path
) -> None:
    run(tmp_path, f"dirs_save:2:{how}", "dirs_load:3:call:2", "dirs_load:1:stock:1")


@pytest.mark.long
@pytest.mark.parametrize("how", ["late", "dcp", "call", "async", "async_call", "stock"])
def test_saved_at_four_ranks_it_is_bit_equal_at_any_number(how: str, tmp_path: Path) -> None:
    loads = ("1:stock", "2:reader", "3:call", "3:stock", "4:newest", "8:call")
    run(tmp_path, f"dirs_save:4:{how}", *(f"dirs_load:{each}:2" for each in loads))


def test_a_rank_that_cannot_write_is_known_and_later_saves_are_complete(tmp_path: Path) -> None:
    run(tmp_path, "dirs_full:2", "dirs_load:1:stock:4")


@pytest.mark.long
def test_each_rank_writes_over_its_own_files_that_the_first_one_removed(tmp_path: Path) -> None:
    said = run(tmp_path, "dirs_keep_one:3", "dirs_load:1:stock:5", "dirs_load:2:call:5")
    for rank in (1, 2):
        assert f"rank {rank} [False, False, False, True, True]" in said
    assert not [name for name in os.listdir(tmp_path / ".portus") if name.endswith(".portus")]


@pytest.mark.long
def test_what_one_rank_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    run(tmp_path, "dirs_refused:2", "dirs_load:1:call:2")


def test_directories_of_each_node_are_refused_at_the_first_save(tmp_path: Path) -> None:
    run(tmp_path, "dirs_apart:2")


def _kills() -> list[tuple[str, int]]:
    who = ("0", "1", "all")
    return [(who[number % 3], number * 7 % 60) for number in range(KILLS)]


@pytest.mark.long
@pytest.mark.parametrize("kill", _kills(), ids=lambda kill: f"{kill[0]} after {kill[1]} ms")
def test_a_job_that_was_killed_goes_on_bit_for_bit(kill: tuple[str, int], tmp_path: Path) -> None:
    # Each load is compared with what the job that saved had then, by Portus and by stock.
    run(tmp_path, f"dirs_train:4:4:{kill[0]}-{kill[1]}")
    told = run(tmp_path, "dirs_train:3:5", "dirs_train:1:6", "dirs_train:2:7:all-0")
    starts = [int(line.split()[-1]) for line in told.splitlines() if "goes on from" in line]
    assert starts[0] >= 2, "of four saves, one was in flight and one waited"
    assert starts[-1] == 6
    os.rename(tmp_path / "run" / "step_6", tmp_path / "step_6")
    run(tmp_path, "dirs_load:8:stock:6", "dirs_load:8:call:6")


def test_a_directory_that_is_removed_during_its_save_fails_that_save_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, real = threading.Event(), ImageFile.finish

    def finish(file: ImageFile) -> None:
        assert go_on.wait(30)
        real(file)

    monkeypatch.setattr(ImageFile, "finish", finish)
    writer = PortusStorageWriter()
    first = writer.save(state_of(1), "run/step_1")
    with PENDING.exempt():
        shutil.rmtree("run/step_1")
    go_on.set()
    with pytest.raises(PortusError):
        first.wait()
    writer.save(state_of(2), "run/step_2").wait()
    writer.close()
    assert portus.dcp.load_newest(emptied(), "run") == os.path.realpath("run/step_2")


def test_metadata_of_a_newer_torch_with_more_fields_are_written_for_older_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    portus.dcp.save(SMALL, "step_1")
    real: Any = TensorProperties.__getstate__
    with monkeypatch.context() as newer:
        newer.setattr(TensorProperties, "__getstate__", lambda self: (*real(self), (3, 1)))
        portus.dcp.save(SMALL, "step_2")
        metadata = FileSystemReader("step_1").read_metadata()
        data = pickle.dumps(metadata)  # as stock would
    assert _loads_small("step_2")
    found = {"weight": torch.zeros(2, 3), "turned": torch.zeros(3, 2), "step": 0}
    dcp.load(found, checkpoint_id="step_2")
    assert_same(found, SMALL)
    Path("step_1", ".metadata").write_bytes(data)
    with pytest.raises(PortusError, match="metadata cannot be read"):
        portus.dcp.load(found, "step_1")
