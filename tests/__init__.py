"""The tests. Their states are small, and copied late all the same, in the processes that tests
start too; but not in those of the bench."""

import os
import sys

from portus.engine.fence import writers

if "pytest" in sys.modules or "PYTEST_CURRENT_TEST" in os.environ:
    writers.SMALL = 0
