"""Versions of a pool that reference files hold, and those that may go (design: the reference file).

A version that a living reference file refers to is never retired by ``keep``. One whose files were
all deleted behind our back goes when its space is needed. Order of changes: see ``reference``.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeVar

from portus.client.files import fate
from portus.client.files import reference as files_of
from portus.client.files.fate import Fate, FileLink
from portus.client.files.held import gone_for_good, home_of_link, led_to, missing, unheld
from portus.client.files.host import HostPool, is_renounced
from portus.client.files.notes import note
from portus.client.files.survey import Survey, survey_of
from portus.errors import MediumError, PortusError
from portus.format.reference import Reference, pin_at, pin_of
from portus.index.catalogue import Catalogue
from portus.index.directory import links_directory, make_directory
from portus.index.groups import part_of
from portus.index.keep import Keep
from portus.index.pool import PoolWriter
from portus.index.roots import Superblock
from portus.media.base import FileSystem, Medium
from portus.media.file import OUT_OF_SPACE, PlainFile
from portus.media.local import LocalFiles
from portus.spec import VersionInfo

_log: Final = logging.getLogger("portus")

Result = TypeVar("Result")

ASIDE: Final = ".uncommitted"
"""Behind the name of a reference file whose save was cut off, or failed."""

_ASIDE: Final = re.compile(re.escape(ASIDE) + r"(-\d+)?$")

_WITHDRAWN_MAX: Final = 16
"""Files that one run leaves of saves that failed; the oldest goes. It may fail for weeks."""

_FILE_ROOM: Final = 64 << 10
"""Bytes that the pool gives back for one reference file: it, its link, and what their directories
grow by. Not more, since the next save needs the rest."""

_UNSETTLED_MAX: Final = 20
_SETTLE_S: Final = 0.1
"""A commit and its files take milliseconds; who waits for them in vain goes on."""


def is_aside(path: str) -> bool:
    """True for a file that was put aside, by its name: what it is named after is not there."""
    return _ASIDE.search(path) is not None


class HeldPool(Protocol):
    """What a keeper needs of a pool."""

    @property
    def medium(self) -> Medium:
        """The medium that the pool is on."""

    @property
    def superblock(self) -> Superblock:
        """The superblock, which identifies the pool."""

    def catalogue(self) -> Catalogue:
        """What is committed now."""

    def retire(self, versions: Collection[int]) -> None:
        """Let go of versions, by id."""

    def may_have(self, token: bytes) -> bool:
        """True if readers may find the version of that token, though its commit failed."""


class InFlight(Protocol):
    """What a keeper needs of a save that is in flight."""

    @property
    def token(self) -> bytes:
        """Names its version."""

    @property
    def step(self) -> int:
        """The step of training."""

    @property
    def model(self) -> str:
        """The model that it is a version of."""

    @property
    def over(self) -> bool:
        """True when it is committed, or will never be."""


Going = tuple[InFlight, frozenset[bytes]]
"""A save in flight, and the tokens of the versions that its commit may retire."""


def keeper_of(path: str, writer: HeldPool, address: str | None = None) -> Keeper:
    """The one keeper of a pool that this process writes. address: of its host, if it has one."""
    with _making:
        keeper = _keepers.get(writer)
        if keeper is None:
            keeper = _keepers[writer] = Keeper(path, writer, address=address)
        return keeper


class Keeper:
    """The reference files of one pool. Thread-safe."""

    def __init__(
        self,
        path: str,
        writer: HeldPool,
        files: FileSystem | None = None,
        address: str | None = None,
    ) -> None:
        """path: of the pool file; for a pool on a host, its ``address`` being given, the path
        that its links directory is named after. files: those of this machine if not given."""
        self._path = path
        self._address: Final = address
        self._directory = links_directory(path)
        self._survey = survey_of(self._directory)
        self._files: Final = files or LocalFiles()
        self._pool: Final = weakref.ref(writer)  # it is the key of the table of keepers
        self._guard: Final = threading.Lock()
        self._placing: Final = threading.Lock()
        """Held while a file is placed: its link is there before its name, as if it were deleted."""
        self._known: Final[dict[str, Reference]] = {}
        self._decisions = 0
        """How often it was decided what goes, under the guard; it is carried out later."""
        self._going: tuple[Going, ...] = ()
        self._leaving: set[str] = set()
        """Tokens of versions that are being retired, or were."""
        self._begun = False
        self._seen: list[FileLink] = []
        """The links when they were looked at last."""
        self._withdrawn: Final[deque[str]] = deque()
        self._keeps: Final[dict[str, Keep | None]] = {}
        """What is kept of each model without files."""
        self._untold: list[Reference] = []
        """Files of which the storage host is to hear before what they lead to is committed."""
        self._settled: Final = threading.Condition()
        self._settling: Final[set[bytes]] = set()
        """Tokens of versions that are being committed, or are, before their files lead to them."""
        self._commits = 0
        files_of.tidy(self._directory, self._files)
        self._note_place()
        self._read_holds()
        self._read_links()
        self._read_strays()

    @property
    def _writer(self) -> HeldPool:
        writer = self._pool()
        assert writer is not None, "the keeper outlived its pool"
        return writer

    def keep(self, model: str, value: Keep | None) -> None:
        """Set the ``keep`` of ``model``: versions that it keeps for ever, or for a while, do not go
        with their files."""
        self._keeps[model] = value

    def is_new(self, path: str) -> bool:
        """True if nothing is at ``path`` yet."""
        return os.path.basename(path) not in self._files.entries(os.path.dirname(path))

    def place(
        self,
        path: str,
        token: bytes,
        step: int,
        model: str,
        part: str | None = None,
        in_flight: InFlight | None = None,
        asked: int | None = None,
    ) -> Reference:
        """Put a reference to the version ``token``, to come or committed, at ``path``; or to the
        ``part`` of its state that has this key. A part falls back to nothing: other files of its
        directory, not ours perhaps, are of this step.

        in_flight: a save of the model that may not be over yet. Its commit may retire the version
        to fall back to, so it is fallen back to first; or another one that is on record.
        asked: when this was asked for; what is at ``path`` and is newer stays (see ``order``).
        """
        self._follow()
        self._with_room(lambda: self._make_directories(path))
        while True:  # ends: each turn but the last something was decided about versions that go
            decisions, going = self._decisions, self._going
            others = [each for each in going if not each[0].over and each[0].token != token]
            fallback = self._newest(model, token) if part is None else None
            made = self._reference(path, token, step, model, part)
            if part is None:
                made = _falling_back(made, fallback, in_flight, others)
            with self._guard:
                if decisions == self._decisions:
                    self._known[made.id] = made  # from here on it holds what it leads to
                    break
        placed = False
        try:
            with self._placing:
                placed = self._with_room(
                    lambda: files_of.place(path, made, self._files, self._directory, asked)
                )
            if placed and self._host is not None:
                self._untold.append(made)
        finally:
            if not placed:
                with self._guard:
                    self._known.pop(made.id, None)
        return made

    def _with_room(self, act: Callable[[], Result]) -> Result:
        """What ``act`` gives; on a full disk it is called once more, after the pool gave back some
        of the space that nothing reaches."""
        try:
            return act()
        except MediumError as error:
            pool = self._writer
            if error.errno not in OUT_OF_SPACE or not isinstance(pool, PoolWriter):
                raise
            if not pool.give_back(_FILE_ROOM):
                raise
        return act()

    def _reference(
        self, path: str, token: bytes, step: int, model: str, part: str | None
    ) -> Reference:
        relative = os.path.relpath(self._path, os.path.dirname(path)).replace(os.sep, "/")
        return Reference(
            id=os.urandom(16).hex(),
            token=token.hex(),
            pool=self._writer.superblock.uuid.hex(),
            pool_path=self._address or self._path,
            pool_relative=self._address or relative,
            model=model,
            step=step,
            written_path=path,
            written_ns=time.time_ns(),
            part=part,
        )

    def is_here(self, reference: Reference) -> bool:
        """True if it leads to this pool, or to a version that this pool was filled with: a host
        may have another one after it was started again, and its replica has."""
        if reference.pool == self._writer.superblock.uuid.hex():
            return True
        entries = self._host.catalogue().entries() if self._host is not None else ()
        return any(entry.info.token.hex() == reference.token for entry in entries)

    def make_durable(self, paths: Iterable[str]) -> None:
        """Return when the references at ``paths`` survive power loss, and the host knows them."""
        host = self._host
        while host is not None and self._untold:
            host.hold(self._untold[0])
            self._untold.pop(0)
        for path in {os.path.dirname(path): path for path in paths}.values():
            self._make_durable(path)

    def _make_durable(self, path: str) -> None:
        while True:  # ends: each turn but the last follows the pool to where it was moved
            directory = self._directory
            try:
                return files_of.make_durable(path, self._files, directory)
            except MediumError as error:
                self._follow()
                if error.errno != errno.ENOENT or self._directory == directory:
                    raise

    def replace(
        self,
        path: str,
        info: VersionInfo,
        part: str | None = None,
        *,
        retire: bool = True,
        asked: int | None = None,
    ) -> None:
        """Put a reference to a committed version in place of what is at ``path``, durably, and
        let go of the version that was led to from there. retire: False leaves it to a commit.
        asked: as for ``place``."""
        old = files_of.read_through(path, self._files)
        self.place(path, info.token, info.step, info.model, part, asked=asked)
        self.make_durable([path])
        if old is not None:
            self.let_go(old, retire=retire)

    def remove(self, path: str, *, asked: int | None = None) -> None:
        """Remove the file at ``path``, durably, and then what it alone led to. asked: as for
        ``place``."""
        old = files_of.read_through(path, self._files)
        files_of.take_away(path, self._files, asked)
        if old is not None:
            self.let_go(old)

    def remove_directory(self, path: str) -> None:
        """Remove a directory, durably, and then what its files alone led to."""
        led = [
            old
            for directory, _, names in os.walk(path)
            for name in names
            if (old := files_of.read_through(os.path.join(directory, name), self._files))
        ]
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise MediumError(error.errno, f"cannot remove {path}: {error.strerror}") from error
        files_of.make_removals_durable(os.path.dirname(path), self._files)
        for old in led:
            self.let_go(old)

    def is_spare(self, path: str) -> bool:
        """True if nothing is lost when ``path`` is removed: all that is there are reference files,
        and each version that they lead to has another file of its own, or there is none."""
        found, others = self._found_at(path)
        led = led_to(found, self._writer.catalogue())
        are_here = all(map(self.is_here, found))
        return are_here and not others and led <= self._held_elsewhere(found, led)

    def is_outlived(self, path: str) -> bool:
        """True if a version newer than all that the reference files at ``path`` lead to has a file
        of its own elsewhere."""
        found, _ = self._found_at(path)
        catalogue = self._writer.catalogue()
        commits = {entry.info.token.hex(): entry.info.commit for entry in catalogue.entries()}
        newest = max((commits[token] for token in led_to(found, catalogue)), default=None)
        if newest is None or not all(map(self.is_here, found)):
            return False  # not known to be older than anything
        newer = {token for token, commit in commits.items() if commit > newest}
        return bool(self._held_elsewhere(found, newer))

    def _found_at(self, path: str) -> tuple[list[Reference], int]:
        """The reference files at ``path``, or in that directory, and how many other files. A
        symbolic link is nothing: what it leads to stays."""
        paths = [] if os.path.islink(path) or self._files.status(path) is None else [path]
        if paths and os.path.isdir(path):
            paths = [os.path.join(home, name) for home, _, names in os.walk(path) for name in names]
        read = [files_of.read_through(each, self._files) for each in paths]
        found = [each for each in read if each is not None]
        return found, len(paths) - len(found)

    def _held_elsewhere(self, but: Sequence[Reference], tokens: Collection[str]) -> set[str]:
        """Return those of ``tokens`` whose versions have a living file other than ``but``."""
        ids = {each.id for each in but}
        with self._guard:
            others = [each for each in self._known.values() if each.id not in ids]
        return {
            each.token
            for each in others
            if each.token in tokens
            and fate.state_of(each, self._directory, self._files) is Fate.ALIVE
        }

    def begin(self, model: str | None) -> None:
        """A run starts, the first of this process with this pool: put aside the files that lead to
        a state of which nothing was ever committed. Of one model, or of all."""
        with self._guard:
            begun, self._begun = self._begun, True
        if begun:
            return  # and there may be saves in flight
        try:
            for path, each in self._uncommitted(model, frozenset()).items():
                if _stands_alone(each):
                    self._put_aside(path, each)
            self._forget_put_aside()
        except MediumError as error:
            _log.warning("portus: files of interrupted saves stay: %s", error)

    def _forget_put_aside(self) -> None:
        """Forget the files that a process put aside, if it died before it did this: their links
        would stay when the pool is gone."""
        there = {entry.info.token.hex() for entry in self._writer.catalogue().entries()}
        for link in self._seen:
            reference = link.reference
            if link.state is Fate.ALIVE and link.path is None and reference.token not in there:
                paths = self._survey.copies(reference)
                if paths and all(map(is_aside, paths)):
                    self._forget(reference)
                    with self._guard:
                        self._known.pop(reference.id, None)

    def withdraw(self, path: str, placed: Reference, asked: int, *, is_in_doubt: bool) -> None:
        """The save failed that ``placed`` was put at ``path`` for: put the file aside, or until its
        run starts again it would be taken for a checkpoint of its step. asked: as for ``place``.

        is_in_doubt: its commit had begun. Then the file stays if readers may find its version. What
        cannot be put aside stays too, which is logged; nothing is raised.
        """
        if not _stands_alone(placed):
            return
        try:
            if not (is_in_doubt and self._writer.may_have(bytes.fromhex(placed.token))):
                self._take_away(path, placed, asked)
        except PortusError as error:
            _log.warning(
                "portus: %s, whose save failed, could not be removed, and does not lead to "
                "its own step; remove it yourself: %s",
                path,
                error,
            )

    def cut_off(self, tokens: Collection[bytes]) -> None:
        """The groups that these versions are parts of were never completed, by other ranks: put
        the files aside that lead to them. What cannot be put aside stays, which is logged."""
        texts = {token.hex() for token in tokens}
        for path, reference in self._placed().items():
            if reference.token in texts:
                try:
                    self._take_away(path, reference, None)
                except PortusError as error:
                    _log.warning(
                        "portus: %s leads to no checkpoint, and could not be removed; remove it "
                        "yourself: %s",
                        path,
                        error,
                    )

    def mend(
        self,
        *,
        uncommitted: bool,
        cut_off: Collection[bytes] = (),
        model: str | None = None,
        before: Callable[[list[str]], None] | None = None,
    ) -> list[str]:
        """Undo what the death of a process left half done; the paths of files that are gone.

        Files of one directory that lead to parts of a state come to lead to parts of the same
        version, the newest one: a save into an existing directory was cut off while it replaced
        them. uncommitted: put files aside whose save was never committed, of one model or of all.
        cut_off: tokens of versions that count as never committed, since other parts of their
        group are not. Files that lead to another pool, which was here once, are left alone.
        before: is told which files are put aside, before the first one is.
        """
        lost = self._uncommitted(model, cut_off) if uncommitted else {}
        infos = [entry.info for entry in self._writer.catalogue().entries()]
        committed = {info.token.hex(): info for info in infos if info.token not in cut_off}
        found = {path: each for path, each in self._placed().items() if each.token in committed}
        newest: dict[str, VersionInfo] = {}
        for path, each in found.items():
            if each.part is not None:
                home, info = os.path.dirname(path), committed[each.token]
                newest[home] = max(newest.get(home, info), info, key=lambda info: info.commit)
        for path, each in found.items():
            best = newest.get(os.path.dirname(path)) if each.part else None
            if best is not None and committed[each.token].commit < best.commit:
                self.replace(path, best, each.part)
        if before is not None and lost:
            before(list(lost))
        for path, each in lost.items():
            self._put_aside(path, each)
        return list(lost)

    def commits(self, token: bytes) -> None:
        """The version is committed next, and then its files are put in place: ``settle``."""
        with self._settled:
            self._settling.add(token)
            self._commits += 1

    def settle(self, token: bytes) -> None:
        """The files of the version lead to it by now, or it failed."""
        with self._settled:
            self._settling.discard(token)
            self._settled.notify_all()

    def read_settled(self, read: Callable[[], Result]) -> Result:
        """What ``read`` returns of a moment in which no committed version waits for its files.
        Blocks until there is one, and reads again if a save committed meanwhile; after
        ``_UNSETTLED_MAX`` tries it takes what there is."""
        for _ in range(_UNSETTLED_MAX):
            with self._settled:
                self._settled.wait_for(lambda: not self._settling, _SETTLE_S)
                commits = self._commits
            found = read()
            if commits == self._commits and not self._settling:
                return found
        return read()

    def placed(self, model: str) -> dict[str, Reference]:
        """The reference files that lead to versions of ``model``, by their paths from the root of
        the run, or, of those elsewhere, from that of the file system. Raises ``MediumError``."""
        root, found = self._root, {}
        for path, each in self._placed().items():
            if each.model == model:
                below = os.path.relpath(path, root)
                found[path if below.startswith(os.pardir) else below] = each
        return found

    def pinned(self, model: str) -> dict[str, Reference]:
        """The pins of versions of ``model``, by the paths at which no file is. Raises
        ``MediumError``."""
        self._read_pins()
        with self._guard:
            known = list(self._known.values())
        return {each.written_path: each for each in known if each.is_pin and each.model == model}

    def put_back(self, path: str, info: VersionInfo, part: str | None) -> None:
        """Put a file to a committed version where ``placed`` of another pool had it, durably; not
        where something is, nor outside of the run and the working directory. A pin is put to it as
        ``pinned`` had it. Raises ``MediumError``."""
        pin = pin_at(path)
        if pin is not None:
            uuid, now_ns = self._writer.superblock.uuid, time.time_ns()
            make_directory(self._directory)
            made = pin_of(info, uuid, self._path, pin, now_ns)
            files_of.place_copy(made, self._directory, self._files)
            return
        place = os.path.normpath(os.path.join(self._root, path))
        homes = [self._root]
        with contextlib.suppress(OSError):  # the working directory may be gone
            homes.append(os.getcwd())
        if not any(os.path.commonpath([place, home]) == home for home in homes):
            _log.warning(
                "portus: %s is outside of the run, and is not restored: portus export makes a file "
                "of %s@%d",
                place,
                info.model,
                info.step,
            )
        elif not os.path.lexists(place):
            self.replace(place, info, part)

    @property
    def _root(self) -> str:
        """The directory of the run, as far as is known: what holds ``.portus``, or the pool."""
        return self._survey.root or os.path.dirname(self._directory)

    def _placed(self) -> dict[str, Reference]:
        """The reference files that lead to this pool, by path. What was moved is left out: who did
        it may know why."""
        uuid = self._writer.superblock.uuid.hex()
        self._read_links()
        return {
            link.path: link.reference
            for link in self._links()
            if link.state is Fate.ALIVE and link.path and link.reference.pool == uuid
        }

    def _uncommitted(self, model: str | None, cut_off: Collection[bytes]) -> dict[str, Reference]:
        """The files that lead to what was never committed. Who retires what a file leads to
        forgets its link first (``renounce``), so these were not retired."""
        infos = [entry.info for entry in self._writer.catalogue().entries()]
        committed = {info.token.hex() for info in infos if info.token not in cut_off}
        return {
            path: each
            for path, each in self._placed().items()
            if each.token not in committed and model in (None, each.model)
        }

    def _take_away(self, path: str, reference: Reference, asked: int | None) -> None:
        """Put aside the file of a save that failed in this run."""
        aside = self._put_aside(path, reference, asked)
        if aside is not None:
            self._withdrawn.append(aside)
        if len(self._withdrawn) > _WITHDRAWN_MAX:
            self._files.remove(self._withdrawn.popleft())

    def _put_aside(self, path: str, reference: Reference, asked: int | None = None) -> str | None:
        """Rename a file whose save was never committed: it would be taken for a checkpoint. Its
        name then; None if it is not there any more."""
        aside = path + ASIDE
        for number in itertools.count(2):
            if self._files.status(aside) is None:
                break
            aside = f"{path}{ASIDE}-{number}"
        newest = self._newest_file(reference.model)
        if newest is not None:
            files_of.lead_links_to(newest, path)  # a last.ckpt that leads nowhere is a fresh start
        if not files_of.move(path, aside, reference, self._files, asked):
            return None
        self._files.sync(os.path.dirname(path))
        self._forget(reference)
        with self._guard:
            self._known.pop(reference.id, None)
            self._untold = [each for each in self._untold if each.id != reference.id]
        _log.warning(
            "portus: the save of step %s to %s was never committed: the file is %s now",
            reference.step,
            path,
            os.path.basename(aside),
        )
        return aside

    def _newest_file(self, model: str) -> str | None:
        """The path of a file of the newest version of ``model`` that has one."""
        infos = [entry.info for entry in self._writer.catalogue().entries()]
        commits = {info.token.hex(): info.commit for info in infos if info.model == model}
        found = [
            (commits[each.token], path)
            for path, each in self._placed().items()
            if each.token in commits
        ]
        return max(found, default=(0, None))[1]

    def renounce(self, versions: Collection[int]) -> None:
        """Forget the files that refer to ``versions``, which are about to be retired: they are not
        to be taken for files of saves that were cut off."""
        entries = self._writer.catalogue().entries()
        tokens = {entry.info.token.hex() for entry in entries if entry.info.id in versions}
        for link in self._links():
            if link.reference.token in tokens:
                self._forget(link.reference)
                with self._guard:
                    self._known.pop(link.reference.id, None)

    def held(self, catalogue: Catalogue, coming: InFlight | None = None) -> set[int]:
        """Versions that reference files lead to, as far as is known without looking. ``coming``:
        a save whose version is there once this answer counts. It is on record that its commit may
        retire what is not held: files that are placed now fall back to it first. Pins are looked
        for. Raises ``MediumError``."""
        token = coming.token if coming else b""
        self._read_pins()
        with self._guard:
            tokens = led_to(list(self._known.values()), catalogue, token)
            if coming is not None:
                infos = [e.info for e in catalogue.entries() if e.info.model == coming.model]
                free = frozenset(each.token for each in infos if each.token.hex() not in tokens)
                others = [each for each in self._going if not each[0].over]
                self._going = (*others, (coming, free))
                self._decisions += 1
        return {entry.info.id for entry in catalogue.entries() if entry.info.token.hex() in tokens}

    def _read_pins(self) -> None:
        """Note the pins that came or went since the last look. A storage host notes its own."""
        with self._guard:
            known = {name: each for name, each in self._known.items() if each.is_pin}
        if self._host is None:
            there = files_of.pins(self._directory, self._files, known)
            with self._guard:
                self._known.update(there)
                for name in known.keys() - there.keys():
                    self._known.pop(name, None)

    def deleted(self) -> set[int]:
        """Versions all of whose reference files were deleted, durably, and which ``keep`` does not
        want; of those that it wants the links are forgotten. Looks at every link."""
        dead = self._read_links()
        catalogue = self._writer.catalogue()
        with self._guard:
            led = led_to(list(self._known.values()), catalogue)
        gone = {reference.token for reference in dead} - led
        infos = [entry.info for entry in catalogue.entries() if entry.info.token.hex() in gone]
        lasting = self._lasting(catalogue, led) if infos else set()
        spared = {info.token.hex() for info in infos if info.id in lasting}
        for reference in dead:
            if reference.token in spared:
                self._forget(reference)
        return {info.id for info in infos} - lasting

    def _lasting(self, catalogue: Catalogue, led: Collection[str]) -> set[int]:
        """Versions to which no file leads, ``led`` being the tokens of the others, and which stay
        all the same (``keep``)."""
        found: set[int] = set()
        for model, keep in self._keeps.items():
            listed = catalogue.models.get(model)
            if keep is not None and listed is not None and not keep.is_last_alone:
                infos = [entry.info for entry in listed.versions]
                free = [info for info in infos if info.token.hex() not in led]
                if part_of(model) is None:  # else others have a say: it goes by a commit alone
                    free = keep.lasting(free, infos[-1].time_ns)
                found |= {info.id for info in free}
        return found

    def collect(self, states: Collection[Fate]) -> set[int]:
        """Retire the versions that only reference files of ``states`` lead to, and forget those
        files; the ids. DELETED: those that ``deleted`` names; UNKNOWN: see ``fate``. However
        long it takes to look for copies."""
        found = self._links(survey_of(self._directory, None))
        gone = unheld(found, self._writer.catalogue(), states)
        lost = gone_for_good(found, states, self._files)
        self._writer.retire(gone)
        there = {entry.info.token.hex() for entry in self._writer.catalogue().entries()}
        for reference in lost:
            if reference.token not in there:
                self._forget(reference)
        return gone

    def _follow(self) -> None:
        """The pool may have been renamed since it was opened, or a directory above it. Its links
        are beside it; what is placed from now on says where it is."""
        medium = self._writer.medium
        if not isinstance(medium, PlainFile) or medium.is_at(self._path):
            return
        path = medium.path_now()
        if path != self._path:
            _log.warning(
                "%s was moved to %s during the run; saves continue there, and new files lead there",
                self._path,
                path,
            )
            self._path, self._directory = path, links_directory(path)
            self._survey = survey_of(self._directory)
            self._note_place()

    def _note_place(self) -> None:
        """Note where the pool is, so that files that are not beside it lead there."""
        if self._address is None and isinstance(self._files, LocalFiles):
            note(self._writer.superblock.uuid, self._path)

    def _make_directories(self, path: str) -> None:
        make_directory(self._directory)
        directory = os.path.dirname(path)
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            raise MediumError(
                error.errno, f"{directory}: cannot be made for a reference file: {error.strerror}"
            ) from error

    def let_go(self, old: Reference, *, retire: bool = True) -> None:
        """The file of ``old`` was removed or replaced, durably: retire what it alone led to."""
        if not self.is_here(old):
            return  # its own writer finds the link without a file
        self._follow()
        if fate.state_of(old, self._directory, self._files, self._survey) is Fate.ALIVE:
            return  # a copy was removed, not the file itself, or there is one
        self._read_pins()
        catalogue = self._writer.catalogue()
        there = {entry.info.token.hex(): entry.info.id for entry in catalogue.entries()}
        with self._guard:
            self._known.pop(old.id, None)
            led = led_to(list(self._known.values()), catalogue)
            goes = retire and old.token in there.keys() - led
            goes = goes and there[old.token] not in self._lasting(catalogue, led)
            self._leaving &= there.keys()
            if goes:
                self._leaving.add(old.token)
                self._decisions += 1
        if goes:
            self._writer.retire([there[old.token]])
        self._forget(old)

    def _newest(self, model: str, but: bytes) -> VersionInfo | None:
        found = self._writer.catalogue().models.get(model)
        infos = [entry.info for entry in found.versions] if found else []
        others = [i for i in infos if i.token != but and i.token.hex() not in self._leaving]
        return others[-1] if others else None

    def _read_links(self) -> list[Reference]:
        """The deleted references; all others are known from now on. Links that lead to nothing
        any more are removed.

        Deleted is what survives power loss so: a name that was removed or replaced, by a process
        that was killed or by a user, and not synced, comes back. Its version must be there then,
        or the one that it falls back to.
        """
        found = self._links()
        lost = [each for each in found if each.state is Fate.DELETED]
        settled = {each: self._is_settled(each) for each in set(map(home_of_link, lost))}
        gone = [each.reference for each in lost if settled[home_of_link(each)]]
        ids = {each.id for each in gone}
        there = {entry.info.token.hex() for entry in self._writer.catalogue().entries()}
        dead = [each for each in gone if each.token in there]
        for each in gone:
            if each.token not in there:
                self._forget(each)
        with self._guard:
            for link in found:
                if link.reference.id not in ids:
                    self._known.setdefault(link.reference.id, link.reference)
            for each in gone:
                self._known.pop(each.id, None)
        self._seen = found
        return [*dead, *(each for each in self._drop_overwritten(found) if each.token in there)]

    def _drop_overwritten(self, found: Sequence[FileLink]) -> list[Reference]:
        """Forget the files that another program wrote to in place: the links would keep their bytes
        on the disk when their names are gone. What they were, as far as is known. ``found``: the
        links that are references."""
        ids = {each.reference.id for each in found}
        with self._placing:
            lost = fate.overwritten(self._directory, self._files, ids, self._survey)
        dropped = []
        for name, path in lost.items():
            _log.warning(
                "portus: %s was a reference file; another program wrote to it in place, so it no "
                "longer keeps its version",
                path or f"a file whose link is {name}",
            )
            with self._guard:
                known = self._known.pop(name.id, None)
            if known is not None:
                self._forget(known)
                dropped.append(known)
            self._files.remove(os.path.join(self._directory, str(name)))
        return dropped

    def advice(self) -> str:
        """What can be done where space is short, as the end of a message: versions are held for
        files of which nobody knows where they are. Nothing if there are none."""
        infos = [info for info, _ in missing(self._seen, self._writer.catalogue())]
        if not infos:
            return ""
        return (
            f"; {sum(info.size for info in infos)} bytes are {len(infos)} versions whose files "
            "are not where they were: portus gc --missing deletes them"
        )

    @property
    def _host(self) -> HostPool | None:
        writer = self._writer
        return writer if isinstance(writer, HostPool) else None

    def _forget(self, reference: Reference) -> None:
        """Remove the link of a reference file, and have the storage host, if any, forget it."""
        files_of.forget(reference, self._directory, self._files)
        if self._host is not None:
            self._host.let_go(reference)

    def _read_holds(self) -> None:
        """What the storage host knows: files that were written from elsewhere hold too, and what
        was led to from here may have been retired by hand from there. It comes to know what is
        here, and was written when hosts kept no record."""
        if self._host is None:
            return
        known = {each.id: each for each in self._host.on_record()}
        held = {name: each for name, each in known.items() if not is_renounced(each)}
        self._known.update(held)
        for link in self._links():
            if link.reference.id in known.keys() - held.keys():
                files_of.forget(link.reference, self._directory, self._files)
            elif link.state is Fate.ALIVE and link.reference.id not in held:
                self._untold.append(link.reference)

    def _read_strays(self) -> None:
        """Where links got lost that there must have been: find the files of this run."""
        if self._survey.root is None:
            return
        catalogue = self._writer.catalogue()
        there = {entry.info.token.hex() for entry in catalogue.entries()}
        is_lost = there and not os.path.isdir(self._directory)
        if not is_lost and (not self._known or there <= led_to([*self._known.values()], catalogue)):
            return
        uuid = self._writer.superblock.uuid.hex()
        self._with_room(lambda: make_directory(self._directory))
        self._survey.renew()
        for each in fate.strays(self._directory, self._files, uuid, self._survey, there):
            self._known[each.id] = each

    def _links(self, survey: Survey | None = None) -> list[FileLink]:
        with self._placing:
            return fate.links(self._directory, self._files, survey=survey or self._survey)

    def _is_settled(self, directory: str) -> bool:
        """True once what was removed from ``directory`` stays removed."""
        try:
            files_of.make_removals_durable(directory, self._files)
        except MediumError as error:
            _log.warning("versions are kept whose files were deleted: %s", error)
            return False
        return True


def _falling_back(
    made: Reference,
    fallback: VersionInfo | None,
    in_flight: InFlight | None,
    going: Sequence[Going],
) -> Reference:
    if fallback is not None:
        in_flight = next((each for each, free in going if fallback.token in free), in_flight)
    if fallback is not None and in_flight is not None and fallback.token == in_flight.token:
        in_flight = None  # it is over by now
    return replace(
        made,
        fallback=fallback.token.hex() if fallback else None,
        fallback_step=fallback.step if fallback else None,
        in_flight=in_flight.token.hex() if in_flight else None,
        in_flight_step=in_flight.step if in_flight else None,
    )


def _stands_alone(reference: Reference) -> bool:
    """False for parts of a directory, and of a group: those are mended as wholes."""
    return reference.part is None and part_of(reference.model) is None


_keepers: Final[weakref.WeakKeyDictionary[HeldPool, Keeper]] = weakref.WeakKeyDictionary()
_making: Final = threading.Lock()
