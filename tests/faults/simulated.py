"""A run of a simulated history: it resumes, saves every step, and keeps the last two and "last".

All of its state follows from its step (``tests.crash.saver.Training``), so what a file holds can be
told from its step alone. What it says is what a user knows: which file was told to be saved, and
which one was asked to go.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import portus
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.run import Save, Stage
from portus.engine.settings.keep import Keep
from portus.engine.spec import VersionInfo
from portus.reach.index.records import VersionRecord
from portus.reach.pools.image_draft import ImageDraft
from portus.reach.pools.training_pool import PointerDraft
from portus.reach.training.training_files import TrainingFiles
from tests.crash import saver
from tests.crash.saver import Training
from tests.faults import calls
from tests.faults.calls import Fault
from tests.nursery import Say

KEEP = 2


class OwnCallError(Exception):
    """A call failed that the script makes itself, on its own folder: it ends, as it would without
    Portus. Whatever else ends it is an error of ours, or a defect."""


@contextlib.contextmanager
def own_call() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OwnCallError(f"{error}") from error


def train(
    say: Say, run: str, steps: int, plain: list[int] | None, mistake: str | None = None
) -> None:
    """Go on from the newest checkpoint that loads, for so many steps; a call may fail. mistake: the
    engine is wrong in this way."""
    if mistake is not None:
        MISTAKES[mistake]()
    root = Path(run)
    os.chdir(root)
    calls.begin(run)
    if plain:
        calls.arm(Fault.of(plain))
    try:
        _train(say, root, steps)
    except portus.PortusError as error:
        say(f"stopped {error}".replace("\n", " "))
    except OwnCallError as error:
        say(f"ended {error}".replace("\n", " "))
    say("end")


def _train(say: Say, root: Path, steps: int) -> None:
    folder = root / "ckpt"
    with own_call():
        folder.mkdir(exist_ok=True)
    training = _resumed(say, folder)
    handles: list[tuple[str, int, Any]] = []
    files = TrainingFiles(
        portus.Settings(), pool=portus.Place.parse(root / ".portus" / "run.portus")
    )
    try:
        files.begin("run", str(root / ".portus"), str(folder))
        for _ in range(steps):
            training.advance()
            step, old = training.step, training.step - KEEP
            for name in ("last", str(step)):
                say(f"asks {name}.ckpt {step}")
                handle = files.save(training.state(), str(folder / f"{name}.ckpt"), step)
                handles.append((f"{name}.ckpt", step, handle))
            with own_call():
                is_there = (folder / f"{old}.ckpt").exists()
            if is_there:
                say(f"removes {old}.ckpt")
                files.remove(str(folder / f"{old}.ckpt"))
            _tell(say, handles[:-2])
            del handles[:-2]
        _tell(say, handles)
    finally:
        files.close()


def _tell(say: Say, handles: list[tuple[str, int, Any]]) -> None:
    for name, step, handle in handles:
        try:
            handle.wait()
        except portus.PortusError as error:
            say(f"failed {name} {step} {error}".replace("\n", " "))
        else:
            say(f"saved {name} {step}")


def _resumed(say: Say, folder: Path) -> Training:
    """As a user's script: from "last", or from the newest of the others that loads."""
    with own_call():
        steps = sorted((int(each.stem) for each in folder.glob("[0-9]*.ckpt")), reverse=True)
    for name in ("last", *steps):
        try:
            state: Any = portus.load(folder / f"{name}.ckpt", weights_only=False)
        except (portus.PortusError, FileNotFoundError) as error:
            say(f"passed over {name} {error}".replace("\n", " "))
            continue
        say(f"resumed {state['step']}")
        return Training(state["step"])
    say("resumed 0")
    return Training()


# Engines that are wrong on purpose, from now on in this process.


def _remove_at_once() -> None:
    def remove(self: TrainingFiles, path: str) -> None:
        saver, _ = self._open()
        saver.remove(path)

    setattr(TrainingFiles, "remove", remove)  # noqa: B010


def _tell_before_the_commit() -> None:
    committing = Save._commit

    def commit(self: Save) -> None:
        with self._lock:
            self._info = VersionInfo(self.model, 0, 0, self.step, self.token, 0, 0)
            self._stage = Stage.COMMITTED
            self._ended.notify_all()
        committing(self)

    setattr(Save, "_commit", commit)  # noqa: B010


def _put_pointers_before_the_commit() -> None:
    def commit(self: PointerDraft, labels: Labels) -> VersionRecord:
        assert self._files is not None
        self._files.finish()
        self._files.publish()
        return ImageDraft.commit(self, labels)

    setattr(PointerDraft, "commit", commit)  # noqa: B010


def _let_go_of_what_others_lead_to() -> None:
    committing = ImageDraft.commit

    def commit(self: ImageDraft, labels: Labels) -> VersionRecord:
        return committing(self, replace(labels, keep=Keep(last=1)))

    setattr(ImageDraft, "commit", commit)  # noqa: B010


MISTAKES: dict[str, Callable[[], None]] = {
    "removed at once": _remove_at_once,
    "told before the commit": _tell_before_the_commit,
    "pointers before the commit": _put_pointers_before_the_commit,
    "pointers hold nothing": _let_go_of_what_others_lead_to,
}


def warm_up() -> None:
    saver.warm_up()
