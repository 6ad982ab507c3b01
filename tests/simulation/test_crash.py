"""The simulated disk: what it keeps, what it may lose; and that the explorer finds mistakes."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from portus.engine.format.checksum import digest
from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import MediumError
from portus.reach.media.pool import FileSystem, SparseMedium
from tests.contract.files import FilesContract
from tests.contract.media import SparseMediumContract
from tests.simulation.crash import (
    Crash,
    CrashFiles,
    CrashMedium,
    Faults,
    Point,
    Recording,
    record,
)
from tests.simulation.disk import Disk, File, Page
from tests.simulation.explore import Exploration, Explorer, ImageError
from tests.simulation.outcomes import NOISE, outcomes, power_loss

# --- it is a medium and it is files ---------------------------------------------------------


class TestCrashMedium(SparseMediumContract):
    def make(self, size: int) -> CrashMedium:
        self.files = CrashFiles()
        return self.files.create("/medium", size)

    def read_behind(self, medium: Medium, offset: int, length: int) -> bytes:
        return content(self.files.disk, 1)[offset : offset + length]

    def write_behind(self, medium: Medium, offset: int, data: bytes) -> None:
        pages = self.files.disk.files[1].pages
        for place, byte in enumerate(data, offset):
            index, inside = divmod(place, PAGE)
            page = bytearray(pages[index].states[-1] if index in pages else bytes(PAGE))
            page[inside] = byte
            pages[index] = Page((bytes(page),), False)

    def break_persist(self, medium: Medium) -> None:
        self.files.faults = Faults(persist=frozenset({self.files.persists + 1}))

    def after_power_loss(self, medium: SparseMedium) -> Iterable[bytes]:
        self.files.sync("/")
        disk = self.files.disk
        for choices in itertools.islice(outcomes(disk, random.Random(1)), 400):
            yield content(power_loss(disk.lost(), choices), 1)


class TestCrashFiles(FilesContract):
    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.crash = CrashFiles(["/pools"])

    def files(self) -> FileSystem:
        return self.crash

    def directory(self) -> str:
        return "/pools"

    def read_behind(self, path: str) -> bytes | None:
        number = self.crash.disk.names.now.get(path)
        return None if number is None else content(self.crash.disk, number)

    def write_behind(self, path: str, data: bytes) -> None:
        number = len(self.crash.disk.files) + 1
        pages = {}
        for index in range(-(-len(data) // PAGE)):
            piece = data[index * PAGE : (index + 1) * PAGE]
            pages[index] = Page((piece.ljust(PAGE, b"\0"),), False)
        self.crash.disk.files[number] = File((len(data),), pages, number)
        self.crash.disk.names.now[path] = self.crash.disk.names.synced[path] = number


def content(disk: Disk, number: int) -> bytes:
    file = disk.files[number]
    pages = (file.pages.get(index) for index in range(-(-file.size // PAGE)))
    return b"".join(page.states[-1] if page else bytes(PAGE) for page in pages)[: file.size]


# --- what a power loss may leave ------------------------------------------------------------


def left(
    scenario: Callable[[CrashFiles], object], look: Callable[[CrashFiles], object], count: int = 400
) -> set[object]:
    """What ``look`` sees after power losses at the end of ``scenario``, once everything before
    its first event was made durable."""
    images = ended(scenario, prepared()).power_losses(random.Random(1))
    return {look(image.files()) for image in itertools.islice(images, count)}


def ended(scenario: Callable[[CrashFiles], object], files: CrashFiles) -> Point[str]:
    """The end of ``scenario`` on ``files``."""
    recording: Recording[str] = record(lambda files, report: scenario(files), files)
    return recording.points[-1]


def prepared() -> CrashFiles:
    """``/d/old``, two pages of ``o``, durable; and an empty directory ``/e``."""
    files = CrashFiles(["/d", "/e"])
    with_content(files, "/d/old", b"o" * 2 * PAGE, persist=True)
    files.sync("/d")
    return files


def with_content(
    files: CrashFiles, path: str, data: bytes, *, persist: bool = False
) -> CrashMedium:
    medium = files.create(path, len(data))
    medium.store(0, data)
    if persist:
        medium.persist([Extent(0, len(data))])
    return medium


def text(path: str = "/d/old") -> Callable[[CrashFiles], bytes | None]:
    """The bytes at ``path``, runs of one byte written once."""

    def look(files: CrashFiles) -> bytes | None:
        if files.status(path) is None:
            return None
        medium = files.open(path, writable=False)
        data = bytearray(medium.size)
        medium.load(0, memoryview(data))
        return bytes(byte for byte, _ in itertools.groupby(data))

    return look


def names(files: CrashFiles) -> tuple[str, ...]:
    return (*files.entries("/d"), *(f"e/{name}" for name in files.entries("/e")))


def opened(files: CrashFiles) -> CrashMedium:
    return files.open("/d/old", writable=True)


def test_what_was_persisted_stays_and_nothing_else_is_sure() -> None:
    def scenario(files: CrashFiles) -> None:
        medium = opened(files)
        medium.store(0, b"a" * PAGE)
        medium.persist([Extent(0, PAGE)])
        medium.store(PAGE, b"b" * PAGE)

    found = left(scenario, text())
    assert {b"ao", b"ab"} <= found
    assert all(str(each, "ascii").startswith("a") for each in found if isinstance(each, bytes))


def test_a_page_may_hold_every_state_since_its_persist() -> None:
    def scenario(files: CrashFiles) -> None:
        for byte in (b"a", b"b", b"c"):
            opened(files).store(0, byte * 2 * PAGE)

    found = left(scenario, lambda files: tuple(sorted(set(text()(files) or b""))))
    assert {tuple(each) for each in (b"o", b"a", b"b", b"c")} <= found


def test_pages_are_lost_each_by_itself() -> None:
    def scenario(files: CrashFiles) -> None:
        opened(files).store(0, b"n" * 2 * PAGE)

    assert {b"o", b"on", b"no", b"n"} <= left(scenario, text())


def test_every_combination_of_a_few_pages_comes_up() -> None:
    def scenario(files: CrashFiles) -> None:
        for index in range(7):
            opened(files).store(index * PAGE, b"n")

    def grown() -> CrashFiles:
        files = prepared()
        opened(files).grow(7 * PAGE)
        return files

    images = ended(scenario, grown()).power_losses(random.Random(1))
    found = {
        tuple(bytes_at(image.files(), index * PAGE) == b"n" for index in range(7))
        for image in images
    }
    assert len(found) == 2**7


def bytes_at(files: CrashFiles, offset: int) -> bytes:
    data = bytearray(1)
    opened(files).load(offset, memoryview(data))
    return bytes(data)


def test_a_page_that_came_back_to_an_old_state_is_kept_as_it_is() -> None:
    def scenario(files: CrashFiles) -> None:
        for byte in (b"a", b"o"):
            opened(files).store(0, byte * 2 * PAGE)

    kept = next(ended(scenario, prepared()).power_losses(random.Random(1)))
    assert text()(kept.files()) == b"o"


def test_noise_comes_only_where_it_is_asked_for_and_a_page_was_changed() -> None:
    def scenario(files: CrashFiles) -> None:
        opened(files).store(0, b"n")

    def noisy(point: Point[str], *, noise: bool) -> set[bool]:
        images = itertools.islice(point.power_losses(random.Random(1), noise=noise), 100)
        pages = [text_of(image.files()) for image in images]
        assert {page[PAGE:] for page in pages} == {b"o" * PAGE}
        return {page[:PAGE] == NOISE for page in pages}

    point = ended(scenario, prepared())
    assert noisy(point, noise=False) == {False}
    assert noisy(point, noise=True) == {False, True}


def test_images_are_the_same_if_the_same_can_be_found_in_them() -> None:
    first, second = prepared(), prepared()
    assert first.disk.digest() == second.disk.digest()
    opened(first).store(5, b"ooo")
    first.link("/d/old", "/e/new")
    first.remove("/e/new")
    assert first.disk.digest() == second.disk.digest()
    for change in (
        lambda files: opened(files).grow(3 * PAGE),
        lambda files: opened(files).store(5, b"n"),
        lambda files: files.link("/d/old", "/e/new"),
        lambda files: files.replace("/d/old", "/d/new"),
    ):
        changed = prepared()
        change(changed)
        assert changed.disk.digest() != second.disk.digest()


def test_a_page_tears_at_every_sector_and_a_store_within_one() -> None:
    def scenario(files: CrashFiles) -> None:
        opened(files).store(0, b"n" * PAGE)

    def cut(files: CrashFiles) -> int | None:
        """Bytes that are new at the start; less than none: that are old there; None: neither."""
        data = text_of(files)[:PAGE]
        new, old = data.count(b"n"), data.count(b"o")
        if data == b"n" * new + b"o" * old:
            return new
        return -old if data == b"o" * old + b"n" * new else None

    found = left(scenario, cut)
    assert set(range(0, PAGE + 1, 512)) <= found
    assert {-each for each in range(0, PAGE, 512)} <= found
    assert None in found

    def small(files: CrashFiles) -> None:
        opened(files).store(8, b"n" * 64)

    assert {0, 32, 64} <= left(small, lambda files: text_of(files).count(b"n"))


def text_of(files: CrashFiles) -> bytes:
    data = bytearray(2 * PAGE)
    opened(files).load(0, memoryview(data))
    return bytes(data)


def test_a_persist_covers_the_bytes_it_was_asked_for_and_no_others() -> None:
    def scenario(files: CrashFiles) -> None:
        medium = opened(files)
        medium.store(0, b"n" * 1024)
        medium.persist([Extent(0, 512)])

    found = left(scenario, lambda files: text_of(files).count(b"n"))
    assert {512, 1024} <= found
    assert all(isinstance(count, int) and count >= 512 for count in found)

    def twice(files: CrashFiles) -> None:
        scenario(files)
        opened(files).persist([Extent(0, 1024)])

    assert left(twice, lambda files: text_of(files).count(b"n")) == {1024}


def test_the_size_of_a_new_file_is_sure_after_a_persist_only() -> None:
    def scenario(files: CrashFiles) -> None:
        medium = files.create("/d/new", 10)
        files.sync("/d")
        medium.persist([])

    def size(files: CrashFiles) -> int | None:
        status = files.status("/d/new")
        return status.size if status else None

    assert left(scenario, size) == {0, 10}

    def persisted(files: CrashFiles) -> None:
        scenario(files)
        files.open("/d/new", writable=True).persist([Extent(0, 1)])

    assert left(persisted, size) == {10}


def test_growth_is_durable_and_what_is_behind_the_end_is_gone() -> None:
    def scenario(files: CrashFiles) -> None:
        opened(files).grow(3 * PAGE)
        opened(files).store(2 * PAGE, b"n" * PAGE)

    assert {b"o\0", b"on"} <= left(scenario, text())
    assert left(scenario, lambda files: opened(files).size) == {3 * PAGE}

    def shrunk(files: CrashFiles) -> None:
        medium = with_content(files, "/d/new", b"n" * PAGE)
        files.sync("/d")
        assert medium.size == PAGE

    def regrown(files: CrashFiles) -> tuple[int, bytes | None]:
        medium = files.open("/d/new", writable=True)
        size = medium.size
        medium.grow(PAGE)
        return size, text("/d/new")(files)

    found = left(shrunk, regrown)
    assert {(0, b"\0"), (PAGE, b"\0"), (PAGE, b"n")} <= found
    assert (0, b"n") not in found


def test_a_name_is_sure_after_the_sync_of_its_own_directory() -> None:
    def scenario(files: CrashFiles) -> None:
        files.create("/d/a", 0)
        files.create("/e/b", 0)
        files.sync("/e")

    assert left(scenario, names) == {("old", "e/b"), ("a", "old", "e/b")}


def test_changes_of_different_names_happen_in_any_order_and_of_one_name_in_theirs() -> None:
    def scenario(files: CrashFiles) -> None:
        files.link("/d/old", "/d/a")
        files.link("/d/old", "/d/b")
        files.remove("/d/a")

    assert left(scenario, names) == {("old",), ("a", "old"), ("b", "old"), ("a", "b", "old")}


def test_of_two_changes_of_one_name_the_second_comes_with_the_first() -> None:
    def scenario(files: CrashFiles) -> None:
        for name in ("a", "b"):
            with_content(files, f"/d/{name}", name.encode(), persist=True)
        files.sync("/d")
        for name in ("a", "b"):
            files.replace(f"/d/{name}", "/d/old")

    found = left(scenario, lambda files: (names(files), text()(files)))
    assert found == {(("a", "b", "old"), b"o"), (("b", "old"), b"a"), (("old",), b"b")}


def test_a_rename_happens_whole() -> None:
    def scenario(files: CrashFiles) -> None:
        with_content(files, "/d/new", b"n", persist=True)
        files.sync("/d")
        files.replace("/d/new", "/d/old")

    found = left(scenario, lambda files: (names(files), text()(files)))
    assert found == {(("new", "old"), b"o"), (("old",), b"n")}


def test_a_rename_between_directories_never_loses_the_file() -> None:
    def scenario(files: CrashFiles) -> None:
        files.replace("/d/old", "/e/new")

    assert left(scenario, names) == {("old",), ("old", "e/new"), ("e/new",)}

    def target_synced(files: CrashFiles) -> None:
        scenario(files)
        files.sync("/e")

    assert left(target_synced, names) == {("old", "e/new"), ("e/new",)}

    def source_synced(files: CrashFiles) -> None:
        scenario(files)
        files.sync("/d")

    assert left(source_synced, names) == {("e/new",)}


def test_a_rename_onto_its_own_hard_link_does_nothing() -> None:
    files = prepared()
    files.link("/d/old", "/e/same")
    files.replace("/d/old", "/e/same")
    assert names(files) == ("old", "e/same")


def test_many_changes_of_names_are_sampled_and_still_each_may_be_lost() -> None:
    def scenario(files: CrashFiles) -> None:
        for number in range(12):
            files.link("/d/old", f"/d/{number:02}")

    found = left(scenario, lambda files: frozenset(names(files)), 2000)
    every = {f"{number:02}" for number in range(12)}
    assert frozenset({"old"}) in found
    assert frozenset({"old", *every}) in found
    for lost in every:
        assert any(
            lost not in each for each in found if isinstance(each, frozenset) and "old" in each
        )


# --- kill, faults, stop ---------------------------------------------------------------------


def test_a_killed_process_leaves_its_caches_and_they_can_still_be_lost() -> None:
    def killed(files: CrashFiles) -> None:
        opened(files).store(0, b"n" * PAGE)

    [image] = ended(killed, prepared()).kills()
    assert text()(image.files()) == b"no"
    after = ended(lambda files: None, image.files())
    losses = itertools.islice(after.power_losses(random.Random(1)), 50)
    assert {b"o", b"no"} <= {text()(loss.files()) for loss in losses}


def test_a_kill_may_come_in_the_middle_of_a_store() -> None:
    def scenario(files: CrashFiles) -> None:
        opened(files).store(0, b"n" * 2 * PAGE)

    recording: Recording[str] = record(lambda files, report: scenario(files), prepared())
    point = recording.points[0]
    assert [text_of(image.files()).count(b"n") for image in point.kills()] == [0, PAGE]


def test_what_a_failed_persist_dropped_looks_clean_and_is_not_written_by_a_later_one() -> None:
    def scenario(files: CrashFiles) -> None:
        medium = opened(files)
        medium.store(0, b"n" * 2 * PAGE)
        with pytest.raises(MediumError) as caught:
            medium.persist([Extent(0, 2 * PAGE)])
        assert caught.value.errno == errno.EIO
        again = opened(files)
        assert text()(files) == b"n"
        again.store(PAGE, b"n")
        again.persist([Extent(0, 2 * PAGE)])

    faulty = CrashFiles.on(prepared().disk, faults=Faults(persist=frozenset({1})))
    losses = itertools.islice(ended(scenario, faulty).power_losses(random.Random(1)), 100)
    found = {text()(image.files()) for image in losses}
    assert {b"on", b"n"} <= found
    assert all(each is not None and each.endswith(b"n") for each in found)


def test_a_growth_that_finds_no_space_changes_nothing() -> None:
    files = prepared()
    files.faults = Faults(grow=frozenset({2}))
    medium = opened(files)
    medium.grow(3 * PAGE)
    with pytest.raises(MediumError) as caught:
        medium.grow(4 * PAGE)
    assert caught.value.errno == errno.ENOSPC
    assert medium.size == 3 * PAGE
    medium.store(0, b"still written")
    medium.persist([Extent(0, PAGE)])


def test_a_process_can_be_stopped_before_any_event() -> None:
    files = CrashFiles(["/d"], faults=Faults(stop=2))
    medium = files.create("/d/a", PAGE)
    with pytest.raises(Crash):
        medium.store(0, b"n")
    assert text("/d/a")(files) == b"\0"


def test_a_recording_has_a_point_before_each_event_and_one_at_the_end() -> None:
    def scenario(files: CrashFiles, report: Callable[[str], None]) -> None:
        report("begun")
        medium = opened(files)
        medium.store(0, b"n")
        medium.persist([Extent(0, 1)])
        report("done")

    points = record(scenario, prepared()).points
    assert [point.event and point.event.text.split()[0] for point in points] == [
        "store",
        "persist",
        None,
    ]
    assert [point.facts for point in points] == [("begun",), ("begun",), ("begun", "done")]


# --- a small store, right and wrong ---------------------------------------------------------

Fact = tuple[str, int]

_AREAS = 2
_SIZE = 2 * PAGE


class Toy:
    """A store of one number, in two files: ``data`` has two areas, ``root`` two slots."""

    files: CrashFiles

    def __init__(self, files: CrashFiles) -> None:
        self.files = files
        self.find_names()
        if files.status("/toy/root") is None:
            self.format()
        self.data = files.open("/toy/data", writable=True)
        self.root = files.open("/toy/root", writable=True)
        self.number = newest(files)
        self.recover()

    def find_names(self) -> None:
        """Those that are found may be in caches only."""
        self.files.sync("/toy")

    def format(self) -> None:
        for name, size in (("data", _AREAS * _SIZE), ("root", 2 * PAGE)):
            self.files.remove(f"/toy/{name}.new")
            medium = self.files.create(f"/toy/{name}.new", size)
            if name == "root":
                medium.store(0, packed(0, bytes(_SIZE)))
            self.make_durable(medium)
            self.publish(name)

    def make_durable(self, medium: CrashMedium) -> None:
        medium.persist([Extent(0, medium.size)])

    def publish(self, name: str) -> None:
        self.files.replace(f"/toy/{name}.new", f"/toy/{name}")
        self.files.sync("/toy")

    def recover(self) -> None:
        """The root found may be in caches only."""
        offset = self.number % 2 * PAGE
        self.root.store(offset, packed(self.number, self.bytes_of(self.number)))
        self.root.persist([Extent(offset, PAGE)])

    def save(self, number: int) -> None:
        data, offset = payload(number), self.area(number)
        self.data.store(offset, data)
        self.persist_data(offset)
        self.store_root(number, data)
        self.root.persist([Extent(number % 2 * PAGE, PAGE)])

    def area(self, number: int) -> int:
        return number % _AREAS * _SIZE

    def persist_data(self, offset: int) -> None:
        self.data.persist([Extent(offset, _SIZE)])

    def store_root(self, number: int, data: bytes) -> None:
        self.root.store(number % 2 * PAGE, packed(number, data))

    @staticmethod
    def bytes_of(number: int) -> bytes:
        return payload(number) if number else bytes(_SIZE)


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(_SIZE)


def packed(number: int, data: bytes) -> bytes:
    body = number.to_bytes(8, "little") + digest(data)
    return body + digest(body)


def loaded(files: CrashFiles, name: str) -> bytes:
    medium = files.open(f"/toy/{name}", writable=False)
    data = bytearray(medium.size)
    medium.load(0, memoryview(data))
    return bytes(data)


def newest(files: CrashFiles) -> int:
    """The number of the newest whole root, whose data must be whole too."""
    root, data = loaded(files, "root"), loaded(files, "data")
    slots = [root[offset : offset + 40] for offset in (0, PAGE)]
    whole = [slot for slot in slots if digest(slot[:24]) == slot[24:]]
    assert whole, "no root"
    best = max(whole, key=lambda slot: int.from_bytes(slot[:8], "little"))
    number = int.from_bytes(best[:8], "little")
    area = data[number % _AREAS * _SIZE :][:_SIZE]
    assert digest(area) == best[8:24], f"the data of {number} is gone"
    return number


def saves(toy: type[Toy], count: int) -> Callable[[CrashFiles, Callable[[Fact], None]], None]:
    """A process that opens the store, tells what it found, and saves some more."""

    def scenario(files: CrashFiles, report: Callable[[Fact], None]) -> None:
        store = toy(files)
        report(("saved", store.number))
        for number in range(store.number + 1, store.number + 1 + count):
            report(("saving", number))
            store.save(number)
            report(("saved", number))

    return scenario


def verify(files: CrashFiles, facts: Sequence[Fact]) -> None:
    saved = max((number for word, number in facts if word == "saved"), default=None)
    tried = max((number for _, number in facts), default=0)
    if saved is None and files.status("/toy/root") is None:
        return
    found = newest(files)
    assert (saved or 0) <= found <= tried, f"{found}, not {saved} or {tried}"


def explorer(toy: type[Toy], processes: int = 1, faults: Faults | None = None) -> Explorer[Fact]:
    return Explorer(
        processes=[saves(toy, 3)] + [saves(toy, 2)] * (processes - 1),
        verify=verify,
        start=lambda: CrashFiles(["/toy"], faults=faults or Faults()),
        budgets=(300, 10),
    )


def test_the_right_order_survives_every_crash_and_crashes_in_recovery() -> None:
    found = explorer(Toy, 3).explore()
    print(found)
    assert len(found.images) > 400
    assert found.runs > 100


class DataNotPersisted(Toy):
    def persist_data(self, offset: int) -> None:
        pass


class DataPersistedInPart(Toy):
    def persist_data(self, offset: int) -> None:
        self.data.persist([Extent(offset, _SIZE - 512)])


class RootBeforeData(Toy):
    def save(self, number: int) -> None:
        self.store_root(number, payload(number))
        super().save(number)


class LiveAreaOverwritten(Toy):
    def area(self, number: int) -> int:
        return 0


class OneSlot(Toy):
    def store_root(self, number: int, data: bytes) -> None:
        self.root.store(0, packed(number, data))
        self.root.persist([Extent(0, PAGE)])


class RootNotPersisted(Toy):
    def save(self, number: int) -> None:
        self.data.store(self.area(number), payload(number))
        self.persist_data(self.area(number))
        self.store_root(number, payload(number))


class DirectoryNotSynced(Toy):
    def publish(self, name: str) -> None:
        self.files.replace(f"/toy/{name}.new", f"/toy/{name}")


class RenamedBeforePersist(Toy):
    def make_durable(self, medium: CrashMedium) -> None:
        pass


class NamedBeforePersist(Toy):
    def make_durable(self, medium: CrashMedium) -> None:
        name = medium.info.name.removeprefix("/toy/").removesuffix(".new")
        self.files.replace(f"/toy/{name}.new", f"/toy/{name}")
        super().make_durable(medium)

    def publish(self, name: str) -> None:
        self.files.sync("/toy")


class NameInCachesOnly(Toy):
    def find_names(self) -> None:
        pass


@pytest.mark.parametrize(
    "wrong",
    [
        DataNotPersisted,
        DataPersistedInPart,
        RootBeforeData,
        LiveAreaOverwritten,
        OneSlot,
        RootNotPersisted,
        DirectoryNotSynced,
        RenamedBeforePersist,
        NamedBeforePersist,
    ],
)
def test_a_wrong_order_is_found_and_can_be_replayed(wrong: type[Toy]) -> None:
    with pytest.raises(ImageError) as caught:
        explorer(wrong).explore()
    assert "after these events" in str(caught.value)
    cause = caught.value.__cause__
    assert cause is not None
    with pytest.raises(type(cause)) as again:
        explorer(wrong).replay(caught.value.case)
    assert str(again.value) == str(cause)


class RootNotStoredAgain(Toy):
    def recover(self) -> None:
        pass


@pytest.mark.parametrize("wrong", [RootNotStoredAgain, NameInCachesOnly])
def test_what_only_caches_hold_needs_two_processes_to_be_found(wrong: type[Toy]) -> None:
    explorer(wrong).explore()
    with pytest.raises(ImageError) as caught:
        explorer(wrong, 2).explore()
    assert len(caught.value.case) == 2
    assert caught.value.case[0][1] < 0
    cause = caught.value.__cause__
    assert cause is not None
    with pytest.raises(type(cause)):
        explorer(wrong, 2).replay(caught.value.case)


class Retries(Toy):
    def persist_data(self, offset: int) -> None:
        try:
            super().persist_data(offset)
        except MediumError:
            self.data = self.files.open("/toy/data", writable=True)
            super().persist_data(offset)


class StoresAgain(Toy):
    def persist_data(self, offset: int) -> None:
        try:
            super().persist_data(offset)
        except MediumError:
            number = self.number + 1 if offset != self.area(self.number) else self.number
            self.data = self.files.open("/toy/data", writable=True)
            self.data.store(offset, payload(number))
            super().persist_data(offset)


_FIRST_SAVE = Faults(persist=frozenset({4}))


def test_a_retry_after_eio_is_found_and_storing_again_is_not() -> None:
    with pytest.raises(ImageError):
        explorer(Retries, faults=_FIRST_SAVE).explore()
    explorer(StoresAgain, faults=_FIRST_SAVE).explore()


def test_what_comes_before_a_fault_is_in_the_search_without_faults() -> None:
    def found(faults: Faults | None, *, after_fault: bool = False) -> Exploration:
        search = replace(explorer(StoresAgain, 1, faults), budgets=(10_000,))
        return replace(search, after_fault=after_fault).explore()

    whole, after, without = found(_FIRST_SAVE), found(_FIRST_SAVE, after_fault=True), found(None)
    assert whole.images <= after.images | without.images
    assert after.images - without.images
    assert after.crashes < whole.crashes
    with pytest.raises(ImageError):
        replace(explorer(Retries, faults=_FIRST_SAVE), after_fault=True).explore()


def test_an_image_is_verified_again_when_more_is_known() -> None:
    def scenario(files: CrashFiles, report: Callable[[Fact], None]) -> None:
        opened(files).store(0, b"n")
        report(("stored", 1))

    def check(files: CrashFiles, facts: Sequence[Fact]) -> None:
        assert not facts or bytes_at(files, 0) == b"n", "lost"

    with pytest.raises(ImageError) as caught:
        Explorer(processes=[scenario], verify=check, start=prepared).explore()
    assert str(caught.value.__cause__).startswith("lost")


def test_the_next_process_runs_on_what_power_losses_left() -> None:
    def scenario(files: CrashFiles, report: Callable[[Fact], None]) -> None:
        opened(files).store(0, b"n" * 2 * PAGE)

    def following(files: CrashFiles, report: Callable[[Fact], None]) -> None:
        found.add(text()(files))

    found = set[bytes | None]()
    Explorer(
        processes=[scenario, following],
        verify=lambda files, facts: None,
        start=prepared,
        followed=3,
    ).explore()
    assert {b"o", b"n", b"no", b"on"} <= found


def test_an_error_of_the_next_process_is_reported_with_its_case() -> None:
    def broken(files: CrashFiles, report: Callable[[Fact], None]) -> None:
        raise ValueError("cannot open")

    search = Explorer(
        processes=[saves(Toy, 1), broken],
        verify=verify,
        start=lambda: CrashFiles(["/toy"]),
    )
    with pytest.raises(ImageError) as caught:
        search.explore()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="cannot open"):
        search.replay(caught.value.case)
