from __future__ import annotations

import dataclasses
import io
import json
import pickle
import pickletools
import random
import zipfile

import pytest

from portus.engine.format import pointer_marks
from portus.engine.format.checksum import digest
from portus.errors import CorruptionError, UsageError
from portus.reach.format import reference as ref

SAMPLE = ref.Reference(
    token="a" * 32,
    pool="b" * 32,
    pool_path="/runs/7/.portus/run.portus",
    model="lightning",
    step=1200,
    written_path="/runs/7/checkpoints/last.ckpt",
    files=1,
)


def outcome(data: bytes) -> object:
    try:
        return ref.decode(data)
    except CorruptionError:
        return CorruptionError


def with_text(text: str) -> bytes:
    """A file that is right around ``text``, whatever ``text`` says."""
    return ref._archive(text)


def with_fields(**changes: object) -> bytes:
    fields = json.loads(ref._body(SAMPLE)) | changes
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return with_text(digest(body.encode()).hex() + body)


def test_what_was_encoded_comes_back() -> None:
    odd = dataclasses.replace(SAMPLE, pool_path="/näme/\udcff\n", model="𝔪", step=-(1 << 63))
    for sample in (SAMPLE, odd):
        assert ref.decode(ref.encode(sample)) == sample


def test_the_bytes_never_change() -> None:
    # A golden file: a reference written today must be read for ever.
    golden = digest(ref.encode(SAMPLE)).hex()
    assert golden == "daa6b4b676a997978117334f1a509732"


def test_every_flipped_bit_is_found() -> None:
    data = ref.encode(SAMPLE)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            assert outcome(bytes(damaged)) is CorruptionError, (position, bit)


def test_every_other_byte_value_is_found() -> None:
    data = ref.encode(SAMPLE)
    for position in range(len(data)):
        for value in (0, 0x20, 0x2E, 0x39, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] = value
            assert outcome(bytes(damaged)) in (CorruptionError, SAMPLE), (position, value)
            assert outcome(bytes(damaged)) is CorruptionError or damaged == data


def test_every_cut_and_every_tail_is_found() -> None:
    data = ref.encode(SAMPLE)
    for length in range(len(data)):
        assert outcome(data[:length]) in (CorruptionError, None), length
    head = data.index(pointer_marks.HEAD_MARK) + len(pointer_marks.HEAD_MARK)
    assert all(outcome(data[:length]) is CorruptionError for length in range(head, len(data)))
    assert outcome(data + b"\0") is CorruptionError


def test_damaged_runs_of_bytes_never_give_another_reference() -> None:
    seed = 20260921
    print(f"seed {seed}")
    rng, data = random.Random(seed), ref.encode(SAMPLE)
    other = ref.encode(dataclasses.replace(SAMPLE, step=1300, token="d" * 32))
    found = 0
    for _ in range(3000):
        start = rng.randrange(len(data))
        end = min(len(data), start + rng.randrange(1, 600))
        fill = rng.choice([b"\0" * (end - start), other[start:end], rng.randbytes(end - start)])
        damaged = data[:start] + fill.ljust(end - start, b"\0") + data[end:]
        result = outcome(damaged)
        assert result in (CorruptionError, None) or damaged in (data, other)
        found += result is CorruptionError
    assert found > 2000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\3\4",
        b"PK\5\6" + bytes(18),
        bytes(1500),
        json.dumps({"weight": {"dtype": "F32"}}).encode().ljust(400),
        pickle.dumps({"a": 1}, protocol=2),
        random.Random(3).randbytes(5000),
    ],
)
def test_files_of_others_are_no_reference(data: bytes) -> None:
    assert ref.decode(data) is None


def test_a_long_file_is_no_reference_whatever_it_starts_with() -> None:
    assert ref.decode(ref.encode(SAMPLE) + bytes(pointer_marks.POINTER_MAX)) is None


def test_a_text_that_is_not_the_one_form_is_damage_even_with_a_right_checksum() -> None:
    good = ref._body(SAMPLE)
    for body in ("", "[]", "7", "{", "null", good + " ", good.replace(":", ": ", 1), "[" * 9000):
        with pytest.raises(CorruptionError):
            ref.decode(with_text(digest(body.encode()).hex() + body))
    doubled = good.replace('"step":1200', '"step":7,"step":1200')
    with pytest.raises(CorruptionError):
        ref.decode(with_text(digest(doubled.encode()).hex() + doubled))


@pytest.mark.parametrize(
    "changes",
    [
        {"portus": 0},
        {"portus": True},
        {"portus": "1"},
        {"token": "0" * 31},
        {"token": "../" + "0" * 29},
        {"token": "A" * 32},
        {"token": None},
        {"pool": 7},
        {"pool_path": ""},
        {"pool_path": "a\0b"},
        {"model": ["m"]},
        {"model": "m" * 5000},
        {"step": 1.0},
        {"step": 1 << 63},
        {"step": True},
        {"written_path": None},
        {"written_path": ""},
        {"files": "2"},
        {"portus": 3},
        {"fallback": "c" * 32, "fallback_step": 1100},
        {"stranger": 1},
    ],
)
def test_fields_out_of_range_are_damage(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptionError):
        ref.decode(with_fields(**changes))


def test_a_newer_format_says_to_upgrade() -> None:
    with pytest.raises(UsageError, match="upgrade"):
        ref.decode(with_fields(portus=ref.FORMAT + 1, something="new"))


def test_fields_that_cannot_be_stored_are_refused_before_they_are_written() -> None:
    with pytest.raises(UsageError, match="32 lower-case hex"):
        dataclasses.replace(SAMPLE, token="x")
    with pytest.raises(UsageError, match="model must be 1 to"):
        dataclasses.replace(SAMPLE, model="")


def test_the_longest_fields_still_fit_the_limit() -> None:
    longest = dataclasses.replace(
        SAMPLE,
        pool_path="\udcff" * ref.TEXT_MAX,
        written_path="\udcff" * ref.TEXT_MAX,
        model="\U0001f600" * ref.TEXT_MAX,
    )
    assert ref.decode(ref.encode(longest)) == longest


def test_the_pickle_is_one_call_and_nothing_else() -> None:
    with zipfile.ZipFile(io.BytesIO(ref.encode(SAMPLE))) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        program = archive.read("archive/data.pkl")
        assert "portus export PATH FILE" in archive.read("archive/README.txt").decode()
    assert names[0] == "archive/data.pkl"
    steps = [(op.name, argument) for op, argument, _ in pickletools.genops(program)]
    assert [name for name, _ in steps] == [
        "PROTO",
        "GLOBAL",
        "BINUNICODE",
        "TUPLE1",
        "REDUCE",
        "STOP",
    ]
    assert steps[1][1] == f"portus {pointer_marks.GLOBAL_NAME}"
    text = steps[2][1]
    assert isinstance(text, str)
    assert ref.decode_text(text) == SAMPLE


def test_a_usual_reference_is_small() -> None:
    assert len(ref.encode(SAMPLE)) < 2048
