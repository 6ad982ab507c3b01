"""``Shelf``: named arrays that survive, and are changed in place. The object that a user holds."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal

import numpy as np

from portus.companions.shelf.items import Array, Item, arrays_of, copy_item, view_item
from portus.companions.shelf.store import ShelfStore
from portus.engine.settings.fits import Seconds, SomeBytes, is_text, refuse_misfits
from portus.errors import StaleError, UsageError
from portus.reach.index.directory import create_pool, has_pool, open_reader, open_writer
from portus.reach.index.place import Place
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.media.local import LocalFiles

_TRIES: Final = 20
"""Times that a reader starts again when the shelf was replaced meanwhile, at most."""

_HALF_UNDONE: Final = "a change of this shelf was interrupted while it was undone; open it again"

_OWN: Final = frozenset(
    {
        "_pool",
        "_guard",
        "_in_transaction",
        "_closed",
        "_store",
        "_items",
        "_process",
        "_has_opened",
    }
)
"""Attributes of a ``Shelf`` that are no names on it."""


class Shelf:
    """Named arrays in their own pool file, or on a DAX device: ``shelf.centers = array``,
    ``shelf["centers"]``.

    An assignment copies its value. Reading a name returns a view, a numpy array or a CPU tensor of
    the same shape and dtype, which you change in place; the shelf owns its memory. Use
    ``shelf[name]`` for names that are attributes of this class or no identifiers. Besides arrays a
    shelf holds None, bool, int, float, str, bytes, and dicts, lists and tuples of all of these.
    Reading a container returns a new one with views in it; to change the container itself, assign
    it again.

    An assignment (``shelf.x = y``, ``shelf.x += y``) is its own transaction, unless it is inside a
    ``transaction``. All other changes of views are durable once ``sync`` or ``close`` has returned.
    No other thread may write to views during a commit: its writes may be in this commit, in part,
    or in the next one.

    Every method may raise ``MediumError``; the committed state stays. If Ctrl-C, or another signal
    handler, raises during a commit or while a change is undone, the shelf makes no further commit:
    open it again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Literal["w", "r"] = "w",
        *,
        max_bytes: SomeBytes | None = None,
        log_bytes: SomeBytes | None = None,
        timeout_s: Seconds = 10.0,
    ) -> None:
        """Open the shelf at ``path``, and create it in mode "w" if it does not exist. This reads
        and verifies all of it into memory, and takes up to twice its size as it is changed.

        path: a file whose name ends with .portus, or a DAX device.
        mode: "r" shows the last commit; writing to its views raises.
        max_bytes: the largest size of the file, in bytes.
        log_bytes: the size of the log, which receives changes first; default: a quarter of all
        arrays, at least 8 MiB.
        timeout_s: how long to wait for another writer, in seconds.

        Raises ``BusyError``, which names the process that has it open for writing,
        ``CorruptionError`` for damage, ``UsageError`` if the file holds something else,
        ``MediumError``.
        """
        place = Place.parse(path)
        if place.local_pool is None:
            raise UsageError(
                f"{place}: a shelf is a file whose name ends with .portus, or a DAX device"
            )
        sizes = {"max_bytes": max_bytes, "log_bytes": log_bytes, "timeout_s": timeout_s}
        refuse_misfits(Shelf.__init__, {"mode": mode, **sizes})
        files = LocalFiles()
        if mode == "w":
            if not has_pool(place.path, files):
                create_pool(place.path, files)
            pool: PoolReader = open_writer(
                place.path,
                files,
                timeout_s=timeout_s,
                max_bytes=max_bytes,
                reads='portus.Shelf({!r}, mode="r")',
            )
        else:
            pool = open_reader(place.path, files)
        self._begin(pool, log_bytes)
        self._has_opened = True

    @classmethod
    def on(cls, pool: PoolReader, *, log_bytes: int | None = None) -> Shelf:
        """Return a shelf on an open pool, which ``close`` closes; for tests on other media."""
        made = cls.__new__(cls)
        made._begin(pool, log_bytes)
        return made

    def _begin(self, pool: PoolReader, log_bytes: int | None) -> None:
        self._pool = pool
        # Reentrant: the block of a transaction uses the shelf.
        self._guard = threading.RLock()
        self._in_transaction = False
        self._closed = False
        self._process = os.getpid()
        try:
            self._load(log_bytes)
        except BaseException:
            self._abandon()
            raise

    def _load(self, log_bytes: int | None = None) -> None:
        for left in reversed(range(_TRIES)):
            try:
                self._store = ShelfStore(self._pool, log_bytes)
                break
            except StaleError:
                if not left:
                    raise
        self._items: Mapping[str, Item] = self._store.items
        """Never changed: a change makes another mapping."""

    # --- names ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        with self._guard:
            self._check_open()
            return view_item(self._there(name))

    def __setitem__(self, name: str, value: object) -> None:
        with self._guard:
            self._check_writable()
            _check_name(name)
            item = self._items.get(name)
            if isinstance(item, Array) and item.fits(value):
                self._change(self._items, item, value)  # views of it stay what they are
                return
            item = copy_item(value, name)
            self._change({**self._items, name: item}, item)

    def __delitem__(self, name: str) -> None:
        with self._guard:
            self._check_writable()
            self._there(name)
            self._change({key: item for key, item in self._items.items() if key != name})

    def __getattr__(self, name: str) -> Any:
        # Own attributes that are not set yet would recurse: ``self[name]`` reads some.
        if name.startswith("_"):
            raise AttributeError(f"a shelf has no attribute {name!r}; use shelf[{name!r}]")
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error)) from error

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        elif name.startswith("_") or hasattr(type(self), name):
            raise AttributeError(
                f"{name} is reserved for the shelf's own attributes; use shelf[{name!r}]"
            )
        else:
            self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"there is no {name!r} on this shelf")
        del self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._items})

    def keys(self) -> tuple[str, ...]:
        """Return the names, in the order of their first assignment."""
        return tuple(self._items)

    def rename(self, old: str, new: str) -> None:
        """Rename ``old`` to ``new``, which must not exist. Raises ``KeyError``, ``UsageError``."""
        with self._guard:
            self._check_writable()
            self._there(old)
            _check_name(new)
            if new in self._items:
                raise UsageError(
                    f"rename {old!r}: {new!r} exists already; delete it, or swap the two"
                )
            names = {old: new}
            self._change({names.get(key, key): item for key, item in self._items.items()})

    def swap(self, one: str, other: str) -> None:
        """Exchange the values of two names. Raises ``KeyError``."""
        with self._guard:
            self._check_writable()
            pair = {one: self._there(other), other: self._there(one)}
            self._change({**self._items, **pair})

    def resize(self, name: str, *sizes: int) -> None:
        """Give an array another shape. Elements that both shapes contain stay, the others are zero;
        with another number of dimensions all are. Old views stay valid, but are no longer part of
        the shelf. Raises ``KeyError``, and ``UsageError`` for a value that is no array."""
        with self._guard:
            self._check_writable()
            item = self._there(name)
            if not isinstance(item, Array):
                raise UsageError(
                    f"resize {name!r}: it is not an array, but a {type(item).__name__}"
                )
            if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in sizes):
                raise UsageError(
                    f"resize {name!r}: expected a shape of integers of at least 0, found {sizes}"
                )
            made = item.like(tuple(int(size) for size in sizes))
            self._change({**self._items, name: made}, made)

    # --- transactions ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Shelf]:
        """Return a context manager that makes all changes inside it one commit. At its end all of
        them are durable; if the process or the machine dies before, none is. Earlier changes of
        views that were not synced are committed too.

        If the block raises, everything goes back to the last commit. A transaction cannot contain
        another one, and other threads wait. Blocks at the end, until the commit is durable.
        """
        with self._guard:
            self._check_writable()
            if self._in_transaction:
                raise UsageError(
                    "a transaction was entered inside another one; leave that one first"
                )
            # Earlier changes are not committed here: no caller asked for that, and it would cost
            # a commit for each transaction.
            self._in_transaction = True
            try:
                with self._atomic():
                    yield self
                    self._commit(self._items, self._arrays())
            finally:
                self._in_transaction = False

    def sync(self) -> None:
        """Commit all changes of views together. Blocks until they are durable. Raises
        ``UsageError`` inside a transaction, which commits at its end."""
        with self._guard:
            self._check_writable()
            if self._in_transaction:
                raise UsageError("sync inside a transaction: leaving the transaction commits it")
            self._commit(self._items, self._arrays())

    def refresh(self) -> None:
        """Show the current commit, on a shelf that is open for reading. Existing views stay as they
        are. Raises the errors of the constructor."""
        with self._guard:
            self._check_open()
            if isinstance(self._pool, PoolWriter):
                raise UsageError("refresh: this shelf is open for writing, so it is always current")
            self._load()

    def close(self) -> None:
        """Sync, if the shelf is open for writing, and release it. Existing views stay valid, but
        are no longer part of it. A second call does nothing. Raises ``UsageError`` inside a
        transaction, which continues."""
        with self._guard:
            if self._closed:
                return
            if self._in_transaction:
                raise UsageError("close inside a transaction: leave the transaction first")
            try:
                if isinstance(self._pool, PoolWriter):
                    self.sync()
                    self._store.seal()
            finally:
                self._abandon()

    def __enter__(self) -> Shelf:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close. After an exception this does not sync, so changes outside of transactions are
        lost."""
        if kind is None:
            try:
                self.close()
            finally:
                self._abandon()  # a transaction without an end is lost, as if the process died
        else:
            self._abandon()

    def __del__(self) -> None:
        """Release the shelf's own pool. Changes without a ``sync`` are lost."""
        # A forked child releases nothing: the lock and the mapping belong to the parent.
        if getattr(self, "_has_opened", False) and self._process == os.getpid():
            self._abandon()

    def _abandon(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.close()

    def _change(self, items: Mapping[str, Item], item: Item = None, value: object = None) -> None:
        """Replace the contents by ``items``. ``item`` is one that may have new bytes, or an array
        to fill with ``value``. The change is its own transaction, or a part of the open one."""
        if self._in_transaction:
            if value is not None:
                item.fill(value)
            self._items = items
            return
        arrays = list(arrays_of(item))
        with self._atomic(arrays):
            if value is not None:
                item.fill(value)
            self._commit(items, arrays)

    @contextlib.contextmanager
    def _atomic(self, arrays: Sequence[Array] | None = None) -> Iterator[None]:
        """Restore the last commit if the block raises: these arrays, or all."""
        whole = False
        try:
            yield
            whole = True
        except BaseException:
            self._items = self._store.items
            for each in self._arrays() if arrays is None else arrays:
                each.revert()
            whole = True
            raise
        finally:
            if not whole:  # half of a change must not be committed
                self._pool.medium.poison(_HALF_UNDONE)

    def _commit(self, items: Mapping[str, Item], changed: Sequence[Array]) -> None:
        self._check_process()  # the parent and its child share the memory of the committed state
        self._store.commit(items, changed)
        self._items = items

    def _arrays(self) -> list[Array]:
        return list(arrays_of(self._items))

    def _there(self, name: str) -> Item:
        if name not in self._items:
            there = list(self._items)[:20]
            raise KeyError(f"there is no {name!r} on this shelf; there are {there}")
        return self._items[name]

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self._pool.medium.info.name}: used after it was closed")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                f"{self._pool.medium.info.name}: opened in process {self._process}, used in "
                f"process {os.getpid()}: a forked child must open it itself"
            )

    def _check_writable(self) -> None:
        self._check_open()
        self._check_process()
        if not isinstance(self._pool, PoolWriter):
            raise UsageError(
                f"{self._pool.medium.info.name}: opened for reading; open it without mode='r'"
            )


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or name.startswith("$") or not is_text(name):
        raise UsageError(f"a name on a shelf is text that does not begin with $: {name!r:.80}")
