"""``portus verify [MODEL[@STEP]]``: a check of every rule of the format, and of every byte."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from portus.cli import words
from portus.cli.files import file_document, find_files, open_files
from portus.cli.options import OPTIONAL_TARGET, POOL_OR_MIRROR, Text, option
from portus.cli.output import (
    FOUND,
    MEND,
    Json,
    Output,
    bar,
    error_document,
    error_line,
    exit_code,
    fields,
)
from portus.cli.pools import open_places
from portus.errors import PortusError, UsageError
from portus.reach.daemon.pools import parse_rate
from portus.reach.index.check import RULES, Severity
from portus.reach.places.base import Check, CheckPace, Verdict
from portus.reach.places.opening import Places

_RESULTS: Final = {0: "healthy", FOUND: "DAMAGED", MEND: "NEEDS REPAIR"}


def command(
    output: Output,
    target: Text = OPTIONAL_TARGET,
    pool: Text = POOL_OR_MIRROR,
    rate: Text = option(
        "--rate SIZE/s", "read at most this much per second, and from the disk, not its cache"
    ),
) -> None:
    """Read every byte of a torch file, of those below a directory, or of a pool, and check every
    rule of the format. Exit code 1 if damage was found.

    With --rate, such as 50M/s, it disturbs others little, and finds rot of the disk before a
    version is needed: for cron.
    """
    pace = CheckPace(
        bytes_per_s=None if rate is None else parse_rate(rate),
        tell=lambda text: output.note(f"portus: {text}"),
    )
    path, done = find_files(target, pool), list[_CheckResult]()
    with open_places(pool, target, whole=True) if path is None else open_files(path) as places:
        for check in _checks(places, pace):
            done.append(_CheckResult.of(check))
            done[-1].show(output)
    if not done:
        what = "checkpoint file" if places.all() else "pool"  # a directory of files is one place
        raise UsageError(f"{places.place}: there is no {what} to verify; nothing was saved there")
    codes = [each.code for each in done]
    damaged = sum(map(bool, codes))
    has_files = any(each.check.file is not None for each in done)
    if has_files and len(codes) > 1:
        result = f"{damaged} DAMAGED" if damaged else "all are healthy"
        output.line(f"{words.count(len(codes), 'file')}: {result}")
    documents: list[Json] = [each.document() for each in done]
    output.document({"healthy": not damaged, "files" if has_files else "pools": documents})
    # Damage that was found in a pool counts more than a pool that could not be read.
    is_found = any(each.code == FOUND and (has_files or each.error is None) for each in done)
    output.code = FOUND if is_found else max(codes)


def _checks(places: Places, pace: CheckPace) -> Iterator[Check]:
    if places.target is None:
        for place in places.all():
            yield from place.checks(None, pace)
        return
    for place, chosen in places.by_place(places.select()).items():
        yield from place.checks(chosen, pace)


@dataclass(frozen=True, slots=True)
class _CheckResult:
    """The findings of a check, the error that ended it, if any, and how long it took."""

    check: Check
    verdict: Verdict
    error: PortusError | None
    passed_s: float

    @classmethod
    def of(cls, check: Check) -> _CheckResult:
        """Run a check and return its result."""
        verdict, start, error = Verdict(check.path), time.monotonic(), None
        try:
            with bar(check.title) as advance:

                def progress(done: int, total: int) -> None:
                    verdict.size = done
                    advance(done, total)

                check.run(verdict, progress)
        except PortusError as raised:
            error = raised
        return cls(check, verdict, error, time.monotonic() - start)

    @property
    def code(self) -> int:
        """The exit code for the result."""
        if self.error is not None:
            return exit_code(self.error)
        severities = {finding.severity for finding in self.verdict.findings}
        if Severity.ERROR in severities:
            return FOUND
        return MEND if Severity.MEND in severities else 0

    def show(self, output: Output) -> None:
        """Print the result."""
        check, verdict = self.check, self.verdict
        path = check.path if check.file is None else words.path(check.path)
        if self.error is not None:
            if check.file is None:
                output.note(f"portus: {error_line(self.error)}")
            else:
                output.line(f"{path}: DAMAGED: {error_line(self.error)}")
            return
        for finding in verdict.findings:
            output.line(f"{finding.severity.value} {finding}")
        by = f" by the {verdict.by}" if verdict.by else ""
        versions = ""
        if check.file is None:
            removed = (
                f" ({verdict.removed} of them removed by the newest commit, and kept until the "
                "next one)"
            )
            versions = words.count(verdict.versions, "version")
            versions += f"{removed if verdict.removed else ''}, "
        output.line(
            f"{path}: {_RESULTS[self.code]}{by}; {versions}{words.size(verdict.size)} read in "
            f"{self.passed_s:.1f} s ({words.size(verdict.size / max(self.passed_s, 1e-9))}/s)"
        )

    def document(self) -> dict[str, Json]:
        """Return the JSON document of the result."""
        found: dict[str, Json] = {
            "healthy": self.code == 0,
            "seconds": round(self.passed_s, 3),
            "error": None if self.error is None else error_document(self.error),
        }
        if self.check.file is not None:
            return {**file_document(self.check.file), **found, "by": self.verdict.by or None}
        findings: list[Json] = [
            {
                **fields(each, "invariant", "where", "expected", "found"),
                "rule": RULES[each.invariant],
                "severity": each.severity.value,
            }
            for each in self.verdict.findings
        ]
        own = fields(self.verdict, "path", "versions", "removed", "size")
        return {**own, **found, "findings": findings}
