"""Objects on a storage host: ``portus://host:7117`` as the place of a mirror.

The objects are the tenant's, beside its pool; the host promises the same as every store does
(``reach.mirror.store``). Each running request has a connection, as a rule four at most.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from portus.errors import StaleError, TransportError, UsageError
from portus.reach.mirror.store import (
    ListedObject,
    MissingError,
    Part,
    check_name,
    check_prefix,
    short,
)
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import parse
from portus.reach.protocol.messages import Expected, ProtocolError, Said, column, expect
from portus.reach.transport.dial import Credentials
from portus.reach.transport.host import Links
from portus.reach.transport.stream import Link

_ANSWER_S: Final = 60.0
"""The longest silence of a host while it makes an object durable."""


class HostStore:
    """The objects of a tenant on a storage host, as a ``Store``."""

    def __init__(
        self,
        address: str,
        prefix: str,
        credentials: Credentials | None = None,
        answer_s: float = _ANSWER_S,
    ) -> None:
        """Make no request yet. credentials: by default those of the environment. answer_s: the
        longest silence of the host."""
        self._address: Final = address
        self._prefix: Final = f"{prefix}/" if prefix else ""
        self._credentials: Final = credentials
        self._answer_s: Final = answer_s
        self._guard: Final = threading.Lock()
        self._links: Links | None = None
        self._used: Final[set[Link]] = set()
        self._closed = False

    def put(self, name: str, data: bytes) -> None:
        self._place(name, data, fresh=False)

    def create(self, name: str, data: bytes) -> bool:
        return self._place(name, data, fresh=True)

    def get(self, name: str) -> bytes:
        return self._get(name, 0, 0)

    def get_range(self, name: str, start: int, length: int) -> Part:
        data = self._get(name, start, length) if length else b""
        if len(data) != length:
            raise short(f"{self._address}: {name}", start, length, len(data))
        return data

    def list(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        check_prefix(prefix, self._address)
        below, last = self._prefix + prefix, self._prefix + after if after else ""
        while True:  # ends: each answer begins after the last name, and there is an end of them
            answer = self._ask(said.List(below, last), said.Listed)
            if not answer.names:
                return
            sizes, modified = column(answer.sizes, "sizes"), column(answer.modified, "modified")
            if not len(answer.names) == len(sizes) == len(modified):
                raise ProtocolError(f"{self._address}: listed: columns of other lengths")
            for each, size, when in zip(answer.names, sizes, modified, strict=True):
                if not last < each:
                    raise ProtocolError(f"{self._address}: listed: names in no order")
                last = each
                yield ListedObject(each.removeprefix(self._prefix), int(size), int(when) / 1e6)

    def delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), said.LISTED_MAX):
            some = names[start : start + said.LISTED_MAX]
            self._ask(said.Delete([self._full_name(name) for name in some]), said.Done)

    def close(self) -> None:
        with self._guard:
            self._closed = True
            links, self._links = self._links, None
            used = list(self._used)
        # Wakes threads in the middle of a request, with an error.
        for link in used:
            link.close()
        if links is not None:
            links.close()

    def _place(self, name: str, data: bytes, *, fresh: bool) -> bool:
        if len(data) > said.OBJECT_SIZE_MAX:
            raise UsageError(
                f"{self._address}: {name} has {len(data)} bytes; an object on a storage host has "
                f"{said.OBJECT_SIZE_MAX} at most: mirror a state of so many tensors to a bucket"
            )
        return self._ask(said.Put(self._full_name(name), fresh, data), said.Done).granted

    def _get(self, name: str, start: int, length: int) -> bytes:
        try:
            return self._ask(said.Get(self._full_name(name), start, length), said.Object).data
        except StaleError as error:
            raise MissingError(f"{self._address}: there is no {name}") from error

    def _full_name(self, name: str) -> str:
        return self._prefix + check_name(name, self._address)

    def _ask(self, message: Said, kind: type[Expected]) -> Expected:
        links = self._connect()
        with links.lend() as link, self._using(link):
            return expect(link.ask(message, self._answer_s), kind)

    @contextlib.contextmanager
    def _using(self, link: Link) -> Iterator[None]:
        """Let ``close`` end the request inside."""
        with self._guard:
            if self._closed:
                raise TransportError(f"{self._address}: closed")
            self._used.add(link)
        try:
            yield
        finally:
            with self._guard:
                self._used.discard(link)

    def _connect(self) -> Links:
        with self._guard:
            if self._closed:
                raise UsageError(f"{self._address}: this store is closed")
            if self._links is None:
                credentials = self._credentials or Credentials.from_environment()
                self._links = Links(parse(self._address), credentials)
            return self._links
