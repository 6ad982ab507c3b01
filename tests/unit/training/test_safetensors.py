"""``portus.save_safetensors``: the file that the package writes, in the background, verified."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from portus.engine.image.integrity import is_whole
from portus.engine.loading.checkpoint_file import has_digests, verify_file
from portus.engine.paths import process
from portus.engine.paths.process import load, save
from portus.engine.writer.image_file import ImageFile
from portus.errors import CorruptionError, UsageError
from portus.reach.training.safetensors import save_safetensors
from tests.warm import in_process

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only"),
    pytest.mark.usefixtures("own_saver"),
]


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in expected.items()
    )


def some() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "weight": torch.nn.Parameter(torch.randn(300, 1700)).detach(),
        "bias": torch.randn(5).to(torch.bfloat16),
        "empty": torch.empty(0),
        "step": torch.tensor(3),
    }


def test_the_package_and_portus_read_what_was_saved() -> None:
    state = some()
    save_safetensors(state, "x.safetensors", {"format": "pt"}).wait()
    assert same(safetensors.torch.load_file("x.safetensors"), state)
    assert same(load("x.safetensors"), state)
    with safetensors.safe_open("x.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    assert has_digests("x.safetensors")
    assert verify_file("x.safetensors") == os.path.getsize("x.safetensors")
    assert os.listdir() == ["x.safetensors"] or sorted(os.listdir()) == [".portus", "x.safetensors"]


def test_a_file_of_the_package_loads_unverified() -> None:
    safetensors.torch.save_file(some(), "stock.safetensors")
    assert same(load("stock.safetensors"), some())
    assert not has_digests("stock.safetensors")
    verify_file("stock.safetensors")


def test_what_an_optimizer_writes_meanwhile_is_saved_as_it_was_at_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, real = threading.Event(), ImageFile.finish

    def finish(file: ImageFile) -> None:
        assert go_on.wait(30)
        real(file)

    monkeypatch.setattr(ImageFile, "finish", finish)
    model = torch.nn.Linear(400, 700)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        model(torch.randn(3, 400)).square().mean().backward()
        optimizer.step()
        expected = {name: each.detach().clone() for name, each in model.named_parameters()}
        state = {name: each.detach() for name, each in model.named_parameters()}
        handle = save_safetensors(state, f"{step}.safetensors")
        assert not os.path.exists(f"{step}.safetensors")
        optimizer.step()
        go_on.set()
        handle.wait()
        go_on.clear()
        assert same(safetensors.torch.load_file(f"{step}.safetensors"), expected)
        go_on.set()


def test_parts_of_one_storage_are_saved_as_they_were_at_the_call() -> None:
    flat = torch.arange(5000.0)
    state = {"first": flat[:2000].view(40, 50), "second": flat[3000:], "one": flat[2500]}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    handle = save_safetensors(state, "x.safetensors")
    flat.zero_()
    handle.wait()
    assert same(safetensors.torch.load_file("x.safetensors"), expected)
    assert same(load("x.safetensors"), expected)


def test_spares_are_written_over_by_smaller_and_larger_files() -> None:
    for size in (900_000, 300_000, 1_100_000, 10, 700_000):
        state = {"w": torch.full((size,), float(size)), "b": torch.ones(3)}
        save_safetensors(state, "x.safetensors").wait()
        process._savers[0].remove(os.path.abspath("x.safetensors"))
        save_safetensors(state, "y.safetensors", wait=True)
        assert same(safetensors.torch.load_file("y.safetensors"), state)
        verify_file("y.safetensors")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ([1], "expected a dict of tensors by name, found list"),
        ({1: torch.zeros(1)}, "expected the name of a tensor, found 1"),
        ({"__metadata__": torch.zeros(1)}, "expected the name of a tensor"),
        ({"\ud800": torch.zeros(1)}, "expected a name in UTF-8"),
        ({"a": 1}, r"tensors\['a'\]: expected a tensor, found int"),
        ({"a": torch.zeros(3, 3).to_sparse()}, r"tensors\['a'\]: expected a dense tensor"),
        ({"a": torch.zeros(2, device="meta")}, "expected a dense tensor, found one of .* on meta"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "complex128, which safetensors does not"),
        ({"a": torch.zeros(2, 3).t()}, r"tensors\['a'\] is not contiguous"),
        ({"a": torch.zeros(2, dtype=torch.complex64).conj()}, r"tensors\['a'\] is not contiguous"),
    ],
)
def test_what_the_format_does_not_hold_is_refused_before_anything_is_there(
    state: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        save_safetensors(state, "x.safetensors")
    assert os.listdir() == []


def test_tensors_that_share_memory_are_refused_by_name() -> None:
    base = torch.arange(10.0)
    for state in ({"a": base, "b": base}, {"a": base[:6], "b": base[5:]}):
        with pytest.raises(UsageError, match="'a' and 'b' share memory"):
            save_safetensors(state, "x.safetensors")
        with pytest.raises(RuntimeError, match="share memory"):
            safetensors.torch.save_file(state, "x.safetensors")
    save_safetensors({"a": base[:5], "b": base[5:]}, "x.safetensors").wait()
    assert same(load("x.safetensors"), {"a": base[:5], "b": base[5:]})


def test_metadata_that_are_no_texts_are_refused() -> None:
    with pytest.raises(UsageError, match="metadata: expected texts by their names"):
        save_safetensors({}, "x.safetensors", {"a": 1})  # type: ignore[dict-item]


def test_a_damaged_byte_is_an_error_that_names_the_tensor_and_nothing_is_returned() -> None:
    save_safetensors(some(), "x.safetensors").wait()
    data = bytearray(Path("x.safetensors").read_bytes())
    data[-100] ^= 1
    Path("x.safetensors").write_bytes(data)
    with pytest.raises(CorruptionError, match=r"x\.safetensors: weight|x\.safetensors: bias"):
        load("x.safetensors")
    with pytest.raises(CorruptionError):
        verify_file("x.safetensors")
    with open("x.safetensors", "rb") as file:
        assert not is_whole(file.fileno(), "x.safetensors")
    data[-100] ^= 1
    data[0] ^= 255
    Path("x.safetensors").write_bytes(data)
    with pytest.raises(CorruptionError, match=r"x\.safetensors"):
        load("x.safetensors")


def test_parts_are_loaded_by_patterns() -> None:
    save_safetensors(some(), "x.safetensors").wait()
    assert same(load("x.safetensors", names="b*"), {"bias": some()["bias"]})
    with pytest.raises(UsageError, match="no key path matches 'wieght'"):
        load("x.safetensors", names="wieght")
    data = bytearray(Path("x.safetensors").read_bytes())
    data[data.index(some()["weight"].numpy().tobytes())] ^= 1
    Path("x.safetensors").write_bytes(data)
    assert same(load("x.safetensors", names="b*"), {"bias": some()["bias"]})


def test_a_load_takes_a_device_and_refuses_what_has_no_meaning() -> None:
    save_safetensors(some(), "x.safetensors").wait()
    assert load("x.safetensors", map_location="meta")["weight"].device.type == "meta"
    assert same(load("x.safetensors", map_location="cpu", weights_only=True), some())
    for settings in ({"mmap": True}, {"map_location": {"cuda:0": "cpu"}}):
        with pytest.raises(UsageError, match="is a safetensors file"):
            load("x.safetensors", **settings)


def test_a_load_waits_for_a_save_in_flight_and_commits_are_in_order() -> None:
    for number in range(6):
        state = {"n": torch.full((20_000,), float(number))}
        if number % 2:
            save({"n": number}, f"{number}.pt")
        else:
            save_safetensors(state, "x.safetensors")
    assert load("x.safetensors")["n"][0] == 4
    assert [os.path.exists(f"{number}.pt") for number in (1, 3)] == [True, True]


def test_a_save_in_a_signal_handler_is_written_at_once() -> None:
    done = in_process(
        "import os, signal, torch, safetensors.torch\n"
        "from portus.reach.training.safetensors import save_safetensors\n"
        "from portus.engine.media import calls\n"
        "flat = torch.arange(100.0)\n"
        "def handle(*_):\n"
        "    handle = save_safetensors({'a': flat, 'b': torch.ones(9)[2:4]}, 'x.safetensors')\n"
        "    assert handle.committed and os.path.exists('x.safetensors')\n"
        "signal.signal(signal.SIGUSR1, handle)\n"
        "from portus.reach.formats import safetensors_file\n"
        "real = safetensors_file.NamedTensors\n"
        "import portus.reach.training.safetensors as made\n"
        "def interrupted(*a, **k):\n"
        "    made.NamedTensors = real\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    return real(*a, **k)\n"
        "made.NamedTensors = interrupted\n"
        "save_safetensors({'c': torch.zeros(4)}, 'y.safetensors').wait()\n"
        "found = safetensors.torch.load_file('x.safetensors')\n"
        "assert torch.equal(found['a'], flat) and found['b'].tolist() == [1, 1]\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_removed_too_early_by_a_killed_program_is_put_back_if_it_is_whole() -> None:
    program = (
        "import os, signal, torch\n"
        "from portus.reach.training.safetensors import save_safetensors\n"
        "from portus.engine.writer.image_file import ImageFile\n"
        "save_safetensors({'n': torch.ones(9)}, '1.safetensors').wait()\n"
        "ImageFile.finish = lambda file: os.kill(os.getpid(), signal.SIGKILL)\n"
        "save_safetensors({'n': torch.ones(9)}, '2.safetensors')\n"
        "os.unlink('1.safetensors')\n"
        "import time; time.sleep(60)\n"
    )
    done = in_process(program)
    assert done.returncode == -9
    assert load("1.safetensors")["n"].tolist() == [1.0] * 9
    assert not os.path.exists("2.safetensors")
