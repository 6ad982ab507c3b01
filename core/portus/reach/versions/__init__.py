"""Versions of a pool in the making, and copied from one pool to another."""
