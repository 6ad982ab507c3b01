"""``portus gc``: let go of versions whose reference files are gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from portus.cli.output import Json, Output, error_document, exit_code, said, size_text
from portus.cli.pools import find_pool, version_document
from portus.cli.rm import writing
from portus.client.keeper import unheld
from portus.client.reference import State, links, links_directory
from portus.errors import PortusError, UsageError
from portus.index.directory import open_reader, pool_files, remove_pool
from portus.media.dax import is_device
from portus.media.local import LocalFiles
from portus.protocol.address import is_address
from portus.spec import VersionInfo

_FILES: Final = LocalFiles()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """``missing``: count as deleted what is gone and may have been moved. ``empty``: remove pool
    files without versions. ``dry_run``: change nothing."""

    missing: bool = False
    empty: bool = False
    dry_run: bool = False

    @property
    def states(self) -> frozenset[State]:
        """Of the reference files that hold nothing."""
        return frozenset({State.DELETED, State.UNKNOWN} if self.missing else {State.DELETED})


def run(pool: str | None, wish: Wish, output: Output) -> int:
    """Collect; the exit code."""
    documents: list[Json] = []
    code = 0
    place = find_pool(pool)
    if is_address(place):
        raise UsageError(
            f"{place}: reference files are known to the trainers that wrote them, not to the host; "
            f"a trainer lets go of what was deleted when its space is needed; at any other time: "
            f"portus rm --force"
        )
    for path in pool_files(place):
        try:
            infos, removed = (_look if wish.dry_run else _collect)(path, wish)
        except PortusError as error:
            documents.append({"path": path, "error": error_document(error)})
            output.note(f"portus: {said(error)}")
            code = max(code, exit_code(error))
        else:
            _say(path, infos, removed, wish, output)
            retired: list[Json] = [version_document(info) for info in infos]
            documents.append({"path": path, "retired": retired, "removed": removed})
    if not documents:
        output.line("no pools")
    output.document({"dry_run": wish.dry_run, "pools": documents})
    return code


def _look(path: str, wish: Wish) -> tuple[list[VersionInfo], bool]:
    """What would go: versions, and whether the file does too. Changes nothing."""
    reader = open_reader(path)
    try:
        catalogue = reader.catalogue()
    finally:
        reader.close()
    found = links(links_directory(path), _FILES, adopt=False)
    gone = unheld(found, catalogue, wish.states)
    infos = [entry.info for entry in catalogue.entries() if entry.info.id in gone]
    return infos, wish.empty and len(gone) == len(catalogue.ids()) and not is_device(path)


def _collect(path: str, wish: Wish) -> tuple[list[VersionInfo], bool]:
    with writing(path) as (writer, keeper):
        before = {entry.info.id: entry.info for entry in writer.catalogue().entries()}
        gone = keeper.collect(wish.states)
        removed = wish.empty and not writer.catalogue().ids() and not is_device(path)
        if removed:  # while it is locked: whoever waits for it finds that it is gone
            remove_pool(path, _FILES)
    return [before[version] for version in sorted(gone)], removed


def _say(path: str, infos: list[VersionInfo], removed: bool, wish: Wish, output: Output) -> None:
    would = "would be " if wish.dry_run else ""
    for info in infos:
        output.line(f"{path}: {info.model}@{info.step} {would}let go of, {size_text(info.size)}")
    if removed:
        output.line(f"{path}: empty, {would}removed")
    elif not infos:
        output.line(f"{path}: nothing to do")
