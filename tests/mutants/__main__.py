"""``python -m tests.mutants``: what the tests of a package do not notice.

Of each package a sample of mutants (modules with one small change, by the operators of cosmic-ray)
is made in a copy of the tree, and each meets the tests that execute what it changes, the quickest
first. One that fails a test is killed; one that none fails has survived, and is printed. Which
survivors mean the same as what they came from is on record here (``EQUIVALENT``); all others are
gaps. A score is killed / (all - equivalent).

cosmic-ray's own runner starts pytest once for each change, and edits the tree that it runs in.
mutmut has all mutants in one rewritten package, where forks, signals and lines would differ.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

TESTS: Final[dict[str, tuple[str, ...]]] = {
    "engine/copying": ("tests/unit/copying",),
    "engine/directory": (
        "tests/unit/directory",
        "tests/unit/paths/test_several_files.py",
        "tests/crash/test_publish.py",
        "tests/faults/test_paths.py",
    ),
    "engine/fence": ("tests/unit/fence", "tests/property/test_audit.py"),
    "engine/files": ("tests/unit/files",),
    "engine/format": (
        "tests/unit/format",
        "tests/unit/index/test_log.py",
        "tests/golden/test_golden.py",
    ),
    "engine/image": ("tests/unit/image", "tests/unit/loading"),
    "engine/loading": ("tests/unit/loading", "tests/unit/files/test_flips.py"),
    "engine/media": ("tests/unit/media", "tests/contract/test_media.py"),
    "engine/paths": ("tests/unit/paths", "tests/unit/pools/test_checkpointer.py"),
    "engine/pipeline": ("tests/unit/pipeline", "tests/property/test_audit.py"),
    "engine/settings": ("tests/unit/settings",),
    "engine/state": ("tests/unit/state", "tests/unit/loading"),
    "engine/writer": ("tests/unit/writer", "tests/unit/paths/test_disks.py"),
    "reach/format": (
        "tests/unit/format",
        "tests/unit/index/test_log.py",
        "tests/golden/test_golden.py",
    ),
    "reach/index": (
        "tests/unit/index",
        "tests/unit/cli/test_rescue.py",
        "tests/unit/job/test_journal.py",
        "tests/unit/embedding/test_placed.py",
    ),
    "reach/protocol": ("tests/unit/protocol", "tests/golden/test_protocol.py"),
}
"""The tests that have to kill the mutants of a package."""

SLOWER: Final = 5.0
"""A mutant has this many times as long as its tests took without it, and..."""

RUN_S_MIN: Final = 60.0
"""...that long at least."""

EQUIVALENT: Final[dict[str, str]] = {
    "protocol/connection.py: if kind.from_client == self._is_client: -> "
    "if kind.from_client is self._is_client:": "there is one True and one False",
    "index/check_version.py: _BATCH: Final = 64 << 20 -> _BATCH: Final = 64 << 21": "how many "
    "bytes are read at once",
}
"""Survivors that mean the same: "package/module.py: old -> new", and why."""


def main(arguments: Sequence[str]) -> int:
    """Try all; print survivors and scores. 0 if each package has ``--least``."""
    asked = _asked(arguments)
    os.environ.setdefault("PORTUS_TEST_SEED", "1")
    _import_what_is_slow()
    with tempfile.TemporaryDirectory(prefix="portus-mutants-") as own:
        tree = Path(own).resolve()
        _copy(tree)
        scores = [_score(tree, each, asked.each, asked.seed) for each in asked.package or TESTS]
    return 0 if min(scores) >= asked.least else 1


def _asked(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("package", nargs="*", choices=[[], *TESTS])
    parser.add_argument("--each", type=int, default=60, help="mutants of a package (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (%(default)s)")
    parser.add_argument(
        "--least", type=float, default=0.6, help="a lower score fails (%(default)s)"
    )
    return parser.parse_args(arguments)


def _import_what_is_slow() -> None:
    """Each run is a fork of this process. Nothing of ours: torch would import it."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import hypothesis
    import torch

    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    assert hypothesis is not None
    assert torch is not None
    assert not [name for name in sys.modules if name.split(".")[0] == "portus"]


def _copy(tree: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    native = [str(each.relative_to(ROOT)) for each in ROOT.glob("core/portus/engine/copying/*.so")]
    for name in [*listed, *native]:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def _score(tree: Path, name: str, count: int, seed: int) -> float:
    """Try ``count`` mutants of the package ``name``."""
    from tests.mutants.attack import covered, survives
    from tests.mutants.sample import sampled

    package = tree / "core/portus" / name
    began = time.monotonic()
    covering, seconds = covered(tree, package, TESTS[name])
    print(f"mutants: {name}: {len(seconds)} tests in {time.monotonic() - began:.0f} s", flush=True)
    killed, same, left = 0, 0, 0
    for mutant in sampled(package, count, seed):
        module = str(mutant.module.relative_to(tree))
        key = f"{package.name}/{mutant.module.name}: {mutant.change}"
        there = covering.get(module, {})
        met = {each for line in mutant.lines for each in there.get(line, ())}
        if any(there.get(line) == [] for line in mutant.lines):  # when the module is imported
            met = set(seconds)
        names = sorted(met, key=lambda each: seconds[each])
        if key in EQUIVALENT:
            same += 1
            continue
        source = mutant.module.read_text()
        mutant.module.write_text(mutant.code)
        try:
            limit = max(RUN_S_MIN, SLOWER * sum(seconds[each] for each in names))
            alive = not names or survives(tree, names, limit)
        finally:
            mutant.module.write_text(source)
        killed += not alive
        left += alive
        if alive:
            print(f"mutants: survived {len(names)} tests: {mutant.lines.start}: {key}", flush=True)
    score = killed / (killed + left) if killed + left else 1.0
    print(
        f"mutants: {name}: {killed} of {killed + left} killed, {score:.0%}; "
        f"{same} more mean the same; {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return score


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
