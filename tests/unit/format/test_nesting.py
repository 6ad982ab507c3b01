"""JSON that nests too deep is refused before anything recurses."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portus.engine.format.nesting import DEPTH_MAX, refuse_deep


@pytest.mark.parametrize(("opener", "closer"), [("[", "]"), ('{"a":', "}"), ('[{"]":', "}]")])
def test_what_is_deeper_is_refused_and_the_deepest_is_not(opener: str, closer: str) -> None:
    depth = DEPTH_MAX // len(closer)
    refuse_deep((opener * depth + "1" + closer * depth).encode())
    with pytest.raises(ValueError, match=f"deeper than {DEPTH_MAX}"):
        refuse_deep((opener * (depth + 1) + "1" + closer * (depth + 1)).encode())
    with pytest.raises(ValueError, match=f"deeper than {DEPTH_MAX}"):
        refuse_deep((opener * 100_000).encode())


def test_what_is_wide_is_not_deep() -> None:
    refuse_deep(json.dumps([[{}]] * 10_000).encode())


_JSON = st.recursive(
    st.none() | st.text(), lambda of: st.lists(of) | st.dictionaries(st.text(), of)
)


@given(_JSON)
def test_brackets_in_strings_count_for_nothing(value: object) -> None:
    refuse_deep(json.dumps([value, ["[{" * DEPTH_MAX, '\\"[' * DEPTH_MAX] * 70]).encode())


@given(st.binary() | st.text(alphabet='[]{}"\\a').map(str.encode))
def test_any_bytes_are_refused_or_not(data: bytes) -> None:
    refuse_deep(data)
    refuse_deep(b'"' + data)
