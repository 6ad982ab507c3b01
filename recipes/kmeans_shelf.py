"""KMeans by scikit-learn on a shelf: killed at any moment, it continues at the same iteration.

    python recipes/kmeans_shelf.py runs/kmeans.portus --clusters 10
    python recipes/kmeans_shelf.py runs/kmeans.portus --clusters 10 --mini-batch 1000

Run it again after a crash. The result equals that of an uninterrupted run, bit for bit: an
iteration is a function of what is on the shelf, and one thread adds in one order.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans, MiniBatchKMeans
from threadpoolctl import threadpool_limits

import portus
from mnist_shaped import Points, points

TOLERANCE = 1e-9
"""The move of a center, relative to its length, below which it has converged."""


def lloyd(data: Points, centers: Points) -> Points:
    """Return the centers after one iteration: for each the mean of the points nearest to it."""
    model = KMeans(len(centers), init=centers, n_init=1, max_iter=1)
    found: Points = model.fit(data).cluster_centers_
    return found


class MiniBatch:
    """One iteration of ``MiniBatchKMeans``, whose state is its centers, and the number of points
    that each has had."""

    def __init__(self, clusters: int, size: int) -> None:
        self.size = size
        self._model = MiniBatchKMeans(clusters, n_init=1, reassignment_ratio=0, random_state=0)

    def __call__(self, data: Points, centers: Points, counts: Points, step: int) -> None:
        """Run one iteration in place. The batch depends on the step alone."""
        rows = np.random.default_rng(step).integers(len(data), size=self.size)
        model = self._model
        if not hasattr(model, "cluster_centers_"):  # its result for the first batch is not used
            model.partial_fit(data[: max(self.size, len(centers))])
        model.cluster_centers_, model._counts = centers.copy(), counts.copy()
        model.partial_fit(data[rows])
        centers[:], counts[:] = model.cluster_centers_, model._counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shelf", type=Path)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--mini-batch", type=int, default=0, help="points of a batch; 0: all")
    parser.add_argument("--mnist", type=Path, help="an .npz file of it")
    parser.add_argument("--points", type=int, default=70_000)
    parser.add_argument("--features", type=int, default=784)
    wish = parser.parse_args()
    data = points(wish.mnist, wish.points, wish.features)
    wish.shelf.parent.mkdir(parents=True, exist_ok=True)
    with threadpool_limits(1), portus.Shelf(wish.shelf) as shelf:
        if "centers" not in shelf:
            with shelf.transaction():
                rng = np.random.default_rng(0)
                shelf.centers = data[rng.choice(len(data), wish.clusters, replace=False)]
                shelf.counts = np.zeros(wish.clusters)
                shelf.iteration, shelf.converged = 0, False
        print(f"from iteration {shelf.iteration}", flush=True)
        iterate(wish, data, shelf)


def iterate(wish: argparse.Namespace, data: Points, shelf: portus.Shelf) -> None:
    """Iterate until it has converged, or made its iterations."""
    mini_batch = MiniBatch(wish.clusters, wish.mini_batch) if wish.mini_batch else None
    while shelf.iteration < wish.iterations and not shelf.converged:
        with shelf.transaction():  # centers, counts and iteration: all or none
            before = shelf.centers.copy()
            if mini_batch is not None:
                mini_batch(data, shelf.centers, shelf.counts, shelf.iteration)
            else:
                shelf.centers[:] = lloyd(data, shelf.centers)
            shelf.iteration += 1
            moved = np.linalg.norm(shelf.centers - before) / np.linalg.norm(before)
            shelf.converged = bool(moved < TOLERANCE)
            began = time.perf_counter()
        took_ms = 1000 * (time.perf_counter() - began)
        said = f"iteration {shelf.iteration}: moved {moved:.3g}, kept in {took_ms:.3f} ms"
        print(said, flush=True)
    print("converged" if shelf.converged else "not converged yet", flush=True)


if __name__ == "__main__":
    main()
