"""A mistake in a declaration fails when it is made, and a request without an answer at start."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import ClassVar

import pytest

from portus.reach.daemon.requests.router import ANSWERS
from portus.reach.protocol import messages as said
from portus.reach.protocol.vocabulary import MessageKind, Phase, Vocabulary

ASK = {Phase.READY: Phase.ASKED}


class _Body:
    kind: ClassVar[MessageKind]


def spoken() -> Vocabulary:
    """One request, its answer, and what is no request."""
    words = Vocabulary()
    words.client(5, "GREET", {Phase.NEW: Phase.GREETED})(type("Greet", (_Body,), {}))
    words.client(6, "ASK", ASK, handler="ask")(Ask)
    words.client(7, "LEAVE", {Phase.READY: Phase.CLOSED})(type("Leave", (_Body,), {}))
    words.host(64, "TOLD", {Phase.ASKED: Phase.READY})(type("Told", (_Body,), {}))
    return words


class Ask(_Body):
    pass


class Answers:
    def _ask(self, message: Ask) -> str:
        return f"asked {message}"

    def _helps(self, message: Ask, again: bool) -> None:
        """No handler: it takes two."""


def test_each_request_is_bound_to_the_method_it_declares() -> None:
    assert spoken().handlers(Answers) == {Ask.kind: (Answers, Answers._ask)}


def test_a_request_that_no_method_answers_is_told_by_both_names() -> None:
    words = spoken()
    words.client(8, "WONDER", ASK, handler="wonder")(type("Wonder", (_Body,), {}))
    with pytest.raises(AssertionError, match=r"WONDER: .*'wonder'.*Answers of .*_wonder\("):
        words.handlers(Answers)


def test_a_method_that_no_message_names_is_told() -> None:
    class More(Answers):
        def _ask(self, message: Ask) -> str:
            return ""

        def _gone(self, message: Ask) -> str:
            return ""

    with pytest.raises(AssertionError, match=r"_gone of .*More.*no message names it"):
        spoken().handlers(More)


def test_a_handler_of_another_message_is_told() -> None:
    class Other:
        def _ask(self, message: _Body) -> str:
            return ""

    with pytest.raises(AssertionError, match=r"ASK: _ask of .* takes .*_Body.*expected .*Ask"):
        spoken().handlers(Other)


def test_a_request_declares_its_handler_and_nothing_else_does() -> None:
    words = spoken()
    with pytest.raises(AssertionError, match=r"WONDER: it is a request, and no handler"):
        words.client(8, "WONDER", ASK)(type("Wonder", (_Body,), {}))
    with pytest.raises(AssertionError, match=r"PART: it is no request"):
        words.client(8, "PART", {Phase.PULLING: Phase.PULLING}, handler="part")(_Body)
    assert words.get(8) is None


@pytest.mark.parametrize(("number", "name"), [(6, "WONDER"), (9, "ASK")])
def test_no_number_and_no_name_is_declared_twice(number: int, name: str) -> None:
    with pytest.raises(AssertionError, match=r"6 is ASK already"):
        spoken().client(number, name, ASK, handler="wonder")(type("Wonder", (_Body,), {}))


def test_a_number_says_whose_message_it_is() -> None:
    words = Vocabulary()
    for number in (0, 64):
        with pytest.raises(AssertionError, match=r"number of the host's"):
            words.client(number, "WONDER", ASK, handler="wonder")
    for number in (63, 256):
        with pytest.raises(AssertionError, match=r"no number of a host's"):
            words.host(number, "WONDER", {})


def test_every_request_of_the_protocol_has_its_answer() -> None:
    silent = {kind for kind in said.MESSAGES if kind.from_client} - set(ANSWERS)
    heard_by_the_session = {said.Hello.kind, said.ClientProof.kind, said.DATA, said.Bye.kind}
    assert silent == heard_by_the_session


def test_a_host_does_not_start_with_a_message_that_nobody_answers() -> None:
    code = """
        from portus.reach.protocol import messages as said
        from portus.reach.protocol.vocabulary import Phase

        @said.MESSAGES.client(63, "WONDER", {Phase.READY: Phase.ASKED}, handler="wonder")
        class Wonder(said.Message, frozen=True):
            pass

        import portus.reach.daemon.main
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert ended.returncode
    assert "AssertionError: message WONDER: its handler is declared as 'wonder'" in ended.stderr
