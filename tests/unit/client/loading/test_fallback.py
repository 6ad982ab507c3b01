"""What is damaged or missing here is taken from the mirror, verified, and said."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.client.loading import resolve
from portus.client.paths.pooled import PoolCheckpointer
from portus.errors import CorruptionError, UsageError
from portus.format.layout import RecordKind
from portus.index.directory import open_reader
from portus.index.records import decode_layout
from portus.mirror.address import parse
from tests.hosts import free_port


class Run:
    """A run with a mirror: steps 1, 2 and 3, of which 2 and 3 have files."""

    def __init__(self, root: Path) -> None:
        self.root = root / "run"
        self.root.mkdir()
        self.url = f"file://{root}/bucket"
        self.pool = self.root / ".portus" / "net.portus"
        with self.start() as run:
            for step in (1, 2, 3):
                path = None if step == 1 else self.root / f"{step}.ckpt"
                run.save(state(step), step, reference=path).wait()

    def start(self, **more: Any) -> PoolCheckpointer:
        settings: dict[str, Any] = {"mirror": self.url, "keep": None}
        return PoolCheckpointer(self.root / ".portus", "net", **(settings | more))

    def damage(self, step: int, name: str) -> None:
        """Flip a bit of a tensor in the pool."""
        reader = open_reader(str(self.pool))
        [entry] = [each for each in reader.catalogue().entries() if each.info.step == step]
        record = reader.record(entry)
        specs = decode_layout(reader.payload(record.layout, RecordKind.LAYOUT))
        [storage] = [each.storage for each in specs if each.name == name]
        place = record.storage_extents(storage)[0]
        reader.close()
        flip(self.pool, place.offset + 5)

    def damage_mirror(self, kind: str) -> None:
        for path in (Path(parse(self.url).prefix) / "net" / kind).iterdir():
            flip(path, path.stat().st_size // 2)


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(step)), "frozen": torch.arange(70_000), "step": step}


def same(left: Any, right: dict[str, Any]) -> bool:
    return left["step"] == right["step"] and all(
        torch.equal(left[name], right[name]) for name in ("w", "frozen")
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(resolve.POOLS, "_mirrors", [])
    made = Run(tmp_path)
    monkeypatch.chdir(made.root)
    return made


def test_a_damaged_version_is_taken_from_the_mirror_and_said(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.damage(3, "w")
    with caplog.at_level(logging.ERROR, "portus"), run.start() as saver:
        assert same(saver.load(), state(3))
        assert "step 3 is taken from the mirror file://" in caplog.text
        assert "FALLING BACK" not in caplog.text
        target = state(0)
        saver.restore_into(target)
        assert same(target, state(3))
        assert same(saver.load(step=2), state(2))
    with portus.open(run.pool) as pool:
        assert same(pool.load("net"), state(2)), "who knows no mirror falls back"


def test_what_is_damaged_here_and_there_is_never_handed_out(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.damage(3, "w")
    run.damage_mirror("packs")
    with caplog.at_level(logging.ERROR, "portus"), run.start() as saver:
        assert same(saver.load(), state(2)), "the newest one that verifies"
        assert "FALLING BACK to step 2" in caplog.text
        with pytest.raises(CorruptionError, match=r"step 3 .* is damaged"):
            saver.load(step=3)
    with pytest.raises(CorruptionError, match=r"step 3 .* is damaged"):
        portus.load_reference("3.ckpt")


def test_the_save_after_damage_shares_nothing_with_it(run: Run) -> None:
    """Nobody wrote to ``frozen``, so else the next save would take it for what is there."""
    trained = state(4)
    with run.start() as saver:
        for step in (4, 5, 6):
            trained["step"] = step
            trained["w"].fill_(step)
            if step == 6:
                run.damage(5, "frozen")
                saver.load()  # an older one, if the mirror is behind
            saver.save(trained, step).wait()
    with portus.open(run.pool) as pool:
        assert same(pool.load("net", step=6), state(6))


def test_a_reference_whose_version_is_damaged_or_gone_is_led_to_the_mirror(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.damage(3, "w")
    resolve.POOLS._mirrors.clear()
    with pytest.raises(CorruptionError):
        portus.load_reference("3.ckpt")
    portus.Settings(mirror=run.url).allow_mirror()
    with caplog.at_level(logging.ERROR, "portus"):
        assert same(portus.load_reference("3.ckpt"), state(3))
        assert same(torch.load("3.ckpt"), state(3))
    assert caplog.text.count("INSTEAD") == 2
    caplog.clear()
    assert same(portus.load_reference("2.ckpt"), state(2))
    assert not caplog.text, "what is whole here is read here"
    shutil.rmtree(".portus")
    assert same(portus.load_reference("2.ckpt"), state(2))
    assert "is not beside the reference" in caplog.text


def test_only_what_is_configured_is_asked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(".portus")
    resolve.POOLS._mirrors.clear()
    with pytest.raises(UsageError, match="may not choose what is opened"):
        portus.load_reference("2.ckpt")
    monkeypatch.setenv("PORTUS_MIRROR", run.url)
    assert same(portus.load_reference("2.ckpt"), state(2))
    monkeypatch.setenv("PORTUS_MIRROR", "none")
    with pytest.raises(UsageError, match="may not choose what is opened"):
        portus.load_reference("2.ckpt")


def test_a_step_that_is_only_in_the_mirror_is_loaded_from_there(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with run.start(keep=portus.Keep(last=1, every=1)) as saver:
        pass
    shutil.rmtree(run.root)
    run.root.mkdir()
    with run.start() as saver:
        assert saver.steps() == [2, 3]
        with caplog.at_level(logging.ERROR, "portus"):
            assert same(saver.load(step=1), state(1))
        assert "step 1 is taken from the mirror" in caplog.text
        with pytest.raises(UsageError, match="step: expected an integer, found '3'"):
            saver.load(step="3")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"there are steps \[2, 3\]"):
            saver.load(step=7)


def test_a_mirror_that_does_not_answer_leaves_things_as_they_are(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}"),
        ("PORTUS_MIRROR", "s3://bucket/runs"),
    ):
        monkeypatch.setenv(name, value)
    run.damage(3, "w")
    resolve.POOLS._mirrors.clear()
    with caplog.at_level(logging.ERROR, "portus"):
        with pytest.raises(CorruptionError, match=r"step 3 .* is damaged"):
            portus.load_reference("3.ckpt")
        assert "and it cannot be loaded from s3://bucket/runs: " in caplog.text
        assert "the connection is refused" in caplog.text
        assert same(portus.load_reference("2.ckpt"), state(2))
