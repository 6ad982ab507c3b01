"""Reach: other places (pools, storage hosts, mirrors), other formats and callers."""
