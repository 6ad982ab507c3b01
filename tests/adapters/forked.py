"""Ordinary scripts in forks of a warm process: programs of their own, less what imports cost.

With the flag, what torch calls at the end of its own import is called in the fork. What launchers
do, and how Portus gets there, is tried on processes that are started as users start them.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.nursery import Say, nursery


def script(
    path: Path,
    root: Path,
    *arguments: object,
    processes: int = 1,
    flag: bool = False,
    ends: str = "well",
    variables: Mapping[str, str] | None = None,
) -> str:
    """The script in ``root``, on so many processes; what they wrote on stderr.

    ends: "well"; "killed", one of them by itself, and the others then; or "failed", each of them.
    """
    root.mkdir(exist_ok=True)
    children = nursery(__name__)
    with contextlib.ExitStack() as stack:
        started = []
        alone = [{}] if processes == 1 else environments(stack, processes)
        for rank, environment in enumerate(alone):
            errors = root / f"errors-{rank}.txt"
            told = {**environment, **(variables or {}), "PORTUS_ACCELERATE": "1" if flag else "0"}
            wanted = ("run", str(path), str(root), [*map(str, arguments)], told, str(errors))
            started.append((stack.enter_context(children.start(*wanted)), errors))
        if ends == "killed":
            assert started[-1][0].wait() == -signal.SIGKILL, started[-1][1].read_text()
            for child, _ in started:
                child.kill()
        for child, errors in started:
            code = child.wait()
            assert (code == 0) == (ends == "well"), errors.read_text()
        return "".join(errors.read_text() for _, errors in started)


def environments(stack: contextlib.ExitStack, processes: int) -> list[dict[str, str]]:
    """What ``torchrun`` would tell each of these processes."""
    meet = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stack.callback(lambda: meet)  # it is there until they have ended
    every = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(meet.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    ranks = map(str, range(processes))
    return [{**every, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


# In the nursery.


def warm_up() -> None:
    """What the scripts import. No thread stays, and nothing of Portus."""
    import accelerate  # noqa: F401
    import lightning.pytorch.strategies  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.gpt2  # noqa: F401


def run(
    _: Say, path: str, root: str, arguments: list[str], environment: dict[str, str], errors: str
) -> None:
    os.environ.update(environment)
    os.chdir(root)
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = [path, *arguments]
    kept: list[object] = []
    destroy = torch.distributed.destroy_process_group

    def keep_and_destroy(group: Any = None) -> None:
        kept.append(torch.distributed.group.WORLD)
        destroy(group)

    # Without Portus torch may hang there as the models go (pytorch#56297).
    torch.distributed.destroy_process_group = keep_and_destroy
    import portus_accelerate

    portus_accelerate.register()  # nothing, without the flag
    runpy.run_path(path, run_name="__main__")
    if portus_accelerate.is_on():
        sys.exit()  # as a program does: what is left to do at the exit is done
