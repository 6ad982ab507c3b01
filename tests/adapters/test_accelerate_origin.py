"""Of which checkpoint the files of a directory are."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

import portus
from portus_accelerate.directories import note, origin_of


def test_pointers_and_files_say_of_which_checkpoint_they_are(tmp_path: Path) -> None:
    home = tmp_path / "step_5"
    for number in range(2):
        pool = portus.Place.parse(tmp_path / f"{number}.portus") if number else None
        files = portus.TrainingFiles(portus.Settings(), pool=pool)
        files.begin(f"net~{number}", str(tmp_path / ".portus"), str(tmp_path))
        files.save_directory(str(home), {f"{number}.bin": {}}, 5, note("net", 5)).wait()
        files.close()
    assert portus.is_reference(home / "1.bin")
    assert origin_of(str(home)) == f"{home} (model 'net', step 5)"
    (tmp_path / "1.portus").unlink()
    assert origin_of(str(home)) == f"{home} (model 'net', step 5)", "without the pool, too"


def test_what_several_processes_saved_at_once_is_one_checkpoint(tmp_path: Path) -> None:
    home = tmp_path / "step_5"
    home.mkdir()
    for number, model in enumerate(("net", "net~2", "net~3")):
        pool = portus.Place.parse(tmp_path / f"{number}.portus")
        files = portus.TrainingFiles(portus.Settings(), pool=pool)
        files.begin(model, str(tmp_path / ".portus"), str(tmp_path))
        files.save({}, str(home / str(number)), 5).wait()
        files.close()
    assert origin_of(str(home)) == f"{home} (model 'net', step 5)"


def test_files_of_a_training_say_of_which_checkpoint_they_are(tmp_path: Path) -> None:
    files = portus.TrainingFiles(portus.Settings())
    state = {"a.bin": 1, "model.safetensors": portus.Safetensors({"w": torch.zeros(3)})}
    files.save_directory(str(tmp_path / "step_7"), state, 7, note("net", 7)).wait()
    files.close()
    assert origin_of(f"{tmp_path}/step_7") == f"{tmp_path}/step_7 (model 'net', step 7)"


def test_a_directory_of_stock_files_is_of_nobody(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    torch.save([1], tmp_path / "optimizer.bin")
    assert origin_of(str(tmp_path)) == ""
    assert origin_of(str(tmp_path / "none")) == ""
