"""A mistake in a declaration fails when it is made, and a request without an answer at start."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import typing
from typing import Annotated, ClassVar

import msgspec
import pytest
from msgspec import Meta

from portus.reach.daemon.session import ANSWERS
from portus.reach.protocol import messages as said
from portus.reach.protocol.vocabulary import MessageKind, Vocabulary


class Ask(msgspec.Struct):
    kind: ClassVar[MessageKind]
    name: Annotated[str, Meta(max_length=100)]
    parts: Annotated[list[Annotated[bytes, Meta(max_length=7)]], Meta(max_length=10)]


def spoken() -> Vocabulary:
    """One request."""
    words = Vocabulary()
    words.message(6, "ASK")(Ask)
    return words


def test_the_limit_of_a_body_is_that_of_its_fields() -> None:
    spoken()
    most = Ask("\U0001f600" * 100, [bytes(7)] * 10)
    size = len(msgspec.msgpack.encode(most))
    assert size <= Ask.kind.body_size_max < size + 200


def test_a_field_without_a_limit_is_told() -> None:
    class Boundless(msgspec.Struct):
        kind: ClassVar[MessageKind]
        text: str

    with pytest.raises(AssertionError, match=r"WONDER\.text: it has no limit"):
        spoken().message(8, "WONDER")(Boundless)


@pytest.mark.parametrize(("number", "name"), [(6, "WONDER"), (9, "ASK")])
def test_no_number_and_no_name_is_declared_twice(number: int, name: str) -> None:
    with pytest.raises(AssertionError, match=r"6 is ASK already"):
        spoken().message(number, name)(Ask)


def test_every_request_of_the_protocol_has_its_answer() -> None:
    silent = {kind for kind in said.MESSAGES if kind.from_client} - {each.kind for each in ANSWERS}
    heard_by_the_session = {said.Hello.kind, said.ClientProof.kind, said.DATA, said.Bye.kind}
    assert silent == heard_by_the_session


@pytest.mark.parametrize("message", ANSWERS, ids=lambda message: message.kind.name)
def test_an_answer_takes_the_message_that_it_is_for(message: type[said.Message]) -> None:
    assert typing.get_type_hints(ANSWERS[message])["message"] is message


def test_a_host_does_not_start_with_a_message_that_nobody_answers() -> None:
    code = """
        from portus.reach.protocol import messages as said

        @said.MESSAGES.message(63, "WONDER")
        class Wonder(said.Message, frozen=True):
            pass

        import portus.reach.daemon.main
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert ended.returncode
    assert "AssertionError: message WONDER: it is a request, and nothing answers it" in ended.stderr
