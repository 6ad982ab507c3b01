"""What clients told a host of their reference files stays told."""

from __future__ import annotations

from pathlib import Path

import pytest

from portus.errors import UsageError
from portus.format.reference import Reference, decode, encode
from portus.index import holds as module
from portus.index.holds import PoolHolds
from portus.media.local import LocalFiles


def reference(number: int) -> Reference:
    return Reference(
        id=f"{number:032x}",
        token=f"{number:032x}",
        pool="b" * 32,
        pool_path="portus://host:1",
        pool_relative="portus://host:1",
        model="m",
        step=number,
        written_path="/run/x.ckpt",
        written_ns=0,
    )


def found(holds: PoolHolds) -> list[int]:
    steps, after = [], "0" * 32
    while some := holds.after(after, 3000):
        for data in some:
            there = decode(data)
            assert there is not None
            steps.append(there.step)
            after = there.id
    return steps


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_is_kept_is_there_until_it_is_let_go_of(tmp_path: Path, in_memory: bool) -> None:
    directory = None if in_memory else str(tmp_path / "pool.references")
    holds = PoolHolds(directory, LocalFiles())
    for number in (7, 3, 5):
        holds.keep(f"{number:032x}", encode(reference(number)))
        holds.keep(f"{number:032x}", encode(reference(number)))
    assert found(holds) == [3, 5, 7]
    holds.let_go(f"{5:032x}")
    holds.let_go(f"{5:032x}")
    assert found(holds) == [3, 7]
    if directory is not None:
        (tmp_path / "pool.references" / "half.new").write_bytes(b"half")
        (tmp_path / "pool.references" / "rotten").write_bytes(b"rot")
        assert found(PoolHolds(directory, LocalFiles())) == [3, 7]


def test_nonsense_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    holds = PoolHolds(None, LocalFiles())
    for data in (b"", b"x" * 2000, encode(reference(2))):
        with pytest.raises(UsageError, match="not a reference file with that id"):
            holds.keep(f"{1:032x}", data)
    monkeypatch.setattr(module, "HOLDS_MAX", 2)
    for number in (1, 2):
        holds.keep(f"{number:032x}", encode(reference(number)))
    with pytest.raises(UsageError, match="at most 2"):
        holds.keep(f"{3:032x}", encode(reference(3)))
    holds.let_go(f"{1:032x}")
    holds.keep(f"{3:032x}", encode(reference(3)))
    assert found(holds) == [2, 3]
