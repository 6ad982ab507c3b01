"""The versions that reference files hold, according to the links of a pool and its catalogue."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from portus.client.files import fate
from portus.client.files import reference as files_of
from portus.client.files.fate import Fate, FileLink
from portus.client.files.survey import survey_of
from portus.format.reference import Reference
from portus.index.catalogue import Catalogue
from portus.index.directory import links_directory
from portus.media.base import FileSystem
from portus.media.local import LocalFiles
from portus.spec import VersionInfo


def home_of_link(link: FileLink) -> str:
    """The directory that the reference is missing in."""
    return os.path.dirname(link.path or link.reference.written_path)


def missing(links: Sequence[FileLink], catalogue: Catalogue) -> list[tuple[VersionInfo, Reference]]:
    """The versions that are held for files of which it is not known where they are, and for no
    other; oldest first, each with the file that was written last."""
    lost = unheld(links, catalogue, (Fate.UNKNOWN, Fate.DELETED))
    there = {entry.info.token.hex(): entry.info for entry in catalogue.entries()}
    found: dict[int, tuple[VersionInfo, Reference]] = {}
    for link in sorted(links, key=lambda link: link.reference.written_ns):
        token = link.reference.leads_to(there)
        if link.state is Fate.UNKNOWN and token is not None and there[token].id in lost:
            found[there[token].id] = there[token], link.reference
    return sorted(found.values(), key=lambda each: each[0].commit)


def unheld(links: Sequence[FileLink], catalogue: Catalogue, states: Collection[Fate]) -> set[int]:
    """Versions that reference files of ``states`` lead to, and no other reference file does."""
    others = [each.reference for each in links if each.state not in states]
    gone = {each.reference.token for each in links if each.state in states}
    gone -= led_to(others, catalogue)
    return {entry.info.id for entry in catalogue.entries() if entry.info.token.hex() in gone}


def held_in(path: str, catalogue: Catalogue) -> set[int]:
    """Versions of the pool file at ``path`` that reference files lead to, by its links."""
    files = LocalFiles()
    found = fate.links(links_directory(path), files, adopt=False)
    gone = gone_for_good(found, {Fate.DELETED}, files)
    alive = [each.reference for each in found if each.reference not in gone]
    tokens = led_to(alive, catalogue)
    return {entry.info.id for entry in catalogue.entries() if entry.info.token.hex() in tokens}


def is_deserted(path: str, catalogue: Catalogue) -> bool:
    """True if files led to each version of the pool file at ``path``, and all of them were deleted,
    durably. However long it takes to look for copies. Raises ``MediumError``."""
    files, directory = LocalFiles(), links_directory(path)
    found = fate.links(directory, files, adopt=False, survey=survey_of(directory, None))
    gone_for_good(found, {Fate.DELETED}, files)
    if any(link.state is not Fate.DELETED for link in found):
        return False
    return catalogue.ids() <= unheld(found, catalogue, {Fate.DELETED})


def forget_deleted(path: str) -> None:
    """Remove the links of deleted reference files from those of the pool file at ``path``."""
    files, directory = LocalFiles(), links_directory(path)
    for each in fate.links(directory, files, adopt=False):
        if each.state is Fate.DELETED:
            files_of.forget(each.reference, directory, files)


def gone_for_good(
    links: Sequence[FileLink], states: Collection[Fate], files: FileSystem
) -> list[Reference]:
    """The reference files of ``states``, once they stay gone: a power cut would bring back a name
    that was not. Raises ``MediumError``."""
    lost = [each for each in links if each.state in states]
    for directory in set(map(home_of_link, lost)):
        files_of.make_removals_durable(directory, files)
    return [each.reference for each in lost]


def led_to(references: list[Reference], catalogue: Catalogue, coming: bytes = b"") -> set[str]:
    """Tokens of the versions there that ``references`` lead to: where a save failed or was cut
    off, the one that its reference falls back to."""
    there = {entry.info.token.hex() for entry in catalogue.entries()} | {coming.hex()}
    return {token for each in references if (token := each.leads_to(there))}
