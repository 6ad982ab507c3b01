"""Small real file systems, for root; a storage host; a saver of files."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hosts import serving, url

SMALL_BYTES = 16 << 20

Mount = Callable[[str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a fresh file system of ``SMALL_BYTES`` by its kind, or skips and says why."""
    with ExitStack() as stack:

        def of_kind(kind: str) -> Path:
            place = tmp_path / f"mounted {kind}"
            place.mkdir()
            _run(*_command(kind, tmp_path), str(place))
            # Lazily: a test that failed may still have a file open there.
            stack.callback(subprocess.run, ["umount", "--lazy", str(place)], check=True)
            return place

        yield of_kind


def _command(kind: str, directory: Path) -> list[str]:
    """The mount command for ``kind``, less the place, after its image was made."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    if kind == "tmpfs":
        return ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "portus-test"]
    if kind == "overlay":
        names = [directory / name for name in ("lower", "upper", "work")]
        for name in names:
            name.mkdir()
        lower, upper, work = names
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        return ["mount", "-t", "overlay", "-o", options, "portus-test"]
    image = directory / f"{kind}.img"
    with open(image, "wb") as file:
        file.truncate(SMALL_BYTES if kind.startswith("ext") else 512 << 20)
    make = {
        "ext2": ["mkfs.ext2", "-q", "-F"],
        "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
        "xfs": ["mkfs.xfs", "-q", "-m", "reflink=0"],
        "xfs with reflink": ["mkfs.xfs", "-q", "-m", "reflink=1"],
        "btrfs": ["mkfs.btrfs", "-q"],
    }[kind]
    if shutil.which(make[0]) is None:
        pytest.skip(f"no {make[0]} here")
    _run(*make, str(image))
    return ["mount", "-o", "loop", str(image)]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]} failed: {done.stderr.strip()}")


@pytest.fixture
def host_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A storage host, to which references may lead; and a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "host") as server:
        monkeypatch.setenv("PORTUS_POOL", url(server))
        yield url(server)


@pytest.fixture
def own_saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test has a saver of its own, which is closed behind it, and works in its directory."""
    from portus.engine.paths import process  # not for all: it imports torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "_savers", [])
    monkeypatch.setattr(process, "_writers", [])
    yield
    process._finish()
