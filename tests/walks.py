"""Four walks of a tensor through the code, recorded while they happen. ``python -m tests.walks``
writes them into the architecture page.

A walk has steps: functions that do something to the tensor or to its file. When a step begins, the
functions of ours on the stack are those that hand the tensor on. The walk is these functions, and
their files. What they call for an answer has returned by then, and does not count; nor does what
only wraps a function. The stacks of one thread do not depend on when another one runs.

A walk *climbs* where a file comes again on a stack, below another file that it had called. Its
*hops* are the changes of file on the way to the first byte: in the call, and then on the worker.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- made by: python -m tests.walks -->\n\n", "<!-- end of what is made -->"

WRAPPERS = ("engine/media/calls", "companions/job/stock")
"""Modules whose functions wrap others, and do nothing else."""
EITHER = {"engine/writer/staged_way": "StagedWay.", "engine/writer/cached_way": "CachedWay."}
"""Two ways to write: which one is taken is measured on each file system."""

SAVE = [
    "engine/state/pickling.pickle_state", "engine/state/pickling.PickledState.image",
    "engine/fence/snapshot.copy_order", "engine/directory/publisher.Publisher.begin",
    "engine/fence/fence.Fence.guard", "engine/files/queue.Queue.put",
]  # fmt: skip
COMMIT = [
    " or ".join(EITHER) + ".move",
    "engine/writer/image_file.ImageFile.finish",
    "engine/directory/publisher.Publication.publish",
]
LOAD = [
    "engine/files/pending.PendingPaths.wait_for", "engine/loading/open_file.open_file",
    "engine/loading/checkpoint_file.load_opened", "engine/image/torch_reader.read_torch",
    "engine/loading/open_file.StoredBytes.fetch", "engine/copying/local.fetch",
]  # fmt: skip
STEPS = {
    "portus.save": (SAVE, COMMIT),
    "PortusIO.save_checkpoint": (SAVE, COMMIT),
    "portus.load": (LOAD, []),
    "Accelerator.save_state": (["portus_accelerate/capture.Torch.save", *SAVE], COMMIT),
}
"""Of each walk: the steps in the calling thread, and those in the worker's."""

Stack = list[tuple[str, str]]
"""(module, function) from the outermost to the step."""


@functools.cache
def functions_of(path: str) -> dict[int, str]:
    """Return the name of each function of a module by its first line; of an inner one, that of the
    function around it."""
    found: dict[int, str] = {}

    def look(node: ast.AST, owner: str, around: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside, name = owner, around
            if isinstance(child, ast.ClassDef):
                inside = f"{owner}{child.name}."
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                name = around or f"{owner}{getattr(child, 'name', 'lambda')}"
                decorators = getattr(child, "decorator_list", [])
                found.setdefault(min([child.lineno, *(each.lineno for each in decorators)]), name)
            look(child, inside, name)

    look(ast.parse(Path(path).read_text()), "", "")
    return found


@functools.cache
def named(code: CodeType) -> tuple[str, str] | None:
    """Return the module and the function of some code of ours; None for all other code."""
    path = Path(code.co_filename)
    if not any(part in code.co_filename for part in ("/core/portus/", "/portus_")):
        return None
    if not path.is_relative_to(ROOT):
        return None
    module = path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("core/portus/")
    function = functions_of(code.co_filename).get(code.co_firstlineno)
    if module in EITHER and function is not None:
        return " or ".join(EITHER), function.removeprefix(EITHER[module])
    return None if function is None or module in WRAPPERS else (module, function)


class Recorder:
    """The stacks of a walk's steps, and all files that it enters. Made before the worker starts."""

    def __init__(self) -> None:
        self.stacks: dict[tuple[bool, str], Stack] = {}
        """By whether the thread is the caller's, and the step; of its first time."""
        self.files: set[str] = set()
        self._caller = threading.get_ident()
        threading.setprofile(self._called)

    def record(self, walk: Iterator[None]) -> None:
        """Do a walk, which is all that is recorded."""
        self.stacks, self.files = {}, set()
        sys.setprofile(self._called)
        try:
            next(walk)
        finally:
            sys.setprofile(None)

    def _called(self, frame: FrameType | None, event: str, _: object) -> None:
        found = named(frame.f_code) if frame is not None and event == "call" else None
        if found is None:
            return
        self.files.add(found[0])
        step = threading.get_ident() == self._caller, ".".join(found)
        if step not in self.stacks:
            stack: Stack = []
            while frame is not None:
                if (one := named(frame.f_code)) is not None:
                    stack.insert(0, one)
                frame = frame.f_back
            self.stacks[step] = stack


def small_state() -> tuple[Any, Callable[[], None]]:
    """Return a state, and what changes it: a step of its optimizer."""
    import torch

    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        net(torch.ones(4)).sum().backward()
        optimizer.step()

    step()
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}, step


def save(root: Path) -> Iterator[None]:
    import portus

    state, step = small_state()
    while True:
        yield
        portus.save(state, root / "one.pt").join()
        step()


def lightning(root: Path) -> Iterator[None]:
    from portus_lightning import PortusIO

    state, step = small_state()
    plugin = PortusIO()
    for number in itertools.count():
        yield
        plugin.save_checkpoint(state, str(root / f"{number}.ckpt"))
        plugin.wait()
        step()


def load(root: Path) -> Iterator[None]:
    import portus

    portus.save(small_state()[0], root / "one.pt").join()
    while True:
        yield
        portus.load(root / "one.pt")


def accelerate(root: Path) -> Iterator[None]:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    import portus_accelerate

    project = ProjectConfiguration(str(root), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    portus_accelerate.enable(accelerator)
    net = torch.nn.Linear(4, 4)
    rows = torch.utils.data.TensorDataset(torch.ones(8, 4))
    data = torch.utils.data.DataLoader(rows, batch_size=2)
    net, optimizer, data = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), data)
    for batch in data:
        accelerator.backward(net(batch[0]).sum())
        optimizer.step()
        yield
        accelerator.save_state()
        portus_accelerate.wait(accelerator)


WAYS = dict(zip(STEPS, (save, lightning, load, accelerate), strict=True))


def recorded(root: Path) -> dict[str, Any]:
    """Do each walk twice, and return the second as data: what is imported or opened once is not on
    it."""
    from portus.engine.fence import writers

    writers.SMALL = 0  # states as small as these are copied late too
    recorder, found = Recorder(), {}
    for name, way in WAYS.items():
        (root / name).mkdir()
        walk = way(root / name)
        next(walk)
        next(walk)
        recorder.record(walk)
        calls, works = STEPS[name]
        found[name] = {
            "caller": [recorder.stacks[True, step] for step in calls],
            "worker": [recorder.stacks[False, step] for step in works],
            "entered": sorted(recorder.files),
            "order": [[s for mine, s in recorder.stacks if mine is each] for each in (True, False)],
        }
    threading.setprofile(None)
    return found


def walked() -> dict[str, Any]:
    """Return what ``recorded`` does, in a process of its own."""
    with tempfile.TemporaryDirectory() as root:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.walks", root],
            check=False, timeout=300, capture_output=True, text=True, cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'core'}{os.pathsep}{ROOT}"},
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def files_of(walk: dict[str, Any]) -> list[str]:
    """Return the files that hand the tensor on, in the order in which they are first passed."""
    return list(dict.fromkeys(file for stack in _stacks(walk) for file, _ in stack))


def climbs(walk: dict[str, Any]) -> list[str]:
    """Return the files that come again on one stack, below another one."""
    found = []
    for stack in _stacks(walk):
        files = [file for file, _ in itertools.groupby(file for file, _ in stack)]
        found += [file for number, file in enumerate(files) if file in files[:number]]
    return sorted(set(found))


def hops(walk: dict[str, Any]) -> int:
    """Return how often the file changes on the way to the first byte."""
    stacks = [walk["caller"][-1], *walk["worker"][:1]]
    return sum(len(list(itertools.groupby(file for file, _ in each))) - 1 for each in stacks)


def _stacks(walk: dict[str, Any]) -> list[Stack]:
    return [*walk["caller"], *walk["worker"]]


def _functions(stacks: list[Stack], file: str) -> list[str]:
    return list(dict.fromkeys(name for stack in stacks for own, name in stack if own == file))


def section(walks: dict[str, Any]) -> str:
    """Return the walks as the page has them: of a save, what it adds to the first one."""
    first, *_ = walks.values()
    lines = []
    for name, walk in walks.items():
        files = files_of(walk)
        common = [] if walk is first else [each for each in files if _is_in(first, walk, each)]
        lines += [f"**`{name}`**: {len(files)} files; {hops(walk)} hops before a byte moves.", ""]
        threads = ["caller", "worker"] if walk["worker"] and not common else ["caller"]
        titles = {"caller": "in the call", "worker": "on the worker"}
        lines.append("| file | " + " | ".join(titles[each] for each in threads) + " |")
        lines.append("|---" * (1 + len(threads)) + "|")
        for file in files:
            if file not in common:
                cells = [[f"`{each}`" for each in _functions(walk[t], file)] for t in threads]
                title = f"`{file}`".replace(" or ", "` or `")
                lines.append(f"| {title} | " + " | ".join(map(", ".join, cells)) + " |")
        if common:
            lines.append(f"| from `{common[0]}` on as `{next(iter(walks))}` | |")
        lines.append("")
    return "\n".join(lines) + "\n"


def _is_in(first: dict[str, Any], walk: dict[str, Any], file: str) -> bool:
    return all(
        set(_functions(walk[thread], file)) <= set(_functions(first[thread], file))
        for thread in ("caller", "worker")
    )


def on_the_page() -> str:
    """Return the walks that the page has now."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(recorded(Path(sys.argv[1]))))
    else:
        PAGE.write_text(PAGE.read_text().replace(on_the_page(), section(walked())))
