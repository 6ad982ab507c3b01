"""Objects in a bucket, by obstore: S3 and compatible stores, Google, Azure; memory for tests.

Theory. obstore waits in Rust, and no Python code can end that wait. So each call is a task of an
event loop, in a thread of the store's own: ``close`` cancels the tasks, which drops their requests.

With S3 a signature may cover the SHA-256 of the sent bytes, which takes three times as long as
sending them. TLS protects the same bytes, so with TLS the signature omits it; plain HTTP has no
other protection.

obstore may repeat all requests but those of ``create``, since a repetition has the same effect.
``create`` is sent once: its caller has to find out the outcome of a request without an answer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
import weakref
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from portus.engine.copying.thread import JoinableThread
from portus.errors import PortusError, StaleError, TransportError, UsageError
from portus.reach.mirror.address import StoreAddress, StoreKind
from portus.reach.mirror.causes import is_beyond_the_end, translate
from portus.reach.mirror.store import (
    PART_SIZE,
    ListedObject,
    Part,
    check_name,
    check_prefix,
    is_name,
    short,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PAGE_ENTRIES: Final = 1000
"""Entries of a list in one request: the limit of S3."""

_SINGLY: Final = (StoreKind.GOOGLE, StoreKind.AZURE)
"""Stores where a missing object is an error, which ends a deletion of many."""

_SIDE_BY_SIDE: Final = 16
"""Deletions at once, if each is a request."""

_PARTS_ABREAST: Final = 4
_PARTS_MAX: Final = 10_000
"""Parts of an object, at most, at S3."""

_COPY_MAX: Final = 2 << 30
"""Bytes of an object that one request copies. S3 takes 5 GiB, but a request has to end in time."""

_THREADS_S: Final = 10.0
"""The longest that the end of a store waits for threads of obstore."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimeouts:
    """The longest times of a call: a request that does not connect within ``connect_s``, or does
    not finish within ``request_s``, ends. Then it is repeated, ``retries`` times and until
    ``retry_s`` have passed since the first one began. So a call ends within
    ``retry_s + request_s``, and ``create`` within ``request_s``. All in seconds.

    ``request_s`` is for all of an object: with 120 s, 16 MiB need 140 kB/s.
    """

    connect_s: float = 5.0
    request_s: float = 120.0
    retries: int = 3
    retry_s: float = 60.0


class Bucket:
    """``Store`` of the objects below a prefix of a bucket. Close it; the exit closes it, too."""

    def __init__(self, address: StoreAddress, patience: BucketTimeouts | None = None) -> None:
        """Make no request yet. Raises ``UsageError`` if obstore is missing, or for wrong settings
        in the environment."""
        self._address: Final = address
        self._patience: Final = patience or BucketTimeouts()
        try:
            # Imported only when a bucket is opened: it is an extra.
            import obstore
        except ModuleNotFoundError:
            raise UsageError(
                f"{address}: this needs obstore; pip install 'portus-checkpoint[mirror]'"
            ) from None
        self._obstore: Final = obstore
        self._store: Final = self._open(self._patience.retries)
        # For ``create``: if obstore repeated it after a lost answer, it would find its own object,
        # and report that another writer had won.
        self._once: Final = self._open(0)
        self._calls: Final = _Calls(str(address))
        self._end: Final = weakref.finalize(self, self._calls.close)

    def __repr__(self) -> str:
        return f"Bucket({str(self._address)!r})"

    def put(self, name: str, data: bytes) -> None:
        path = check_name(name, self._address)
        put = partial(self._obstore.put_async, self._store, path, data, use_multipart=False)
        self._ask("put", name, put)

    def put_stream(self, name: str, parts: Iterable[Part], size: int, *, unless: str = "") -> None:
        put = partial(
            self._obstore.put_async,
            self._store,
            check_name(name, self._address),
            self._chunks(parts, unless),
            use_multipart=True,  # they become one object once all of them are there
            # S3 takes 10,000 parts of an object at most.
            chunk_size=max(PART_SIZE, -(-size // _PARTS_MAX)),
            max_concurrency=_PARTS_ABREAST,
        )
        self._ask("put", name, put)

    def copy(self, name: str, target: str, size: int) -> bool:
        if size > _COPY_MAX:
            return False
        path, new = check_name(name, self._address), check_name(target, self._address)
        # One request: a repeated one may copy later bytes of the name, after this returned.
        self._ask("copy", name, lambda: self._obstore.copy_async(self._once, path, new))
        return True

    def create(self, name: str, data: bytes) -> bool:
        path = check_name(name, self._address)
        return self._ask("create", name, lambda: self._create(path, data))

    def get(self, name: str) -> bytes:
        path = check_name(name, self._address)
        return self._ask("get", name, lambda: self._get(path))

    def get_range(self, name: str, start: int, length: int) -> Part:
        path = check_name(name, self._address)
        if not length:
            return b""
        found = self._ask("get", name, lambda: self._get_range(path, start, start + length))
        if len(found) < length:
            raise short(f"{self._address}: {name}", start, length, len(found))
        return found

    def list(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        below = check_prefix(prefix, self._address)
        if after:
            check_name(after.rstrip("/"), self._address)
        stream = self._obstore.list(
            self._store, below or None, offset=after or None, chunk_size=PAGE_ENTRIES
        )
        last = ""
        while page := self._ask("list", prefix, lambda: _next_page(stream)):
            for each in page:
                name = each["path"]
                if not is_name(name) or not name.startswith(prefix):
                    continue
                # The newest entry is found by order; S3 Express lists in none.
                if name <= last:
                    raise UsageError(
                        f"{self._address}: expected a list in the order of names, found {name} "
                        f"after {last}; directory buckets (S3 Express) cannot hold a mirror"
                    )
                last = name
                if name > after:
                    yield ListedObject(name, each["size"], each["last_modified"].timestamp())

    def delete(self, names: Sequence[str]) -> None:
        paths = [check_name(name, self._address) for name in names]
        if paths:
            self._ask("delete", _several(paths), lambda: self._delete(paths))

    def close(self) -> None:
        """Close it as ``Store.close`` does; calls of other threads end with ``TransportError``."""
        self._calls.close()  # if Ctrl-C ends this, ``_end`` closes it at the exit

    def _open(self, retries: int) -> ObjectStore:
        from obstore import store as stores

        address, patience = self._address, self._patience
        if address.kind is StoreKind.MEMORY:
            return _MEMORY.setdefault(address.prefix, stores.MemoryStore())
        opening: Any = {
            StoreKind.S3: stores.S3Store,
            StoreKind.GOOGLE: stores.GCSStore,
            StoreKind.AZURE: stores.AzureStore,
        }[address.kind]
        try:
            opened: ObjectStore = opening(
                address.bucket,
                prefix=address.prefix or None,
                config={
                    "timeout": f"{round(patience.request_s * 1e3)}ms",
                    "connect_timeout": f"{round(patience.connect_s * 1e3)}ms",
                    **_unsigned_headers(address.kind),
                },
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=patience.retry_s),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": timedelta(seconds=5),
                        "base": 2,
                    },
                },
            )
        except self._obstore.exceptions.BaseError as error:
            failed = self._translate(error, "open", "")
        else:
            return opened
        raise failed

    def _ask(self, operation: str, name: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of ``work``, run by the thread of this store. Raises as ``Store``."""
        try:
            return self._calls.run(work)
        except PortusError:
            raise
        except (self._obstore.exceptions.BaseError, OSError, NotImplementedError) as error:
            failed = self._translate(error, operation, name)
        raise failed  # here, without obstore's error as its context: that may have secrets

    def _translate(self, error: BaseException, operation: str, name: str) -> PortusError:
        connect_s, request_s = self._patience.connect_s, self._patience.request_s
        call = self._address, operation, name
        return translate(error, *call, connect_s=connect_s, request_s=request_s)

    async def _chunks(self, parts: Iterable[Part], unless: str) -> AsyncIterator[Part]:
        for part in parts:
            yield part
        if unless:  # now: what is left is the last part, and to make all of them one object
            try:
                await self._obstore.head_async(self._store, unless)
            except FileNotFoundError:
                return
            raise StaleError(f"{self._address}: {unless} is there by now")

    async def _create(self, path: str, data: bytes) -> bool:
        try:
            await self._obstore.put_async(self._once, path, data, mode="create")
        except self._obstore.exceptions.AlreadyExistsError:
            return False
        return True

    async def _get(self, path: str) -> bytes:
        found = await self._obstore.get_async(self._store, path)
        return bytes(await found.bytes_async())

    async def _get_range(self, path: str, start: int, end: int) -> memoryview:
        try:
            found = await self._obstore.get_range_async(self._store, path, start=start, end=end)
        except self._obstore.exceptions.BaseError as error:
            # The server calls it an error; a ``Store`` has no bytes behind the end.
            if is_beyond_the_end(error):
                return memoryview(b"")
            raise
        return memoryview(found)

    async def _delete(self, paths: Sequence[str]) -> None:
        if self._address.kind not in _SINGLY:
            await self._obstore.delete_async(self._store, paths)
            return

        async def delete(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                await self._obstore.delete_async(self._store, path)

        for first in range(0, len(paths), _SIDE_BY_SIDE):
            await asyncio.gather(*map(delete, paths[first : first + _SIDE_BY_SIDE]))


def _unsigned_headers(kind: StoreKind) -> dict[str, str]:
    """Return the setting that keeps the SHA-256 of contents out of signatures, for TLS, unless the
    environment has it."""
    said = {name.upper(): value for name, value in os.environ.items()}
    is_plain = any(
        value.strip().lower().startswith("http://")
        for name, value in said.items()
        if name.startswith("AWS_ENDPOINT")
    )
    # SHA-256 takes 0.76 s for each GiB, the socket 0.25 s. TLS authenticates the same bytes; over
    # plain HTTP nothing else protects them.
    if kind is not StoreKind.S3 or is_plain or "AWS_UNSIGNED_PAYLOAD" in said:
        return {}
    return {"unsigned_payload": "true"}


_MEMORY: Final[dict[str, ObjectStore]] = {}
"""The stores in memory, by name: all stores of this process share them."""


async def _next_page(stream: Any) -> Sequence[Any]:
    try:
        page: Sequence[Any] = await stream.__anext__()
    except StopAsyncIteration:
        return ()
    return page


def _several(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that knows which futures the threads of obstore hold."""

    def __init__(self) -> None:
        super().__init__()
        self.over: Final = asyncio.Event()
        self._futures: Final[set[weakref.ref[asyncio.Future[Any]]]] = set()

    def create_future(self) -> asyncio.Future[Any]:
        future = super().create_future()
        self._futures.add(weakref.ref(future, self._futures.discard))
        return future

    def wait_for_threads(self) -> None:
        """Return once no thread is about to give an answer, or is still returning from that."""
        from obstore.store import MemoryStore

        # A thread returns through Python. Before 3.14, one that does so while the interpreter ends
        # kills the process, by SIGABRT.
        end = time.monotonic() + _THREADS_S
        while self._futures and time.monotonic() < end:
            time.sleep(0.001)
            MemoryStore()  # any call frees the objects that a thread dropped without the GIL


class _Calls:
    """An event loop in a thread of its own, which begins with the first call."""

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._guard: Final = threading.Lock()
        self._process: Final = os.getpid()
        self._loop: _Loop | None = None
        self._thread: JoinableThread | None = None
        self._is_closed = False

    def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of ``work()``, awaited in the loop. If a signal handler raises here,
        the work is cancelled, and the exception is raised when the work has ended."""
        if os.getpid() != self._process:
            raise UsageError(f"{self._name}: opened by another process; open it in this one")
        done: concurrent.futures.Future[Result] = concurrent.futures.Future()
        tasks: list[asyncio.Task[Result]] = []

        async def perform() -> Result:
            return await work()

        def begin() -> None:
            tasks.append(asyncio.get_running_loop().create_task(perform()))
            tasks[0].add_done_callback(end)

        def end(task: asyncio.Task[Result]) -> None:
            if task.cancelled():
                done.set_exception(TransportError(f"{self._name}: closed in the middle of a call"))
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        with self._guard:
            loop = self._start()
            loop.call_soon_threadsafe(begin)
        try:
            concurrent.futures.wait([done])
        except BaseException:
            # Wait for its end: until then the request may read the caller's memory.
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            concurrent.futures.wait([done])
            raise
        return done.result()

    def close(self) -> None:
        """Cancel the running calls, wait for their end, and end the thread. A second call after
        Ctrl-C waits too."""
        if os.getpid() != self._process:
            return
        with self._guard:
            self._is_closed = True
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # it has ended
                    self._loop.call_soon_threadsafe(self._loop.over.set)
        # The garbage collector may be in any thread.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> _Loop:
        if self._is_closed:
            raise UsageError(f"{self._name}: it is closed; open it again")
        if self._loop is None:
            self._loop = _Loop()
            self._thread = JoinableThread(partial(_serve, self._loop), "portus-store")
            self._thread.start()
        return self._loop


def _serve(loop: _Loop) -> None:
    loop.run_until_complete(loop.over.wait())
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.wait_for_threads()
    loop.close()
