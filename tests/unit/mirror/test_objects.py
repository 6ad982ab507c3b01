from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from portus.reach.mirror import objects, writer
from portus.reach.mirror.objects import (
    DIGEST_SUFFIX,
    NUMBER_MAX,
    entry_name,
    entry_number,
    prefix_of,
    version_file_name,
)
from portus.reach.mirror.store import is_name

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "format.md").read_text()

MODELS = (
    *("gpt", "gpt/rank-0-of-4", "gpt=2Frank-0-of-4", "a.b", ".", "..", "~", "a b", "%2F", "größe"),
    *("x" * 150, "x" * 151, "x" * 200, "é" * 199, "é" * 200, '?#[]{}<>|^`\\*"\r\n'),
)


def test_each_model_has_a_prefix_of_its_own_that_every_store_takes() -> None:
    prefixes = {prefix_of(model) for model in MODELS}
    assert len(prefixes) == len(MODELS)
    for prefix in prefixes:
        assert re.fullmatch(r"[A-Za-z0-9_=-]{1,190}/", prefix), prefix


@pytest.mark.parametrize("number", [1, 2, 9, 10, 10_000, NUMBER_MAX])
def test_a_later_entry_comes_first_in_a_list(number: int) -> None:
    assert entry_number(entry_name(number)) == number
    if number < NUMBER_MAX:
        assert entry_name(number + 1) < entry_name(number)


@pytest.mark.parametrize("name", ["log/", "log/12", "log/0000000000001", "log/00000000000a", ""])
def test_other_names_have_no_number(name: str) -> None:
    assert entry_number(name) is None


def test_no_two_files_of_a_version_are_one_object() -> None:
    names = (
        "a b",
        "a=20b",
        "quoted/a=20b",
        "quoted/a b",
        "a/b",
        "a=2Fb",
        "/a",
        "\udcff",
        "x" * 249,
        "x" * 900,
    )
    found = {version_file_name(1, name, bytes(16), bytes(8)) for name in names}
    assert len(found) == len(names)
    assert all(is_name(each + DIGEST_SUFFIX) for each in found)
    segments = [each for name in found for each in (name + DIGEST_SUFFIX).split("/")]
    assert max(map(len, segments)) <= 255, "file systems take no more"


def structs() -> list[type[msgspec.Struct]]:
    kinds = [each for each in vars(objects).values() if isinstance(each, type)]
    return [each for each in kinds if issubclass(each, msgspec.Struct)]


@pytest.mark.parametrize("kind", structs())
def test_the_document_has_the_fields(kind: type[msgspec.Struct]) -> None:
    config = kind.__struct_config__
    assert config.array_like, "fields come to be at the end"
    tag = [f'`"{config.tag}"`'] if config.tag else []
    fields = ", ".join([*tag, *(f"`{name}`" for name in kind.__struct_fields__)])
    assert f"| {kind.__name__} | {fields} |\n" in TEXT


def test_the_document_has_the_header_and_the_numbers() -> None:
    assert len(structs()) == 7
    assert objects.HEADER.table() in TEXT
    assert NUMBER_MAX == 10**12 - 1
    assert f"number is a multiple of {objects.STRIDE} MUST" in TEXT
    assert f"| facts of an entry | {objects.FACTS_MAX} |" in TEXT
    assert f"the last {objects.TERMS_MAX} |" in TEXT
    assert (
        f"| the name of a claiming process, for messages | {objects.WHO_SIZE_MAX} characters |"
        in TEXT
    )
    assert f"older than {writer.GRACE_S / 3600:.0f} hours by the clock of the store" in TEXT
