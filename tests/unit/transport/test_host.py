"""The connections of one client to a host that goes and comes. The clock is the test's."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import pytest

from portus.errors import TransportError
from portus.reach.protocol.address import parse
from portus.reach.transport.dial import GREETING_S, Credentials, dial
from portus.reach.transport.host import Links
from tests.hosts import serving, url
from tests.simulation.lossy import LossyLink


class Clock:
    """Stands still until it is moved."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def failed(links: Links) -> str:
    with pytest.raises(TransportError) as caught:
        links.borrow()
    return str(caught.value)


def test_a_host_that_is_down_is_tried_now_and_then_and_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr("portus.reach.transport.host.time", clock)
    with (
        serving(tmp_path / "pools") as server,
        LossyLink("127.0.0.1", server.listeners[0].port) as link,
        contextlib.closing(Links(parse(f"portus://127.0.0.1:{link.port}"), Credentials())) as links,
        caplog.at_level(logging.WARNING, "portus"),
    ):
        for pauses in ([0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0], [0.5, 1.0]):
            held = links.borrow()
            link.cut_after = link.relayed
            held.close()
            links.give_back(held)
            for pause_s in pauses:
                assert "next try in" not in failed(links), "it was not tried"
                assert f"(next try in {pause_s:.1f} s)" in failed(links)
                clock.now_s += pause_s - 0.25
                assert "(next try in 0.2 s)" in failed(links)
                clock.now_s += 0.25
            assert "connected again" not in caplog.text
            link.cut_after = None
            for each in [links.borrow(), links.borrow()]:
                links.give_back(each)
            assert caplog.text.count("connected again") == 1
            caplog.clear()


def test_who_was_let_in_waits_for_the_host_as_long_as_was_said(tmp_path: Path) -> None:
    """Not as long as for each word of the greeting."""
    with serving(tmp_path / "pools") as server:
        for silence_s in (GREETING_S / 2, GREETING_S * 2):
            link, _ = dial(parse(url(server)), Credentials(), silence_s)
            with contextlib.closing(link):
                assert link.silence_s == silence_s
