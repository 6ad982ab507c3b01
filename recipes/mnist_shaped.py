"""Points in the shape of MNIST: 70,000 rows of 784 numbers.

MNIST itself, if a file of it is given (``.npz`` with ``x_train`` and ``x_test``, or with ``data``);
else scikit-learn's 1797 digits, enlarged from 8 x 8 to 28 x 28, each many times with noise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

Points = npt.NDArray[np.float64]

PIXELS = 784


def points(file: Path | None = None, count: int = 70_000, features: int = PIXELS) -> Points:
    """Return ``count`` points, the same at each call, each of the first ``features`` pixels."""
    if file is not None:
        with np.load(file) as found:
            names = ("x_train", "x_test") if "x_train" in found else ("data",)
            rows = np.concatenate([found[name].reshape(-1, PIXELS) for name in names])
        return np.ascontiguousarray(rows[:count, :features] / 255.0)
    digits = load_digits().images / 16
    large = np.kron(digits, np.ones((4, 4)))[:, 2:30, 2:30].reshape(-1, PIXELS)
    rng = np.random.default_rng(0)
    chosen = large[rng.integers(len(large), size=count), :features]
    return np.ascontiguousarray(chosen + rng.normal(0, 0.1, (count, features)))
