"""The command as a process of its own: without torch, beside a trainer, interrupted, cut off."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.unit.cli.scene import Run

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"
MAIN = "import sys; from portus.cli.main import main; sys.argv[0] = 'portus'; main()"


def process(
    *arguments: str | Path, before: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", before + MAIN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("show", "net"),
        ("verify",),
        ("verify", "net@20"),
        ("export", "net", "out.pt"),
        ("export", "ckpt/step-00000005.pt", "out.pt"),
        ("gc",),
        ("gc", "--missing", "ckpt"),
        ("rm", "net@10"),
        ("rm", "led@5"),
        ("rm", "ckpt/step-00000005.pt"),
    ],
    ids=" ".join,
)
def test_it_works_without_torch(run: Run, arguments: tuple[str, ...]) -> None:
    run.point(5)
    done = process(*arguments, "--json", before=WITHOUT_TORCH, cwd=run.root)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


def test_help_loads_neither_torch_nor_numpy() -> None:
    check = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sorted({'torch', 'numpy', 'msgspec'} & set(sys.modules))))\n"
    )
    done = process("--help", before=check)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("name", "extra", "command"),
    [
        ("typer", "cli", "ls"),
        ("msgspec", "cli", "doctor"),
        ("msgspec", "cli", "serve memory:1M"),
        ("numpy", "cli", "ls"),
        ("prometheus_client", "metrics", "serve memory:1M --listen unix:portus --metrics 1"),
    ],
)
def test_without_what_it_needs_it_says_in_one_line_what_to_install(
    tmp_path: Path, name: str, extra: str, command: str
) -> None:
    without = f"import sys; sys.modules[{name!r}] = None\n"
    done = process(*command.split(), before=without, cwd=tmp_path)
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []
    [line] = done.stderr.splitlines()
    assert line == f"portus: this needs {name}: pip install 'portus-checkpoint[{extra}]'"


def test_a_module_of_somebody_else_that_is_missing_is_no_fault_of_the_installation() -> None:
    done = process("ls", before="import sys; sys.modules['portus.cli.ls'] = None\n")
    assert done.returncode == 1
    assert "pip install" not in done.stderr


def test_python_m_portus_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "portus", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("python -m portus", "portus") == process("--help").stdout


def holding(path: Path) -> subprocess.Popen[str]:
    """A process that writes the pool until its stdin ends."""
    program = textwrap.dedent(
        f"""
        import sys
        from portus.reach.index.directory import WRITERS
        writer = WRITERS.open({str(path)!r})
        print("ready", flush=True)
        sys.stdin.read()
        """
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    return holder


@pytest.mark.long
def test_a_pool_that_is_being_written_is_read_and_not_changed(run: Run) -> None:
    holder = holding(run.net)
    try:
        for command in (("ls",), ("show", "net@20"), ("verify",), ("gc", "--dry-run")):
            assert process(*command, cwd=run.root).returncode == 0, command
        for command in (("gc",), ("rm", "net@10")):
            done = process(*command, "--json", cwd=run.root)
            assert done.returncode == 75, done
            assert f"pid {holder.pid} on" in done.stderr
            assert "Traceback" not in done.stderr
            json.loads(done.stdout)
    finally:
        holder.communicate("")
    assert process("gc", cwd=run.root).returncode == 0


@pytest.mark.long
def test_a_pool_removed_while_somebody_waits_for_it_is_not_written(run: Run) -> None:
    """Whoever opens it holds a file that has no name any more: that must be noticed."""
    assert process("rm", "net", "--yes", cwd=run.root).returncode == 0
    holder = holding(run.net)
    waiting = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from portus.reach.index.directory import WRITERS\nWRITERS.open({str(run.net)!r})",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.stderr is not None
    assert "waiting up to" in waiting.stderr.readline()
    os.unlink(run.net)
    holder.communicate("")
    _, said = waiting.communicate()
    assert waiting.returncode == 1
    assert "removed or replaced while it was opened" in said


@pytest.mark.long
def test_ctrl_c_leaves_nothing_behind(run: Run) -> None:
    import torch

    with PoolCheckpointer(run.pool / "big.portus", "big") as trainer:
        trainer.save({"x": torch.zeros(200 << 20, dtype=torch.uint8)}, 1).wait()
    slow = textwrap.dedent(
        """
        import portus.reach.versions.open_version as tensors, time, sys
        fetch = tensors.fetch
        def slowly(*arguments):
            print("reading", file=sys.stderr, flush=True)
            time.sleep(0.2)
            return fetch(*arguments)
        tensors.fetch = slowly
        """
    )
    before = sorted(os.listdir(run.root))
    done = subprocess.Popen(
        [sys.executable, "-c", slow + MAIN, "export", "big", "out.pt"],
        cwd=run.root,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.stderr is not None
    assert done.stderr.readline() == "reading\n"
    done.send_signal(signal.SIGINT)
    _, said = done.communicate(timeout=30)
    assert done.returncode == 130
    assert said.splitlines()[-1] == "portus: interrupted"
    assert "Traceback" not in said
    assert sorted(os.listdir(run.root)) == before


def at_a_terminal(run: Run, typed: str, *arguments: str) -> tuple[int, str]:
    """Exit code and all that a terminal shows of a command."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=run.root,
        env={**os.environ, "TERM": "xterm"},
    ) as command:
        os.close(theirs)
        os.write(ours, typed.encode())
        shown = b""
        while True:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    return command.returncode, shown.decode()


@pytest.mark.long
def test_progress_is_shown_at_a_terminal(run: Run) -> None:
    for arguments in (("verify",), ("export", "net", "out.pt")):
        code, shown = at_a_terminal(run, "", *arguments)
        assert code == 0, shown
        assert "\u2501" in shown
    code, shown = at_a_terminal(run, "", "ls")
    assert code == 0
    assert "net.portus" in shown


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("typed", "code"),
    [
        pytest.param("y\n", 0, marks=pytest.mark.long),
        pytest.param("n\n", 2, marks=pytest.mark.long),
        ("\n", 2),
    ],
)
def test_a_whole_model_is_asked_about_at_a_terminal(run: Run, typed: str, code: int) -> None:
    found, shown = at_a_terminal(run, typed, "rm", "net")
    assert found == code, shown
    assert "[y/N]" in shown
    left = json.loads(process("ls", "--json", run.net).stdout)["pools"][0]["models"]
    assert bool(left) == (code != 0)


def test_a_reader_that_has_enough_ends_it_quietly(run: Run) -> None:
    script = '"$0" -c "$1" ls --json | true; exit ${PIPESTATUS[0]}'
    done = subprocess.run(
        ["/bin/bash", "-c", script, sys.executable, MAIN],
        capture_output=True,
        text=True,
        cwd=run.root,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.long
def test_a_path_that_is_no_text_does_no_harm(run: Run) -> None:
    run.point(99, directory=os.fsdecode(b"odd\xff"))
    done = process("ls", cwd=run.root)
    assert done.returncode == 0
    assert "odd\\udcff" in done.stdout
    assert process("ls", "--json", cwd=run.root).returncode == 0
    out = process("export", os.fsdecode(b"odd\xff"), "out", cwd=run.root)
    assert out.returncode == 0, out.stderr


@pytest.mark.long
@pytest.mark.parametrize("arguments", ["ls", "ls --json", "verify"])
def test_a_result_that_cannot_be_written_is_an_error_of_the_machine(
    run: Run, arguments: str
) -> None:
    for unbuffered in ("", "1"):
        done = subprocess.run(
            ["/bin/sh", "-c", f'"$0" -c "$1" {arguments} > /dev/full', sys.executable, MAIN],
            capture_output=True,
            text=True,
            cwd=run.root,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
        expected = "portus: cannot write to standard output: No space left on device\n"
        assert (done.returncode, done.stderr) == (74, expected)


@pytest.mark.long
@pytest.mark.parametrize("arguments", ["ls", "verify", "gc", "ls --nonsense"])
def test_closed_streams_do_no_harm(run: Run, arguments: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -c "$1" {arguments} <&- >&- 2>&-', sys.executable, MAIN],
        cwd=run.root,
        timeout=60,
        check=False,
    )
    assert done.returncode == (2 if "nonsense" in arguments else 0)
    assert process("verify", cwd=run.root).returncode == 0


def test_the_help_lists_every_command_once_and_those_of_files_first() -> None:
    from typer.main import get_command

    from portus.cli.app import app

    said = process("--help").stdout
    listed = re.findall(r"^  ([a-z]+)  +[a-z]", said, re.MULTILINE)
    assert sorted(listed) == sorted(get_command(app).commands)  # type: ignore[attr-defined]
    assert listed[0] == "ls"
