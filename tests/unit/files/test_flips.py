"""A byte of what a client and a host say to each other is changed on the way, each in turn."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.engine.pipeline.draft import Labels
from portus.errors import CorruptionError, PortusError
from portus.reach.daemon.server import Server
from portus.reach.daemon.shared_state import ClientTimeouts
from portus.reach.index.check import check
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import VersionEntry, VersionRecord
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.transport.stream import Link
from portus.reach.versions.host import HostPool
from portus.reach.versions.pool_draft import PoolDraft
from tests.depth import DEPTH
from tests.golden import conversation
from tests.hosts import connect_again_at_once, serving, url
from tests.same import assert_same
from tests.simulation.lossy import LossyLink

SAMPLE = 10
"""Bytes of each conversation that `make test` changes."""

OTHERS = {"other": 5, "kept": 7}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The length of a greeting is guarded by nothing: then somebody waits for the rest of it."""
    monkeypatch.chdir(tmp_path)
    connect_again_at_once(monkeypatch)
    monkeypatch.setattr("portus.reach.transport.dial.GREETING_S", 1.5)
    monkeypatch.setattr("portus.reach.daemon.session.GREETING_S", 1.0)


def meant(step: int) -> dict[str, Any]:
    """A learning rate, a name and a tensor that are others at each step."""
    return {"lr": 0.125 + step, f"w{step}": torch.full((30,), float(step)), "step": step}


def same(found: Any, step: int) -> bool:
    expected = meant(step)
    name = f"w{step}"
    return (
        list(found) == list(expected)
        and found["lr"] == expected["lr"]
        and found["step"] == step
        and torch.equal(found[name], expected[name])
    )


class Scene:
    """A host, a link to it that changes bytes, and a run of two versions beside other models."""

    def __init__(self, server: Server, link: LossyLink) -> None:
        self.direct = url(server)
        self.address = f"portus://127.0.0.1:{link.port}"
        self.writer = server.house.pools.of("default").writer
        self.link = link
        self.step = 1
        for model, step in (*OTHERS.items(), ("run", 0)):
            with PoolCheckpointer(self.direct, model=model) as checkpointer:
                checkpointer.save(meant(step), step).wait()

    def save(self) -> bool:
        """One more version of the run, the only one that is kept; True if it is told."""
        self.step += 1
        with PoolCheckpointer(self.address, model="run", keep=1) as checkpointer:
            checkpointer.save(meant(self.step), self.step).wait(20)
        assert self.steps() == [self.step], "told, and not there"
        return True

    def retire(self) -> bool:
        """The run's versions go, by their tokens, and no others."""
        tokens = [entry.info.token for entry in self.entries()]
        with contextlib.closing(HostPool(self.address)) as pool:
            pool.let_go(tokens)
        assert self.steps() == [], "told, and still there"
        with PoolCheckpointer(self.direct, model="run") as checkpointer:
            checkpointer.save(meant(self.step), self.step).wait()
        return True

    def read(self) -> bool:
        """What was saved is handed out, or nothing is."""
        with portus.open(self.address) as pool:
            assert same(pool.load("kept"), OTHERS["kept"])
        return True

    def entries(self) -> list[VersionEntry]:
        """The versions of the run."""
        found = self.writer.catalogue().entries()
        return [entry for entry in found if entry.info.model == "run"]

    def steps(self) -> list[int]:
        return [entry.info.step for entry in self.entries()]

    def look(self) -> None:
        """Every version is what was meant, and none of those that nobody spoke of is gone."""
        with portus.open(self.direct) as pool:
            for model, step in OTHERS.items():
                assert pool.steps(model) == [step]
                assert same(pool.load(model), step)
            for step in pool.steps("run"):
                assert same(pool.load("run", step), step)

    def flipped(self, act: Callable[[], bool], places: Iterable[int]) -> tuple[int, int]:
        """``act`` again and again, with a byte changed each time; how often it came through and
        was refused."""
        told = refused = 0
        for place in places:
            self.link.damage_at = self.link.relayed + place
            try:
                told += act()
            except PortusError:
                refused += 1
            self.link.damage_at = None
            self.look()
        return told, refused

    def size(self, act: Callable[[], bool]) -> int:
        """Bytes that are said in ``act``, both ways."""
        before = self.link.relayed
        assert act()
        return self.link.relayed - before


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with (
        serving(tmp_path / "pools", patience=ClientTimeouts(silent_s=3.0, claim_s=5)) as server,
        LossyLink("127.0.0.1", server.listeners[0].port) as link,
    ):
        made = Scene(server, link)
        yield made
        assert check(made.writer) == []


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("act", ["save", "retire", "read"])
def test_a_byte_that_changes_on_the_way_is_refused_or_harmless(
    scene: Scene, act: str, seed: int
) -> None:
    act_of = getattr(scene, act)
    size = scene.size(act_of)
    places = random.Random(seed).sample(range(size), SAMPLE)
    _, refused = scene.flipped(act_of, places)
    assert refused or act == "read", "what is read and refused is asked for again"
    assert act_of(), "the link is well again"


def kept(writer: PoolWriter) -> dict[bytes, tuple[str, int, bool, bytes]]:
    """All that a version says, by its token, but its bytes."""
    found = {}
    for entry in writer.catalogue().entries():
        record, info = writer.record(entry), entry.info
        found[info.token] = info.model, info.step, info.inexact, record.contents
        assert record.units.tobytes() == conversation.DIGESTS
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_byte_of_a_conversation_is_refused_or_harmless(tmp_path: Path, seed: int) -> None:
    """All that a client may say but by verbs: two saves, a retirement, reads, a reference file. A
    run tries a third of the bytes, or fewer,, by its seed; the rest are tried by others."""
    first = ("model", 10, False, conversation.CONTENTS)
    meant = {conversation.FIRST: first, conversation.SECOND: ("model", 11, True, *first[3:])}
    with (
        serving(tmp_path / "pools", patience=ClientTimeouts(silent_s=1.0, claim_s=5)) as server,
        LossyLink("127.0.0.1", server.listeners[0].port) as relay,
    ):
        hosted = server.house.pools.of("default")

        def talked() -> bool:
            plain = socket.create_connection(("127.0.0.1", relay.port), 5)
            link = Link(plain, is_client=True, name="host", silence_s=1.0)
            try:
                conversation.talk(link)
                return True
            except PortusError:
                return False
            finally:
                link.close()

        def gone() -> None:
            hosted.writer.retire(hosted.writer.catalogue().ids())

        before = relay.relayed
        assert talked()
        size, harmless, every = relay.relayed - before, 0, round(3 / DEPTH)
        for place in range(seed % every, size, every):
            gone()
            relay.damage_at = relay.relayed + place
            told = talked()
            relay.damage_at = None
            harmless += told
            found = kept(hosted.writer)
            assert found.items() <= meant.items(), place
            assert not told or found.keys() == {conversation.SECOND}, place
        assert size > 4000
        assert harmless <= 30, "a goodbye is heard by nobody"
        assert check(hosted.writer) == []


def another_step(labels: Labels) -> Labels:
    return replace(labels, step=labels.step + 1)


def others(labels: Labels) -> Labels:
    contents = labels.contents.replace(b"step-00000002.pt", b"step-00000003.pt")
    return replace(labels, contents=contents)


@pytest.mark.parametrize(("wrong", "what"), [(another_step, "step"), (others, "contents")])
def test_what_a_host_committed_otherwise_than_it_was_meant_does_not_count(
    wrong: Callable[[Labels], Labels],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes that change in the memory of the host, behind all digests of frames."""
    commit = PoolDraft.commit_rows

    def changed(draft: PoolDraft, rows: Any, labels: Labels, gone: Any) -> VersionRecord:
        return commit(draft, rows, wrong(labels), gone)

    state = {"lr": 0.125, "w": torch.ones(30)}
    with (
        serving(tmp_path / "pools") as server,
        PoolCheckpointer(url(server), on_error="warn") as saves,
    ):
        saves.save(state, 1).wait()
        with monkeypatch.context() as patch:
            patch.setattr(PoolDraft, "commit_rows", changed)
            with pytest.raises(CorruptionError, match=f"committed another {what} "):
                saves.save({**state, "more": 0.125}, 2).wait()
        assert saves.steps() == [1]
        assert_same(saves.load(), state)
