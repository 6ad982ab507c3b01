"""``docs/format.md`` says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from portus.engine.format.checksum import UNIT
from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.format.record import Record
from portus.engine.spec import PAGE
from portus.reach.format import items, layout
from portus.reach.index.findings import RULES
from portus.reach.media.lock import PIN_BASE, WRITER_BYTE

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "format.md").read_text()


@pytest.mark.parametrize("table", layout.TABLES, ids=lambda table: table.name)
def test_the_document_holds_the_table(table: Record) -> None:
    assert table.table() in TEXT


@pytest.mark.parametrize("rule", RULES)
def test_the_document_holds_the_rule(rule: str) -> None:
    assert f"- **{rule}** {RULES[rule]}\n" in TEXT


def test_every_record_of_the_layout_is_in_the_tables() -> None:
    records = [value for value in vars(layout).values() if isinstance(value, Record)]
    assert set(map(id, records)) == set(map(id, layout.TABLES))


def test_the_document_names_every_tag_of_a_shelf() -> None:
    source = Path(items.__file__).read_text()
    tags = set(re.findall(r'"(\$[a-z]+)"', source))
    assert len(tags) == 7
    assert {tag for tag in tags if f"`{tag}`" not in TEXT} == set()


def test_the_document_holds_the_zones() -> None:
    slots = layout.SLOT_OFFSETS
    for offset, what in (
        (slots[0], "root slot 0: even commits"),
        (slots[1], "root slot 1: odd commits"),
        (layout.HOLDER_OFFSET, "holder: who opened the pool for writing last"),
        (slots[2], "copy of root slot 0"),
        (slots[3], "copy of root slot 1"),
    ):
        assert f"| {offset // PAGE} | {offset} | {what} |" in TEXT
    assert f"| {layout.DATA_START // PAGE} on | {layout.DATA_START} |" in TEXT
    assert f"up to {layout.HOLDER_SIZE - 1} bytes of text" in TEXT


def test_the_document_holds_the_kinds_of_records() -> None:
    for kind in layout.RecordKind:
        name = kind.name.lower().replace("_", " ")
        assert f"| {kind.value} | {name} |" in TEXT
        assert f"{kind.value} {name}" in layout.HEADER.table()


def test_the_document_holds_the_numbers() -> None:
    assert f"# The pool format, version {layout.FORMAT_VERSION}\n" in TEXT
    assert f"is {PAGE} bytes" in TEXT
    assert f"is {UNIT >> 20} MiB of a storage" in TEXT
    assert f"Containers nest to a depth of {items.DEPTH_MAX}" in TEXT
    assert layout.VERSION_ID_MAX == 1 << 61
    assert f"| a model's name | {layout.NAME_SIZE_MAX} characters" in TEXT
    assert layout.RECORD_SIZE_MAX == 64 << 30
    assert (PIN_BASE, WRITER_BYTE) == (1 << 62, (1 << 62) - 1)


def test_the_layout_sizes_every_dtype_that_is_saved() -> None:
    from portus.engine.state.walk import DTYPES

    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == {
        name: size for name, size in ITEM_SIZES.items() if name in DTYPES
    }
