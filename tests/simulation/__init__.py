"""Disks, devices, links and stores for tests, which crash, fail or lie in every legal way."""
