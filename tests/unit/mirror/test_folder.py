"""Objects as files: what is synced, and what a crash or another writer leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from portus.errors import MediumError, TransportError
from portus.reach.mirror.folder import PARTIAL, PARTIAL_S_MAX, Folder
from portus.reach.mirror.store import UnwritableError


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the system that make something durable, or seen, in their order."""
    said: list[str] = []

    def note(name: str, path_of: Callable[..., str]) -> None:
        real = getattr(os, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            done = real(*arguments, **named)
            said.append(f"{name} {path_of(*arguments)}")
            return done

        monkeypatch.setattr(os, name, noted)

    note("fsync", lambda number: os.readlink(f"/proc/self/fd/{number}"))
    note("mkdir", lambda path, *_: path)
    note("replace", lambda _, path: path)
    note("link", lambda _, path: path)
    return said


@pytest.mark.parametrize("verb", ["replace", "link"])
def test_a_name_is_made_after_its_bytes_are_durable_and_told_after_it_is(
    tmp_path: Path, events: list[str], verb: str
) -> None:
    root = tmp_path / "a" / "b"
    store = Folder(str(root))
    if verb == "link":
        assert store.create("log/1", b"x")
    else:
        store.put("log/1", b"x")
    (data,) = (number for number, each in enumerate(events) if f"fsync {root}/{PARTIAL}/" in each)
    named = events.index(f"{verb} {root}/log/1")
    assert data < named < len(events) - 1
    assert events[-1] == f"fsync {root}/log"
    for path in (tmp_path / "a", root, root / PARTIAL, root / "log"):
        made = events.index(f"mkdir {path}")
        assert made < events.index(f"fsync {path.parent}", made) < named
    assert os.listdir(root / PARTIAL) == []


def test_a_loser_syncs_the_directory_too(tmp_path: Path, events: list[str]) -> None:
    """Whoever made the name may have been killed before it did."""
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "1").write_bytes(b"other")
    events.clear()
    assert Folder(str(tmp_path)).create("log/1", b"x") is False
    assert events[-1] == f"fsync {tmp_path}/log"


def test_what_writers_that_were_killed_left_is_removed_after_a_day(tmp_path: Path) -> None:
    Folder(str(tmp_path)).put("a", b"x")
    for name, age_s in (("old", PARTIAL_S_MAX + 60), ("young", PARTIAL_S_MAX - 60)):
        path = tmp_path / PARTIAL / name
        path.write_bytes(b"half")
        moment = (tmp_path / "a").stat().st_mtime - age_s
        os.utime(path, (moment, moment))
    store = Folder(str(tmp_path))
    assert [each.name for each in store.list("")] == ["a"]
    store.put("b", b"x")
    assert os.listdir(tmp_path / PARTIAL) == ["young"]
    assert [each.name for each in store.list("")] == ["a", "b"]


def test_a_link_whose_answer_was_lost_is_told_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS the request is repeated, and meets its own link."""
    real = os.link

    def linked_twice(source: str, target: str) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", linked_twice)
    store = Folder(str(tmp_path))
    assert store.create("log/1", b"x") is True
    assert store.create("log/1", b"x") is False


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EPERM, UnwritableError),
        (errno.EOPNOTSUPP, UnwritableError),
        (errno.EROFS, UnwritableError),
        (errno.ESTALE, TransportError),
        (errno.ETIMEDOUT, TransportError),
        (errno.ENOSPC, MediumError),
        (errno.EIO, MediumError),
    ],
)
def test_what_a_file_system_refuses_is_told_by_who_has_to_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fails(source: str, target: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fails)
    store = Folder(str(tmp_path))
    with pytest.raises(kind, match="log/1"):
        store.create("log/1", b"x")
    assert list(store.list("")) == []
    assert os.listdir(tmp_path / PARTIAL) == []


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = Folder(str(tmp_path / "file" / "below"))
    with pytest.raises(UnwritableError, match="file"):
        store.put("a", b"x")


def test_a_directory_that_goes_away_is_told_in_the_same_words_each_time(tmp_path: Path) -> None:
    store = Folder(str(tmp_path / "mirror"))
    store.put("a", b"x")
    (tmp_path / "mirror").rename(tmp_path / "away")
    said = set()
    for _ in range(3):
        with pytest.raises(MediumError) as failed:
            store.put("b", b"x")
        said.add(str(failed.value))
    [text] = said
    assert f"{tmp_path}/mirror/{PARTIAL}: cannot create a file in: No such file" in text
