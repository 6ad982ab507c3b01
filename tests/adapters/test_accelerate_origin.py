"""Of which checkpoint the files of a directory are."""

from __future__ import annotations

from pathlib import Path

import portus
from portus_accelerate.origin import Origin, origin_of


def test_what_several_processes_saved_at_once_is_one_checkpoint(tmp_path: Path) -> None:
    home = tmp_path / "step_5"
    home.mkdir()
    for number, model in enumerate(("net", "net~2", "net~2/rank-1-of-2")):
        with portus.PoolCheckpointer(tmp_path / "pools", model) as checkpointer:
            checkpointer.save({}, 5, reference=home / str(number)).wait()
    assert origin_of(str(home)) == Origin(str(home), "net", 5)


def test_a_directory_without_references_is_of_nobody(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"some bytes")
    assert origin_of(str(tmp_path)) is None
    assert origin_of(str(tmp_path / "none")) is None
