"""``python -m tests.suites``: Accelerate's own tests of checkpoints, stock and with Portus.

The tests come from the source distribution of the Accelerate that is installed, by pip. Each
suite runs twice, unchanged: as it is, and with ``PORTUS_ACCELERATE=1``. A test that ends otherwise
with Portus has to be one of ``KNOWN``, and each of those has to end otherwise still. Lightning's
source distributions hold no tests, so its suite is not here.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

SUITES: Final = (
    "tests/test_state_checkpointing.py",
    "tests/test_accelerator.py",
    "-k",
    "CheckpointTest or save or load or state or checkpoint",
)

NEEDED: Final = "parameterized"
"""What these tests import besides, from PyPI; put beside them."""

SUITE_S_MAX: Final = 1200

KNOWN: Final = {
    f"tests.test_state_checkpointing.CheckpointTest_{kind}::test_with_save_limit": (
        "the oldest checkpoint goes once the new one is committed, and not before that: the test "
        "looks in the same moment"
    )
    for kind in ("use_safetensors", "use_pytorch")
}


def main() -> int:
    """Run both, print what differs; 0 if that is what is known to."""
    with tempfile.TemporaryDirectory(prefix="portus-suites-") as own:
        home = _sources(Path(own))
        stock = _outcomes(home, "stock", {})
        ours = _outcomes(home, "portus", {"PORTUS_ACCELERATE": "1"})
    differs = {
        name: (stock.get(name, "not run"), ours.get(name, "not run"))
        for name in sorted(stock.keys() | ours.keys())
        if stock.get(name) != ours.get(name)
    }
    for name, (before, after) in differs.items():
        print(f"suites: {name}: {before}, with Portus {after}: {KNOWN.get(name, 'NOT KNOWN')}")
    stale = [name for name in KNOWN if name in stock and name not in differs]
    for name in stale:
        print(f"suites: {name}: no longer differs; take it off the list")
    passed = sum(outcome == "passed" for outcome in ours.values())
    print(
        f"suites: {len(ours)} tests with Portus: {passed} passed; {len(differs)} differ from stock"
    )
    return 0 if passed and not stale and differs.keys() <= KNOWN.keys() else 1


def _sources(own: Path) -> Path:
    """Fetch and unpack the tests of the Accelerate that is installed."""
    version = importlib.metadata.version("accelerate")
    print(f"suites: accelerate {version}: fetching its source distribution", flush=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = [*pip, "download", "--no-deps", "--no-binary", ":all:", "--dest", str(own)]
    subprocess.run([*source, f"accelerate=={version}"], check=True)
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(own / "more"), NEEDED], check=True
    )
    (archive,) = own.glob("accelerate-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(own, filter="data")
    return own / f"accelerate-{version}"


def _outcomes(home: Path, label: str, environment: dict[str, str]) -> dict[str, str]:
    """The suites' tests by name, and how each ended."""
    results = home.parent / f"{label}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, f"--junitxml={results}", *SUITES],
        cwd=home,
        env=os.environ | {"PYTHONPATH": str(home.parent / "more")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_S_MAX,
        check=False,
    )
    if not results.exists():
        raise SystemExit(f"suites: {label}: pytest left no results\n{ran.stdout}")
    found = {}
    for case in ElementTree.parse(results).iter("testcase"):
        ended = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = next(iter(ended), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    print(f"suites: {label}: {len(found)} tests ran", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
