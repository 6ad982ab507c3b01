"""A mixture of Gaussians by scikit-learn on a shelf, resumed at the iteration where it died.

    python recipes/gmm_shelf.py runs/gmm.portus --components 10

Run it again after a crash. The result equals that of an uninterrupted run, bit for bit. A component
of 784 dimensions has a covariance of 4.9 MB, and all of them change in each iteration.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

import portus
from mnist_shaped import Points, points

TOLERANCE = 1e-9
"""The relative gain of the likelihood below which it has converged."""

STATE = ("weights_", "means_", "covariances_", "precisions_cholesky_")
"""The state before and after an iteration of EM."""


class Em:
    """One iteration of EM in full. It sets the attributes that ``GaussianMixture`` keeps between
    calls each time, so an iteration is a function of the shelf."""

    def __init__(self, components: int, noise: float) -> None:
        self._model = GaussianMixture(
            components,
            max_iter=1,
            tol=0,
            reg_covar=noise,
            init_params="random_from_data",
            random_state=0,
            warm_start=True,
        )

    def begin(self, data: Points) -> dict[str, Points]:
        """Return the state after the first iteration."""
        self._model.fit(data)
        return {name: getattr(self._model, name) for name in STATE}

    def __call__(self, data: Points, state: dict[str, Points]) -> float:
        """Run one iteration in place; return the likelihood of the data before."""
        model = self._model
        for name, value in state.items():
            setattr(model, name, value.copy())
        model.converged_, model.lower_bound_ = False, -np.inf
        model.n_features_in_ = data.shape[1]
        model.fit(data)
        for name, value in state.items():
            value[:] = getattr(model, name)
        return float(model.lower_bound_)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shelf", type=Path)
    parser.add_argument("--components", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--noise", type=float, default=1e-2, help="added to each variance")
    parser.add_argument("--mnist", type=Path, help="an .npz file of it")
    parser.add_argument("--points", type=int, default=70_000)
    parser.add_argument("--features", type=int, default=784)
    wish = parser.parse_args()
    data = points(wish.mnist, wish.points, wish.features)
    wish.shelf.parent.mkdir(parents=True, exist_ok=True)
    em = Em(wish.components, wish.noise)
    warnings.simplefilter("ignore", ConvergenceWarning)  # one iteration at a time never converges
    with threadpool_limits(1), portus.Shelf(wish.shelf) as shelf:
        if "mixture" not in shelf:
            with shelf.transaction():
                shelf.mixture = em.begin(data)
                shelf.iteration, shelf.likelihood, shelf.converged = 1, float("-inf"), False
        print(f"from iteration {shelf.iteration}", flush=True)
        iterate(wish, data, shelf, em)


def iterate(wish: argparse.Namespace, data: Points, shelf: portus.Shelf, em: Em) -> None:
    """Iterate until it has converged, or made its iterations."""
    while shelf.iteration < wish.iterations and not shelf.converged:
        with shelf.transaction():  # weights, means, covariances and iteration: all or none
            found = em(data, shelf.mixture)
            gained = found - shelf.likelihood
            shelf.converged = bool(abs(gained) < TOLERANCE * abs(found))
            shelf.likelihood = found
            shelf.iteration += 1
            began = time.perf_counter()
        took_ms = 1000 * (time.perf_counter() - began)
        print(f"iteration {shelf.iteration}: {found:.9g}, kept in {took_ms:.3f} ms", flush=True)
    print("converged" if shelf.converged else "not converged yet", flush=True)


if __name__ == "__main__":
    main()
