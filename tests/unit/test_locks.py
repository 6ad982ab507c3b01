"""The architecture page lists every lock of the code, and none besides."""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.locks import locks_of_the_code, rows_of_the_page


def test_the_table_of_locks_has_those_of_the_code() -> None:
    listed = Counter(name for row in rows_of_the_page() for name in row)
    assert listed == Counter({lock.name for lock in locks_of_the_code()})
    assert len(listed) > 60


def test_a_name_is_that_of_one_lock() -> None:
    paths = defaultdict(set)
    for lock in locks_of_the_code():
        paths[lock.name].add(lock.path)
    assert [name for name, where in paths.items() if len(where) > 1] == []
