"""Processes that change a version in place, by its log, on a simulated disk or device; the searches
that crash them, and what the pool of each has to be then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, Protocol, TypeVar

from portus.engine.media.base import Medium
from portus.reach.index.check import Severity, check
from portus.reach.index.directory import create_pool
from portus.reach.index.reader import PoolReader
from portus.reach.index.roots import format_pool, is_blank
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.pool import FileSystem
from portus.reach.media.space import SpaceMedium
from tests.simulation import lines
from tests.simulation.crash import CrashFiles
from tests.simulation.explore import Explorer

POOL: Final = "/pools/shelf.portus"

State = TypeVar("State")
Found = TypeVar("Found")
Report = Callable[[tuple[State, ...]], None]
"""Tells the states that a crash may leave from now on."""


class Process(Generic[State]):
    """One process. ``empty``: the state where there is no pool."""

    def __init__(self, files: CrashFiles, report: Report[State], empty: State) -> None:
        self.files = files
        self.report = report
        if not self.is_there():
            self.report((empty,))
            self.create()

    def is_there(self) -> bool:
        return self.files.status(POOL) is not None

    def create(self) -> None:
        create_pool(POOL, self.files)

    def medium_files(self) -> FileSystem:
        return self.files


class DeviceProcess(Process[State]):
    """One whose pool is on a DAX device."""

    medium: type[SpaceMedium] = SpaceMedium

    def opened(self) -> SpaceMedium:
        return lines.open_device(self.files, POOL, self.medium)

    def is_there(self) -> bool:
        return not is_blank(self.opened())

    def create(self) -> None:
        format_pool(self.opened())

    def medium_files(self) -> FileSystem:
        return lines.files_with_device(self.files, POOL, self.medium)


_Found = TypeVar("_Found", contravariant=True)


class Verify(Protocol[_Found]):
    """Asserts that what is found has one of the states that the last fact allows."""

    def __call__(
        self,
        files: CrashFiles,
        facts: Sequence[tuple[_Found, ...]],
        find: Callable[[CrashFiles], Medium | None] = ...,
    ) -> None: ...


User = TypeVar("User", bound=Process[Any])


def on_disk(
    plans: Sequence[Callable[[User], None]],
    budgets: tuple[int, ...],
    user: Callable[[CrashFiles, Report[State]], User],
    verify: Verify[State],
) -> Explorer[tuple[State, ...]]:
    """The search over processes with a file, which make these plans one after another."""
    return Explorer(
        processes=[_process(plan, user) for plan in plans],
        verify=verify,
        start=lambda: CrashFiles(["/pools"]),
        budgets=budgets,
        noise=True,
    )


def on_device(
    plans: Sequence[Callable[[User], None]],
    budgets: tuple[int, ...],
    user: Callable[[CrashFiles, Report[State]], User],
    verify: Verify[State],
    size: int,
) -> Explorer[tuple[State, ...]]:
    """The same with a DAX device of ``size`` bytes."""

    def start() -> CrashFiles:
        files = CrashFiles(["/pools"])
        lines.make_device(files, POOL, size)
        return files

    return Explorer(
        processes=[_process(plan, user) for plan in plans],
        verify=lambda files, facts: verify(files, facts, _pool_on_device),
        start=start,
        budgets=budgets,
    )


def _process(
    plan: Callable[[User], None], user: Callable[[CrashFiles, Report[State]], User]
) -> Callable[..., None]:
    def scenario(files: CrashFiles, report: Report[State]) -> None:
        plan(user(files, report))

    return scenario


def pool_file(files: CrashFiles) -> Medium | None:
    """The pool in a file, if it is there."""
    return files.open(POOL, writable=True) if files.status(POOL) is not None else None


def _pool_on_device(files: CrashFiles) -> Medium | None:
    medium = lines.open_device(files, POOL)
    return None if is_blank(medium) else medium


def require_unbroken(files: CrashFiles, reader: PoolReader) -> None:
    """Assert that no rule of the format is broken; of one image in ten, since it takes long."""
    if files.disk.digest()[0] < 26:
        require_rules(reader)


def require_rules(reader: PoolReader) -> None:
    """Assert that no rule of the format is broken."""
    errors = [each for each in check(reader) if each.severity is Severity.ERROR]
    broken = [str(each) for each in errors if each.invariant != "F2"]
    assert not broken, broken


def each_by_the_rules(search: Explorer[Found]) -> Explorer[Found]:
    """The same search on a disk, for what shows in the rules alone: they are asserted of every
    image. One in ten may miss it; which ones depends on the bytes and on the name of the pool."""

    def verify(files: CrashFiles, facts: Sequence[Found]) -> None:
        search.verify(files, facts)
        medium = pool_file(files)
        if medium is not None:
            require_rules(PoolReader(medium, ProcessLocks()))

    return replace(search, verify=verify)
