"""The roll of a model: which groups are complete, as a cache that may be anything but wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from portus.index import roll
from portus.index.groups import new_id


def test_a_roll_that_is_cut_or_has_a_flipped_bit_anywhere_is_none() -> None:
    groups = [new_id(), new_id()]
    whole = roll.encode("run/ä", groups)
    assert roll.decode("run/ä", whole) == groups
    assert roll.decode("run", whole) == [], "that of another model"
    for length in range(len(whole)):
        assert roll.decode("run/ä", whole[:length]) == []
    for place in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            assert roll.decode("run/ä", bytes(flipped)) == []
    assert roll.decode("run/ä", whole + b"\n") == []
    assert roll.decode("run/ä", roll.encode("run/ä", [b"short"])) == []


def test_groups_are_added_to_what_is_named_and_the_newest_stay(tmp_path: Path) -> None:
    groups = [new_id() for _ in range(roll.GROUPS_MAX + 1)]
    roll.add(str(tmp_path), "a/b", groups[:2])
    before = os.stat(tmp_path / "a%2Fb.groups").st_ino
    roll.add(str(tmp_path), "a/b", groups[:1])
    assert os.stat(tmp_path / "a%2Fb.groups").st_ino == before, "it is named already"
    roll.add(str(tmp_path), "a/b", groups[1:])
    assert roll.read(str(tmp_path), "a/b") == groups[1:]
    assert [path.name for path in tmp_path.iterdir()] == ["a%2Fb.groups"]
    (tmp_path / "a%2Fb.groups").write_bytes(b"\xff" * 99)
    roll.add(str(tmp_path), "a/b", groups[:1])
    assert roll.read(str(tmp_path), "a/b") == groups[:1]
    roll.remove(str(tmp_path), "a/b")
    assert roll.read(str(tmp_path), "a/b") == []


def test_what_cannot_be_written_is_not_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll.add(str(tmp_path / "nowhere"), "run", [new_id()])
    (tmp_path / "run.groups").mkdir()
    roll.add(str(tmp_path), "run", [new_id()])
    assert [path.name for path in tmp_path.iterdir()] == ["run.groups"], "nothing half-made"

    def killed(fresh: str, target: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        roll.add(str(tmp_path), "other", [new_id()])
    assert len(list(tmp_path.iterdir())) == 2
    roll.clear(str(tmp_path), "run")
    assert len(list(tmp_path.iterdir())) == 2, "that of another model"
    roll.clear(str(tmp_path), "other")
    assert [path.name for path in tmp_path.iterdir()] == ["run.groups"]


def test_pool_files_of_parts_are_found_by_name_with_their_successors(tmp_path: Path) -> None:
    for name in (
        "a%2Frank-0-of-2.portus",
        "a%2Frank-0-of-2+2.portus",
        "a%2Frank-1-of-2.portus",
        "a%2Frank-0-of-3.portus",
        "a%2Frank-3-of-3.portus",
        "a%2Frank-0-of-2%2Frank-0-of-2.portus",
        "ab%2Frank-0-of-2.portus",
        "a%2Frank-0-of-2.references",
        "a.portus",
        "a.groups",
        "c.groups",
        ".a.groups.0.new",
    ):
        (tmp_path / name).touch()
    roll.add(str(tmp_path), "d", [new_id()])
    roll.add(str(tmp_path), "a", [new_id()])
    found = roll.part_files(str(tmp_path), "a")
    assert {part: [os.path.basename(each) for each in paths] for part, paths in found.items()} == {
        (0, 2): ["a%2Frank-0-of-2+2.portus", "a%2Frank-0-of-2.portus"],
        (1, 2): ["a%2Frank-1-of-2.portus"],
        (0, 3): ["a%2Frank-0-of-3.portus"],
    }
    names = os.listdir(tmp_path)
    assert roll.deserted(str(tmp_path), names) == ["d.groups"], "c.groups is none of ours"
