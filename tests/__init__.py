"""The tests. Their states are small, and copied late all the same, but for those of the bench."""

from portus.client.fence import writers

SMALL = writers.SMALL
writers.SMALL = 0
