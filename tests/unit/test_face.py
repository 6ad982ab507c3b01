"""The public face: lazy, small, and true to what type checkers are told."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

import portus
from tests.packages import ADAPTERS, FOLDERS

CORE = Path(portus.__file__).parent
# Floors that must import without torch: a storage host has none.
TORCHLESS = (
    "errors",
    "engine/spec",
    "engine/settings",
    "companions/cadence",
    "companions/samples",
    "engine/format",
    "reach/format",
    "engine/media",
    "reach/media",
    "companions/media",
    "engine/copying",
    "reach/transport",
    "reach/index",
    "engine/pipeline",
    "reach/versions",
    "reach/mirror",
    "reach/protocol",
    "reach/daemon",
    "cli",
    "testing",
)

# What Windows or macOS lacks of what we may be tempted to use when a module is imported.
LINUX_MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
FRAMEWORKS = (
    *(name.removeprefix("portus_") for name in ADAPTERS),
    *("lightning.pytorch", "pytorch_lightning", "transformers.trainer"),
)
"""What adapters import, as far as it is installed: it need not be importable without Linux."""

LINUX_OS = (
    *("fdatasync", "fork", "getuid", "posix_fadvise", "posix_fallocate", "pread", "preadv"),
    *("pwrite", "pwritev", "register_at_fork", "sched_getaffinity", "statvfs", "sync", "uname"),
)


def fresh(program: str, within_s: int = 60) -> str:
    """What ``program`` prints, run by a new interpreter."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def modules_below(floor: str) -> list[str]:
    """Every module of one floor, by its full name."""
    files = sorted((CORE / floor).rglob("*.py")) or [CORE / f"{floor}.py"]
    parts = [file.relative_to(CORE.parent).with_suffix("").parts for file in files]
    return [".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts]


@pytest.mark.parametrize("name", portus._MODULE_OF)
def test_every_public_name_is_there(name: str) -> None:
    module, _, name_there = portus._MODULE_OF[name].partition(":")
    assert getattr(portus, name) is getattr(import_module(module), name_there or name)
    assert name in dir(portus)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(portus, "nonsense")  # noqa: B009


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((CORE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    told: dict[str, str] = {}
    for line in block.body:
        if isinstance(line, ast.ImportFrom):
            told.update({alias.name: str(line.module) for alias in line.names})
            assert all(alias.asname == alias.name for alias in line.names), "mypy exports no other"
        else:
            name, value = ast.unparse(line).split(" = ")
            told[name] = f"{told[value]}:{value}"
    assert told == portus._MODULE_OF


@pytest.mark.parametrize("floor", TORCHLESS)
def test_a_floor_imports_without_torch(floor: str) -> None:
    modules = modules_below(floor)
    assert modules
    imports = "\n".join(f"import {module}" for module in modules)
    fresh(f"import sys; sys.modules['torch'] = None\n{imports}")


@pytest.mark.long
@pytest.mark.timeout(310)
def test_every_module_imports_where_linux_is_missing() -> None:
    """On macOS and Windows checkpoints load. Here: what they lack is taken from this system,
    after the imports of others, and before ours."""
    fresh(
        "import contextlib, ctypes, importlib, mmap, os, pkgutil, sys\n"
        "import isal.isal_zlib, msgspec, numpy, pytest, torch, xxhash\n"
        f"for name in {FRAMEWORKS}:\n"
        "    with contextlib.suppress(ImportError):\n"
        "        importlib.import_module(name)\n"
        f"sys.modules.update(dict.fromkeys({LINUX_MODULES}))\n"
        f"for name in {LINUX_OS}:\n"
        "    delattr(os, name)\n"
        "for name in dir(mmap):\n"
        "    if name.startswith(('MAP_', 'PROT_', 'MADV_')):\n"
        "        delattr(mmap, name)\n"
        f"for package in map(importlib.import_module, {list(FOLDERS)}):\n"
        "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if not found.name.endswith('._native'):\n"
        "            try:\n"
        "                importlib.import_module(found.name)\n"
        "            except ModuleNotFoundError as error:\n"
        f"                if error.name in {LINUX_MODULES} or error.name.startswith('portus'):\n"
        "                    raise\n",
        within_s=300,
    )


def loaded_by(program: str, before: str) -> set[str]:
    """The modules that ``program`` loads in a new interpreter, beyond those that ``before`` did."""
    told = fresh(
        f"import sys\n{before}\nthere = set(sys.modules)\n{program}\n"
        "print(*(set(sys.modules) - there))"
    )
    return set(told.split())


def test_importing_portus_loads_itself_alone_and_starts_nothing() -> None:
    """What is loaded is what it costs: a time would depend on what else the machine does."""
    before = "import __future__, importlib, threading, typing, warnings"
    nothing_started = "assert threading.active_count() == 1, threading.enumerate()"
    assert loaded_by(f"import portus\n{nothing_started}", before) == {"portus"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("entry", "behind"),
    [
        ("allow_references", {"portus", "portus._autoload"}),
        ("follow_the_flag", {"portus_accelerate"}),
    ],
)
def test_registering_with_torch_loads_next_to_nothing(entry: str, behind: set[str]) -> None:
    """``import torch`` of every script on the machine pays for it."""
    before = (
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "os.environ.pop('PORTUS_ACCELERATE', None)\n"
        "import torch"
    )
    program = f"import portus_in_torch\nportus_in_torch.{entry}()"
    assert loaded_by(program, before) == {"portus_in_torch", *behind}


def test_every_entry_point_leads_somewhere() -> None:
    """A dead one would break ``import torch``, or every Trainer of every user."""
    try:
        distribution = metadata.distribution("portus-checkpoint")
    except metadata.PackageNotFoundError:
        pytest.skip("portus-checkpoint is not installed here, only on the path")
    points = list(distribution.entry_points)
    assert {point.group for point in points} >= {
        "console_scripts",
        "torch.backends",
        "lightning.pytorch.callbacks_factory",
    }
    for point in points:
        assert callable(point.load()), point


def test_the_version_is_the_distributions() -> None:
    try:
        assert metadata.version("portus-checkpoint") == portus.__version__
    except metadata.PackageNotFoundError:
        pytest.skip("portus-checkpoint is not installed here, only on the path")


def test_settings_as_arguments_are_the_settings() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(portus.Settings)}
    told = {
        name: each.__forward_arg__ for name, each in portus.SettingsDict.__annotations__.items()
    }
    assert told == fields
