"""``portus verify [MODEL[@STEP]]``: every rule of the format, every byte; and ``portus scrub``: the
same at a bounded pace."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace

from portus.cli import files
from portus.cli.output import (
    FOUND,
    MEND,
    ROT,
    Json,
    Output,
    count_text,
    error_document,
    exit_code,
    fields,
    said,
    size_text,
)
from portus.cli.pools import PlacePools, allow, find_pool, open_pools
from portus.cli.progress import Progress, adding, bar
from portus.client.files.home import open_place
from portus.errors import CorruptionError, PortusError, UsageError
from portus.index.check import RULES, CheckOptions, Finding, Severity, check_file, check_medium
from portus.index.directory import pools_at
from portus.index.place import Place, PlaceKind
from portus.index.scrub import scrub as scrub_pool
from portus.mirror.address import is_store, parse
from portus.mirror.files import MirroredFiles
from portus.mirror.mirror import models
from portus.mirror.mirrors import Mirrors
from portus.mirror.opening import configured_key, open_file_store
from portus.protocol.address import is_address
from portus.spec import VersionInfo


@dataclass(slots=True)
class Verdict:
    """What the check of one pool file found. ``size``: bytes that were read and compared.
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

    @contextlib.contextmanager
    def reached(self, title: str) -> Iterator[Progress]:
        """Time a check, show its progress, and keep its error."""
        start = time.monotonic()
        try:
            with bar(title) as advanced:

                def progress(done: int, total: int) -> None:
                    self.size = done
                    advanced(done, total)

                yield progress
        except PortusError as error:
            self.error = error
        self.passed_s = time.monotonic() - start


def scrub(pool: str | None, rate: str, output: Output) -> None:
    """Verify everything from the disk, at ``rate`` at most; say at once what is found."""
    from portus.daemon.pools import parse_rate

    run(None, pool, output, bytes_per_s=parse_rate(rate))
    output.code = ROT if output.code == FOUND else output.code


def run(
    target: str | None, pool: str | None, output: Output, *, bytes_per_s: int | None = None
) -> None:
    """Verify what ``target`` names, or all. bytes_per_s: scrub."""
    aim = (target, pool) if bytes_per_s is None else (pool, None)
    path = files.find_files(*aim)
    if path is not None:
        allow(pool)
        files.verify(path, output, bytes_per_s=bytes_per_s)
        return
    if target is not None and pool is None and (is_address(target) or _is_whole_mirror(target)):
        target, pool = None, target
    if bytes_per_s is not None and pool is not None and is_store(pool):
        raise UsageError(f"{pool}: scrub takes pools only; portus verify reads a mirror")
    verdicts = []
    for verdict in _verdicts(target, pool, bytes_per_s, output):
        verdicts.append(verdict)
        _show(verdict, output)
    if not verdicts:
        where = find_pool(pool, mirrors=True)
        raise UsageError(f"{where}: there is no pool to verify; nothing was saved there")
    codes = [verdict.code for verdict in verdicts]
    output.document(
        {"healthy": not any(codes), "pools": [_document(verdict) for verdict in verdicts]}
    )
    damaged = any(each.code == FOUND and each.error is None for each in verdicts)
    output.code = FOUND if damaged else max(codes)


def _is_whole_mirror(target: str) -> bool:
    """Return whether a URL is that of mirrors, and not of a model in one."""
    if not is_store(target):
        return False
    with Mirrors(parse(target)) as mirrors:
        return bool(mirrors.models())


def _verdicts(
    target: str | None, pool: str | None, bytes_per_s: int | None, output: Output
) -> Iterator[Verdict]:
    """Check each pool, or the versions that ``target`` means; of mirrors each version by itself,
    since a damaged manifest says nothing of others, and each file."""
    mirror = None
    if target is None:
        place = find_pool(pool, mirrors=True)
        if place.kind is not PlaceKind.MIRROR:
            for each in pools_at(place):
                yield _verified(each, None, output, bytes_per_s)
            return
        mirror = place
    with PlacePools(mirror) if mirror else open_pools(pool, target or "") as pools:
        chosen: dict[Place, set[int]] = {}
        for found in pools.versions() if mirror else pools.select():
            if not found.is_mirrored:
                chosen.setdefault(found.pool, set()).add(found.info.id)
                continue
            verdict = Verdict(f"{found.pool}: {found.title}", 1)
            with verdict.reached(found.title) as progress:
                found.check(adding(progress, found.info.size))
            yield verdict
    for each, ids in chosen.items():
        yield _verified(each, ids, output, bytes_per_s)
    if mirror:
        yield from _verified_files(mirror.path)


def _verified_files(url: str) -> Iterator[Verdict]:
    """Check each file of the runs that save to directories."""
    with closing(open_file_store(parse(url))) as store:
        for model in models(store, key=configured_key()):
            mirrored = MirroredFiles(store, model, url)
            for file in [each for each in mirrored.read().files if not each.link]:
                verdict = Verdict(f"{url}: {model}: {file.path}", 1)
                with verdict.reached(file.path) as progress:
                    mirrored.check(file, adding(progress, file.size))
                yield verdict


def _verified(
    pool: Place, wanted: set[int] | None, output: Output, bytes_per_s: int | None
) -> Verdict:
    """Check a pool file; of its versions those with the ids ``wanted``, or all."""
    verdict, ids = Verdict(pool.path), set[int]()

    def only(info: VersionInfo) -> bool:
        if wanted is not None and info.id not in wanted:
            return False
        ids.add(info.id)
        return True

    def tell(finding: Finding) -> None:
        if finding.severity is Severity.ERROR:
            output.note(f"portus: {pool}: {finding}")

    with verdict.reached(os.path.basename(pool.path)) as progress, contextlib.ExitStack() as stack:
        look = CheckOptions(progress=progress, only=only)
        # A file is opened by the check: a pool whose first pages are damaged has findings too.
        reader = stack.enter_context(closing(open_place(pool))) if pool.is_host else None
        if bytes_per_s is not None:
            verdict.findings = scrub_pool(reader or pool, bytes_per_s, replace(look, told=tell))
        elif reader is not None:
            verdict.findings = check_medium(reader.medium, reader.locks, look)
        else:
            verdict.findings = check_file(pool.path, look)
        with contextlib.suppress(CorruptionError), closing(open_place(pool)) as newest:
            verdict.removed = len(ids - newest.catalogue().ids())
    verdict.versions = len(ids)
    return verdict


def _show(verdict: Verdict, output: Output) -> None:
    if verdict.error is not None:
        output.note(f"portus: {said(verdict.error)}")
        return
    for finding in verdict.findings:
        output.line(f"{finding.severity.value} {finding}")
    result = {FOUND: "DAMAGED", MEND: "NEEDS REPAIR"}.get(verdict.code, "healthy")
    removed = (
        f" ({verdict.removed} of them removed by the newest commit, and kept until the next one)"
        if verdict.removed
        else ""
    )
    output.line(
        f"{verdict.path}: {result}; {count_text(verdict.versions, 'version')}{removed}, "
        f"{size_text(verdict.size)} read in {verdict.passed_s:.1f} s "
        f"({size_text(verdict.size / max(verdict.passed_s, 1e-9))}/s)"
    )


def _document(verdict: Verdict) -> dict[str, Json]:
    return {
        **fields(verdict, "path", "versions", "removed", "size"),
        "healthy": verdict.code == 0,
        "seconds": round(verdict.passed_s, 3),
        "error": None if verdict.error is None else error_document(verdict.error),
        "findings": [
            {
                **fields(finding, "invariant", "where", "expected", "found"),
                "rule": RULES[finding.invariant],
                "severity": finding.severity.value,
            }
            for finding in verdict.findings
        ],
    }
