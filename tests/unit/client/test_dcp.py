"""Groups on a storage host, of jobs over gloo: bit-equal at any number of ranks, and complete."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from portus.client.retention import Retention
from portus.client.shards.cuts import FORMAT
from portus.index.groups import Past, new_id, part_model, part_token
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from typer.testing import CliRunner

import portus
from portus.cli.app import app
from portus.client.fence.fence import Fence
from portus.client.job.exchange import Heard
from portus.client.job.settings import Settings
from portus.client.leaving import materialize_shards
from portus.client.paths.pooled import PoolCheckpointer
from portus.client.run import Run
from portus.client.shards import grouped
from portus.dcp import Group, GroupReader, GroupWriter, groups, load
from portus.index.directory import WRITERS
from portus.index.keep import Keep
from portus.index.place import Place
from portus.spec import VersionInfo
from portus.testing.nursery import nursery
from tests.hosts import Host, serving, url
from tests.unit.client.late_copy import FENCE_S_MAX, LateCopy
from tests.unit.client.same import assert_same
from tests.unit.client.sharded import PART

OURS = [".metadata", "rank-0-of-1.shard"]
"""What lies in a checkpoint directory of one rank."""
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized"),
]


def run(root: Path, *tasks: str, **environment: str) -> str:
    """Jobs one after another, in processes of their own; what they printed. Without other hosts
    they save to one of ``root``."""
    with contextlib.ExitStack() as stack:
        if "SHARDED_POOL" not in environment:
            environment["SHARDED_POOL"] = stack.enter_context(served(root))
        environment.setdefault("PORTUS_POOL", environment["SHARDED_POOL"])  # it may be loaded from
        errors = stack.enter_context(tempfile.NamedTemporaryFile())
        child = stack.enter_context(
            nursery("tests.unit.client.sharded").start(
                "run", str(root), tasks, environment, errors.name
            )
        )
        printed = child.rest()
        assert child.wait() == 0, errors.read().decode(errors="replace")
    return "\n".join(printed)


@contextlib.contextmanager
def served(root: Path) -> Iterator[str]:
    """The storage host of ``root``; its address."""
    with serving(root / "host") as server:
        yield url(server)


def there(root: Path, model: str | None = None) -> list[Group]:
    """What that host has."""
    with served(root) as host:
        return groups(host, model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of an FSDP2 job of 4 ranks, loaded again by 1 and 2."""
    root = tmp_path_factory.mktemp("saved")
    run(root, "save:4", "load:1", "load:2")
    return root


@pytest.mark.long
def test_saved_at_four_ranks_it_is_bit_equal_at_one_and_two(saved: Path) -> None:
    found = there(saved, "fsdp")
    assert [(group.step, group.count, group.is_complete) for group in found] == [
        (1, 4, True),
        (2, 4, True),
    ]
    sizes = [part.size for _, part in found[-1].parts.values()]
    assert max(sizes) < 2 * min(sizes), "replicated tensors are spread over the ranks"


@pytest.mark.long
def test_saved_at_four_ranks_it_is_bit_equal_at_three_four_and_eight(saved: Path) -> None:
    run(saved, "load:3", "load:4", "load:8")


@pytest.mark.long
def test_tensor_parallel_shards_are_bit_equal(tmp_path: Path) -> None:
    run(tmp_path, "save:4:tp", "load:1:tp", "load:2:tp", "load:4:tp")


@pytest.mark.long
def test_hybrid_shards_are_written_once_spread_over_replicas_and_bit_equal(
    saved: Path, tmp_path: Path
) -> None:
    # Two replicas of two shards. Elsewhere: as many shards, and as many bytes, without replicas.
    run(tmp_path, "save:4:hsdp", "load:1:hsdp", "load:4:hsdp")
    group, plain = there(tmp_path, "hsdp")[-1], there(saved, "fsdp")[-1]
    sizes = [part.size for _, part in group.parts.values()]
    once = sum(part.size for _, part in plain.parts.values())
    assert abs(sum(sizes) - once) < once / 10, "replicas are not written twice"
    assert max(sizes) < 2 * min(sizes), "they are spread over the ranks"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mesh", "plain"])
def test_fully_sharded_data_parallel_states_are_bit_equal(tmp_path: Path, kind: str) -> None:
    run(tmp_path, f"fsdp1:2:{kind}:save", f"fsdp1:2:{kind}:load")
    assert [group.is_complete for group in there(tmp_path)] == [True]


@pytest.mark.long
def test_an_asynchronous_save_is_of_its_moment_and_committed_with_its_future(
    tmp_path: Path,
) -> None:
    run(tmp_path, "async:2")
    assert [group.is_complete for group in there(tmp_path)] == [True]


@pytest.mark.long
def test_an_asynchronous_save_in_a_process_of_its_own_is_committed_when_its_future_is(
    tmp_path: Path,
) -> None:
    run(tmp_path, "process:2")
    found = there(tmp_path, "run")
    assert [(group.step, group.is_complete) for group in found] == [(1, True), (2, True)]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_killed_in_a_save_costs_that_save_and_nothing_else(
    tmp_path: Path, ranks: int
) -> None:
    whole = run(tmp_path / "one", f"train:{ranks}:4").split()
    parts = run(tmp_path / "two", f"train:{ranks}:4:3", f"train:{ranks}:4")
    assert "terminated with signal SIGKILL" in parts
    resumed = parts.splitlines()[-1].split()
    assert resumed[:2] == ["resumed", "2"]
    assert resumed[-1] == whole[-1]


@pytest.mark.long
def test_saves_alike_are_planned_once_and_others_anew(tmp_path: Path) -> None:
    run(tmp_path, "again:2")
    found = there(tmp_path, "run")
    whole = [(group.step, group.count) for group in found if group.is_complete]
    steps = (1, 2, 2, 3, 4, 5, 7, 8, 9, 12, 121, 122, 13, 131, 131, 132, 132)
    assert whole == [(n, 2) for n in steps] + [(14, 1)]
    assert len({group.id for group in found}) == len(found)


@contextlib.contextmanager
def one_full(root: Path) -> Iterator[dict[str, str]]:
    """Two hosts, of which rank 1's has room for a few parts."""
    with serving(root / "a") as first, serving(root / "b", quota=int(4.5 * PART)) as second:
        yield {"SHARDED_POOL": f"{url(first)},{url(second)}"}


def test_a_rank_that_cannot_commit_is_heard_of_everywhere_and_fills_no_other_pool(
    tmp_path: Path,
) -> None:
    for name, on_error, way in (("one", "warn", "directory"), ("two", "raise", "save")):
        with one_full(tmp_path / name) as hosts:
            run(tmp_path / name, f"full:2:{on_error}:{way}", **hosts)


@pytest.mark.long
def test_a_rank_that_cannot_commit_is_heard_of_by_the_planning_of_torch_too(tmp_path: Path) -> None:
    for on_error in ("raise", "warn"):
        with one_full(tmp_path / on_error) as hosts:
            run(tmp_path / on_error, f"full:2:{on_error}:dcp", **hosts)


@pytest.mark.long
def test_shards_of_many_bytes_are_cut_anew_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    run(tmp_path, "big:2:1", "big:3:2", "big:1:3")


@pytest.mark.long
def test_ranks_save_to_a_storage_host_each_a_model_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Host(tmp_path / "host") as host:
        said = run(tmp_path, "train:2:3:3", SHARDED_POOL=host.url)  # rank 1 dies in the save
        assert "terminated with signal SIGKILL" in said
        listed = CliRunner().invoke(app, ["ls", host.url]).stdout
        assert "1 of 2, incomplete: not 1" in listed
        assert listed.count("2 of 2, complete") == 2
        with pytest.raises(portus.UsageError, match=rf"rank 1: {host.url} has steps \["):
            load({}, GroupReader(host.url, "run", step=3))
        said = run(tmp_path, "train:2:4", SHARDED_POOL=host.url)
        resumed = said.splitlines()[-1].split()
        assert resumed[:2] == ["resumed", "2"]
        reader = GroupReader(host.url, "run")  # by one process
        entries = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.zeros(entry.size)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        assert load(state, reader).step == 4
        digest = hashlib.sha256()
        for name, value in sorted(state.items()):
            digest.update(name.encode() + value.numpy().tobytes())
        assert digest.hexdigest() == resumed[-1]
        assert host.stop() == 0
        with pytest.raises(portus.TransportError):
            groups(host.url)


def copied(saved: Path, root: Path) -> Path:
    """The pool of the host of the FSDP job, to break."""
    shutil.copytree(saved / "host", root / "host")
    return root


def damage_shard(root: Path, rank: int) -> None:
    """Damage the biggest shard of a rank's part of the newest group."""
    with served(root) as host:
        _, info = groups(host, "fsdp")[-1].parts[rank]
        with portus.open(host) as pool:
            whole: Any = pool.load(info.model, info.step)
    tensors = (each for each in whole["items"].values() if isinstance(each, torch.Tensor))
    damage(root, max(tensors, key=lambda tensor: tensor.nbytes))


def damage(root: Path, shard: torch.Tensor) -> None:
    """Damage these bytes in the pool of the host."""
    with pool_file(root).open("r+b") as file:
        file.seek(file.read().index(shard.numpy().tobytes()))
        file.write(b"\xff\xff\xff\xff")


def pool_file(root: Path) -> Path:
    """That of the host."""
    (path,) = (root / "host").glob("*.portus")
    return path


def let_go(root: Path, info: VersionInfo) -> None:
    """Take a part away from the host, which does not run."""
    writer = WRITERS.open(str(pool_file(root)))
    writer.retire([info.id])
    WRITERS.close(writer)


def removed(host_pool: str, name: str) -> None:
    """Take ``MODEL@STEP`` away from a host, whatever leads there."""
    done = CliRunner().invoke(app, ["rm", name, "--force", "--pool", host_pool])
    assert done.exit_code == 0, done.output


@pytest.mark.long
def test_a_damaged_newest_group_is_passed_over_by_all_ranks_and_nothing_is_half_loaded(
    saved: Path, tmp_path: Path
) -> None:
    damage_shard(copied(saved, tmp_path), 1)
    said = run(tmp_path, "damaged:4", "mixed:2").splitlines()  # mixed: ranks save other steps
    assert sorted(said) == [f"rank {rank} loaded 1" for rank in range(4)]


def test_a_rank_that_cannot_read_the_metadata_leaves_none_waiting(
    saved: Path, tmp_path: Path
) -> None:
    copied(saved, tmp_path)
    said = run(tmp_path, "late:2").splitlines()
    assert sorted(said) == ["rank 0 heard", "rank 1 heard"]


def whole_state(host: str) -> dict[str, Any]:
    """A state for one process with all tensors of the newest group."""
    entries = GroupReader(host, "fsdp", step=1).read_metadata().state_dict_metadata
    return {
        name: torch.zeros(entry.size)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def test_in_one_process_too_and_the_log_says_which_and_why(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage_shard(copied(saved, tmp_path), 3)
    with served(tmp_path) as host:
        assert load(whole_state(host), GroupReader(host, "fsdp")).step == 1
    assert "step 2 of 4 ranks, the part of rank 3" in caplog.text
    assert "FALLING BACK to model 'fsdp', step 1 of 4 ranks" in caplog.text


@pytest.mark.parametrize("torn", [0, 2])
def test_a_group_of_which_one_rank_was_torn_off_is_passed_over(
    saved: Path, tmp_path: Path, torn: int
) -> None:
    newest = there(copied(saved, tmp_path), "fsdp")[-1]
    let_go(tmp_path, newest.parts[torn][1])
    with served(tmp_path) as host:
        assert load(whole_state(host), GroupReader(host, "fsdp")).step == 1
        with pytest.raises(
            portus.UsageError,
            match=rf"step 2 of 4 ranks is not complete.*; step 1 is\. rank {torn}: .* steps \[1\]",
        ):
            load({}, GroupReader(host, "fsdp", step=2))


@pytest.mark.long
def test_a_directory_leads_to_its_group_until_a_newer_one_is_complete(tmp_path: Path) -> None:
    run(tmp_path, "directories:2", "read:1:4:4", "read:2:4:4")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".links", "4", "host"]
    assert [group.step for group in there(tmp_path) if group.is_complete][-1] == 4


@pytest.mark.long
def test_a_rank_that_dies_in_a_save_leaves_a_directory_that_leads_to_a_complete_group(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as host:
        run(tmp_path, "directories:2:3", SHARDED_POOL=host)
        # Step 3 replaces 2, which stays, since rank 1 never committed 3.
        assert sorted(path.name for path in tmp_path.iterdir()) == [".links", "2", "3", "host"]
        said = run(tmp_path, "read:2:2:2", "read:1:3:2", SHARDED_POOL=host)
        assert said.count("has 2") == 3
        removed = sorted(portus.mend(host, uncommitted=True, links=str(tmp_path / ".links")))
    names = [".metadata", "meta.pt", "rank-0-of-2.shard", "rank-1-of-2.shard"]
    assert removed == [str(tmp_path / "3" / name) for name in names]
    assert sorted(path.name for path in (tmp_path / "2").iterdir()) == names


def test_a_damaged_shard_is_named_with_its_rank(saved: Path, tmp_path: Path) -> None:
    damage_shard(copied(saved, tmp_path), 3)
    with (
        served(tmp_path) as host,
        pytest.raises(CheckpointException, match=r"step 2 of 4 ranks, the part of rank 3"),
    ):
        dcp.load(whole_state(host), storage_reader=GroupReader(host, "fsdp", step=2))


def test_a_part_can_be_loaded_by_name(saved: Path) -> None:
    state = {"model": {"0.bias": torch.zeros(96)}}
    with served(saved) as host:
        dcp.load(state, storage_reader=GroupReader(host, "fsdp"))
    expected = torch.load(saved / "fsdp.pt")["model.0.bias"]
    assert torch.equal(state["model"]["0.bias"], expected)


def test_groups_are_listed(saved: Path, tmp_path: Path) -> None:
    newest = there(copied(saved, tmp_path), "fsdp")[-1]
    with served(tmp_path) as host:
        assert "4 of 4, complete" in CliRunner().invoke(app, ["ls", host]).stdout
    let_go(tmp_path, newest.parts[2][1])
    with served(tmp_path) as host:
        assert "3 of 4, incomplete: not 2" in CliRunner().invoke(app, ["ls", host]).stdout
        document = json.loads(CliRunner().invoke(app, ["ls", host, "--json"]).stdout)
    newest_there = document["groups"][-1]
    assert [newest_there[key] for key in ("step", "count", "missing")] == [2, 4, [2]]


# One process, no process group.


def save(writer: GroupWriter, step: int, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=f"step_{step}", storage_writer=writer)


def test_objects_keep_their_types_and_nothing_is_pickled(host_pool: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": (1, {"x": None}), "b": torch.float16, "t": torch.arange(6)}
    writer = GroupWriter(host_pool, "run")
    save(writer, 7, state)
    writer.close()
    other: dict[str, Any] = {"a": None, "b": None, "t": torch.zeros(6, dtype=torch.int64)}
    reader = GroupReader(host_pool, "run", step=7)
    dcp.load(other, storage_reader=reader)
    assert other["a"] == (1, {"x": None})
    assert other["b"] is torch.float16
    assert torch.equal(other["t"], state["t"])
    assert b"\x80\x02}" not in pool_file(tmp_path).read_bytes()


def loaded(host_pool: str, checkpoint_id: Any, **asked: Any) -> float:
    """What ``dcp.load`` gives for an id."""
    state = {"t": torch.zeros(4)}
    reader = GroupReader(host_pool, "run", **asked)
    dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=reader)
    return float(state["t"][0])


def test_an_id_loads_what_was_saved_as_it_and_nothing_else(host_pool: str) -> None:
    writer = GroupWriter(host_pool, "run", keep=None)
    ids = ["ckpt/best", Path("ckpt/last"), "runA/step_7", "runB/step_7", "step_3/model"]
    ids += ["step_3/optim", "ckpt/last/", "s3://bucket/a_9", "/absolute/4"]
    for number, name in enumerate(ids):
        state = {"t": torch.full((4,), float(number))}
        dcp.save(state, checkpoint_id=name, storage_writer=writer)
    dcp.save({"t": torch.full((4,), 50.0)}, storage_writer=writer)
    writer.save({"t": torch.full((4,), 51.0)}, step=8)
    for step in (60, 61):  # planned once
        name = f"again/{step}.pt"
        writer.save({"t": torch.full((4,), float(step))}, step=step, checkpoint_id=name)
    writer.close()
    for number, name in enumerate(ids):
        assert loaded(host_pool, name) == (6 if "last" in str(name) else number), name
    for name in (Path("runA/step_7"), "./runA//step_7/", "runB/../runA/step_7"):
        assert loaded(host_pool, name) == 2
    assert loaded(host_pool, "again/60.pt") == 60
    assert loaded(host_pool, "runB/step_7", step=7) == 3
    assert loaded(host_pool, None, step=8) == 51
    assert loaded(host_pool, None) == 61
    what = r"saved as 'ckpt/7'; there are 'again/61\.pt' \(step 61\), .* and 3 more; saved by "
    for name, told in {
        "ckpt/7": what + r"step alone, so ask with step=: 8, 5",
        "ckpt/never_saved": "was saved as 'ckpt/never_saved'",
        os.path.abspath("ckpt/best"): "/ckpt/best'; there are",
        "absolute/4": "'/absolute/4'",
        "runA": "was saved as 'runA'",
        "8": "ask with step=: 8",
        "step_7": "was saved as 'step_7'",
    }.items():
        with pytest.raises(CheckpointException, match=told):
            loaded(host_pool, name)
    with pytest.raises(CheckpointException, match="saved as 'runB/step_7' at step 8"):
        loaded(host_pool, "runB/step_7", step=8)


def test_a_directory_is_asked_for_by_its_path_and_leads_to_no_other_step(
    host_pool: str, tmp_path: Path
) -> None:
    writer = GroupWriter(host_pool, "run", keep=None)
    for step in (1, 2):
        state = {"t": torch.full((4,), float(step))}
        writer.save_directory(state, tmp_path / f"{step}", step=step)
    writer.close()
    assert loaded(host_pool, tmp_path / "1") == 1
    (tmp_path / "2").rename(tmp_path / "moved")
    reader = GroupReader.at(tmp_path / "moved")
    assert reader is not None
    state = {"t": torch.zeros(4)}
    dcp.load(state, checkpoint_id=tmp_path / "moved", storage_reader=reader)
    assert state["t"][0] == 2
    with pytest.raises(portus.UsageError, match=f"this reader loads {tmp_path / 'moved'}"):
        dcp.load(state, checkpoint_id=tmp_path / "1", storage_reader=reader)
    removed(host_pool, "run@2")
    for act in (load, lambda state, reader: dcp.load(state, storage_reader=reader)):
        with pytest.raises((portus.UsageError, CheckpointException), match="was asked for"):
            act(state, reader)
    assert state["t"][0] == 2
    falling_back = GroupReader.at(tmp_path / "moved", fall_back=True)
    assert falling_back is not None
    assert load(state, falling_back).step == 1


def test_a_directory_is_of_whoever_saved_there_last(host_pool: str, tmp_path: Path) -> None:
    place = tmp_path / "last.ckpt"
    stock = dcp.FileSystemWriter(place)
    dcp.save({"m": {"t": torch.zeros(4)}}, storage_writer=stock)
    assert GroupReader.at(place) is None
    writer = GroupWriter(host_pool, "run")
    writer.save_directory({"m": {"t": torch.ones(4)}}, place, step=1, files={"a.pt": [1]})
    writer.close()
    assert sorted(os.listdir(place)) == ["a.pt", "rank-0-of-1.shard"]
    assert torch.load(place / "a.pt") == [1]
    assert torch.load(place / "rank-0-of-1.shard") == FORMAT, "no shard, which means nothing alone"
    reader = GroupReader.at(place)
    assert reader is not None
    state = {"m": {"t": torch.zeros(4)}}
    load(state, reader)
    assert torch.equal(state["m"]["t"], torch.ones(4))
    with pytest.raises(portus.UsageError, match="a part of a sharded checkpoint"):
        portus.materialize(place / "rank-0-of-1.shard")
    with pytest.raises(portus.UsageError, match="cannot be called"):
        writer.save_directory({}, place, step=2, files={"items": 1})
    writer.close()
    dcp.save({"m": {"t": torch.zeros(4)}}, storage_writer=dcp.FileSystemWriter(place))
    assert GroupReader.at(place) is None
    assert GroupReader.at(tmp_path) is None


@pytest.mark.long
def test_a_materialised_directory_is_one_of_torch_and_needs_no_pool(
    host_pool: str, tmp_path: Path
) -> None:
    run(tmp_path, "directories:2", SHARDED_POOL=host_pool)
    place = tmp_path / "4"
    reader = GroupReader.at(place)
    assert reader is not None
    entries = reader.read_metadata().state_dict_metadata

    def empty() -> dict[str, Any]:
        return {
            name: torch.zeros(entry.size) if isinstance(entry, TensorStorageMetadata) else None
            for name, entry in entries.items()
        }

    expected = empty()
    load(expected, reader)
    done = CliRunner().invoke(app, ["materialize", str(place)])
    assert done.exit_code == 0, done.output
    removed(host_pool, "run@4")
    assert not list(place.glob("*.shard"))
    assert torch.load(place / "meta.pt") == {"step": 4}
    found = empty()
    dcp.load(found, checkpoint_id=place)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(value, found[name]) if torch.is_tensor(value) else value == found[name]
        assert same, name
    assert GroupReader.at(place) is None, "it is torch's now"
    dcp_to_torch_save(place, tmp_path / "whole.pt")  # which has the nesting of the state
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert whole["step"] == 4
    assert torch.equal(whole["model"]["0.weight"], expected["model.0.weight"])


def test_the_directories_inside_of_one_of_accelerate_are_torch_s_each(
    host_pool: str, tmp_path: Path
) -> None:
    writer = GroupWriter(host_pool, "run")
    parts: dict[str, Any] = {
        "pytorch_model_fsdp_0": {"model": {"t": torch.rand(5)}},
        "optimizer_0": {"optimizer": {"m": torch.rand(5), "groups": [{"lr": 0.5}]}},
    }
    writer.save_directory(parts, tmp_path / "place", step=1)
    writer.close()
    portus.materialize(tmp_path)
    names = [".metadata", "__0_0.distcp"]
    for part, state in parts.items():
        place = tmp_path / "place" / part
        assert sorted(os.listdir(place)) == names
        found = copy.deepcopy(state)
        for value in found.values():
            for name in value.keys() & {"t", "m"}:
                value[name].zero_()
        dcp.load(found, checkpoint_id=place)
        assert_same(found, state)


def test_shards_go_to_files_of_a_bounded_size(
    host_pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(materialize_shards, "FILE_SIZE", 3000)
    writer = GroupWriter(host_pool, "run")
    state = {f"t{n}": torch.rand(250) for n in range(8)}
    writer.save_directory(dict(state), tmp_path / "place", step=1)
    writer.close()
    portus.materialize(tmp_path / "place")
    names = sorted(each.name for each in (tmp_path / "place").glob("*.distcp"))
    assert names == [f"__{n}_0.distcp" for n in range(3)]
    found = {name: torch.zeros(250) for name in state}
    dcp.load(found, checkpoint_id=tmp_path / "place")
    assert_same(found, state)


MATERIALISE = """
import sys
import torch.distributed.checkpoint
import portus.dcp
from portus.client.leaving import materialize_shards

def peak():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1])

materialize_shards.FILE_SIZE = int(sys.argv[2])
before = peak()
portus.materialize(sys.argv[1])
print(peak() - before)
"""


@pytest.mark.long
def test_materialising_takes_the_memory_of_a_file_of_shards_and_not_of_the_state(
    host_pool: str,
    tmp_path: Path,
) -> None:
    file_size, state_size = 8 << 20, 128 << 20
    writer = GroupWriter(host_pool, "run")
    state = {f"t{n}": torch.full((1 << 18,), n) for n in range(state_size >> 21)}
    writer.save_directory(dict(state), tmp_path / "place", step=1)
    writer.close()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MATERIALISE, tmp_path / "place", str(file_size)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert len(list((tmp_path / "place").glob("*.distcp"))) == state_size // file_size
    grown = int(done.stdout) << 10
    assert grown < state_size // 3, f"{grown >> 20} MiB at its peak, for {state_size >> 20} MiB"


def test_a_damaged_shard_is_not_materialised_and_the_directory_stays(
    host_pool: str, tmp_path: Path
) -> None:
    writer = GroupWriter(host_pool, "run")
    shard = torch.rand(5000)
    writer.save_directory({"t": shard}, tmp_path / "place", step=1)
    writer.close()
    damage(tmp_path, shard)
    with pytest.raises(portus.CorruptionError, match="the part of rank 0"):
        portus.materialize(tmp_path / "place")
    assert sorted(os.listdir(tmp_path / "place")) == OURS


def test_torch_s_own_reader_finds_a_directory_of_ours_and_fails_instead_of_starting_afresh(
    host_pool: str,
    tmp_path: Path,
) -> None:
    place, state = tmp_path / "step-5", {"t": torch.rand(9)}
    writer = GroupWriter(host_pool, "run", keep=1)
    for step in (4, 5):
        writer.save_directory(dict(state), place, step=step)
        writer.wait()
    found = [
        path.parent for path in tmp_path.glob("*/.metadata")
    ]  # how trainers look for the newest
    assert found == [place]
    target = {"t": torch.zeros(9)}
    with pytest.raises(CheckpointException, match="global metadata read failed: A load persistent"):
        dcp.load(target, checkpoint_id=place)
    assert not target["t"].any()
    with pytest.raises(portus.UsageError, match="a part of a sharded checkpoint"):
        portus.materialize(place / ".metadata")
    reader = GroupReader.at(place)
    assert reader is not None
    assert load(target, reader).step == 5
    portus.materialize(place)
    assert sorted(os.listdir(place)) == [".metadata", "__0_0.distcp"]
    target["t"].zero_()
    dcp.load(target, checkpoint_id=place)
    assert_same(target, state)
    writer.save_directory(dict(state), place, step=6)  # torch's goes only when this one is there
    writer.close()
    assert os.listdir(place) == ["rank-0-of-1.shard"]


def test_a_damaged_shard_is_told_by_the_name_of_its_tensor(host_pool: str, tmp_path: Path) -> None:
    shard = torch.rand(5000)
    writer = GroupWriter(host_pool, "run")
    writer.save({"net": {"weight": shard}, "other": torch.rand(9)}, step=1)
    writer.close()
    damage(tmp_path, shard)
    state = {"net": {"weight": torch.zeros(5000)}}
    told = "model 'run', step 1.*the part of rank 0.* net.weight is damaged"
    with pytest.raises(portus.CorruptionError, match=told):
        load(state, GroupReader(host_pool, "run"))
    assert not state["net"]["weight"].any()


def test_a_directory_in_the_place_of_another_keeps_the_old_group_until_the_new_is_complete(
    host_pool: str,
    tmp_path: Path,
) -> None:
    writer = GroupWriter(host_pool, "run", keep=1)
    for step in (1, 2, 3):
        writer.save_directory({"t": torch.full((9,), float(step))}, tmp_path / "last", step=step)
        writer.wait()
        assert [group.step for group in groups(host_pool)][-2:] in (
            [1],
            [step - 1, step],
        )
    writer.close()


def test_what_directories_lead_to_is_kept_and_goes_when_they_are_deleted(
    host_pool: str, tmp_path: Path
) -> None:
    writer = GroupWriter(host_pool, "run", keep=1)
    for step in (1, 2, 3, 4):
        writer.save_directory({"t": torch.full((9,), float(step))}, tmp_path / f"{step}", step=step)
        writer.wait()
    assert [group.step for group in groups(host_pool)] == [1, 2, 3, 4]
    shutil.rmtree(tmp_path / "2")
    writer.save_directory({"t": torch.zeros(9)}, tmp_path / "5", step=5)
    writer.close()
    assert [group.step for group in groups(host_pool)] == [1, 3, 4, 5]


def test_a_state_of_another_nesting_is_planned_anew(host_pool: str) -> None:
    writer = GroupWriter(host_pool, "run")
    writer.save({"a": {"b": torch.ones(4)}}, step=1)
    writer.save({"a.b": torch.ones(4)}, step=2)
    writer.close()
    for step, path in ((1, ("a", "b")), (2, ("a.b",))):
        metadata = GroupReader(host_pool, "run", step=step).read_metadata()
        assert metadata.planner_data == {"a.b": path}


def test_what_a_save_blocked_is_told_with_its_planning(host_pool: str) -> None:
    state = {f"t{n}": torch.zeros(8) for n in range(400)}
    writer = GroupWriter(host_pool, "run", keep=1)

    def told(act: Callable[[], object]) -> float:
        """The share of a call that is in its statistics."""
        start = time.perf_counter()
        act()
        took = time.perf_counter() - start
        writer.wait()
        assert writer.last is not None
        return writer.last.stats.blocked_s / took

    writer.save(state, step=1)
    writer.wait()
    shares = [told(lambda: writer.save(state, step=2)) for _ in range(3)]
    assert max(shares) > 0.9, "the plan is made and compared in the call"
    by_torch = [told(lambda: save(writer, 3, dict(state))) for _ in range(3)]
    assert max(by_torch) > 0.6, "but for what torch does when all is under way"
    writer.close()


def test_a_load_waits_for_saves_of_what_it_loads_into(host_pool: str) -> None:
    writer = GroupWriter(host_pool, "run")
    save(writer, 1, {"t": torch.ones(9)})
    writer.close()
    state = {"t": torch.zeros(9)}
    fence, under_way = Fence(FENCE_S_MAX), LateCopy({**state}, everything_late=True)
    fence.guard(under_way)
    load(state, GroupReader(host_pool, "run"))
    fence.close()
    assert under_way.waits == 1
    assert not under_way.torn
    assert torch.equal(state["t"], torch.ones(9))


def test_ranks_that_chose_different_groups_are_told(host_pool: str) -> None:
    reader = GroupReader(host_pool, "run")
    plans = [LoadPlan([], storage_data=new_id()) for _ in range(2)]
    with pytest.raises(portus.StaleError, match="load again"):
        reader.prepare_global_plan(plans)
    assert reader.prepare_global_plan(plans[:1] * 2) == plans[:1] * 2


class Held:
    """A writer that has saved before and, from now on, begins no commit until it is released."""

    def __init__(self, writer: GroupWriter | PoolCheckpointer) -> None:
        self.begun, self.release = threading.Event(), threading.Event()
        writer.wait()
        opened = writer._open() if isinstance(writer, GroupWriter) else writer
        opened.part.surplus = self._hold

    def _hold(self, own: Sequence[VersionInfo]) -> list[int]:
        self.begun.set()
        self.release.wait(60)
        return []


def test_a_save_from_another_thread_returns_when_it_is_committed(host_pool: str) -> None:
    writer = GroupWriter(host_pool, "run")
    save(writer, 1, {"t": torch.ones(9)})
    held = Held(writer)
    thread = threading.Thread(target=save, args=(writer, 2, {"t": torch.ones(9)}))
    thread.start()
    assert held.begun.wait(60)
    thread.join(0.2)
    assert thread.is_alive()
    held.release.set()
    thread.join()
    assert writer.last is not None
    assert writer.last.committed
    writer.close()


def test_what_this_process_saves_to_a_directory_is_waited_for_however_long_it_takes(
    host_pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "AWAITED_S_MAX", 0.0)
    writer = GroupWriter(host_pool, "run")
    save(writer, 1, {"t": torch.ones(9)})
    held = Held(writer)
    writer.save_directory({"t": torch.full((9,), 2.0)}, tmp_path / "2", step=2)
    later = threading.Timer(0.2, held.release.set)
    later.start()
    reader = GroupReader.at(tmp_path / "2")
    assert reader is not None
    assert load({"t": torch.zeros(9)}, reader).step == 2
    writer.close()
    later.join()


def test_ranks_that_are_about_to_commit_are_waited_for(host_pool: str, tmp_path: Path) -> None:
    place, group = tmp_path / "place", new_id()
    place.mkdir()
    zero, one = (PoolCheckpointer(host_pool, part_model("run", rank, 2)) for rank in range(2))
    with zero, one:
        shard = {str(place / "rank-0-of-2.shard"): "format"}
        zero.save({"format": 1}, 1, token=part_token(group, 0), reference=shard).wait()
        one.save({}, 0)
        held = Held(one)
        one.save({"format": 1}, 1, token=part_token(group, 1))
        assert held.begun.wait(60)
        later = threading.Timer(0.2, held.release.set)
        later.start()
        assert GroupReader.at(place) is not None
        assert groups(host_pool)[-1].is_complete
        later.join()


class Order:
    """Replacements, removals and syncs of names in a directory, as they come."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, str]] = []
        replace, unlink, fsync = os.replace, os.unlink, os.fsync

        def replaced(source: str, target: str) -> None:
            self.found.append(("replace", os.path.basename(target)))
            replace(source, target)

        def unlinked(path: str, **more: Any) -> None:
            if str(path).endswith(".shard"):
                self.found.append(("unlink", os.path.basename(path)))
            unlink(path, **more)

        def synced(descriptor: int) -> None:
            self.found.append(
                ("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
            )
            fsync(descriptor)

        monkeypatch.setattr(os, "replace", replaced)
        monkeypatch.setattr(os, "unlink", unlinked)
        monkeypatch.setattr(os, "fsync", synced)


def test_a_directory_leads_somewhere_at_every_moment_of_materialising(
    host_pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    writer = GroupWriter(host_pool, "run")
    writer.save_directory({"t": torch.rand(9)}, place, step=1)
    writer.close()
    with monkeypatch.context() as patch:
        order = Order(place, patch)
        portus.materialize(place)
    assert ("sync", "__0_0.distcp") in order.found
    begin = order.found.index(("replace", "__0_0.distcp"))
    assert order.found[begin:] == [
        ("replace", "__0_0.distcp"),
        ("replace", ".metadata"),
        ("sync", "place"),
        ("unlink", "rank-0-of-1.shard"),
        ("sync", "place"),
    ]


def test_a_directory_that_is_replaced_while_it_is_materialised_stays_the_newer_one(
    host_pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, usage = tmp_path / "place", shutil.disk_usage
    writer = GroupWriter(host_pool, "run")

    def saved(step: int) -> None:
        writer.save_directory({"t": torch.full((9,), float(step))}, place, step=step)
        writer.wait()

    def replaced(path: str) -> Any:
        saved(2)
        return usage(path)

    saved(1)
    monkeypatch.setattr(shutil, "disk_usage", replaced)
    with pytest.raises(portus.UsageError, match="was replaced while it was materialised"):
        portus.materialize(place)
    writer.close()
    assert sorted(os.listdir(place)) == OURS
    reader = GroupReader.at(place)
    assert reader is not None
    assert load({"t": torch.zeros(9)}, reader).step == 2


def test_without_room_nothing_is_materialised(
    host_pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    writer = GroupWriter(host_pool, "run")
    writer.save_directory({"t": torch.rand(9)}, place, step=1)
    writer.close()
    full = shutil.disk_usage(tmp_path)._replace(free=35)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(portus.MediumError, match="36 bytes needed, 35 free"):
        portus.materialize(place)
    assert sorted(os.listdir(place)) == OURS


def test_a_directory_leads_to_a_group(host_pool: str, tmp_path: Path) -> None:
    writer = GroupWriter(host_pool, "run", keep=1, links=str(tmp_path / "links"))
    for step in (1, 2):
        state = {"t": torch.full((9,), float(step))}
        files = {"more": {"step": step}}
        writer.save_directory(state, tmp_path / f"{step}", step=step, files=files)
        writer.wait()
    writer.remove(tmp_path / "1")
    reader = GroupReader.at(tmp_path / "2")
    assert reader is not None
    state = {"t": torch.zeros(9)}
    assert load(state, reader).step == 2
    assert torch.equal(state["t"], torch.full((9,), 2.0))
    assert reader.file("more") == {"step": 2} == torch.load(tmp_path / "2/more")
    with pytest.raises(portus.UsageError, match="step 2 of 1 ranks: rank 0 saved no other"):
        reader.file("other")
    writer.close()
    assert not (tmp_path / "1").exists()
    assert [group.step for group in groups(host_pool)] == [2]


def test_old_groups_go_once_newer_ones_are_complete(host_pool: str, tmp_path: Path) -> None:
    writer = GroupWriter(host_pool, "run", keep=2, links=str(tmp_path / "links"))
    for step in range(6):
        save(writer, step, {"t": torch.full((1000,), float(step))})
        writer.wait()
    writer.close()
    assert [group.step for group in groups(host_pool)] == [3, 4, 5]


def save_as(
    host_pool: str, links: Path, count: int, step: int, directory: Path | None = None
) -> bytes:
    """A group of a job of ``count`` ranks that is over; its id."""
    group = new_id()
    for rank in range(count):
        name = part_model("run", rank, count)
        shard = {str(directory / f"rank-{rank}-of-{count}.shard"): "format"} if directory else None
        with PoolCheckpointer(host_pool, name, keep=None, links=str(links)) as checkpointer:
            content = {"format": FORMAT, "t": torch.full((4000,), float(step))}
            token = part_token(group, rank)
            checkpointer.save(content, step, token=token, reference=shard).wait()
    return group


def test_a_part_that_a_rank_says_it_lacks_is_looked_for_before_others_let_go_of_theirs(
    host_pool: str, tmp_path: Path
) -> None:
    links = tmp_path / "links"
    ids = [save_as(host_pool, links, 2, step) for step in (1, 2)]
    run = Run(Place.named(host_pool), "run", Settings(), links=str(links))
    retention = Retention(run, keep=Keep(last=1))
    retention.stand(0, 2)
    for group in ids:
        retention.begin(group)
    lost = tuple((group, 1) for group in ids)
    said = Heard(count=2, complete=frozenset(), lost=lost, error=None, raised=False)
    retention.hear(said)
    parts = [run.part(part_model("run", rank, 2), run.place) for rank in range(2)]
    with parts[0] as own, parts[1] as other:
        infos, theirs = own.versions(), other.versions()
        assert retention.going(infos) == ([], []), "rank 1 has both"
        other.prepare(0)
        other.part.let_go([theirs[0].id])
        assert retention.going(infos) == ([infos[0].id], [infos[0].id])
        retention.hear(replace(said, count=1, complete=frozenset(ids)))
        assert retention.going(infos)[0], "one rank of two says nothing of a group"
        retention.hear(replace(said, complete=frozenset(ids)))
        assert retention.going(infos) == ([], [infos[0].id]), "what all have committed is older"


def test_a_group_that_could_not_be_seen_at_the_start_is_not_taken_for_one_that_is_not_complete(
    tmp_path: Path,
) -> None:
    ids = [new_id() for _ in range(3)]
    own = [
        VersionInfo("run/rank-0-of-2", n + 1, n + 1, 10 + n, part_token(group, 0), n, 1)
        for n, group in enumerate(ids)
    ]
    run = Run(Place.named(tmp_path), "run", Settings())
    retention = Retention(run, Keep(last=1, best=("loss", "min", 1), every=10))
    retention.stand(0, 2)
    for group in ids[1:]:
        retention.begin(group)
    said = Heard(count=2, complete=frozenset(ids[1:]), lost=(), error=None, raised=False)
    retention.hear(said)
    assert retention.going(own) == ([], [])
    retention.tell(Past(incomplete=(ids[0],)))
    assert retention.going(own) == ([1], [1])


@pytest.mark.long
def test_what_jobs_of_other_numbers_of_ranks_left_goes_but_for_what_directories_lead_to(
    host_pool: str, tmp_path: Path
) -> None:
    links, kept = tmp_path / "links", tmp_path / "kept"
    kept.mkdir()
    save_as(host_pool, links, 3, 1)
    save_as(host_pool, links, 2, 2)
    save_as(host_pool, links, 2, 3, kept)
    save_as(host_pool, links, 4, 4)
    writer = GroupWriter(host_pool, "run", keep=2, links=str(links))

    def saved(*steps: int) -> list[tuple[int, int]]:
        for step in steps:
            writer.save({"t": torch.full((1000,), float(step))}, step=step)
            writer.wait()
        return [(group.step, group.count) for group in groups(host_pool, "run")]

    before = [(1, 3), (2, 2), (3, 2), (4, 4)]
    assert saved(5) == [*before, (5, 1)], "none of its own is known to be complete"
    assert saved(6) == [(3, 2), (4, 4), (5, 1), (6, 1)]
    assert saved(7, 8) == [(3, 2), (6, 1), (7, 1), (8, 1)]
    shutil.rmtree(kept)
    writer.close()
    writer = GroupWriter(host_pool, "run", keep=2, links=str(links))
    assert saved(9, 10, 11)[0] == (9, 1)
    writer.close()


@pytest.mark.long
def test_a_job_that_goes_on_with_other_numbers_of_ranks_takes_no_more_room(tmp_path: Path) -> None:
    sizes = []
    for number, count in enumerate((4, 2, 3)):
        run(tmp_path, f"elastic:{count}:{10 * number}")
        assert {group.count for group in there(tmp_path)} == {count}
        sizes.append(pool_file(tmp_path).stat().st_blocks * 512)
    assert max(sizes) < 1.5 * sizes[0], sizes


def test_what_was_there_before_and_cannot_be_seen_stays_until_newer_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connections that there are go on; the one for that look cannot be made."""
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "host") as server:

        def saved(writer: GroupWriter, step: int) -> list[int]:
            save(writer, step, {"t": torch.full((9,), float(step))})
            writer.wait()
            with monkeypatch.context() as other:
                other.delenv("PORTUS_SECRET_FILE", raising=False)
                return [group.step for group in groups(url(server))]

        writer = GroupWriter(url(server), "run", keep=2)
        assert [saved(writer, step) for step in (1, 2)][-1] == [1, 2]
        writer.close()
        writer = GroupWriter(url(server), "run", keep=1)
        writer.prepare(0)
        monkeypatch.setenv("PORTUS_SECRET_FILE", str(tmp_path / "gone"))
        assert saved(writer, 3) == [1, 2, 3]
        assert "earlier checkpoints of model 'run' cannot be read" in caplog.text
        assert saved(writer, 4) == [3, 4]
        writer.close()
        monkeypatch.undo()
        writer = GroupWriter(url(server), "run", keep=1)
        assert saved(writer, 5) == [4, 5]
        writer.close()


def test_a_first_save_where_nothing_is_yet_warns_of_nothing(
    host_pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        writer = GroupWriter(host_pool)
        save(writer, step, {"t": torch.ones(3)})
        writer.close()
    assert [group.step for group in groups(host_pool)] == [1, 2]
    assert not [each for each in caplog.records if each.name == "portus"]


def test_a_shape_that_does_not_fit_is_named(host_pool: str) -> None:
    writer = GroupWriter(host_pool, "run")
    save(writer, 1, {"t": torch.zeros(4, 4)})
    writer.close()
    with pytest.raises(CheckpointException, match=r"Size mismatch .* for t"):
        dcp.load({"t": torch.zeros(2, 2)}, storage_reader=GroupReader(host_pool, "run"))
    what = r"model 'run', step 1 of 1 ranks was not loaded: rank 0: "
    with pytest.raises(portus.UsageError, match=rf"{what}Size mismatch .* for t"):
        load({"t": torch.zeros(2, 2)}, GroupReader(host_pool, "run"))
    with pytest.raises(portus.UsageError, match=rf"{what}Missing key .* other"):
        load({"other": torch.zeros(2)}, GroupReader(host_pool, "run"))


def test_what_is_not_there_is_said_with_what_is(host_pool: str, tmp_path: Path) -> None:
    writer = GroupWriter(host_pool, "run")
    save(writer, 1, {"t": torch.zeros(4)})
    writer.close()
    with pytest.raises(portus.UsageError, match=r"has step 9; there are steps \[1\]"):
        GroupReader(host_pool, "run", step=9).read_metadata()
    with pytest.raises(portus.UsageError, match="nothing sharded"):
        GroupReader(host_pool, "other").read_metadata()
    writer.save_directory({"t": torch.zeros(4)}, tmp_path / "2", step=2)
    writer.close()
    removed(host_pool, "run@2")
    reader = GroupReader.at(tmp_path / "2")
    assert reader is not None
    what = r"the one that was asked for; there are steps \[1"
    with pytest.raises(portus.UsageError, match=what):
        reader.read_metadata()
    with pytest.raises(portus.UsageError, match=what):
        portus.materialize(tmp_path / "2")
    assert sorted(os.listdir(tmp_path / "2")) == OURS


def save_parts(host_pool: str, root: Path, content: dict[str, Any]) -> Path:
    """A group of two ranks, and a directory that leads to it."""
    place, group = root / "place", new_id()
    place.mkdir()
    for rank in range(2):
        shard = {str(place / f"rank-{rank}-of-2.shard"): "format"}
        with PoolCheckpointer(host_pool, part_model("run", rank, 2)) as checkpointer:
            token = part_token(group, rank)
            checkpointer.save(content, 1, token=token, reference=shard).wait()
    return place


def test_a_group_of_a_newer_format_is_refused(host_pool: str, tmp_path: Path) -> None:
    reader = GroupReader.at(save_parts(host_pool, tmp_path, {"format": 99, "metadata": "?"}))
    assert reader is not None
    with pytest.raises(portus.UsageError, match="written by a newer Portus"):
        reader.read_metadata()


def test_a_directory_that_nothing_replaces_is_removed_at_once(
    host_pool: str, tmp_path: Path
) -> None:
    writer = GroupWriter(host_pool, "run")
    writer.save_directory({"t": torch.ones(4)}, tmp_path / "1", step=1)
    writer.close()
    writer = GroupWriter(host_pool, "run")
    writer.remove(tmp_path / "1")
    writer.wait()
    assert not (tmp_path / "1").exists(), "while the writer is open"
    writer.close()


def test_ranks_that_saved_each_for_itself_are_no_group_and_named(
    host_pool: str, tmp_path: Path
) -> None:
    for rank in range(2):
        with PoolCheckpointer(host_pool, part_model("run", rank, 2)) as checkpointer:
            checkpointer.save({"t": torch.zeros(4)}, 5).wait()
    what = r"no group of model 'run'; nothing .*'run/rank-0-of-2' has steps \[5\], 'run/rank-1-of"
    with pytest.raises(portus.UsageError, match=what):
        load({"t": torch.zeros(4)}, GroupReader(host_pool, "run"))


def test_a_path_is_refused_and_told_what_saves_and_loads_there(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "a.portus"):
        for of in (GroupWriter, GroupReader, groups):
            with pytest.raises(portus.UsageError, match=r"found a path; .*portus\.dcp\.save"):
                of(place)
