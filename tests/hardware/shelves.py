"""``python -m tests.hardware.shelves PATH...``: verifies what shelves hold, then changes them.

Says ``found N STEP`` of shelf N, whose bytes all follow from its step, and ``saved N STEP`` when
that transaction was committed. No torch.
"""

from __future__ import annotations

import sys

from portus.companions.shelf import Shelf
from portus.engine.spec import PAGE
from portus.reach.index.check import check
from portus.reach.index.findings import Severity
from tests.crash import shelf_loop


def opened(path: str) -> Shelf:
    shelf = Shelf(path, log_bytes=100 * PAGE)
    shelf_loop.begin(shelf)
    shelf_loop.verify(shelf)
    errors = [str(each) for each in check(path) if each.severity is Severity.ERROR]
    assert not errors, errors
    return shelf


def main(paths: list[str]) -> None:
    shelves = [opened(path) for path in paths]
    for number, shelf in enumerate(shelves):
        print(f"found {number} {shelf.step}", flush=True)
    while True:
        for number, shelf in enumerate(shelves):
            print(f"saved {number} {shelf_loop.advance(shelf)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
