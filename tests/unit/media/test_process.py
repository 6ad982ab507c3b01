"""Descriptors of one process: threads that open them wait for no other, and forks wait for all."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from portus.engine.media import process
from portus.engine.media.process import Descriptor
from portus.errors import UsageError
from tests.moments import at, elsewhere


def _open_and_close(path: Path) -> None:
    Descriptor(str(path), os.O_RDONLY).close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("function", [process._open, Descriptor._is_here])
def test_a_thread_opens_while_a_signal_handler_has_interrupted_another_one_in_it(
    tmp_path: Path, function: object
) -> None:
    (file := tmp_path / "file").write_bytes(b"1")
    descriptor = Descriptor(str(file), os.O_RDONLY)
    with at("call", function, elsewhere(lambda: _open_and_close(file))):  # type: ignore[arg-type]
        descriptor.close()
        _open_and_close(file)


@pytest.mark.timeout(30)
def test_a_fork_waits_for_the_threads_that_open_and_they_for_it(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"1")
    inside, leave = threading.Event(), threading.Event()
    order = list[str]()

    def hold() -> None:
        with process.no_fork():
            inside.set()
            assert leave.wait(20)
            order.append("left")

    def fork() -> None:
        number = os.fork()
        if number == 0:
            os._exit(0)
        order.append("forked")
        os.waitpid(number, 0)

    with ThreadPoolExecutor(3) as threads:
        holding = threads.submit(hold)
        assert inside.wait(20)
        forking = threads.submit(fork)
        while not process._forking:
            pass
        late = threads.submit(_open_and_close, file)
        assert not forking.done()
        assert not late.done()
        leave.set()
        for each in (holding, forking, late):
            each.result(20)
    assert order == ["left", "forked"]
    assert process._busy == {}


def test_of_two_threads_that_close_a_descriptor_one_does(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"1")
    descriptor = Descriptor(str(file), os.O_RDONLY)
    number = descriptor.number
    with at("call", Descriptor._is_here, elsewhere(descriptor.close)):
        descriptor.close()
    with pytest.raises(UsageError, match="after it was closed"):
        _ = descriptor.number
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    again = os.open(file, os.O_RDONLY)
    descriptor.close()
    os.fstat(again)
    os.close(again)
