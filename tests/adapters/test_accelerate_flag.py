"""The flag, in its three ways, over a script that knows nothing of Portus; each in a process of
its own, as users have it."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import portus
import portus_accelerate
from portus_accelerate import FLAG, autoload
from portus_accelerate.settings import VARIABLE, _tell
from tests.adapters import forked
from tests.adapters.launching import TWO

HERE = Path(__file__).parent
SCRIPT = HERE / "accelerate_script.py"


def run(
    root: Path,
    site: Path,
    *arguments: object,
    launcher: tuple[str, ...] = (),
    flag: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """The script in ``root``, with the entry points of this tree."""
    root.mkdir(exist_ok=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PORTUS")}
    more = {"PYTHONPATH": str(site), "HF_HOME": str(root / "hf")}
    command = [sys.executable, *launcher, str(SCRIPT), "--root", str(root)]
    return subprocess.run(
        [*command, *map(str, arguments)],
        env={**clean, **more, **({"PORTUS_ACCELERATE": "1"} if flag else {}), **variables},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def whole(root: Path, *arguments: object, processes: int = 1) -> None:
    """The script without Portus, to its end."""
    forked.script(SCRIPT, root, "--root", root, *arguments, processes=processes)
    assert not is_on(root)


def losses(root: Path, rank: int = 0) -> list[str]:
    """What the script logged: step, digest of the batch, loss in hex; and the state at the end."""
    return (root / f"losses-{rank}.txt").read_text().splitlines()


def is_on(root: Path) -> bool:
    return any((root / ".portus").glob("*.journal"))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What happens without Portus."""
    root = tmp_path_factory.mktemp("stock")
    whole(root)
    assert (root / "checkpoints/checkpoint_0/model.safetensors").exists()
    return losses(root)


def killed_and_resumed(
    root: Path,
    site: Path,
    *arguments: object,
    after: int,
    launcher: tuple[str, ...] = (),
    flag: bool = True,
    **variables: str,
) -> None:
    """Killed right after save number ``after`` was asked for; started again by the same command."""
    how: Any = {"launcher": launcher, "flag": flag, **variables}
    killed = run(root, site, *arguments, "--kill-after", after, **how)
    assert killed.returncode in (-signal.SIGKILL, 1), killed.stderr
    done = run(root, site, *arguments, **how)
    assert done.returncode == 0, done.stderr
    assert is_on(root)


def killed_and_resumed_in_forks(
    root: Path, *arguments: object, after: int, processes: int = 1
) -> None:
    """The same without the start of a Python."""
    how: Any = {"processes": processes, "flag": True}
    killed = ("--kill-after", after)
    forked.script(SCRIPT, root, "--root", root, *arguments, *killed, ends="killed", **how)
    forked.script(SCRIPT, root, "--root", root, *arguments, **how)
    assert is_on(root)


def assert_same(found: list[str], expected: list[str]) -> None:
    """Nothing was logged that the uninterrupted run did not log, and all of that was."""
    assert set(found) == set(expected)


@pytest.mark.long
@pytest.mark.smoke
def test_losses_and_final_state_are_the_same_bits(
    stock: list[str], tmp_path: Path, installed: Path
) -> None:
    done = run(tmp_path, installed, flag=True)
    assert done.returncode == 0, done.stderr
    assert is_on(tmp_path)
    assert losses(tmp_path) == stock


@pytest.mark.long
@pytest.mark.parametrize("after", [3, 7])
def test_killed_in_a_save_and_resumed_is_as_if_it_had_not_been(
    stock: list[str], tmp_path: Path, installed: Path, after: int
) -> None:
    # Twelve steps, six to an epoch: in the middle of one, and at its end.
    killed_and_resumed(tmp_path, installed, after=after)
    assert_same(losses(tmp_path), stock)


@pytest.mark.long
def test_a_module_that_runs_the_script_turns_it_on_and_killed_it_resumes(
    stock: list[str], tmp_path: Path, installed: Path
) -> None:
    # Where torch calls no entry points, too.
    how: Any = {"launcher": ("-m", "portus_accelerate.run"), "flag": False}
    killed_and_resumed(tmp_path, installed, after=3, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **how)
    assert_same(losses(tmp_path), stock)


@pytest.mark.long
@pytest.mark.parametrize("after", [4, 8, 7])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("more", [(), ("--seedable",)])
def test_a_stateful_loader_goes_on_with_the_same_order(
    tmp_path: Path, after: int, workers: int, more: tuple[str, ...]
) -> None:
    options = ("--stateful", "--workers", workers, *more)
    whole(tmp_path / "stock", *options)
    killed_and_resumed_in_forks(tmp_path / "on", *options, after=after)
    assert_same(losses(tmp_path / "on"), losses(tmp_path / "stock"))


@pytest.mark.long
@pytest.mark.parametrize("after", [2, 3])
def test_two_processes_of_torchrun_killed_in_a_save_and_resumed(
    tmp_path: Path, installed: Path, after: int
) -> None:
    whole(tmp_path / "stock", processes=2)
    killed_and_resumed(tmp_path / "on", installed, after=after, launcher=TWO)
    for rank in (0, 1):
        assert_same(losses(tmp_path / "on", rank), losses(tmp_path / "stock", rank))


@pytest.mark.long
@pytest.mark.parametrize(
    ("after", "options"),
    [
        (4, ("--stateful",)),
        (2, ("--stateful", "--workers", 2)),
        (2, ("--seedable", "--epochs", 3)),
    ],
)
def test_two_processes_killed_in_a_save_and_resumed(
    tmp_path: Path, after: int, options: tuple[object, ...]
) -> None:
    whole(tmp_path / "stock", *options, processes=2)
    killed_and_resumed_in_forks(tmp_path / "on", *options, after=after, processes=2)
    for rank in (0, 1):
        assert_same(losses(tmp_path / "on", rank), losses(tmp_path / "stock", rank))


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_whose_machine_was_lost_goes_on_from_the_mirror(
    tmp_path: Path, processes: int
) -> None:
    whole(tmp_path / "stock", processes=processes)
    root, mirror = tmp_path / "on", f"file://{tmp_path}/bucket"
    how: Any = {"processes": processes, "flag": True, "variables": {"PORTUS_MIRROR": mirror}}
    forked.script(SCRIPT, root, "--root", root, "--epochs", 1, **how)
    name, steps = f"checkpoint_{6 // processes - 1}", 6 // processes
    newest = {path.name for path in (root / "checkpoints" / name).iterdir()}
    assert f"random_states_{processes - 1}.pkl" in newest
    shutil.rmtree(root)
    forked.script(SCRIPT, root, "--root", root, **how)
    assert {path.name for path in (root / "checkpoints" / name).iterdir()} == newest
    for rank in range(processes):
        expected = losses(tmp_path / "stock", rank)
        assert losses(root, rank) == expected[steps:], "from the second epoch on, the same bits"


YAML = """\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: 'no'
num_processes: 1
use_cpu: true
"""
LAUNCH = ("-m", "accelerate.commands.accelerate_cli", "launch")


@pytest.mark.long
@pytest.mark.parametrize("flag", [False, True])
def test_the_yaml_of_accelerate_launch_turns_it_on(
    stock: list[str], tmp_path: Path, installed: Path, flag: bool
) -> None:
    config = tmp_path / "config.yaml"
    ours = "model: yaml"
    config.write_text(f"{YAML}portus_config: {{{ours}}}\n")
    launcher = (*LAUNCH, "--config_file", str(config))
    done = run(tmp_path, installed, "--limit", 2, launcher=launcher, flag=flag)
    assert done.returncode == 0, done.stderr
    newest = max(tmp_path.glob("checkpoints/*/model.safetensors"))
    assert b'"yaml"' in (portus.read_note(newest) or b"")
    assert losses(tmp_path) == stock
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_10", "checkpoint_11"]


@pytest.mark.parametrize("pool", ["portus://store:7117", "portus+unix:///run/portus.sock"])
def test_a_storage_host_in_the_yaml_is_told_to_the_processes_as_it_is(
    monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    for name in ("PORTUS_POOL", FLAG, VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
    _tell({"pool": pool})
    assert os.environ["PORTUS_POOL"] == pool


def damaged(site: Path, broken: str, text: str) -> Path:
    """A copy of the package in which the module ``broken`` is ``text``; its directory."""
    package = site / "portus_accelerate"
    package.mkdir(parents=True)
    for file in Path(portus_accelerate.__file__).parent.glob("*.py"):
        (package / file.name).write_text(text if file.stem == broken else file.read_text())
    return site


@pytest.mark.parametrize(
    "broken", [pytest.param(n, marks=pytest.mark.long) for n in ("patch", "saver", "settings")]
)
def test_broken_inside_it_breaks_nothing(
    stock: list[str], tmp_path: Path, installed: Path, broken: str
) -> None:
    site = damaged(tmp_path / "site", broken, "raise RuntimeError('broken')")
    both = os.pathsep.join([str(site), str(installed)])
    done = run(tmp_path / "run", Path(both), flag=True)
    assert done.returncode == 0, done.stderr
    assert "has no effect" in done.stderr
    assert not is_on(tmp_path / "run")
    assert losses(tmp_path / "run") == stock


@pytest.mark.long
@pytest.mark.parametrize("missing", ["msgspec", "xxhash"])
def test_without_a_package_that_portus_needs_accelerate_goes_on(
    stock: list[str], tmp_path: Path, installed: Path, missing: str
) -> None:
    (tmp_path / f"{missing}.py").write_text("raise ImportError('not installed')")
    both = os.pathsep.join([str(tmp_path), str(installed)])
    done = run(tmp_path / "run", Path(both), flag=True)
    assert done.returncode == 0, done.stderr
    assert "has no effect: ImportError('not installed')" in done.stderr
    assert losses(tmp_path / "run") == stock


def imported(site: str, **variables: str) -> str:
    """What importing torch in a process of its own says on stderr."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PORTUS")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import torch; torch.ones(1)"],
        env={**clean, "PYTHONPATH": site, **variables},
        cwd="/",  # what is there comes first
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "text", "says"),
    [
        ("__init__", "def register(:", "SyntaxError"),
        pytest.param("__init__", "raise OSError(1)", "OSError(1)", marks=pytest.mark.long),
        pytest.param("__init__", "", "AttributeError", marks=pytest.mark.long),
        pytest.param("autoload", "import not_there", "ModuleNotFoundError", marks=pytest.mark.long),
        pytest.param("autoload", "register = None", "TypeError", marks=pytest.mark.long),
    ],
)
def test_a_damaged_entry_does_not_break_import_torch(
    tmp_path: Path, installed: Path, broken: str, text: str, says: str
) -> None:
    site = damaged(tmp_path / "site", broken, text)
    both = os.pathsep.join([str(site), str(installed)])
    said = imported(both, PORTUS_ACCELERATE="1")
    assert "the flag has no effect" in said
    assert says in said
    assert imported(both) == "", "nobody asked for it"


@pytest.mark.parametrize("error", [OSError(1), SystemExit(1)])
def test_where_nothing_can_be_said_a_damaged_entry_breaks_nothing_either(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    broken: Any = ModuleType("broken")
    broken.register = broken.install = fail
    monkeypatch.setitem(sys.modules, "portus_accelerate", broken)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(autoload, "failures", [])
    monkeypatch.setenv(FLAG, "1")
    monkeypatch.setattr(sys, "stderr", None)
    entry = runpy.run_path(str(HERE.parents[1] / "core" / "portus_in_torch.py"))
    entry["follow_the_flag"]()
    autoload.Watcher("runpy", "run_path", "portus_accelerate")
    assert autoload.failures == [f"portus_accelerate could not be used: {error!r}"]


@pytest.mark.parametrize(
    ("argv", "orig_argv", "is_launcher"),
    [
        (["/usr/bin/accelerate", "launch"], ["python", "/usr/bin/accelerate", "launch"], True),
        (
            ["-m", "x.py"],
            ["python", "-u", "-W", "ignore", "-m", "accelerate.commands.launch", "x.py"],
            True,
        ),
        (["train.py"], ["python", "train.py", "--framework", "accelerate"], False),
    ],
)
def test_the_process_of_accelerate_launch_is_known_however_it_was_started(
    argv: list[str], orig_argv: list[str], is_launcher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert portus_accelerate.is_launcher() is is_launcher


@pytest.mark.long
@pytest.mark.parametrize("text", ["def register(:", "raise OSError('gone')"])
def test_a_damaged_portus_does_not_break_import_torch(
    tmp_path: Path, installed: Path, text: str
) -> None:
    (tmp_path / "portus").mkdir()
    (tmp_path / "portus" / "__init__.py").write_text(text)
    both = os.pathsep.join([str(tmp_path), str(installed)])
    assert "torch.load cannot follow pointers" in imported(both, PORTUS_ACCELERATE="1")
    assert imported(both) == "", "nobody asked for it"


@pytest.mark.long
def test_the_oldest_accelerate_of_the_range(tmp_path: Path, installed: Path) -> None:
    old = tmp_path / "old"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(old)]
    if subprocess.run([*pip, "accelerate==1.0.0"], check=False).returncode:
        pytest.skip("accelerate 1.0.0 cannot be installed here")
    site = Path(os.pathsep.join([str(old), str(installed)]))
    done = run(tmp_path / "stock", site)
    assert done.returncode == 0, done.stderr
    killed_and_resumed(tmp_path / "on", site, after=3)
    assert_same(losses(tmp_path / "on"), losses(tmp_path / "stock"))
    states = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*states, str(HERE / "test_accelerate_states.py")],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_import_torch_loads_nothing_more_when_the_flag_is_off(installed: Path) -> None:
    code = (
        "import torch, sys; print(sorted(m for m in sys.modules if m.startswith('portus')),"
        " [f for f in sys.meta_path if 'portus' in type(f).__module__])"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PORTUS")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = ["portus", "portus._autoload", "portus_accelerate", "portus_in_torch"]
    assert done.stdout.strip() == f"{loaded} []"
