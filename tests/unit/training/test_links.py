"""A link that is replaced leads to the old checkpoint or to the new one, whenever its process dies,
and nothing is left beside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from portus.engine.directory.recovery import recover_directory
from portus.errors import MediumError
from portus.reach.training.links import replace_link
from tests.warm import in_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("there", ["link", "file", "nothing"])
def test_a_process_that_is_killed_leaves_the_one_or_the_other(tmp_path: Path, there: str) -> None:
    seen = set()
    for number in range(1, 20):
        where = tmp_path / str(number)
        where.mkdir()
        (where / "old").write_text("old")
        (where / "new").write_text("new")
        if there == "link":
            (where / "last").symlink_to("old")
        elif there == "file":
            (where / "last").write_text("old")
        done = in_process(
            "import os\n"
            "from portus.reach.training.links import replace_link\n"
            "from tests.adapters.kills import Kills\n"
            f"os.chdir({str(where)!r})\n"
            f"Kills({number})\n"
            "replace_link('last', 'new')\n"
        )
        recover_directory(str(where))
        expected = {"old", "new"} | ({"last"} if os.path.lexists(where / "last") else set())
        assert set(os.listdir(where)) == expected, number
        text = (where / "last").read_text() if (where / "last").exists() else None
        seen.add(text)
        assert text in ("new", None if there == "nothing" else "old")
        if done.returncode == 0:
            assert text == "new"
            break
        assert done.returncode == -9, done.stderr
    assert done.returncode == 0, "every change of a name was tried"
    assert len(seen) == 2


def test_a_directory_is_not_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    with pytest.raises(MediumError, match=r"last: Is a directory"):
        replace_link(str(tmp_path / "last"), str(tmp_path / "a"))
    assert os.listdir(tmp_path) == ["last"]


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MediumError, match="No such file"):
        replace_link(str(tmp_path / "none" / "last"), str(tmp_path / "a"))
