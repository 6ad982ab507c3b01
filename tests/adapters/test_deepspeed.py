"""DeepSpeed with the flag: its own files, in the background, whole or not named by ``latest``."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from portus.engine.loading.checkpoint_file import has_digests
from tests.adapters import deepspeed_jobs
from tests.adapters.deepspeed_jobs import Spec
from tests.adapters.forked import environments
from tests.nursery import Child, nursery

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not deepspeed_jobs.FOLDER.exists(), reason="DeepSpeed is not installed"),
]

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "2"))


def job(
    root: Path,
    ranks: int,
    spec: Spec,
    *,
    by: str = "train",
    teller: int = 0,
) -> str:
    """What the rank ``teller`` said."""
    with started(root, ranks, spec, by) as children:
        said = [child.rest() for child in children]
        for rank, child in enumerate(children):
            assert child.wait() == 0, (root / f"errors-{rank}.txt").read_text()
        return "\n".join(said[teller])


@contextlib.contextmanager
def started(root: Path, ranks: int, spec: Spec, by: str) -> Iterator[list[Child]]:
    """The processes of a training."""
    programs = nursery("tests.adapters.deepspeed_jobs")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(programs.start(by, str(root), environment, spec))
            for environment in environments(stack, ranks)
        ]


def killed(root: Path, ranks: int, spec: Spec, who: int, number: int, by: str = "train") -> None:
    """Train until this rank kills itself at its change of a name of this number, and then the
    others. Threads make some of the changes, so there may be fewer than were counted: then at an
    earlier one."""
    while True:
        with started(root, ranks, {**spec, "kill": number, "who": who}, by) as children:
            code = children[who].wait()
            for child in children:
                child.kill()
        if code != 0:
            break
        number = number * 3 // 4
        shutil.rmtree(root)
    assert code == -signal.SIGKILL, (root / f"errors-{who}.txt").read_text()


def went(said: str) -> list[str]:
    """The losses, and the state at the end."""
    return [line for line in said.splitlines() if line.startswith(("loss", "digest"))]


def _later(case: int) -> Any:
    """One of the cases that ``make long`` runs."""
    return pytest.param(case, marks=pytest.mark.long)


CASES = list(itertools.product([0, 1, 2, 3], ["fp32", "bf16"], [1, 2]))


def spec_of(stage: int, kind: str, **more: Any) -> Spec:
    return {"stage": stage, "kind": kind, "last": 6, "every": 3, **more}


def goes_both_ways(root: Path, stage: int, kind: str, ranks: int) -> None:
    plain, ours = spec_of(stage, kind), spec_of(stage, kind, by="portus")
    through = job(root / "stock", ranks, plain)
    assert went(job(root / "ours", ranks, ours)) == went(through), "saves change nothing"
    after = went(through)[3:]
    for source, spec in itertools.product(("stock", "ours"), (plain, ours)):
        found = job(root / source, ranks, {**spec, "from": "global_step3", "every": 100})
        assert "from 3" in found
        assert went(found) == after, (source, spec)
    assert (root / "ours" / "ckpt" / "latest").read_text() == "global_step6"
    names = {
        where: sorted(each.name for each in (root / where / "ckpt" / "global_step3").iterdir())
        for where in ("stock", "ours")
    }
    assert names["ours"] == names["stock"]


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(("stage", "kind", "ranks"), [(2, "bf16", 2)])
@pytest.mark.smoke
def test_each_goes_on_from_what_the_other_saved(
    tmp_path: Path, stage: int, kind: str, ranks: int
) -> None:
    goes_both_ways(tmp_path, stage, kind, ranks)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "kind", "ranks"), CASES)
def test_at_every_stage_of_zero_each_goes_on_from_what_the_other_saved(
    tmp_path: Path, stage: int, kind: str, ranks: int
) -> None:
    goes_both_ways(tmp_path, stage, kind, ranks)


def digests_in(root: Path, tag: str) -> set[bool]:
    """Whether the files of a checkpoint have digests."""
    return {has_digests(each) for each in (root / "ckpt" / tag).iterdir()}


def test_one_engine_is_saved_by_portus_where_the_script_says_so(tmp_path: Path) -> None:
    through = job(tmp_path / "stock", 1, spec_of(1, "fp32"))
    found = job(tmp_path / "ours", 1, spec_of(1, "fp32", by="hand"))
    assert went(found) == went(through)
    assert digests_in(tmp_path / "ours", "global_step6") == {True}


def test_what_portus_does_not_save_stock_does_and_it_is_said(tmp_path: Path) -> None:
    local = {"checkpoint": {"use_node_local_storage": True}}
    job(tmp_path, 1, spec_of(1, "fp32", by="portus", config=local))
    assert digests_in(tmp_path, "global_step6") == {False}
    said = (tmp_path / "errors-0.txt").read_text()
    assert "DeepSpeed saves this engine as it always did: its checkpoints are on each" in said


def test_where_ranks_do_not_see_each_other_s_files_stock_saves(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    job(root, 2, spec_of(2, "fp32", by="portus", apart=True))
    said = (tmp_path / "disk-0" / "errors-0.txt").read_text()
    assert "DeepSpeed saves this engine as it always did" in said
    assert "expected a directory that all ranks see" in said
    assert digests_in(tmp_path / "disk-0", "global_step6") == {False}
    assert (tmp_path / "disk-0" / "ckpt" / "latest").read_text() == "global_step6"


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_deepspeed_s_tools_read_it_and_convert_it_for_another_number_of_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    universal = {"from": "global_step3_universal", "every": 100}
    universal |= {"config": {"checkpoint": {"load_universal": True}}}
    ends = set()
    for by in ("stock", "portus"):
        spec = spec_of(2, "fp32", by=by)
        root = tmp_path / by
        job(root, before, spec)
        weights = job(root, 1, {**spec, "from": "global_step3"}, by="convert")
        ends.add((weights, *went(job(root, after, {**spec, **universal}))))
    assert len(ends) == 1


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("stage", [_later(0), 2, _later(3)])
def test_what_is_saved_is_of_the_call_however_late_it_is_copied(tmp_path: Path, stage: int) -> None:
    plain = spec_of(stage, "fp32")
    ours = {**plain, "by": "portus", "slow": True}
    through = job(tmp_path / "stock", 1, plain)
    assert went(job(tmp_path / "ours", 1, ours)) == went(through)
    assert digests_in(tmp_path / "ours", "global_step3") == {True}
    assert digests_in(tmp_path / "stock", "global_step3") == {False}
    found = job(tmp_path / "ours", 1, {**plain, "from": "global_step3", "every": 100})
    assert went(found) == went(through)[3:]


def test_a_tag_that_exists_is_replaced_in_the_call(tmp_path: Path) -> None:
    plain = {**spec_of(1, "fp32"), "tag": "best"}
    through = job(tmp_path / "stock", 2, plain)
    ours = tmp_path / "ours"
    assert went(job(ours, 2, {**plain, "by": "portus"})) == went(through)
    for by in ("portus", "stock"):
        found = job(ours, 2, {**plain, "by": by, "last": 8, "every": 100})
        assert "from 6" in found, "that of the second save"
    assert digests_in(ours, "best") == {True}


@pytest.mark.long
def test_a_checkpoint_of_two_saves_is_told_on_all_ranks(tmp_path: Path) -> None:
    ours = spec_of(2, "fp32", by="portus")
    job(tmp_path, 2, ours)
    ckpt = tmp_path / "ckpt"
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(ckpt / "global_step3" / name, ckpt / "global_step6" / name)
    with pytest.raises(AssertionError, match="files are of different saves"):
        job(tmp_path, 2, {**ours, "from": "global_step6"})
    assert "files are of different saves" in (tmp_path / "errors-1.txt").read_text()
    found = job(tmp_path, 2, {**ours, "every": 100})
    assert "from 3" in found, "it is passed over where nobody named it"
    assert "is passed over" in (tmp_path / "errors-0.txt").read_text()


@pytest.mark.long
@pytest.mark.parametrize("rank", [_later(0), 1])
def test_a_damaged_byte_is_an_error_by_name_and_passed_over_otherwise(
    tmp_path: Path, rank: int
) -> None:
    ours = spec_of(2, "fp32", by="portus")
    job(tmp_path, 2, ours)
    file = tmp_path / "ckpt" / "global_step6" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(AssertionError, match=f"CorruptionError.*rank_{rank}_mp"):
        job(tmp_path, 2, {**ours, "from": "global_step6"})
    assert "from 3" in job(tmp_path, 2, {**ours, "every": 100})


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("rank", [_later(0), 1])
def test_a_full_disk_on_one_rank_costs_that_save_alone(tmp_path: Path, rank: int) -> None:
    ours = {**spec_of(1, "fp32", by="portus"), "every": 1, "last": 4}
    through = job(tmp_path / "stock", 2, {**ours, "by": "stock"})
    assert went(job(tmp_path / "ours", 2, {**ours, "full": rank})) == went(through)
    ckpt = tmp_path / "ours" / "ckpt"
    assert (ckpt / "latest").read_text() == "global_step4"
    assert digests_in(tmp_path / "ours", "global_step3") == {True}
    said = (tmp_path / "ours" / "errors-0.txt").read_text()
    assert f"a save was given up: rank {rank}: " in said
    assert not list(ckpt.glob("global_step2/*.pt"))
    assert "No space left on device" in said
    assert "from 4" in job(tmp_path / "ours", 2, {**ours, "by": "stock", "last": 5})


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("ranks", [_later(1), 2])
def test_a_directory_that_is_read_only_costs_its_saves_and_the_tag_before_stays(
    tmp_path: Path, ranks: int
) -> None:
    (root := tmp_path / "ours").mkdir()
    if not _can_be_sealed(tmp_path):
        pytest.skip("chattr +i needs root, and a file system that has it")
    ours = {**spec_of(1, "fp32", by="portus"), "every": 1, "last": 4}
    through = job(tmp_path / "stock", ranks, {**ours, "by": "stock"})
    try:
        found = job(root, ranks, {**ours, "sealed": 3})
    finally:
        subprocess.run(["chattr", "-i", root / "ckpt"], check=False)
    assert went(found) == went(through)
    ckpt = root / "ckpt"
    assert (ckpt / "latest").read_text() == "global_step2"
    assert sorted(each.name for each in ckpt.glob("global*")) == ["global_step1", "global_step2"]
    for rank in range(ranks):
        said = (root / f"errors-{rank}.txt").read_text()
        assert "global_step3" in said
        assert "Operation not permitted" in said
    assert "from 2" in job(root, ranks, {**ours, "last": 5})


def _can_be_sealed(directory: Path) -> bool:
    sealed = subprocess.run(["chattr", "+i", directory], check=False, capture_output=True)
    subprocess.run(["chattr", "-i", directory], check=False, capture_output=True)
    return sealed.returncode == 0


@pytest.mark.long
def test_an_empty_latest_of_stock_leads_to_the_newest_that_is_complete(tmp_path: Path) -> None:
    job(tmp_path, 1, spec_of(2, "fp32"))
    (tmp_path / "ckpt" / "latest").write_text("")  # stock, killed right after it opened it
    found = job(tmp_path, 1, {**spec_of(2, "fp32", by="portus"), "last": 7})
    assert "from 6" in found


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "who"), [(1, 0), (2, 0), (2, 1)])
def test_killed_at_any_change_of_a_name_latest_names_a_complete_checkpoint(
    tmp_path: Path, ranks: int, who: int, seed: int
) -> None:
    ours = spec_of(2, "bf16", by="portus", who=who)
    through = went(job(tmp_path / "through", ranks, {**ours, "last": 8, "who": None}))
    counted = job(tmp_path / "counted", ranks, {**ours, "kill": 10**9}, teller=who)
    moments = int(counted.rsplit("moments ", 1)[1])
    assert moments > 8
    for number in random.Random(seed).sample(range(1, moments + 1), min(KILLS, moments)):
        root = tmp_path / f"killed-{number}"
        killed(root, ranks, ours, who, number)
        named = (root / "ckpt" / "latest").read_text()
        assert named in ("global_step3", "global_step6")
        step = int(named[-1])
        for by in ("stock", "portus"):
            copy = tmp_path / "copy"
            shutil.copytree(root, copy)
            found = job(copy, ranks, {**ours, "by": by, "last": 8, "every": 100, "who": None})
            assert f"from {step}" in found
            assert went(found) == through[step:], (number, by)
            shutil.rmtree(copy)


def checkpoints_of(root: Path, by: str) -> Path:
    return root / ("checkpoints" if by == "accelerate" else "run")


def through_a_framework(root: Path, by: str, stage: int, ranks: int) -> None:
    """Save by stock and by Portus; then each goes on from both."""
    plain = {**spec_of(stage, "fp32"), "every": 2}
    ours = {**plain, "by": "portus"}
    assert went(job(root / "ours", ranks, ours, by=by)) == went(
        job(root / "stock", ranks, plain, by=by)
    )
    found = {
        where: sorted(
            str(each.relative_to(root / where))
            for each in checkpoints_of(root / where, by).rglob("*")
        )
        for where in ("stock", "ours")
    }
    assert found["ours"] == found["stock"]
    ends = set()
    for number, (where, spec) in enumerate(itertools.product(("stock", "ours"), (plain, ours))):
        copy = root / f"copy-{number}"
        shutil.copytree(root / where, copy)
        ends.add(tuple(went(job(copy, ranks, {**spec, "last": 8, "every": 100}, by=by))))
    assert len(ends) == 1


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(("by", "stage", "ranks"), [("accelerate", 2, 2)])
def test_under_a_framework_each_goes_on_from_what_the_other_saved(
    tmp_path: Path, by: str, stage: int, ranks: int
) -> None:
    through_a_framework(tmp_path, by, stage, ranks)


@pytest.mark.long
@pytest.mark.parametrize(
    ("by", "stage", "ranks"), list(itertools.product(["accelerate", "trainer"], [2, 3], [1, 2]))
)
def test_under_a_framework_at_stages_2_and_3_each_goes_on_from_what_the_other_saved(
    tmp_path: Path, by: str, stage: int, ranks: int
) -> None:
    through_a_framework(tmp_path, by, stage, ranks)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (2, 2), (3, 2)])
def test_under_lightning_without_its_check_for_gpus_each_goes_on_from_what_the_other_saved(
    tmp_path: Path, stage: int, ranks: int
) -> None:
    plain = spec_of(stage, "fp32", last=9)
    through = {
        by: went(job(tmp_path / by, ranks, {**plain, "by": by}, by="lightning"))
        for by in ("stock", "portus")
    }
    assert through["portus"] == through["stock"]
    stock, ours = (checkpoint_files(tmp_path / by / "ckpt") for by in through)
    assert ours == stock
    ends = set()
    for saved, by in itertools.product(through, through):
        newest = tmp_path / saved / "ckpt" / "epoch=0-step=6.ckpt"
        again = {**plain, "by": by, "from": str(newest)}
        ends.add(tuple(went(job(tmp_path / f"{saved}-{by}", ranks, again, by="lightning"))))
    assert [len(each) for each in ends] == [3 + 1], "the batches are those from the first on"
    assert digests_in(tmp_path / "portus", "epoch=0-step=6.ckpt/checkpoint") == {True}


def checkpoint_files(folder: Path) -> list[str]:
    """All that is in it."""
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*"))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("by", ["accelerate", "trainer"])
def test_a_training_whose_machine_was_lost_goes_on_from_its_mirror(
    tmp_path: Path, by: str, ranks: int
) -> None:
    root, bucket = tmp_path / "run", tmp_path / "bucket"
    ours = {**spec_of(2, "fp32", by="portus", mirror=f"file://{bucket}"), "last": 8}
    through = went(job(root, ranks, ours, by=by))
    shutil.rmtree(root)
    again = {**ours, "every": 100}
    if by == "trainer":  # which has the losses before in its checkpoint
        assert went(job(root, ranks, {**again, "from": "run/checkpoint-6"}, by=by)) == through
        assert (root / "run" / "checkpoint-6").exists()
    else:
        found = job(root, ranks, again, by=by)
        assert "from 6" in found
        assert went(found) == through[6:]


@pytest.mark.long
@pytest.mark.parametrize(("stage", "ranks"), list(itertools.product([1, 2, 3], [1, 2])))
def test_of_a_frozen_base_nothing_is_written_again(tmp_path: Path, stage: int, ranks: int) -> None:
    ours = {**spec_of(stage, "fp32", by="portus"), "every": 1, "last": 10, "limit": 1}
    said = job(tmp_path, ranks, {**ours, "base": 2048}, by="accelerate").splitlines()
    told = [tuple(map(int, line.split()[1:])) for line in said if line.startswith("written")]
    base = 2048 * 2048 * 4 // (ranks if stage == 3 else 1)
    each = len(told) // 10  # files of a save
    sizes, written = (sum(column) for column in zip(*told[5 * each :], strict=True))
    assert sizes > 5 * base
    assert written <= 1.2 * (sizes - 5 * base)


@pytest.mark.long
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("by", ["accelerate", "trainer"])
def test_killed_under_a_framework_that_keeps_one_it_goes_on_from_a_whole_one(
    tmp_path: Path, by: str, who: int, seed: int
) -> None:
    ours = {**spec_of(2, "fp32", by="portus", who=who), "every": 2, "limit": 1}
    counted = job(tmp_path / "counted", 2, {**ours, "kill": 10**9}, by=by, teller=who)
    job(tmp_path / "through", 2, {**ours, "limit": None, "who": None}, by=by)
    ends = set()
    for _ in (6, 4, 2):  # steps are short: that of the one before may be under way, too
        root = tmp_path / "copy"
        shutil.copytree(tmp_path / "through", root)
        ends.add(went(job(root, 2, {**ours, "last": 8, "every": 100, "who": None}, by=by))[-1])
        shutil.rmtree(root)
        shutil.rmtree(max(checkpoints_of(tmp_path / "through", by).glob("checkpoint*")))
    assert len(ends) == {"accelerate": 1, "trainer": 3}[by]  # batches are those of a step, or drawn
    moments = int(counted.rsplit("moments ", 1)[1])
    assert moments > 8
    for number in random.Random(seed).sample(range(1, moments + 1), min(KILLS, moments)):
        root = tmp_path / f"killed-{number}"
        killed(root, 2, ours, who, number, by)
        again = job(root, 2, {**ours, "last": 8, "every": 100, "who": None}, by=by)
        assert went(again)[-1] in ends, number


@pytest.mark.long
def test_trainer_goes_on_from_the_newest_though_random_states_are_missing(tmp_path: Path) -> None:
    ours = {**spec_of(2, "fp32", by="portus"), "every": 2}
    job(tmp_path, 2, ours, by="trainer")
    for states in tmp_path.glob("run/checkpoint-*/rng_state_1.pth"):
        states.unlink()  # rank 1 was killed each time
    removed = tmp_path / "run" / "checkpoint-7"  # a kill came as it was being removed
    removed.mkdir()
    shutil.copy(tmp_path / "run" / "checkpoint-6" / "model.safetensors", removed)
    found = job(tmp_path, 2, {**ours, "last": 8}, by="trainer")
    assert "loss 8" in found
    said = (tmp_path / "errors-0.txt").read_text()
    assert "checkpoint-6, and no checkpoint has those of all processes" in said
    assert "checkpoint-7 is not complete" in said


def printed(lines: list[str]) -> list[str]:
    """What the recipe prints, not DeepSpeed."""
    return [line for line in lines if line.startswith(("tiny", "step"))]


@pytest.mark.long
def test_the_recipe_that_is_killed_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    children = nursery("tests.adapters.deepspeed_jobs")
    command = ["--tiny", "--out", "run"]
    with contextlib.ExitStack() as stack:
        (environment,) = environments(stack, 1)
        through = children.start("recipe", str(tmp_path / "through"), environment, command)
        expected = printed(stack.enter_context(through).rest())
        assert through.wait() == 0, (tmp_path / "through" / "errors-0.txt").read_text()
    assert expected[0] == "tiny on 1 ranks, from step 0"
    with contextlib.ExitStack() as stack:
        (environment,) = environments(stack, 1)
        killed = children.start("recipe", str(tmp_path), environment, command)
        stack.enter_context(killed)
        while not killed.line().startswith("step   12"):
            continue
        killed.kill()
    with contextlib.ExitStack() as stack:
        (environment,) = environments(stack, 1)
        again = children.start("recipe", str(tmp_path), environment, command)
        found = printed(stack.enter_context(again).rest())
        assert again.wait() == 0, (tmp_path / "errors-0.txt").read_text()
    begun = int(found[0].rsplit(" ", 1)[1])
    assert begun in (5, 10)
    assert found[1:] == expected[1 + begun :]
