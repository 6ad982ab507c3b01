"""Names on disk: a reference file appears whole, alone, and is told alive from deleted."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from portus.client.files import fate
from portus.client.files import reference as ref
from portus.errors import CorruptionError, MediumError
from portus.format.reference import Reference, encode
from portus.index.directory import links_directory
from portus.media.local import LocalFiles


class Run:
    """A pool's links directory and a checkpoint directory, and the files in both."""

    def __init__(self, root: Path, files: LocalFiles | None = None) -> None:
        self.files = files or LocalFiles(mapped=False)
        self.pool = str(root / "pool.portus")
        self.links = links_directory(self.pool)
        self.home = root / "checkpoints"
        self.home.mkdir()
        os.mkdir(self.links)
        self.made = 0

    def reference(self, path: Path) -> Reference:
        self.made += 1
        return Reference(
            id=f"{self.made:032x}",
            token=f"{self.made + 1000:032x}",
            pool="b" * 32,
            pool_path=self.pool,
            pool_relative="../pool.portus",
            model="m",
            step=self.made,
            written_path=str(path),
            written_ns=0,
        )

    def save(self, name: str) -> Reference:
        path = self.home / name
        made = self.reference(path)
        ref.place(str(path), made, self.files, self.links)
        ref.make_durable(str(path), self.files, self.links)
        return made

    def link(self, number: int) -> Path:
        """The link of the reference that was made as that number, by whatever name."""
        [path] = Path(self.links).glob(f"{number:032x}*")
        return path

    def states(self) -> dict[int, fate.Fate]:
        return {link.reference.step: link.state for link in fate.links(self.links, self.files)}


class Elsewhere(LocalFiles):
    """The links directory is on another file system than the checkpoints: no link, no rename."""

    def __init__(self, home: Path) -> None:
        super().__init__(mapped=False)
        self.home = home

    def link(self, source: str, target: str) -> None:
        if not os.path.lexists(target):
            self._same(source, target)
        super().link(source, target)

    def replace(self, source: str, target: str) -> None:
        self._same(source, target)
        super().replace(source, target)

    def _same(self, source: str, target: str) -> None:
        if source.startswith(str(self.home)) != target.startswith(str(self.home)):
            raise MediumError(errno.EXDEV, f"{target}: another file system")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def far(tmp_path: Path) -> Run:
    return Run(tmp_path, Elsewhere(tmp_path / "checkpoints"))


def test_a_new_path_gets_the_reference_and_nothing_beside_it(run: Run) -> None:
    made = run.save("a.ckpt")
    assert os.listdir(run.home) == ["a.ckpt"]
    assert ref.read(run.home / "a.ckpt") == made
    assert os.stat(run.home / "a.ckpt").st_nlink == 2
    assert run.states() == {1: fate.Fate.ALIVE}


def test_an_existing_path_is_replaced_and_what_was_there_is_deleted(run: Run) -> None:
    run.save("a.ckpt")
    made = run.save("a.ckpt")
    assert os.listdir(run.home) == ["a.ckpt"]
    assert ref.read(run.home / "a.ckpt") == made
    assert run.states() == {1: fate.Fate.DELETED, 2: fate.Fate.ALIVE}
    assert len(os.listdir(run.links)) == 2


def test_a_file_of_others_and_a_symbolic_link_are_replaced_as_torch_would(run: Run) -> None:
    (run.home / "real.ckpt").write_bytes(b"weights")
    made = run.save("real.ckpt")
    assert ref.read(run.home / "real.ckpt") == made
    target = run.save("target.ckpt")
    os.symlink("target.ckpt", run.home / "last.ckpt")
    made = run.save("last.ckpt")
    assert not (run.home / "last.ckpt").is_symlink()
    assert ref.read(run.home / "last.ckpt") == made
    assert ref.read(run.home / "target.ckpt") == target
    os.symlink("nowhere", run.home / "dangling.ckpt")
    assert run.save("dangling.ckpt") == ref.read(run.home / "dangling.ckpt")


def test_a_directory_at_the_path_is_an_error_and_leaves_it(run: Run) -> None:
    (run.home / "a.ckpt").mkdir()
    with pytest.raises(MediumError):
        run.save("a.ckpt")
    assert (run.home / "a.ckpt").is_dir()
    assert run.states() == {}


def test_deleting_is_seen_and_moving_is_not_taken_for_it(run: Run, tmp_path: Path) -> None:
    for name in ("kept", "removed", "moved", "tree/a", "second"):
        (run.home / name).parent.mkdir(exist_ok=True)
        run.save(name)
    os.remove(run.home / "removed")
    shutil.move(run.home / "moved", tmp_path / "moved.ckpt")
    shutil.rmtree(run.home / "tree")
    os.link(run.home / "second", tmp_path / "second")
    os.remove(run.home / "second")
    gone, here, unknown = fate.Fate.DELETED, fate.Fate.ALIVE, fate.Fate.UNKNOWN
    assert run.states() == {1: here, 2: gone, 3: here, 4: unknown, 5: here}


def test_a_copy_that_takes_the_place_of_the_file_keeps_it_alive(run: Run) -> None:
    first = run.save("last.ckpt")
    shutil.copy(run.home / "last.ckpt", run.home / "previous.ckpt")
    run.save("last.ckpt")
    assert run.states() == {1: fate.Fate.ALIVE, 2: fate.Fate.ALIVE}
    assert os.stat(run.home / "previous.ckpt").st_nlink == 2
    os.remove(run.home / "previous.ckpt")
    assert run.states() == {1: fate.Fate.DELETED, 2: fate.Fate.ALIVE}
    assert fate.state_of(first, run.links, run.files) is fate.Fate.DELETED


@pytest.mark.parametrize("how", ["renamed", "removed"])
def test_a_directory_that_is_gone_before_it_is_settled_is_no_error(
    run: Run, tmp_path: Path, how: str
) -> None:
    path = run.home / "step_1" / "a.ckpt"
    path.parent.mkdir()
    made = run.reference(path)
    ref.place(str(path), made, run.files, run.links)
    if how == "renamed":
        path.parent.rename(run.home / "best")
    else:
        shutil.rmtree(path.parent)
    ref.make_durable(str(path), run.files, run.links)
    alive = how == "renamed"
    assert run.states() == {1: fate.Fate.ALIVE if alive else fate.Fate.UNKNOWN}


def test_a_path_taken_away_and_forgotten_leaves_no_name(run: Run) -> None:
    made = run.save("a.ckpt")
    ref.take_away(str(run.home / "a.ckpt"), run.files)
    ref.take_away(str(run.home / "a.ckpt"), run.files)
    assert fate.state_of(made, run.links, run.files) is fate.Fate.DELETED
    ref.forget(made, run.links, run.files)
    assert os.listdir(run.links) == os.listdir(run.home) == []
    assert run.states() == {}


def test_what_a_crash_left_in_the_links_directory_is_tidied(run: Run) -> None:
    made = run.save("a.ckpt")
    assert made.step == 1
    os.link(run.link(1), f"{run.link(1)}.new")
    os.remove(run.home / "a.ckpt")
    assert run.states() == {1: fate.Fate.ALIVE}  # the leftover counts as a name
    ref.tidy(run.links, run.files)
    assert run.states() == {1: fate.Fate.DELETED}


def test_a_save_after_a_crash_in_the_same_save_works(run: Run) -> None:
    path = run.home / "a.ckpt"
    run.save("a.ckpt")
    made = run.reference(path)
    Path(run.links, f"{made.id}.new").write_bytes(b"half")
    ref.place(str(path), made, run.files, run.links)
    assert ref.read(path) == made


def test_without_hard_links_the_file_is_copied_and_a_missing_one_is_unknown(far: Run) -> None:
    made = far.save("a.ckpt")
    assert os.listdir(far.home) == ["a.ckpt"]
    assert os.stat(far.home / "a.ckpt").st_nlink == 1
    assert ref.read(far.home / "a.ckpt") == made
    assert far.states() == {1: fate.Fate.ALIVE}
    os.rename(far.home / "a.ckpt", far.home / "b.ckpt")
    assert far.states() == {1: fate.Fate.ALIVE}
    (far.home.parent / "archive").mkdir()
    os.rename(far.home / "b.ckpt", far.home.parent / "archive" / "a.ckpt")
    assert far.states() == {1: fate.Fate.UNKNOWN}
    assert fate.state_of(made, far.links, far.files) is fate.Fate.UNKNOWN
    far.save("a.ckpt")
    assert far.states() == {1: fate.Fate.UNKNOWN, 2: fate.Fate.ALIVE}
    ref.forget(made, far.links, far.files)
    assert far.states() == {2: fate.Fate.ALIVE}


def test_without_hard_links_what_a_crash_left_is_tidied(far: Run) -> None:
    made = far.save("a.ckpt")
    left = far.home / f".{made.id}.portus"
    left.write_bytes(b"half")
    ref.tidy(far.links, far.files)
    assert os.listdir(far.home) == ["a.ckpt"]


def test_a_failed_rename_leaves_the_old_file_and_nothing_else(far: Run) -> None:
    (far.home / "a.ckpt").mkdir()
    with pytest.raises(MediumError):
        far.save("a.ckpt")
    assert os.listdir(far.home) == ["a.ckpt"]
    assert far.states() == {}


def test_only_what_is_small_and_regular_is_read(run: Run, tmp_path: Path) -> None:
    made = run.save("a.ckpt")
    huge = tmp_path / "huge.ckpt"
    huge.write_bytes(encode(made))
    os.truncate(huge, 10 << 30)  # sparse
    os.mkfifo(tmp_path / "pipe")
    for name in ("huge.ckpt", "pipe", "checkpoints", "missing", "missing/deeper"):
        assert ref.read(tmp_path / name) is None
    os.chmod(run.home / "a.ckpt", 0o000)
    if os.geteuid() != 0:
        with pytest.raises(MediumError, match=r"a\.ckpt"):
            ref.read(run.home / "a.ckpt")


def test_a_damaged_reference_is_named(run: Run) -> None:
    made = run.save("a.ckpt")
    data = bytearray(encode(made))
    data[300] ^= 1
    (run.home / "b.ckpt").write_bytes(data)
    with pytest.raises(CorruptionError, match=r"b\.ckpt"):
        ref.read(run.home / "b.ckpt")


def test_a_damaged_link_does_not_stand_in_the_way_of_the_others(run: Run) -> None:
    run.save("a.ckpt")
    run.save("b.ckpt")
    run.link(1).write_bytes(b"rot" * 500)
    Path(run.links, "stranger").write_bytes(b"")
    assert run.states() == {2: fate.Fate.ALIVE}


def test_a_link_is_proved_by_identity_not_by_content(run: Run, tmp_path: Path) -> None:
    made = run.save("a.ckpt")
    shutil.copy(run.home / "a.ckpt", tmp_path / "copy.ckpt")
    assert ref.is_linked(str(run.home / "a.ckpt"), made, run.links)
    assert not ref.is_linked(str(tmp_path / "copy.ckpt"), made, run.links)
    assert not ref.is_linked(str(tmp_path / "missing"), made, run.links)
    link = run.link(1)
    os.rename(link, tmp_path / "x")
    os.symlink(tmp_path / "x", link)
    assert not ref.is_linked(str(run.home / "a.ckpt"), made, run.links)
