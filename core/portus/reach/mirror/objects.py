"""The objects of a mirror: their names, their seals, and their contents.

All objects of a model are below one prefix (``prefix_of``)::

    <path>                 a whole file of a run, and its digest beside it
    versions/<...>/<name>  the same of a file of a version, in a pool
    _portus/log/<number>   numbered from the newest down: the first of a list is the newest
    _portus/quoted/<path>  a file of a run whose path no object can have for a name
    _portus/before/<random>/<name>  the earlier contents of such a file, until the new ones count
    _portus/again/<name>   the replacement of such a file, if the store copies no object that large

An entry of the log is created if absent, and never changed or deleted. The name of a file of a
version is never used for other bytes: it has a random tag. So a late request writes the same bytes
again.

Entries are msgpack behind a header (``HEADER``), whose digest covers the name too: an entry that
was moved to another name is damaged. ``docs/format.md`` has all of it, and is tested.
"""

from __future__ import annotations

import hashlib
import hmac
import posixpath
import re
import urllib.parse
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final, cast

import msgspec
from msgspec import Meta

from portus.engine.format.checksum import DIGEST_SIZE, digest
from portus.engine.format.record import Field, Record
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError, UsageError
from portus.reach.mirror.store import is_name

OWN: Final = "_portus/"
"""The prefix of all objects but checkpoint files under their own names."""

LOG: Final = OWN + "log/"
QUOTED: Final = OWN + "quoted/"
BEFORE: Final = OWN + "before/"
AGAIN: Final = OWN + "again/"
VERSIONS: Final = "versions/"
DIGEST_SUFFIX: Final = ".xxh128"
"""The end of the name of the digest beside a file: see ``digest_line``."""

FORMAT_VERSION: Final = 1
NUMBER_MAX: Final = 10**12 - 1
"""Entries of a log, at most."""

STRIDE: Final = 16
"""Each entry whose number is a multiple of this has the whole state, too."""

WRITER_SIZE: Final = 8
WHO_SIZE_MAX: Final = 200
PATH_SIZE_MAX: Final = 4096
NAME_SIZE_MAX: Final = 4096
FACTS_MAX: Final = 1 << 16
"""Facts of one entry, at most."""
TERMS_MAX: Final = 256
"""Terms of a state, at most: it has the last ones."""

HEADER: Final = Record(
    "object header",
    48,
    (
        Field("magic", "8s", "`PMIRROR` 00"),
        Field("format_version", "H", "1"),
        Field("keyed", "H", "1 if the digest is keyed, else 0"),
        Field("reserved", "I", "zero"),
        Field(
            "digest",
            "32s",
            "of the name below the model's prefix, a zero byte, the 16 bytes before, and the "
            "payload: xxh3_128 and 16 zeros, or BLAKE2b of 32 bytes with the key",
        ),
    ),
)
MAGIC: Final = b"PMIRROR\0"


class SealError(CorruptionError):
    """An object is damaged, or was sealed with another key than that of ``PORTUS_MIRROR_KEY``."""


_Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Writer = Annotated[bytes, Meta(min_length=WRITER_SIZE, max_length=WRITER_SIZE)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Path = Annotated[str, Meta(min_length=1, max_length=PATH_SIZE_MAX)]
_Who = Annotated[str, Meta(max_length=WHO_SIZE_MAX)]
_Name = Annotated[str, Meta(max_length=NAME_SIZE_MAX)]
_Metrics = Annotated[dict[str, float], Meta(max_length=FACTS_MAX)]


class Claimed(msgspec.Struct, frozen=True, array_like=True, tag="claimed"):
    """The claim of a writer: from here on only its entries count, in a term of its own.

    ``who``: for messages. ``pool``: the identity of the mirrored pool, and ``commit`` the newest
    commit there: later commits belong to this term. ``passing``: the writer removes and sweeps,
    mirrors nothing, and then ends.
    """

    who: _Who
    pool: _Token
    commit: _Count
    passing: bool = False


class FileObject(msgspec.Struct, frozen=True, array_like=True):
    """A file: the object ``name``, and the xxh3_128 of all of it. ``time_ns``: the time of its last
    change, by the clock of its machine; 0 for a file of a pool."""

    name: _Name
    size: _Count
    digest: Annotated[bytes, Meta(min_length=DIGEST_SIZE, max_length=DIGEST_SIZE)]
    time_ns: _Count = 0


class Added(msgspec.Struct, frozen=True, array_like=True, tag="added"):
    """A checkpoint is mirrored: its files exist as objects. It is a version of a pool, or a file or
    a directory of a run.

    ``term``, ``commit`` and ``time_ns`` are its place in the history: the term in which it was
    committed, its commit in its pool, 0 for a run, and when it was saved. The highest is the
    newest. ``size`` in bytes; ``step``, ``token``, ``inexact`` and ``metrics`` are those of
    ``VersionInfo``; a run's has a random token. ``directory``: of the pointers, as in
    ``FileTable``. ``files``: their names, and the object of each; the file at ``path`` itself has
    an empty name. Names and paths are bytes, since they may be no text.

    ``path``: of a run: POSIX, relative to its directory; replaces the earlier facts of the path and
    of those below. ``link``: the target of the link at ``path``, relative to it; then there are no
    files. ``retired``: the run removed it, and the mirror keeps it: no machine fetches it.
    """

    token: _Token
    step: int
    term: _Count
    commit: _Count
    time_ns: _Count
    size: _Count
    inexact: bool
    directory: Annotated[bytes, Meta(max_length=PATH_SIZE_MAX)]
    files: dict[bytes, FileObject]
    metrics: _Metrics = {}
    path: Annotated[str, Meta(max_length=PATH_SIZE_MAX)] = ""
    link: Annotated[str, Meta(max_length=PATH_SIZE_MAX)] = ""
    retired: bool = False

    @property
    def objects(self) -> Mapping[str, FileObject]:
        """The objects of the files, by the names of those."""
        own = posixpath.basename(self.path)
        return {
            name.decode(errors="surrogateescape") or own: each for name, each in self.files.items()
        }

    @property
    def paths(self) -> Mapping[str, FileObject]:
        """The objects of the files of a run, by their paths."""
        return {
            posixpath.normpath(posixpath.join(self.path, name.decode())): each
            for name, each in self.files.items()
        }

    @property
    def place(self) -> tuple[int, int, int]:
        """The place in the history; the newest has the highest."""
        return self.term, self.commit, self.time_ns

    def is_in(self, path: str) -> bool:
        """Return whether it is at ``path``, or below it."""
        return is_in(self.path, path)

    def info(self, model: str, number: int) -> VersionInfo:
        """Return its ``VersionInfo``, as version ``number`` of the place that it is read from."""
        return VersionInfo(
            model=model,
            id=number,
            commit=self.commit,
            step=self.step,
            token=self.token,
            time_ns=self.time_ns,
            size=self.size,
            inexact=self.inexact,
            metrics=dict(self.metrics),
        )


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """A checkpoint, or a link, is removed."""

    token: _Token


Fact = Claimed | Added | Removed
"""A fact of an entry of the log. An entry's facts apply in order, all at once."""


class Term(msgspec.Struct, frozen=True, array_like=True):
    """The start of a term: the claim's pool, whose newest commit then was ``commit``."""

    number: _Count
    pool: _Token
    commit: _Count


class State(msgspec.Struct, frozen=True, array_like=True):
    """The state of a log, up to the entry ``number``.

    ``term``, ``writer``, ``who``, ``passing``: of the last claim that counts. ``terms``: oldest
    first. ``added``: the checkpoints and links, in the order in which they were added. A model has
    versions, or checkpoints of a run.
    """

    number: _Count = 0
    term: _Count = 0
    writer: Annotated[bytes, Meta(max_length=WRITER_SIZE)] = b""
    who: _Who = ""
    passing: bool = False
    terms: tuple[Term, ...] = ()
    added: tuple[Added, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all objects that count, by their names."""
        return sizes_of(file for each in self.added for file in each.files.values())

    @property
    def newest(self) -> Added | None:
        """The checkpoint from which a training continues; None if there is none."""
        usable = (each for each in self.added if not each.link and not each.retired)
        return max(usable, key=lambda each: each.place, default=None)

    @property
    def checkpoints(self) -> list[Added]:
        """All but links, oldest first; before them those that were removed and are kept."""
        found = [each for each in self.added if not each.link]
        return sorted(found, key=lambda each: (not each.retired, each.place))

    @property
    def links(self) -> dict[str, str]:
        """The targets of the links of a run, by their paths."""
        return {each.path: each.link for each in self.added if each.link}

    def at(self, path: str) -> Added | None:
        """Return the checkpoint or link of a run at ``path``; None if there is none."""
        return next((each for each in self.added if each.path == path), None)

    def term_at(self, time_ns: int) -> int:
        """Return the term of a checkpoint of a run of that time: that of those after it, or the
        present one. So an old one that is mirrored late counts as old."""
        after = [each.term for each in self.added if not each.link and each.time_ns > time_ns]
        return min(after, default=self.term)

    def missing(self, own: Collection[VersionInfo]) -> list[Added]:
        """Return the versions that a pool with the versions ``own`` lacks, oldest first."""
        tokens = {info.token for info in own}
        return [e for e in self.checkpoints if e.token not in tokens and not e.retired]

    def version(self, token: bytes) -> Added | None:
        """Return the checkpoint of that token; None if it is not there."""
        return next((each for each in self.added if each.token == token), None)

    def is_ahead_of(self, pool: bytes, versions: Collection[VersionInfo], commit: int = 0) -> bool:
        """Return whether a training continues from the newest version here, and not from a pool:
        the pool is older, or of a history that another writer left behind. versions: those of the
        pool ``pool``; commit: its newest one. A version that the pool had once, and lacks now, was
        removed there."""
        newest = self.newest
        if newest is None or any(each.token == newest.token for each in versions):
            return False
        claims = [each for each in self.terms if each.pool == pool and each.commit <= commit]
        if claims and newest.place[:2] <= (claims[-1].number, commit):
            return False
        places = [(self.term_of(pool, each.commit), each.commit) for each in versions]
        return max(places, default=(0, 0)) < newest.place[:2]

    def term_of(self, pool: bytes, commit: int) -> int:
        """Return the term in which a pool made a commit: that of the last claim of the pool before
        it; 0 if there was none."""
        terms = [each.number for each in self.terms if each.pool == pool and each.commit < commit]
        return max(terms, default=0)


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry of a log. ``state``: the state after it, if its number is a multiple of ``STRIDE``,
    or if it is a claim after damaged entries."""

    model: _Name
    term: _Count
    writer: _Writer
    facts: Annotated[
        tuple[Claimed | Added | Removed, ...],
        Meta(min_length=1, max_length=FACTS_MAX),
    ]
    state: State | None = None


def sizes_of(files: Iterable[FileObject]) -> dict[str, int]:
    """Return the sizes of these objects, and of the digests beside them, by their names."""
    sizes = {}
    for each in files:
        sizes[each.name] = each.size
        sizes[each.name + DIGEST_SUFFIX] = len(digest_line(each.name, each.digest))
    return sizes


def digest_line(name: str, sent: bytes) -> bytes:
    """Return the object beside the file ``name``: its digest, in the format of ``xxhsum``."""
    return f"{sent.hex()}  {name.rpartition('/')[2]}\n".encode()


def is_in(path: str, above: str) -> bool:
    """Return whether a path is ``above``, or below it."""
    return path == above or path.startswith(f"{above}/")


def prefix_of(model: str) -> str:
    """Return the prefix of the objects of ``model``, in a store that may hold other models too."""
    return _quote(model, "") + "/"


def name_before(name: str, tag: bytes) -> str:
    """Return the new name of the file ``name``, because another one gets that name. tag: random,
    and new for each copy; so a late request overwrites no object that counts."""
    return f"{BEFORE}{tag.hex()}/{name}"


def file_name(path: str) -> str:
    """Return the name of the file at ``path``, below the prefix of its run: its path, if all stores
    accept that as a name."""
    is_plain = _is_free(path, name_before(path, bytes(WRITER_SIZE))) and not f"{path}/".startswith(
        (OWN, VERSIONS)
    )
    return path if is_plain else QUOTED + _quote(path)


def path_of(name: str) -> str | None:
    """Return the path of the file that ``file_name`` gives this name; None if there is none, or it
    is unknown because the name is cut."""
    own = path = own_name(name)
    if own.startswith(QUOTED):
        quoted = own.removeprefix(QUOTED)
        path = urllib.parse.unquote(quoted.replace("=", "%"), errors="surrogateescape")
    return path if path and file_name(path) == own else None


def own_name(name: str) -> str:
    """Return the name that the file of the object ``name`` has unless another one has it."""
    return _ELSEWHERE.sub("", name)


def step_in(path: str) -> int | None:
    """Return the step that the name of a checkpoint says, the last one of a path; None if none."""
    found = _STEP.findall(path)
    return int(found[-1]) if found else None


def _is_free(path: str, name: str) -> bool:
    """Return whether the file at ``path`` may have the name ``name``: all stores accept it, and no
    digest of another file has it."""
    return is_name(name + DIGEST_SUFFIX) and f"{DIGEST_SUFFIX}/" not in f"{path}/"


def version_file_name(step: int, name: str, token: bytes, tag: bytes) -> str:
    """Return the name of the file ``name`` of a version, below the prefix of its model. It is never
    used for other bytes: it has a digest of the version and the random ``tag``."""
    below = f"{VERSIONS}step-{step:08d}-{digest(token + tag)[:6].hex()}/"
    if _is_free(name, below + name) and not name.startswith(OWN):
        return below + name
    return below + QUOTED + _quote(name, "")


def _quote(path: str, safe: str = "/") -> str:
    plain = urllib.parse.quote(path, safe=safe, errors="surrogateescape")
    quoted = plain.replace("~", "%7E").replace(".", "%2E").replace("%", "=")
    if len(quoted) > _QUOTED_MAX:
        said = path.encode(errors="surrogateescape")
        quoted = f"{quoted[:_QUOTED_MAX]}={digest(said).hex()}"
    return quoted


def model_of(prefix: str) -> str | None:
    """Return the model of that prefix; None if it is of none, or the name is cut."""
    quoted = prefix.removesuffix("/")
    model = urllib.parse.unquote(quoted.replace("=", "%"))
    return model if len(quoted) <= _QUOTED_MAX and prefix_of(model) == prefix else None


def entry_name(number: int) -> str:
    """Return the name of an entry of a log; a later one comes before it."""
    assert 0 < number <= NUMBER_MAX
    return f"{LOG}{NUMBER_MAX - number:012d}"


def entry_number(name: str) -> int | None:
    """Return the number of the entry of that name; None for all other names."""
    match = _ENTRY.fullmatch(name)
    return NUMBER_MAX - int(match[1]) if match else None


class Seal:
    """Seals the entries of a mirror's log, with a key or without."""

    def __init__(self, key: bytes | None = None) -> None:
        """key: as it was configured, of any length. None: reads detect only accidents."""
        self._key: Final = None if key is None else hashlib.blake2b(key, digest_size=32).digest()

    def entry(self, number: int, entry: LogEntry) -> bytes:
        """Return the object of ``entry``."""
        return self._wrap(entry_name(number), _encoder.encode(entry))

    def read_entry(self, number: int, data: bytes, model: str | None = None) -> LogEntry:
        """Return the entry in an object. model: the expected one, if that is known. Raises
        ``CorruptionError``; ``UsageError`` if a newer Portus wrote it, or if it needs a key."""
        name = entry_name(number)
        payload = self._unwrap(name, data)
        try:
            said = _entries.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptionError(f"{name}: {error}") from error
        if model is not None and said.model != model:
            raise CorruptionError(f"{name}: it is of model {said.model!r}, not {model!r}")
        return said

    def _wrap(self, name: str, payload: bytes) -> bytes:
        keyed = int(self._key is not None)
        blank = HEADER.pack(magic=MAGIC, format_version=FORMAT_VERSION, keyed=keyed)
        start = blank[:-_SEAL_SIZE]
        return start + self._digest(name, start, payload) + payload

    def _unwrap(self, name: str, data: bytes) -> bytes:
        row = HEADER.unpack(data)
        if row["magic"] != MAGIC:
            raise CorruptionError(f"{name}: expected an object of a mirror, found {data[:8]!r}")
        if row["format_version"] != FORMAT_VERSION:
            raise UsageError(
                f"{name}: written by a newer Portus (format {row['format_version']!r}); this one "
                f"knows format {FORMAT_VERSION}. Upgrade portus-checkpoint"
            )
        if row["keyed"] and self._key is None:
            raise UsageError(f"{name}: it is keyed; set PORTUS_MIRROR_KEY to the key of the mirror")
        start, payload = data[: HEADER.size - _SEAL_SIZE], data[HEADER.size :]
        found = self._digest(name, start, payload)
        expected = cast(bytes, row["digest"])
        if not hmac.compare_digest(found, expected):
            kind_of_error = CorruptionError if self._key is None else SealError
            key = "" if self._key is None else ", or not sealed with the key of PORTUS_MIRROR_KEY"
            raise kind_of_error(
                f"{name} is damaged{key}: expected digest {expected.hex()}, found {found.hex()}"
            )
        return payload

    def _digest(self, name: str, start: bytes, payload: bytes) -> bytes:
        parts = (name.encode(), b"\0", start, payload)
        if self._key is None:
            return digest(b"".join(parts)) + bytes(_SEAL_SIZE - DIGEST_SIZE)
        hasher = hashlib.blake2b(key=self._key, digest_size=_SEAL_SIZE)
        for part in parts:
            hasher.update(part)
        return hasher.digest()


_SEAL_SIZE: Final = 32
_QUOTED_MAX: Final = 150
_STEP: Final = re.compile(r"(?:step|checkpoint)[=_-]?(\d+)")
_ENTRY: Final = re.compile(rf"{LOG}([0-9]{{12}})")
_ELSEWHERE: Final = re.compile(rf"^(?:{AGAIN}|{BEFORE}[0-9a-f]{{{2 * WRITER_SIZE}}}/)")

_encoder: Final = msgspec.msgpack.Encoder()
_entries: Final = msgspec.msgpack.Decoder(LogEntry)
