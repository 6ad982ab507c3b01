"""The bench. Small states are copied as users' are."""

from portus.client.fence import writers
from tests import SMALL

writers.SMALL = SMALL
