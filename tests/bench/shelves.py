"""Rows about the shelf: KMeans and Gaussian mixtures, saved at each iteration, as in the experiment
of PyMM (Wood et al., HPEC'22); and what it costs to ask which pages of 4 GiB were written.

What is saved is what that experiment saves, by its code: of KMeans the centers (k x 784, float64;
12.5 to 63 KB), of a mixture means and Cholesky factors (k x 784 and k x 784 x 784, float32; 4.9 to
24.6 MB) and two numbers. A figure is the mean of the saves of a run, each of other values: those of
iterations. As there, files are written over, and by ``np.savez`` not synced unless it says so.

python -m tests.bench.shelves RESULTS.json PICTURE.png     draws the rows of a run
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import joblib
import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from portus.companions.media import private
from portus.companions.media.private import PrivateMapping
from portus.companions.shelf import Shelf
from portus.engine.spec import PAGE
from tests.bench.measure import Row, Run, timed

State = Mapping[str, Any]
"""Arrays by their names, and plain numbers."""

PIXELS: Final = 784
COUNTS: Final = range(2, 11)
"""Clusters, and components."""

POINTS: Final = 2000
"""Of which iterations are made here; a save does not know how many there are."""

DATA: Final = (70_000, PIXELS)
"""What lies on the shelf too, in one of the ways: MNIST's shape, float32, 220 MB."""

LOG: Final = 64 << 20
ITERATIONS: Final = {"KMeans": 32, "GMM": 3}
BARS: Final = {"KMeans": 10.0, "GMM": 3.0}
PAPER: Final = {"KMeans": (10.0, 75.0), "GMM": (3.0, 3.0)}
"""Source: abstract of the paper of PyMM's authors at HPEC 2022, as IBM Research has it:
KMeans 10 to 75 times, GMM over 3 times as fast as checkpoints by files, on persistent memory."""

SCANNED: Final = 4 << 30
CHANGED: Final = 1024


def shelf_rows(memory: Path, disk: Path, rounds: int) -> Iterator[Row]:
    """All of them."""
    data = np.random.default_rng(0).normal(size=(POINTS, PIXELS))
    for kind, iterations in (("KMeans", kmeans), ("GMM", mixtures)):
        for count in COUNTS:
            states = iterations(data, count)
            for name, folder in (("tmpfs", memory), ("disk", disk)):
                yield _saved(kind, count, states, name, folder, rounds)
    yield scan_row(rounds)


def kmeans(data: np.ndarray, count: int) -> list[State]:
    """The centers after each of some iterations of Lloyd."""
    centers, states = data[:count], list[State]()
    for _ in range(8):
        model = KMeans(count, init=centers, n_init=1, max_iter=1).fit(data)
        centers = model.cluster_centers_
        states.append({"centers": centers})
    return states


def mixtures(data: np.ndarray, count: int) -> list[State]:
    """Means and factors after each of two iterations of EM."""
    states: list[State] = []
    for iterations in (1, 2):
        model = GaussianMixture(
            count, max_iter=iterations, tol=0, reg_covar=1.0, init_params="random_from_data",
            random_state=0,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # after two iterations none has
            model.fit(data)
        states.append(
            {
                "mus": model.means_.astype(np.float32),
                "scale_trils": np.linalg.cholesky(model.covariances_).astype(np.float32),
                "num_features": PIXELS,
                "num_gaussians": count,
            }
        )
    return states


def _saved(
    kind: str, count: int, states: Sequence[State], medium: str, folder: Path, rounds: int
) -> Row:
    durable = medium == "disk"
    that = "np.savez + fsync" if durable else "np.savez"
    row = Row(
        name=f"{kind} k={count}, {medium}: {that} over the shelf, in place",
        bar=1.0 if durable else BARS[kind],
        at_most=False,
        this=that,
        that="in place",
        unit="ms",
    )
    with ExitStack() as stack:
        contenders = files(folder / "saved", states, kind, durable=durable)
        for way in ("assigned", "in place", "data on it"):
            path = folder / f"{way}.portus"
            stack.callback(path.unlink)
            shelf = stack.enter_context(Shelf(path, log_bytes=LOG))
            contenders[way] = on_shelf(shelf, way, states, kind)
        return row.run(contenders, rounds)


def files(path: Path, states: Sequence[State], kind: str, *, durable: bool) -> dict[str, Run]:
    """Ways to save into a file, each over the file of the last time."""

    def torch_save(place: Path, state: State) -> None:
        torch.save(
            {
                name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each
                for name, each in state.items()
            },
            place,
        )

    ways: dict[str, Callable[[Path, State], object]] = {
        "np.savez": lambda place, state: np.savez(place, **state),
        "np.savez_compressed": lambda place, state: np.savez_compressed(place, **state),
        "torch.save": torch_save,
        "joblib": lambda place, state: joblib.dump(dict(state), place),
    }

    def synced(save: Callable[[Path, State], object]) -> Callable[[Path, State], object]:
        def save_and_sync(place: Path, state: State) -> None:
            save(place, state)
            descriptor = os.open(place, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

        return save_and_sync

    if durable:
        ways |= {f"{name} + fsync": synced(ways[name]) for name in tuple(ways)[:2]}
    place = path.with_suffix(".npz")  # or np.savez takes another name
    return {
        name: mean_of(
            [_timed(save, place, state) for state in states],
            1 if "compressed" in name else ITERATIONS[kind],
        )
        for name, save in ways.items()
    }


def _timed(save: Callable[..., object], *arguments: object) -> Run:
    return timed(lambda: save(*arguments))


def on_shelf(shelf: Shelf, way: str, states: Sequence[State], kind: str) -> Run:
    """``assigned``: copied to the shelf, one transaction. ``in place``: it was computed there, so
    that is not counted, and is made durable. ``data on it``: the same, beside the points."""
    with shelf.transaction():
        for name, value in states[0].items():
            shelf[name] = value
        if way == "data on it":
            shelf.data = np.ones(DATA, np.float32)
    if way == "data on it":
        assert shelf.data.any()  # its pages are there

    def assign(state: State) -> float:
        began = time.perf_counter()
        if len(state) == 1:
            [(name, value)] = state.items()
            shelf[name] = value
        else:
            with shelf.transaction():
                for name, value in state.items():
                    shelf[name] = value
        return time.perf_counter() - began

    def compute(state: State) -> float:
        for name, value in state.items():
            if isinstance(value, np.ndarray):
                shelf[name][...] = value
        return timed(shelf.sync)()

    save = assign if way == "assigned" else compute
    return mean_of([functools.partial(save, state) for state in states], ITERATIONS[kind])


def mean_of(saves: Sequence[Run], count: int) -> Run:
    """The mean of ``count`` saves, which take turns, in ms."""

    def run() -> float:
        return 1000 * statistics.fmean(saves[number % len(saves)]() for number in range(count))

    return run


def scan_row(rounds: int) -> Row:
    """Which pages of 4 GiB were written, of which 1,024 were."""
    memory = PrivateMapping(SCANNED)
    memory.committed[::PAGE] = 1
    memory.refresh()
    assert memory.view[::PAGE].all()  # all of them are there
    rng = np.random.default_rng(0)
    memory.view[rng.integers(0, SCANNED // PAGE, CHANGED) * PAGE + 8] = 7
    row = Row(name="which of 4 GiB were written, 1,024 pages", bar=None, this="changed", unit="ms")
    contenders: dict[str, Run] = {"changed": lambda: 1000 * timed(memory.changes)()}
    if private.tells():
        contenders["bit 61"] = lambda: 1000 * timed(lambda: private.written_pages(memory.view))()
    return row.run(contenders, rounds)


def draw(rows: Mapping[str, Any], path: Path) -> None:
    """Files over the shelf by k, beside what the paper says of KMeans and of mixtures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5.6), layout="constrained")
    colors: dict[str, str] = {}
    for panel, kind in zip(panels, BARS, strict=True):
        for medium in ("tmpfs", "disk"):
            found = {
                count: row["figures"]
                for count in COUNTS
                for name, row in rows.items()
                if name.startswith(f"{kind} k={count}, {medium}")
            }
            names = [each for figures in found.values() for each in figures]
            for name in dict.fromkeys(names):
                if name == "in place":
                    continue
                color = colors.setdefault(name.removesuffix(" + fsync"), f"C{len(colors)}")
                ratios = [
                    statistics.median(each[name]) / statistics.median(each["in place"])
                    for each in found.values()
                ]
                style = {"tmpfs": "-", "disk": "-." if "fsync" in name else "--"}[medium]
                panel.plot(list(found), ratios, style, color=color, label=f"{name}, {medium}")
        least, most = PAPER[kind]
        panel.axhspan(least, most, color="gray", alpha=0.2)
        panel.axhline(
            least,
            color="gray",
            label=f"paper: {least:.0f} to {most:.0f}" if most > least else "paper: over 3",
        )
        panel.set_yscale("log")
        panel.set_xlabel("k")
        panel.set_title(f"{kind}: time of a save, over the shelf in place")
    lines = {line.get_label(): line for panel in panels for line in panel.get_lines()}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=90, metadata={"Software": None})


def main() -> None:
    """Draw."""
    results, picture = sys.argv[1:]
    found = json.loads(Path(results).read_text())
    draw({row["name"]: row for row in found["rows"]}, Path(picture))


if __name__ == "__main__":
    main()
