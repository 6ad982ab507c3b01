"""The blocks of code in the documents: found, and run as a reader would.

A document is run in a folder of its own, from its first block to its last: blocks of Python share
their names, and commands find what those left. Blocks below a tab are a story of their own, which
begins with those outside of tabs that come before.

- ``python``: run. With a ``title``, it is written to a file of that name instead.
- ``console``: lines that begin with ``$`` are run; the lines below one have to be in what it
  prints, in that order. Numbers and ages may be others, and so may be the space between words.
  ``Killed``: it ends by SIGKILL. ``...``: anything.
- ``bash``: run as a script that has to come to its end.

A comment right above a block changes that:

- ``<!-- not run: REASON -->``: it is only read, and must be Python if it says so.
- ``<!-- before: CODE -->``: CODE, in the language of the block, is run before it, unseen.

What a document says of one machine is said of this one: ``SUBSTITUTED``.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.hosts import free_port

ROOT: Final = Path(__file__).resolve().parents[1]
RUN: Final = ("python", "console", "bash")
READ: Final = ("text", "yaml", "toml", "ini", "json")
"""Languages of blocks that are run, and of those that are not."""

_FRAMEWORK: Final = re.compile(r"\b(lightning|accelerate|transformers|distributed)\b")

COMMAND_S_MAX: Final = 300.0

_FENCE: Final = re.compile(r"^(?P<space> *)```(?P<language>\w*)(?P<more>[^`\n]*)$")
_TAB: Final = re.compile(r'^=== "(?P<name>[^"]+)"$')
_MARK: Final = re.compile(r"<!-- (?P<kind>not run|before): *(?P<text>.*?)\s*-->\s*\Z", re.DOTALL)
_AGE: Final = re.compile(r"\b\d+ \w+ ago\b")
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a document. ``line``: of its first fence. ``tab``: that it is below, if any.
    ``before``: code that is run before it. ``why_not``: why it is not run; nothing if it is."""

    document: Path
    line: int
    language: str
    text: str
    title: str = ""
    tab: str = ""
    before: str = ""
    why_not: str = ""

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    """All of them, in order."""
    lines = document.read_text().splitlines()
    found: list[Block] = []
    tab, opened, above = "", -1, 0
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if opened >= 0:
            if fence and not fence["language"]:
                found.append(_block(document, lines, opened, number, above, tab))
                opened, above = -1, number + 1
        elif fence:
            opened = number
        elif named := _TAB.match(line):
            tab = named["name"]
        elif line and not line.startswith(" "):
            tab = ""
    assert opened < 0, f"{document.name}:{opened + 1}: a block without an end"
    return found


def _block(
    document: Path, lines: list[str], opened: int, closed: int, above: int, tab: str
) -> Block:
    fence = _FENCE.match(lines[opened])
    assert fence is not None
    title = re.search(r'title="([^"]+)"', fence["more"])
    mark = _MARK.search("\n".join(lines[above:opened]))
    before = textwrap.dedent(mark["text"]) if mark and mark["kind"] == "before" else ""
    return Block(
        document=document,
        line=opened + 1,
        language=fence["language"],
        text=textwrap.dedent("\n".join(lines[opened + 1 : closed])) + "\n",
        title=title[1] if title else "",
        tab=tab,
        before=before,
        why_not=" ".join(mark["text"].split()) if mark and mark["kind"] == "not run" else "",
    )


def stories(blocks: list[Block]) -> dict[str, list[Block]]:
    """What is run together, by the name of the tab; "" is for a document without tabs, or for what
    comes behind the last of them, with the first tab before it."""
    tabs = list(dict.fromkeys(block.tab for block in blocks if block.tab))
    if not tabs:
        return {"": blocks}
    found = {}
    for tab in tabs:
        last = max(n for n, block in enumerate(blocks) if block.tab == tab)
        end = len(blocks) if tab == tabs[0] else last + 1
        found[tab] = [block for block in blocks[:end] if block.tab in ("", tab)]
    return found


def is_heavy(blocks: list[Block]) -> bool:
    """True if anything but Python is run, or a framework is imported."""
    run = [block for block in blocks if not block.why_not]
    return any(
        block.language in ("console", "bash") or _FRAMEWORK.search(block.before + block.text)
        for block in run
    )


@dataclass(slots=True)
class Reader:
    """Runs blocks in a folder, one after another."""

    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    environment: dict[str, str] = field(default_factory=dict)
    behind: list[subprocess.Popen[bytes]] = field(default_factory=list)
    substituted: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.substituted = {
            "store-1": "localhost",
            "0.0.0.0": "127.0.0.1",
            "7117": str(free_port()),
        }
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder),
        }

    def read(self, block: Block) -> None:
        """Run it; ``AssertionError``, or what its code raises, if it is not as it says."""
        if block.why_not or block.language not in RUN:
            if block.language == "python":
                ast.parse(block.text)
            return
        text = self.here(block.text)
        if block.language == "python":
            self._python(block, self.here(block.before))
            if block.title:
                (self.folder / block.title).write_text(text)
            else:
                self._python(block, text)
        elif block.language == "bash":
            self._commands(block, [(self.here(block.before) + "\n" + text, [])])
        else:
            before = self.here(block.before).splitlines()
            self._commands(block, [*((line, []) for line in before), *session(text)])

    def here(self, text: str) -> str:
        """What the document says, said of this machine."""
        for word, ours in self.substituted.items():
            text = text.replace(word, ours)
        return text

    def _python(self, block: Block, text: str) -> None:
        code = compile("\n" * block.line + text, str(block.document), "exec", dont_inherit=True)
        exec(code, self.names)

    def _commands(self, block: Block, commands: Sequence[tuple[str, Sequence[str]]]) -> None:
        for command, expected in commands:
            if exported := re.fullmatch(r"export (\w+)=(\S+)\s*", command):
                self.environment[exported[1]] = exported[2].replace("~", str(self.folder))
            elif re.search(r"^portus serve ", command, re.MULTILINE):
                self._serve(block, command)
            else:
                check_said(block, command, expected, *self._run(command))

    def _run(self, command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder, env=self.environment, timeout=COMMAND_S_MAX, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout

    def _serve(self, block: Block, command: str) -> None:
        """A host stays, as in a terminal of its own, until the document ends."""
        *first, last = command.strip().splitlines()
        code, said = self._run("\n".join(first))
        assert code == 0, f"{block}: {said}"
        log = self.folder / "serve.log"
        with log.open("wb") as output:
            host = subprocess.Popen(
                ["bash", "-c", f"exec {last}"],
                cwd=self.folder, env=self.environment, stdout=output, stderr=output,
            )  # fmt: skip
        self.behind.append(host)
        until = time.monotonic() + COMMAND_S_MAX
        port = int(self.substituted["7117"])
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            assert host.poll() is None, f"{block}: {log.read_text()}"
            assert time.monotonic() < until, f"{block}: nobody listens: {log.read_text()}"
            time.sleep(0.02)  # between two looks

    def close(self) -> None:
        """End what was left running, and close what was left open."""
        for left in self.names.values():
            if type(left).__module__.startswith("portus") and hasattr(left, "close"):
                left.close()
        self.names.clear()
        for host in self.behind:
            host.send_signal(signal.SIGTERM)
            host.wait(COMMAND_S_MAX)


def read(blocks: Sequence[Block], folder: Path) -> None:
    """Run blocks in ``folder``, which is the working directory, as ``Reader`` does."""
    reader = Reader(folder)
    try:
        for block in blocks:
            reader.read(block)
    finally:
        reader.close()


def session(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a block of ``console``, each with the lines below it."""
    command, expected = "", list[str]()
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, expected
            command, expected = line[2:], []
        elif command.endswith("\\"):
            command += "\n" + line
        elif line.strip():
            expected.append(line)
    assert command, f"a block of console begins with a command: {text!r}"
    yield command, expected


def check_said(block: Block, command: str, expected: Sequence[str], code: int, said: str) -> None:
    """Compare what a command came to with what the document has it come to."""
    shown = f"{block}: {command}\n{said}"
    if list(expected[-1:]) == ["Killed"]:
        assert code in (-signal.SIGKILL, 128 + signal.SIGKILL), shown
        expected = expected[:-1]
    else:
        assert code == 0, f"{shown}\nexit code {code}"
    lines = iter([_alike(line) for line in said.splitlines()])
    for line in expected:
        if line.strip() != "...":
            pattern = re.escape(_alike(line)).replace(re.escape("..."), ".*")
            assert any(re.fullmatch(pattern, each) for each in lines), f"{shown}\nlacks: {line}"


def _alike(line: str) -> str:
    return _NUMBER.sub("0", _AGE.sub("just now", " ".join(line.split())))
