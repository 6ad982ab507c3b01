"""Generated states have the very pickle of ``torch.save``, and their storages in its order."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from portus.engine.state.pickling import pickle_state

BASES = [torch.arange(24.0).reshape(4, 6) + each for each in range(3)]

VIEWS = st.sampled_from(
    [
        lambda base: base,
        lambda base: base.t(),
        lambda base: base[1:, ::2],
        lambda base: base[0],
        lambda base: base[0].expand(3, 6),
        lambda base: torch.nn.Parameter(base),
        lambda base: base.clone().to(torch.bfloat16),
        lambda base: base.clone().to(torch.int64),
        lambda base: base[:0].clone(),
        lambda base: base.to(torch.complex64).conj(),
        lambda base: base.to(torch.float8_e4m3fn),
        lambda base: base.clone().requires_grad_(),
    ]
)

LEAVES = st.one_of(
    st.builds(lambda base, view: view(base), st.sampled_from(BASES), VIEWS),
    st.sampled_from(BASES),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.none(),
    st.booleans(),
)

KEYS = st.one_of(st.text(max_size=3), st.integers(-3, 300))

STATES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=5),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(KEYS, parts, max_size=5),
        parts.map(lambda part: [part, part]),
    ),
    max_leaves=25,
)


@settings(max_examples=150, deadline=None)
@given(STATES)
def test_a_generated_state_has_the_pickle_and_the_storages_of_torch(state: Any) -> None:
    file = io.BytesIO()
    torch.save(state, file)

    pickled = pickle_state(state)

    with zipfile.ZipFile(file) as archive:
        assert pickled.pickle == archive.read("archive/data.pkl")
        for index, storage in enumerate(pickled.storages):
            assert bytes(storage.tolist()) == archive.read(f"archive/data/{index}")
        storages = [name for name in archive.namelist() if name.startswith("archive/data/")]
        assert len(storages) == len(pickled.storages)
