"""Removals and links wait for what they depend on, whatever the order of saves and commits (V2)."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from portus.engine.job.settings import Settings
from portus.engine.paths.saver import FileSaver, SharedWriter
from portus.errors import MediumError
from portus.reach.training.after_commit import AfterCommit


def after_commit(saver: FileSaver) -> AfterCommit:
    return AfterCommit(saver, re.compile(""), None)


@pytest.fixture
def saver() -> Iterator[FileSaver]:
    shared = SharedWriter(0)
    saver = FileSaver(shared, Settings())
    yield saver
    saver.close()
    shared.close()


class Scene:
    """Saves that end when they are told to."""

    def __init__(self, root: Path, saver: FileSaver) -> None:
        self.root = root
        self.saver = saver
        self.after = after_commit(saver)
        self.numbers: dict[str, int] = {}

    def path(self, name: str) -> str:
        return os.fspath(self.root / name)

    def save(self, *names: str) -> None:
        for name in names:
            self.numbers[name] = self.after.begin_save(self.path(name))

    def commits(self, *names: str, ok: bool = True) -> None:
        for name in names:
            if ok:
                Path(self.path(name)).write_text(str(self.numbers[name]))
            self.after.over(self.numbers[name], self.path(name), is_committed=ok)
        self.saver.catch_up()

    def there(self) -> list[str]:
        return sorted(os.listdir(self.root))


@pytest.fixture
def scene(tmp_path: Path, saver: FileSaver) -> Scene:
    return Scene(tmp_path, saver)


def test_a_removal_waits_for_the_newest_save_that_was_asked_for(scene: Scene) -> None:
    scene.save("a")
    scene.commits("a")
    scene.save("b")
    scene.after.remove(scene.path("a"))
    assert scene.there() == ["a"]
    assert not scene.after.is_there(scene.path("a")), "for its user it is gone"
    assert scene.after.is_there(scene.path("b")), "and this one is there"
    scene.commits("b")
    assert scene.there() == ["b"]


def test_a_file_is_gone_for_its_user_while_it_is_being_removed(
    tmp_path: Path, saver: FileSaver
) -> None:
    seen = []
    path = os.fspath(tmp_path / "a")

    class Failing(AfterCommit):
        def delete(self, path: str) -> None:
            seen.append(self.is_there(path))
            raise MediumError(5, "the disk fails")

    after = Failing(saver, re.compile(""), None)
    Path(path).write_text("a")
    after.remove(path)
    assert seen == [False]
    assert after.is_there(path), "it stays"


def test_a_file_that_is_removed_before_its_save_is_over_is_gone_for_its_user(scene: Scene) -> None:
    """Whoever waits for a save goes on before the worker has noted its end."""
    scene.save("a", "b")
    scene.after.remove(scene.path("a"))
    assert not scene.after.is_there(scene.path("a"))
    scene.commits("a", "b")
    assert scene.there() == ["b"]


def test_if_that_save_fails_a_later_one_will_do(scene: Scene) -> None:
    scene.save("a")
    scene.commits("a")
    scene.save("b")
    scene.after.remove(scene.path("a"))
    scene.commits("b", ok=False)
    assert scene.there() == ["a"]
    assert scene.after.leftovers() == [scene.path("a")]
    scene.save("c")
    scene.commits("c")
    assert scene.there() == ["c"]


def test_with_nothing_in_flight_a_removal_is_at_once(scene: Scene) -> None:
    scene.save("a", "b")
    scene.commits("a", "b")
    scene.after.remove(scene.path("a"))
    assert scene.there() == ["b"]
    Path(scene.path("foreign")).touch()
    scene.after.remove(scene.path("foreign"))
    assert scene.there() == ["b"]


def test_a_save_to_a_path_that_is_to_be_removed_keeps_it(scene: Scene) -> None:
    scene.save("a")
    scene.commits("a")
    scene.save("b")
    scene.after.remove(scene.path("a"))
    scene.save("a")
    scene.commits("b", "a")
    assert scene.there() == ["a", "b"]
    assert Path(scene.path("a")).read_text() == "3"


def test_a_file_that_is_written_again_is_kept_though_its_removal_waited(scene: Scene) -> None:
    scene.save("a")
    scene.commits("a")
    scene.save("b")
    scene.after.remove(scene.path("a"))
    scene.commits("b", ok=False)
    # The save to "c", a directory, writes it.
    scene.after.begin_save(scene.path("c"), [scene.path("a")])
    scene.save("c")
    scene.commits("c")
    assert scene.there() == ["a", "c"]


def test_a_link_follows_each_commit_and_is_left_by_a_save_that_fails(scene: Scene) -> None:
    link = Path(scene.path("last"))
    scene.save("a")
    scene.after.link(os.fspath(link), scene.path("a"))
    assert not os.path.lexists(link)
    assert scene.after.is_there(os.fspath(link))
    scene.save("b")
    scene.after.link(os.fspath(link), scene.path("b"))
    scene.commits("a")
    assert os.readlink(link) == "a", "the newest that is there"
    scene.commits("b", ok=False)
    assert os.readlink(link) == "a"
    scene.after.link(os.fspath(link), scene.path("b"))
    assert os.readlink(link) == "a", "nothing is there to lead to"


def test_what_a_link_leads_to_stays_until_it_leads_elsewhere(scene: Scene) -> None:
    """The framework may ask for the removal before it asks for the link."""
    scene.save("a")
    scene.after.link(scene.path("last"), scene.path("a"))
    scene.commits("a")
    scene.save("b")
    scene.after.remove(scene.path("a"))
    scene.commits("b")
    assert scene.there() == ["a", "b", "last"]
    scene.after.link(scene.path("last"), scene.path("b"))
    assert scene.there() == ["b", "last"]


def test_a_directory_at_the_place_of_a_link_is_left_to_the_caller(scene: Scene) -> None:
    Path(scene.path("last")).mkdir()
    with pytest.raises(IsADirectoryError):
        scene.after.link(scene.path("last"), scene.path("a"))


def test_a_full_disk_takes_the_oldest_removal_and_never_the_newest_checkpoint(
    scene: Scene,
) -> None:
    scene.save("a")
    scene.commits("a")
    scene.save("b")
    scene.after.remove(scene.path("a"))
    assert not scene.after.make_room(), "it is the newest that is there"
    scene.commits("b", ok=False)
    scene.save("c")
    scene.commits("c", ok=False)
    assert not scene.after.make_room()
    assert scene.there() == ["a"]
    scene.after.remove(scene.path("nothing"))
    scene.save("d")
    scene.commits("d")
    scene.save("e")
    scene.after.remove(scene.path("d"))
    assert not scene.after.make_room()
    scene.save("f")
    scene.commits("e")
    assert scene.there() == ["e"]


def test_a_full_disk_is_given_the_older_of_two(scene: Scene) -> None:
    scene.save("a", "b")
    scene.commits("a", "b")
    scene.save("c")
    scene.after.remove(scene.path("a"))
    assert scene.after.make_room()
    assert scene.there() == ["b"]
    assert not scene.after.make_room()


def test_what_cannot_be_removed_is_said_and_harms_nothing(
    tmp_path: Path, saver: FileSaver, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    after_commit(saver).remove(os.fspath(tmp_path / "file/a"))
    assert "remove it yourself" in caplog.text


def test_at_any_moment_of_any_order_the_newest_commit_is_there_and_the_link_leads_somewhere(
    tmp_path: Path, saver: FileSaver, seed: int
) -> None:
    source = random.Random(seed)
    for number in range(60):
        (tmp_path / str(number)).mkdir()
        scene = Scene(tmp_path / str(number), saver)
        link, flying, committed, at = scene.path("last"), [], [], 0
        for _ in range(40):
            act: Any = source.choice(["save", "save", "over", "over", "remove", "link"])
            if act == "save":
                at += 1
                flying.append(f"s{at}")
                scene.save(f"s{at}")
            elif act == "over" and flying:
                name, ok = flying.pop(0), source.random() < 0.7
                scene.commits(name, ok=ok)
                committed += [name] if ok else []
            elif act == "remove" and at > 1 and flying:
                scene.after.remove(scene.path(f"s{source.randrange(1, at)}"))
            elif act == "link" and at:
                scene.after.link(link, scene.path(f"s{at}"))
            if committed:
                assert committed[-1] in scene.there(), number
            assert os.path.exists(link) or not os.path.lexists(link), number
