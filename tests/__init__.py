"""The tests. Their states are small, and copied late all the same, in the processes that tests
start too; but not in those of the bench."""

import os
import sys

if "pytest" in sys.modules or "PYTEST_CURRENT_TEST" in os.environ:
    # Where tensors are this small, torch's threads only wait for each other: a third of the time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from portus.engine.fence import writers

    writers.SMALL = 0
