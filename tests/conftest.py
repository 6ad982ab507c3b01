"""What every test shares: a clean environment, a printed seed, no thread left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.depth import deep, left_out

if "PORTUS_TEST_SEED" not in os.environ:  # the workers of this run inherit both
    os.environ["PORTUS_TEST_SEED"] = str(random.SystemRandom().randrange(2**32))
    os.environ["PORTUS_TEST_DRAWN"] = "1"
SEED = int(os.environ["PORTUS_TEST_SEED"])
# Else torch starts processes, which import it for seconds, in each that might compile something.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
THREAD_END_S_MAX = 20.0

# No deadline: a busy machine is no fault of the code. `make long` searches deeper.
hypothesis.settings.register_profile(
    "quick",
    deadline=None,
    max_examples=60,
    print_blob=True,
    derandomize="PORTUS_TEST_DRAWN" not in os.environ,
)
hypothesis.settings.register_profile(
    "long", parent=hypothesis.settings.get_profile("quick"), max_examples=deep(1000)
)


def pytest_configure(config: pytest.Config) -> None:
    # A shell ignores Ctrl-C for what it runs behind, and processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("PORTUS_TEST_USERFAULTFD") == "refused":
        from tests.refused import refuse_userfaultfd

        refuse_userfaultfd()
    asked_for_long = config.getoption("markexpr") == "long"
    hypothesis.settings.load_profile("long" if asked_for_long else "quick")


def pytest_report_header() -> str:
    wish = os.environ.get("PORTUS_TEST_USERFAULTFD")
    return f"seed: PORTUS_TEST_SEED={SEED}" + (f", userfaultfd: {wish}" if wish else "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped with the reason where there is none. Of the long searches,
    those that may take longest come first, so that processes side by side end together, and with
    less depth a share of their cases is run. Names of tests repeat: processes side by side would
    not agree on them."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: named after an address; give it ids=")
    if config.getoption("markexpr") == "long":
        items.sort(key=time_out, reverse=True)
        without = left_out(items, SEED)
        config.hook.pytest_deselected(items=[item for item in items if item in without])
        items[:] = [item for item in items if item not in without]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if on_gpu else ""
    for item in on_gpu if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Leave what the imports made out of all later collections of garbage, and out of the search
    for optimizers: with every framework imported, each of them takes a third of a second."""
    gc.collect()
    gc.freeze()


def time_out(item: pytest.Item) -> float:
    """Seconds that a test asked for; 0 if it did not."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0


def _why_no_gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"no CUDA device (torch {torch.__version__}, {built})"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, printed; one of its own for each test. A failing one becomes a named test."""
    own = random.Random(f"{SEED} {request.node.nodeid}").randrange(2**32)
    print(f"seed of this test: {own} (PORTUS_TEST_SEED={SEED})")
    return own


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have Portus set up for themselves."""
    for name in [name for name in os.environ if name.startswith("PORTUS_")]:
        if name != "PORTUS_TEST_SEED":
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Fresh directories. pytest's own way looks at all that there are for each new one."""
    top = tmp_path_factory.mktemp("state")
    return (top / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def no_notes_from_outside(monkeypatch: pytest.MonkeyPatch, homes: Iterator[Path]) -> None:
    """What Portus notes for a user, it notes for each test apart."""
    home = next(homes)
    home.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


@pytest.fixture(autouse=True)
def no_pools_from_before() -> Iterator[None]:
    """Where references may lead is known to the process; what one test allowed is not another's."""
    yield
    resolve = sys.modules.get("portus.reach.pools.resolve")
    if resolve is not None:
        resolve.ALLOWED.clear()


@pytest.fixture(autouse=True)
def nothing_said_before() -> Iterator[None]:
    """What is said once in a process is said once in a test."""
    yield
    stock = sys.modules.get("portus.companions.job.stock")
    if stock is not None:
        stock._said.clear()


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Every thread of Portus (named ``portus...``) has ended when its test has, and so has every
    use of what a process writes files with: one that is left would keep the threads of later tests.
    What listens to the steps of optimizers is gone, too.
    """
    before = set(threading.enumerate())
    yield
    _end_saver()
    users = _users_of_files()
    if users:  # an error that a test caught may hold what it was raised by until it is collected
        names = ", ".join(map(repr, users))
        users.clear()
        gc.collect()
        assert not _users_of_files(), f"left open: {names}; close what you opened"
    elif _listens():
        gc.collect()
    ours = [t for t in threading.enumerate() if t not in before and t.name.startswith("portus")]
    until = time.monotonic() + THREAD_END_S_MAX
    for thread in ours:
        thread.join(max(0.0, until - time.monotonic()))
    left = [thread.name for thread in ours if thread.is_alive()]
    assert not left, f"threads left running: {left}; close what you opened"


def _listens() -> bool:
    fence = sys.modules.get("portus.engine.fence.fence")
    return fence is not None and bool(fence._fences or fence._listeners)


def _users_of_files() -> list[Any]:
    process = sys.modules.get("portus.engine.paths.process")
    return [] if process is None else list(process._open)


def _end_saver() -> None:
    """That of ``portus.save`` lives as long as its process: a later test would find its threads."""
    process = sys.modules.get("portus.engine.paths.process")
    while process is not None and process._savers:
        saver = process._savers.pop()
        with contextlib.suppress(Exception):
            saver.close()
        process.leave(saver)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a test printed may be no UTF-8, such as a path; what workers send has to be."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_sendable(each) for each in value)
    return value
