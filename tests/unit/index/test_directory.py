"""Pool files of which two want to be the writer, and directories that another process removes."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from portus.engine.spec import PAGE
from portus.reach.index.check import check
from portus.reach.index.directory import create_pool, make_directory, open_writer
from portus.reach.index.pool import PoolWriter
from portus.reach.media.local import LocalFiles
from portus.reach.media.pool import SparseMedium
from tests.moments import WAIT_S_MAX, is_in, until
from tests.unit.index.pools import save

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")


@pytest.mark.parametrize("mapped", [True, False])
def test_who_waited_for_the_writer_before_finds_the_file_as_that_one_left_it(
    tmp_path: Path, mapped: bool
) -> None:
    """A job is queued again while its predecessor saves: the pool grew, and has holes."""
    path, files = str(tmp_path / "run.portus"), LocalFiles(mapped=mapped)
    create_pool(path, files)
    before, size = open_writer(path, files), os.path.getsize(path)
    found: list[PoolWriter] = []
    waiting = threading.Thread(
        target=lambda: found.append(open_writer(path, files, timeout_s=WAIT_S_MAX))
    )
    waiting.start()
    until(lambda: is_in(waiting, "acquire_writer"))
    gone = save(before, "m", 1, [b"1" * (1 << 20)])
    save(before, "m", 2, [b"2" * (1 << 20)], retire=[gone.info.id])
    hole = before.reserve(64 * PAGE)
    assert isinstance(before.medium, SparseMedium)
    before.medium.discard(hole)
    before.release(hole)
    known = before.catalogue()
    before.close()
    waiting.join()
    after = found[0]
    try:
        assert os.path.getsize(path) > size, "it grew, or nothing was tried"
        assert after.medium.size == os.path.getsize(path)
        assert after.catalogue() == known
        if mapped:
            assert isinstance(after.medium, SparseMedium)
            assert after.medium.holes() == []
        save(after, "m", 3, [b"3" * (3 << 20)])
        assert check(after) == []
    finally:
        after.close()


def test_a_pool_is_made_beside_an_entry_with_the_longest_name(tmp_path: Path) -> None:
    (tmp_path / ("x" * 255)).mkdir()
    create_pool(str(tmp_path / "run.portus"), LocalFiles())


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("is_gone_early", [True, False])
@pytest.mark.parametrize("name", [".portus", ".portus/checkpoints.journal"])
def test_a_hidden_folder_that_a_save_removes_as_it_is_made_is_made_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_gone_early: bool,
    is_inside: bool,
) -> None:
    """The end of a save removes the folder while it is empty, and the journal begins there."""
    wanted, make, removed = tmp_path / name, os.mkdir, list[str]()

    def make_and_lose(path: str, *mode: int) -> None:
        make(path, *mode)
        if not removed:
            removed.append(path)
            os.rmdir(path)
            if is_gone_early:  # it was there as ``os.mkdir`` made it, and then was not
                raise FileExistsError

    monkeypatch.setattr(os, "mkdir", make_and_lose)
    assert make_directory(str(wanted), is_inside=is_inside)
    assert wanted.is_dir()
    assert {".gitignore", "CACHEDIR.TAG"} <= set(os.listdir(tmp_path / ".portus"))
    assert removed
