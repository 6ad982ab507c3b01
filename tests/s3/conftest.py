"""Tests marked ``s3`` are skipped, with the reason, where the server cannot run; with
``PORTUS_S3=required`` they fail. One server is started for all of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from tests.s3 import needs
from tests.s3.needs import ServerError
from tests.s3.server import Server
from tests.simulation.proxy import RequestProxy

REQUIRED = os.environ.get("PORTUS_S3") == "required"
"""Read before a test clears the environment."""

BUCKET = "portus"
STRANGER = ("stranger-key", "stranger-secret")
"""The credentials of a user who has no right to it."""

READER = ("reader-key", "reader-secret")
"""Those that have the right to read it alone."""

NUMBERS = itertools.count()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = [item for item in items if item.get_closest_marker("s3")]
    if not found or REQUIRED:
        return
    try:
        needs.check()
    except ServerError as error:
        for item in found:
            item.add_marker(pytest.mark.skip(reason=f"no S3 server: {error}"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real S3 server, with a bucket."""
    with Server(tmp_path_factory.mktemp("s3") / "server") as server:
        server.make_bucket(BUCKET)
        server.make_user("stranger", *STRANGER)  # now: it waits 30 s for a gateway that was killed
        server.make_reader(*READER)
        yield server


@pytest.fixture
def environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a client needs to know of ``server`` is in the environment, and nothing else is."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server.environment()


@pytest.fixture
def url(environment: dict[str, str]) -> str:
    """A mirror of this test's own, on the server."""
    return f"s3://{BUCKET}/test-{next(NUMBERS)}"


@pytest.fixture
def proxy(
    server: Server, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[RequestProxy]:
    """A proxy before the server, which the environment leads to from now on."""
    with RequestProxy("127.0.0.1", server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy
