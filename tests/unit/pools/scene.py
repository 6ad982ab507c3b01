"""A training whose checkpoints are pointers to a pool, and what the pool has of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import portus
from portus.engine.loading.checkpoint_file import use_file
from portus.engine.loading.open_file import reads
from portus.engine.paths.process import save
from portus.reach.files.home import open_place
from portus.reach.index.check import check
from portus.reach.training.safetensors import Safetensors, save_safetensors
from portus.reach.training.training_files import TrainingFiles


class Scene:
    """A pool, or several hosts, and a directory for checkpoints."""

    def __init__(self, root: Path, *pools: str) -> None:
        """pools: addresses of hosts; none: a pool file."""
        self.root = root
        self.checkpoints = root / "ckpt"
        self.place = portus.Place.parse(list(pools) or root / "run.portus")

    def path(self, name: str) -> str:
        return str(self.checkpoints / name)

    @contextmanager
    def training(self, name: str = "net", **more: Any) -> Iterator[TrainingFiles]:
        """A training of that name, which has begun."""
        settings = portus.Settings(
            on_error="raise", journal=False, max_bytes=more.pop("max_bytes", None)
        )
        files = TrainingFiles(settings, pool=more.pop("pool", self.place), **more)
        files.begin(name, str(self.root / ".portus"), str(self.checkpoints))
        try:
            yield files
        finally:
            files.close()

    def steps(self, place: portus.Place | None = None) -> list[int]:
        """The steps of all versions in the pool."""
        with portus.open(place or self.place) as pool:
            return [info.step for info in pool.versions()]

    def is_sound(self) -> bool:
        return check(self.place.path) == []


def stored(path: str | Path) -> bytes:
    """The bytes of the file that the pointer at a path leads to."""
    assert portus.is_reference(path), "there is no pointer"
    return use_file(os.fspath(path), lambda file: reads(file)(0, file.size), as_torch=False)


def written(directory: Path, name: str, state: object) -> bytes:
    """The bytes of the file of that name that ``portus.save`` writes."""
    directory.mkdir(exist_ok=True)
    try:
        if isinstance(state, Safetensors):
            save_safetensors(state.tensors, directory / name, dict(state.metadata) or None).wait()
        else:
            save(state, directory / name).wait()
        return (directory / name).read_bytes()
    finally:
        shutil.rmtree(directory)


def allocated(place: portus.Place) -> int:
    """Bytes that versions have in a pool, each counted once."""
    reader = open_place(place)
    try:
        extents = {
            (extent.offset, extent.length)
            for entry in reader.catalogue().entries()
            for index in range(len(reader.record(entry).storages))
            for extent in reader.record(entry).storage_extents(index)
        }
        return sum(length for _, length in extents)
    finally:
        reader.close()
