"""Environments with exact versions, made once and kept in the cache, keyed by what is in them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
UNUSED_DAYS_MAX: Final = 14
"""An environment that nothing used for so long is removed: it holds about 6 GB."""


class SmokeError(Exception):
    """An environment cannot be made here; says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Ends:
    """One end of what is promised: a Python, its torch, and the pins of all else."""

    label: str
    python: str
    torch: str
    pins: Path
    deepspeed: Path

    @property
    def variable(self) -> str:
        """The variable that names an interpreter."""
        return f"{self.label.upper()}_PYTHON"


FLOOR: Final = Ends(
    "floor",
    "3.10",
    "torch==2.6.0",
    ROOT / "requirements/floor.txt",
    ROOT / "requirements/deepspeed-floor.txt",
)
NEWEST: Final = Ends(
    "newest",
    "3.13",
    "torch==2.14.1",
    ROOT / "requirements/dev.txt",
    ROOT / "requirements/deepspeed.txt",
)


def interpreter(end: Ends) -> str:
    """A Python of that version: of the variable, of PATH, or of pyenv. Raises ``SmokeError``."""
    named = os.environ.get(end.variable)
    found = [named] if named else [f"python{end.python}", *_of_pyenv(end.python)]
    for each in found:
        version = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
        said = _output([each, "-c", version]).split()
        if len(said) == 2 and said[0] == end.python:
            return said[1]
    looked = f"${end.variable} is {named!r}" if named else "neither PATH nor pyenv has one"
    raise SmokeError(
        f"Python {end.python} is needed for the {end.label}, and {looked}; install it, or say "
        f"{end.variable}=..."
    )


def cache() -> Path:
    """Where environments are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "portus-smoke"


def environment(end: Ends) -> Path:
    """The environment of that end, made if it is not there yet. Raises ``SmokeError``.

    Whoever asks while another makes it waits.
    """
    python = interpreter(end)
    content = f"{_output([python, '-VV'])}\n{end.torch}\n{end.pins.read_text()}"
    place = cache() / f"{end.label}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    cache().mkdir(parents=True, exist_ok=True)
    with _alone(place.with_suffix(".lock")):
        _remove_unused(place)
        stamp = place / "made"
        if not stamp.exists():
            started = time.monotonic()
            print(f"smoke: {end.label}: making {place}; a few minutes, about 6 GB", flush=True)
            _call([python, "-m", "venv", "--clear", str(place)])
            pip = [*_pip(place), "install", "--no-cache-dir"]
            _call([*pip, end.torch])  # before all else and alone, as the Makefile does
            _call([*pip, end.torch, "-r", str(end.pins)])
            print(f"smoke: {end.label}: made in {time.monotonic() - started:.0f} s", flush=True)
        stamp.touch()
    return place


def with_portus(end: Ends, base: Path, place: Path) -> Path:
    """A Python at ``place`` that has ``base``, and the wheel of this tree as a user would."""
    _call([str(base / "bin/python"), "-m", "venv", "--without-pip", str(place)])
    packages = Path("lib") / f"python{end.python}" / "site-packages"
    (place / packages / "base.pth").write_text(f"{base / packages}\n")
    target = ["--target", str(place / packages)]
    _call([*_pip(base), "install", "--no-deps", "--no-build-isolation", *target, str(ROOT)])
    (place / "deepspeed").symlink_to(_deepspeed(end, base))
    return place / "bin" / "python"


def _deepspeed(end: Ends, base: Path) -> Path:
    """A folder with DeepSpeed beside an environment, made if it is not there yet: Accelerate and
    others import it wherever they find it."""
    place = base / f"deepspeed-{hashlib.sha256(end.deepspeed.read_bytes()).hexdigest()[:16]}"
    if not place.exists():
        made = place.with_suffix(".new")
        shutil.rmtree(made, ignore_errors=True)
        options = ["install", "--no-deps", "--target", str(made), "-r", str(end.deepspeed)]
        _call([*_pip(base), *options])
        made.rename(place)
    return place


def _pip(place: Path) -> list[str]:
    python = str(place / "bin" / "python")
    return [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def _of_pyenv(version: str) -> list[str]:
    known = _output(["pyenv", "versions", "--bare"]).split()
    found = [each for each in known if each.startswith(f"{version}.")]
    prefixes = [_output(["pyenv", "prefix", each]).strip() for each in found]
    return [str(Path(prefix) / "bin" / "python") for prefix in prefixes if prefix]


def _remove_unused(but: Path) -> None:
    for stamp in cache().glob("*/made"):
        age_s = time.time() - stamp.stat().st_mtime
        if stamp.parent != but and age_s > UNUSED_DAYS_MAX * 86400:
            shutil.rmtree(stamp.parent)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _output(command: Sequence[str]) -> str:
    """What it says, or nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SmokeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
