"""Parts of storages, and elements of tensors, against the plain way to get them."""

from __future__ import annotations

import numpy as np
import pytest

from portus.engine.spec import TensorSpec
from portus.reach.pools.contents import _blocks, _is_contiguous


@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5), (1, 1, 100), (50, 2), (0, 3)])
@pytest.mark.parametrize("count", [1, 3, 1000])
def test_blocks_are_the_array_in_order(shape: tuple[int, ...], count: int) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape)
    blocks = list(_blocks(array, count))
    assert [x for block in blocks for x in np.ravel(block)] == list(range(array.size))
    assert all(block.size <= count or block.ndim == 0 for block in blocks)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), True),
        ((3, 4), (4, 1), True),
        ((3, 4), (1, 3), False),
        ((1, 4), (99, 1), True),
        ((3, 4), (8, 1), False),
        ((3,), (0,), False),
    ],
)
def test_contiguous_is_what_torch_says(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: bool
) -> None:
    spec = TensorSpec("x", "float32", shape, strides, 0, 0)
    assert _is_contiguous(spec) is expected
