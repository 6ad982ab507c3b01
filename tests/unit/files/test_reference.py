"""Pointers on disk: only what is small and regular is read, and damage is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from portus.engine.format.pointer_marks import POINTER_MAX
from portus.errors import CorruptionError
from portus.reach.files.reference import read_reference
from portus.reach.format.reference import Reference, encode


def pointer(path: Path) -> Reference:
    """A pointer that was put at that path."""
    return Reference(
        token=f"{2:032x}",
        pool="b" * 32,
        pool_path="/pools/run.portus",
        model="net",
        step=7,
        written_path=str(path),
        files=1,
    )


def test_what_was_written_is_read_also_through_a_link(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(encode(pointer(path)))
    (tmp_path / "link.ckpt").symlink_to("last.ckpt")
    for each in (path, str(path), tmp_path / "link.ckpt"):
        assert read_reference(each) == pointer(path)


def test_only_what_is_small_and_regular_is_read(tmp_path: Path) -> None:
    data = encode(pointer(tmp_path / "x"))
    (tmp_path / "large").write_bytes(data + bytes(POINTER_MAX))
    (tmp_path / "other").write_bytes(b"somebody else's")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("nowhere")
    for name in ("large", "other", "empty", "pipe", "loop", "missing", ".", "other/inside"):
        assert read_reference(tmp_path / name) is None, name


def test_a_damaged_pointer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    data = bytearray(encode(pointer(path)))
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"last\.ckpt: pointer: "):
        read_reference(path)
