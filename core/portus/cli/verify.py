"""``portus verify [MODEL[@STEP]]``: every rule of the format, every byte."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

from portus.cli import files
from portus.cli.output import (
    FOUND,
    MEND,
    Json,
    Output,
    count_text,
    error_document,
    exit_code,
    said,
    size_text,
)
from portus.cli.pools import FoundVersion, aimed, allow, find_pool, open_pools
from portus.cli.progress import Progress, bar
from portus.client.files.home import open_place
from portus.errors import CorruptionError, PortusError, UsageError
from portus.index.check import RULES, CheckOptions, Finding, Severity, check_file, check_medium
from portus.index.directory import pools_at
from portus.index.place import Place
from portus.index.scrub import scrub
from portus.mirror.address import StoreKind, is_store, parse
from portus.mirror.files import MirroredFiles
from portus.mirror.mirror import models
from portus.mirror.mirrors import Mirrors
from portus.mirror.opening import configured_key, open_file_store
from portus.protocol.address import is_address
from portus.spec import VersionInfo
from portus.transport.base import Stop

Only = Callable[[VersionInfo], bool]


@dataclass(slots=True)
class Verdict:
    """What the check of one pool file said. ``size``: bytes that were read and compared.
    ``removed``: how many of ``versions`` the newest commit has no more. A pool keeps the commit
    before the newest one, so a check reads versions that ``portus ls`` does not list."""

    path: str
    versions: int = 0
    removed: int = 0
    size: int = 0
    passed_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    error: PortusError | None = None

    @property
    def code(self) -> int:
        """The exit code for this pool."""
        if self.error is not None:
            return exit_code(self.error)
        severities = {finding.severity for finding in self.findings}
        if Severity.ERROR in severities:
            return FOUND
        return MEND if Severity.MEND in severities else 0

    @property
    def result(self) -> str:
        """Return the result in words, for people."""
        return {FOUND: "DAMAGED", MEND: "NEEDS REPAIR"}.get(self.code, "healthy")


def run(
    target: str | None, pool: str | None, output: Output, *, bytes_per_s: int | None = None
) -> int:
    """Verify; the exit code. bytes_per_s: scrub, and say at once what is found."""
    path = files.meant(target, pool) if bytes_per_s is None else files.meant(pool, None)
    if path is not None:
        allow(pool)
        return files.verify(path, output, bytes_per_s=bytes_per_s)
    verdicts = []
    if target is not None and pool is None and is_address(target):
        target, pool = None, target
    elsewhere = _of_mirror(target, pool)
    if elsewhere is not None:
        if bytes_per_s is not None:
            raise UsageError(
                f"{elsewhere[1]}: scrub takes pools only; portus verify reads a mirror"
            )
        for verdict in (*_verified_mirror(*elsewhere), *_verified_files(*elsewhere)):
            verdicts.append(verdict)
            _say(verdict, output)
        return _ended(verdicts, elsewhere[1], output)
    for chosen, only in _chosen(target, pool):
        with bar(os.path.basename(chosen.path)) as advanced:
            verdict = _verify(chosen, only, advanced, output, bytes_per_s)
        verdicts.append(verdict)
        _say(verdict, output)
    return _ended(verdicts, pool, output)


def _ended(verdicts: Sequence[Verdict], pool: str | None, output: Output) -> int:
    if not verdicts:
        where = find_pool(pool, mirrors=True)
        raise UsageError(f"{where}: there is no pool to verify; nothing was saved there")
    codes = [verdict.code for verdict in verdicts]
    healthy = not any(codes)
    output.document({"healthy": healthy, "pools": [_document(each) for each in verdicts]})
    damaged = any(each.code == FOUND and each.error is None for each in verdicts)
    return FOUND if damaged else max(codes, default=0)


def _of_mirror(target: str | None, pool: str | None) -> tuple[str | None, str] | None:
    """What is meant in which mirror; None for a pool. A URL that is the mirror's own has it all."""
    if target is None or pool is not None:
        return (target, pool) if pool is not None and is_store(pool) else None
    if not is_store(target):
        return None
    with Mirrors(parse(target)) as mirrors:
        if mirrors.models():
            return None, target
    target, url = aimed(target, None)
    assert url is not None
    return target, url


def _verified_mirror(target: str | None, url: str) -> Iterator[Verdict]:
    """Each version of the mirrors at ``url``, or those that ``target`` means, by itself: a manifest
    that is damaged says nothing of others."""
    with open_pools(url, target, mirrors=True) as pools:
        for found in pools.versions() if target is None else pools.select(target):
            verdict = Verdict(f"{found.path}: {found.info.model}@{found.info.step}", 1)
            start = time.monotonic()
            try:
                with bar(f"{found.info.model}@{found.info.step}") as advanced:
                    progress = partial(_count, verdict, advanced)
                    look = CheckOptions(progress=progress)
                    verdict.findings = check_medium(found.reader.medium, found.reader.locks, look)
                    _check_files(url, found)
            except PortusError as error:
                verdict.error = error
            verdict.passed_s = time.monotonic() - start
            yield verdict


def _check_files(url: str, found: FoundVersion) -> None:
    """Raise ``CorruptionError`` for a file of a mirrored version that nobody else could use."""
    with Mirrors(parse(url)) as mirrors:
        mirror = mirrors.of(found.info.model)
        added = mirror.read().version(found.info.token)
        if added is not None:
            mirror.check_files(added, Stop())


def _verified_files(target: str | None, url: str) -> Iterator[Verdict]:
    """Each file of the runs that save to directories."""
    address = parse(url)
    if target is not None or address.kind is StoreKind.HOST:
        return
    with closing(open_file_store(address)) as store:
        for model in models(store, key=configured_key()):
            mirrored = MirroredFiles(store, model, url)
            for said in [each for each in mirrored.read().files if not each.link]:
                verdict, start = Verdict(f"{url}: {model}: {said.path}", 1), time.monotonic()
                try:
                    with bar(said.path) as advanced:

                        def read(
                            count: int,
                            verdict: Verdict = verdict,
                            advanced: Progress = advanced,
                            size: int = said.size,
                        ) -> None:
                            _count(verdict, advanced, verdict.size + count, size)

                        mirrored.check(said, read)
                except PortusError as error:
                    verdict.error = error
                verdict.passed_s = time.monotonic() - start
                yield verdict


def _count(verdict: Verdict, advanced: Progress, done: int, total: int) -> None:
    verdict.size = done
    advanced(done, total)


def _chosen(target: str | None, pool: str | None) -> Iterator[tuple[Place, Only]]:
    """The pool files, and what to look at in each."""
    if target is None:
        for each in pools_at(find_pool(pool)):
            yield each, lambda info: True
        return
    chosen: dict[Place, set[int]] = {}
    with open_pools(pool, target) as pools:
        for found in pools.select(target):
            chosen.setdefault(found.pool, set()).add(found.info.id)
    for each, ids in chosen.items():
        yield each, lambda info, ids=ids: info.id in ids  # type: ignore[misc]


def _verify(
    pool: Place, only: Only, advanced: Progress, output: Output, bytes_per_s: int | None
) -> Verdict:
    verdict, start = Verdict(pool.path), time.monotonic()

    ids: set[int] = set()

    def counted(info: VersionInfo) -> bool:
        wanted = only(info)
        if wanted:
            ids.add(info.id)
        return wanted

    look = CheckOptions(progress=partial(_count, verdict, advanced), only=counted)
    try:
        with contextlib.ExitStack() as stack:
            # A file is opened by the check: a pool whose first pages are damaged has findings too.
            reader = None if not pool.is_host else stack.enter_context(closing(open_place(pool)))
            if bytes_per_s is not None:
                look = replace(look, told=lambda finding: _tell(pool, finding, output))
                verdict.findings = scrub(reader or pool, bytes_per_s, look)
            elif reader is not None:
                verdict.findings = check_medium(reader.medium, reader.locks, look)
            else:
                verdict.findings = check_file(pool.path, look)
        verdict.removed = _removed(pool, ids)
    except PortusError as error:
        verdict.error = error
    verdict.versions = len(ids)
    verdict.passed_s = time.monotonic() - start
    return verdict


def _removed(pool: Place, ids: set[int]) -> int:
    """How many of the versions the newest commit that can be read has no more."""
    with contextlib.suppress(CorruptionError), closing(open_place(pool)) as reader:
        return len(ids - reader.catalogue().ids())
    return 0


def _tell(pool: Place, finding: Finding, output: Output) -> None:
    if finding.severity is Severity.ERROR:
        output.note(f"portus: {pool}: {finding}")


def _say(verdict: Verdict, output: Output) -> None:
    if verdict.error is not None:
        output.note(f"portus: {said(verdict.error)}")
        return
    for finding in verdict.findings:
        output.line(f"{finding.severity.value} {finding}")
    speed = verdict.size / max(verdict.passed_s, 1e-9)
    removed = (
        f" ({verdict.removed} of them removed by the newest commit, and kept until the next one)"
        if verdict.removed
        else ""
    )
    output.line(
        f"{verdict.path}: {verdict.result}; {count_text(verdict.versions, 'version')}{removed}, "
        f"{size_text(verdict.size)} read in {verdict.passed_s:.1f} s "
        f"({size_text(int(speed))}/s)"
    )


def _document(verdict: Verdict) -> dict[str, Json]:
    return {
        "path": verdict.path,
        "healthy": verdict.code == 0,
        "versions": verdict.versions,
        "removed": verdict.removed,
        "size": verdict.size,
        "seconds": round(verdict.passed_s, 3),
        "error": None if verdict.error is None else error_document(verdict.error),
        "findings": [
            {
                "invariant": finding.invariant,
                "rule": RULES[finding.invariant],
                "where": finding.where,
                "expected": finding.expected,
                "found": finding.found,
                "severity": finding.severity.value,
            }
            for finding in verdict.findings
        ],
    }
