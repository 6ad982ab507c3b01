"""What the documents tell a reader to run does what they say: programs and commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.blocks import blocks_of, check_said, read
from tests.unit.test_documents import HEAVY, STORIES


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # as a reader's program has it
@pytest.mark.parametrize("name", HEAVY)
def test_the_programs_and_commands_of_a_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read(STORIES[name], tmp_path)


def test_a_page_that_says_what_is_not_so_is_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    for text in (
        "```python\nassert False\n```\n",
        "```console\n$ false\n```\n",
        "```console\n$ echo one two\ntwo one\n```\n",
        "```console\n$ echo 1\nKilled\n```\n",
        "```bash\nfalse\ntrue\n```\n",
        "<!-- before: x = 1 -->\n```python\nassert x == 2\n```\n",
        "<!-- not run: for lack of a machine -->\n```python\nx = = 1\n```\n",
    ):
        document.write_text(text)
        with pytest.raises((AssertionError, SyntaxError)):
            read(blocks_of(document), tmp_path)
    (block,) = blocks_of(document)
    check_said(block, "x", ["a  12.5 MiB", "...", "d ... f"], 0, "a 3 MiB\nb\nc\nd e f\n")
