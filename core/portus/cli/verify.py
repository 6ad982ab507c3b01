"""``portus verify [MODEL[@STEP]]``: every rule of the format, every byte; and ``portus scrub``: the
same at a bounded pace."""

from __future__ import annotations

import time
from collections.abc import Iterator

from portus.cli import files
from portus.cli.options import AS_JSON, OPTIONAL_TARGET, POOL_OR_MIRROR, Text
from portus.cli.output import (
    FOUND,
    MEND,
    Json,
    Output,
    count_text,
    error_document,
    error_line,
    exit_code,
    fields,
    path_text,
    reporting,
    size_text,
)
from portus.cli.pools import allow, open_places
from portus.cli.progress import bar
from portus.errors import PortusError, UsageError
from portus.reach.index.check import RULES, Severity
from portus.reach.places.base import Check, CheckPace, Verdict
from portus.reach.places.opening import Places


def command(
    target: Text = OPTIONAL_TARGET, pool: Text = POOL_OR_MIRROR, as_json: bool = AS_JSON
) -> None:
    """Read every byte of a torch file, of those below a directory, or of a pool, and check every
    rule of the format. Exit code 1 if damage was found."""
    with reporting(as_json) as output:
        run(target, pool, output)


def run(
    target: str | None, pool: str | None, output: Output, *, bytes_per_s: int | None = None
) -> None:
    """Verify what ``target`` names, or all. bytes_per_s: scrub."""
    pace = CheckPace(bytes_per_s=bytes_per_s, told=lambda text: output.note(f"portus: {text}"))
    documents: list[Json] = []
    codes: list[int] = []
    has_files = has_damage = False
    with _places_of(target, pool, is_scrub=bytes_per_s is not None) as places:
        for check in _checks(places, pace):
            verdict, error, passed_s = _run_check(check)
            code = _code(verdict, error)
            codes.append(code)
            has_files = has_files or check.file is not None
            has_damage = has_damage or (code == FOUND and error is None)
            _show(check, verdict, error, passed_s, output)
            documents.append(_document(check, verdict, error, passed_s))
        if not codes:
            what = (
                "checkpoint file" if places.all() else "pool"
            )  # a directory of files is one place
            raise UsageError(
                f"{places.place}: there is no {what} to verify; nothing was saved there"
            )
    damaged = sum(map(bool, codes))
    if has_files and len(codes) > 1:
        result = f"{damaged} DAMAGED" if damaged else "all are healthy"
        output.line(f"{count_text(len(codes), 'file')}: {result}")
    output.document({"healthy": not damaged, "files" if has_files else "pools": documents})
    output.code = FOUND if has_damage or (has_files and FOUND in codes) else max(codes)


def _places_of(target: str | None, pool: str | None, *, is_scrub: bool) -> Places:
    path = files.find_files(*((pool, None) if is_scrub else (target, pool)))
    if path is None:
        return open_places(pool, target, whole=True)
    allow(None if is_scrub else pool)
    return files.open_files(path)


def _checks(places: Places, pace: CheckPace) -> Iterator[Check]:
    if places.target is None:
        for place in places.all():
            yield from place.checks(None, pace)
        return
    for place, chosen in places.by_place(places.select()).items():
        yield from place.checks(chosen, pace)


def _run_check(check: Check) -> tuple[Verdict, PortusError | None, float]:
    """Return what a check found, why it could not be ended, and how long it took."""
    verdict, start, error = Verdict(check.path), time.monotonic(), None
    try:
        with bar(check.title) as advanced:

            def progress(done: int, total: int) -> None:
                verdict.size = done
                advanced(done, total)

            check.run(verdict, progress)
    except PortusError as raised:
        error = raised
    return verdict, error, time.monotonic() - start


def _code(verdict: Verdict, error: PortusError | None) -> int:
    if error is not None:
        return exit_code(error)
    severities = {finding.severity for finding in verdict.findings}
    if Severity.ERROR in severities:
        return FOUND
    return MEND if Severity.MEND in severities else 0


def _show(
    check: Check, verdict: Verdict, error: PortusError | None, passed_s: float, output: Output
) -> None:
    path = check.path if check.file is None else path_text(check.path)
    if error is not None and check.file is None:
        output.note(f"portus: {error_line(error)}")
        return
    if error is not None:
        output.line(f"{path}: DAMAGED: {error_line(error)}")
        return
    for finding in verdict.findings:
        output.line(f"{finding.severity.value} {finding}")
    code = _code(verdict, error)
    result = {FOUND: "DAMAGED", MEND: "NEEDS REPAIR"}.get(code, "healthy")
    removed = (
        f" ({verdict.removed} of them removed by the newest commit, and kept until the next one)"
        if verdict.removed
        else ""
    )
    versions = f"{count_text(verdict.versions, 'version')}{removed}, "
    output.line(
        f"{path}: {result}{f' by the {verdict.by}' if verdict.by else ''}; "
        f"{versions if check.file is None else ''}{size_text(verdict.size)} read in "
        f"{passed_s:.1f} s ({size_text(verdict.size / max(passed_s, 1e-9))}/s)"
    )


def _document(
    check: Check, verdict: Verdict, error: PortusError | None, passed_s: float
) -> dict[str, Json]:
    found: dict[str, Json] = {
        "healthy": _code(verdict, error) == 0,
        "seconds": round(passed_s, 3),
        "error": None if error is None else error_document(error),
    }
    if check.file is not None:
        return {**files.file_document(check.file), **found, "by": verdict.by or None}
    return {
        **fields(verdict, "path", "versions", "removed", "size"),
        **found,
        "findings": [
            {
                **fields(finding, "invariant", "where", "expected", "found"),
                "rule": RULES[finding.invariant],
                "severity": finding.severity.value,
            }
            for finding in verdict.findings
        ],
    }
