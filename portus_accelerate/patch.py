"""The places in Accelerate that Portus changes.

For an ``Accelerator`` without a ``Saver`` they stay stock's. Naming, hooks and the saved values
stay Accelerate's own.

name                             what changes for an Accelerator with a Saver
``Accelerator.__init__``         makes the Saver, if the flag is on
``prepare_data_loader``          follows plain loaders
``Accelerator.save_state``       passes files to the Saver; ``total_limit`` after the commit
``Accelerator.load_state``       waits for saves in flight; takes the newest that loads
``Accelerator.end_training``     finishes saves before the process group ends
``Accelerator.log``              passes the cost of saves to the trackers, too
``load_accelerator_state``       restores the state that exact resume needs
``__init__`` and ``__iter__`` of note the generators when an iterator is made, and at the start of
  the loaders                    an epoch; the delivered batches; which loader skips another's
``torch`` in                     captures the saves inside of ``save_state``, and verifies the loads
  ``accelerate.checkpointing``,  inside of ``load_state``
  ``accelerate.utils.other``,
  ``accelerate.utils.fsdp_utils``
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import safetensors.torch
import torch.distributed as dist

import portus
from portus_accelerate import capture, deepspeed, is_on, resume
from portus_accelerate.autoload import ON, status, tell, why_unsupported
from portus_accelerate.saver import SAVER, Saver, save_state, saver_for, saver_of
from portus_accelerate.settings import from_environment, from_mapping

_log: Final = logging.getLogger("portus_accelerate")

OLDEST: Final = (1, 0)
NEWEST: Final = (1, 15)
"""The first and last versions of Accelerate that this was made for."""

_NEEDED: Final = ("TrainingFiles", "load", "read_note")
"""Names of Portus to load before any change: a missing package is found then."""


def install() -> None:
    """Change the loaded Accelerate. Leave a version outside the range alone, and report it.

    Raises nothing that leaves Accelerate half changed.
    """
    version = getattr(sys.modules["accelerate"], "__version__", "?")
    reason = why_unsupported("Accelerate", version, OLDEST, NEWEST)
    if reason:
        tell(reason)
        _log.warning("Portus: %s", reason)
        return
    for needed in _NEEDED:
        getattr(portus, needed)
    portus.register_reference_loader()  # torch may not have called it, and loads would fail
    if is_installed():
        return
    for owner, name, value in _changes():  # all exist before the first is put in place
        setattr(owner, name, value)
    tell(f"{ON}for Accelerate {version}")


def is_installed() -> bool:
    """Return True once Accelerate was changed."""
    module = sys.modules.get("accelerate.checkpointing")
    return isinstance(getattr(module, "torch", None), capture.Torch)


def enable(accelerator: Any, **settings: Any) -> None:
    """Turn Portus on for ``accelerator``, in the script instead of by the flag.

    settings: the keys of ``portus_config:``.

    accelerator: an ``Accelerator``, or an engine of DeepSpeed.

    A second call does nothing. Raises ``UsageError`` for an unknown setting, for one that differs
    from that of the flag or of an earlier call, and for a version of Accelerate that is not
    supported.
    """
    if any(each.__name__ == "DeepSpeedEngine" for each in type(accelerator).__mro__):
        deepspeed.enable(accelerator, **settings)
        return
    install()
    if not is_installed():
        raise portus.UsageError(status())
    chosen, saver = from_mapping(settings, "portus_accelerate.enable"), saver_of(accelerator)
    if saver is None:
        saver = Saver(accelerator, chosen)
        setattr(accelerator, SAVER, saver)
        saver.follow_data()
        return
    for name in settings:
        new, old = getattr(chosen, name), getattr(saver.settings, name)
        if new != old:
            raise portus.UsageError(
                f"portus_accelerate.enable: {name}={new!r}, but Portus is already on for this "
                f"Accelerator with {name}={old!r}, by the flag or an earlier call; set it there"
            )


def wait(accelerator: Any) -> None:
    """Wait until everything that this process saved with ``save_state`` is durable. Failures are
    reported as ``on_error`` says. Returns at once if Accelerate itself saves."""
    saver = saver_of(accelerator)
    if saver is not None:
        saver.wait()


def should_save(accelerator: Any) -> bool:
    """Return True if the state should be saved now. Call it after each step, on all processes.

    ```python
    optimizer.step()
    if portus_accelerate.should_save(accelerator):
        accelerator.save_state()
    ```

    Set ``every``, ``max_overhead`` and ``mtbf`` with the other keys of the flag. See ``cadence``.
    """
    return cadence(accelerator).should_save()


def should_leave(accelerator: Any) -> bool:
    """Return True if any process of this job received SIGTERM or SIGUSR1. Then save the state and
    leave the loop. Call it after each step, on all processes.

    ```python
    leaves = portus_accelerate.should_leave(accelerator)
    if leaves or portus_accelerate.should_save(accelerator):
        accelerator.save_state()
    if leaves:
        break
    ```

    ``end_training()`` then waits for the commit. Set ``preempt_within`` with the other keys of the
    flag. Raises ``UsageError`` if Portus is not turned on.
    """
    return _saver_of(accelerator, "should_leave").should_leave()


def cadence(accelerator: Any) -> portus.Cadence:
    """Return the ``portus.Cadence`` behind ``should_save``. It counts steps from the first call on.
    ``save_state`` saves its measurements, and ``load_state`` restores them.

    Raises ``UsageError`` if Portus is not turned on for ``accelerator``. If it is turned on, but
    Accelerate itself saves, "auto" means every 10 minutes.
    """
    return _saver_of(accelerator, "cadence").cadence()


def _changes() -> list[tuple[Any, str, Any]]:
    module: Any = sys.modules["accelerate.accelerator"]
    loading: Any = sys.modules["accelerate.data_loader"]
    other: Any = sys.modules["accelerate.utils.other"]
    found = [
        portus.around(owner, name, function)
        for owner, name, function in (
            (module.Accelerator, "__init__", _init),
            (module.Accelerator, "prepare_data_loader", _prepare_data_loader),
            (module.Accelerator, "save_state", save_state),
            (module.Accelerator, "load_state", _load_state),
            (module.Accelerator, "end_training", _end_training),
            (module.Accelerator, "log", _log_values),
            (module.Accelerator, "backward", _backward),
            (module, "load_accelerator_state", _load_accelerator_state),
            (other, "safe_save_file", capture.safe_save_file),
            (safetensors.torch, "load_file", capture.safe_load_file),
            (loading.DataLoaderAdapter, "__init__", resume.make_loader),
            (loading.DataLoaderShard, "__iter__", resume.iterate),
            (loading.DataLoaderDispatcher, "__iter__", resume.iterate),
        )
    ]
    for name in (
        "accelerate.checkpointing",
        "accelerate.utils.other",
        "accelerate.utils.fsdp_utils",
    ):
        if name in sys.modules:
            writing: Any = sys.modules[name]
            # The module's name for torch, not torch: saves of other code meanwhile stay torch's.
            found.append((writing, "torch", capture.Torch(writing.torch)))
    return found


def _saver_of(accelerator: Any, function: str) -> Saver:
    """Return the Saver of ``accelerator``. Raise ``UsageError`` if Portus is not turned on for it.
    function: the caller, for the message."""
    saver = saver_for(accelerator)
    if saver is None:
        raise portus.UsageError(
            f"portus_accelerate.{function}: expected an Accelerator that Portus saves for, found "
            "one without: turn the flag on, or call portus_accelerate.enable(accelerator) before"
        )
    return saver


def _init(stock: Callable[..., None], self: Any, *given: Any, **named: Any) -> None:
    stock(self, *given, **named)
    if is_on() and SAVER not in self.__dict__:
        setattr(self, SAVER, Saver(self, from_environment()))


def _prepare_data_loader(stock: Callable[..., Any], self: Any, *given: Any, **named: Any) -> Any:
    prepared = stock(self, *given, **named)
    saver = saver_of(self)
    if saver is not None:
        saver.follow_data()
    return prepared


def _load_state(
    stock: Callable[..., Any], self: Any, input_dir: Any = None, *more: Any, **named: Any
) -> Any:
    saver = saver_of(self)
    if saver is None:
        return stock(self, input_dir, *more, **named)
    # As stock does with it, later.
    chosen = None if input_dir is None else os.path.expanduser(os.fspath(input_dir))
    _loading.append(saver)
    try:
        return saver.loader.load_state(lambda place: stock(self, place, *more, **named), chosen)
    finally:
        _loading.pop()


_loading: Final[list[Saver]] = []
"""The savers that load: ``load_accelerator_state`` has no argument for them."""


def _load_accelerator_state(
    stock: Callable[..., Any], input_dir: Any, *more: Any, **named: Any
) -> Any:
    saver = _loading[-1] if _loading else None
    # First: the next lines start from the generators that stock restores.
    result = stock(input_dir, *more, **named)
    if saver is not None:
        saver.after_load(os.fspath(input_dir))
    return result


_ended: Final[list[Any]] = []
"""The process group of the last job to end. Otherwise its models would be the last to hold it.
torch releases a model's group with Python's lock held, which gloo's threads may need to end: they
release the tensors of an exchange, such as the last save's, some time after it ends."""


def _end_training(stock: Callable[..., Any], self: Any) -> Any:
    saver = saver_of(self)
    try:
        if saver is not None:
            if dist.is_available() and dist.is_initialized():
                _ended[:] = [dist.group.WORLD]
            saver.finish()
            if saver.logged is not None:
                _tell_trackers(self, saver, *saver.logged)
    finally:
        result = stock(self)
    return result


def _log_values(
    stock: Callable[..., Any], self: Any, values: Any, step: Any = None, *more: Any, **named: Any
) -> Any:
    saver = saver_of(self)
    if saver is None:
        return stock(self, values, step, *more, **named)
    saver.logged = (step,)
    if step is None:  # without one, trackers count calls: ours would use another step
        for stats in saver.take_stats()[-1:]:
            values = {**stats.metrics(), **values}
    result = stock(self, values, step, *more, **named)
    _tell_trackers(self, saver, step)
    return result


def _backward(stock: Callable[..., Any], self: Any, *given: Any, **named: Any) -> Any:
    saver = saver_for(self)
    if saver is not None:
        saver.training.passes += 1
    return stock(self, *given, **named)


def _tell_trackers(accelerator: Any, saver: Saver, step: Any) -> None:
    """Log the cost of saves that have ended to the trackers, at the step that the script logs: some
    take no smaller one, and drop what comes after a greater."""
    for stats in saver.take_stats():
        for tracker in accelerator.trackers if accelerator.is_main_process else ():
            tracker.log(stats.metrics(), step=step)
