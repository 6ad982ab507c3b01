"""The fence: no thread writes memory that a save in flight still has to read (V7).

Theory. A save returns while stable storages are still to be copied. A thread that is about to write
one waits, here, until that copy has ended. Two kinds of writers can be intercepted:

- an optimizer's step, by torch's global step pre-hook. In Lightning's automatic optimization the
  whole forward and backward run as the *closure* of ``step``, that is, after the hook; waiting in
  the hook would leave no overlap. So the hook wraps the closure, and waits after it has
  returned. Torch's own optimizers write nothing before that; others wait at once (and after);
- the functions in ``guards.GUARDED``.

Each waits only for saves that hold storages it writes, so two trainers in one process do not wait
for each other. A wait that lasts longer than ``timeout_s`` gives the save up: it never reads the
source again, nor commits. Training continues.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Final, TypeVar, cast

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from portus.engine.fence import writers
from portus.engine.fence.guards import GUARDED, Arguments, GuardedFunction
from portus.engine.media.calls import is_nested, mark
from portus.engine.pipeline.run import Save

_log: Final = logging.getLogger("portus")


class Listener:
    """Receives the steps and the saves of this process, each in its own thread. Each method does
    nothing unless it is overridden; none may raise or wait."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer is about to step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""

    def began(self, save: Save, medium: str) -> None:
        """Note that a save is about to begin, and the kind of medium that it goes to."""


class Fence:
    """Holds up writers for one ``Checkpointer``. Safe from any thread.

    timeout_s: the longest that one wait may block a writer. Keep it well under the time-out of the
    process group: other ranks wait for a rank that waits here.
    """

    @mark
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s: Final = timeout_s
        self._saves: tuple[Save, ...] = ()
        self._closed = False
        global _fences
        with _lock:
            _fences = (*_fences, self)
            _hook_steps()
            _put_on_guards()

    @mark
    def guard(self, save: Save) -> None:
        """Make writers wait for this save from now on. Call it before the save returns."""
        with _lock:
            assert not self._closed, "guard after close"
            # Replaced, never changed: the hooks read it without a lock.
            self._saves = (*(save for save in self._saves if not save.over), save)
            _count_saves()
            _put_on_guards()  # for modules that were loaded since

    def wait(self, storages: Collection[int] | None = None) -> None:
        """Wait for the saves that still read one of these storages (data pointers; None: any), at
        most for the time-out. Never raises."""
        start = time.perf_counter()
        for save in self._saves:
            if storages is None or not save.storages.isdisjoint(storages):
                self._await_copy(save, start)

    @mark
    def close(self) -> None:
        """Wait for the saves in flight, and stop guarding; the last fence takes the hooks out of
        torch. A second call does nothing."""
        global _fences
        with _lock:
            if self._closed:
                return
            self._closed = True
        # Not under the lock, which other fences and their saves need meanwhile.
        self.wait()
        with _lock:
            _fences = tuple(other for other in _fences if other is not self)
            _count_saves()
            _unhook_steps()
            if not _fences:
                while _patched:
                    _patched.popitem()[1]()
                writers.forget()

    def _wait_for(self, optimizer: Optimizer) -> None:
        start = time.perf_counter()
        for save in self._saves:
            if save.over or _may_write(optimizer, save):
                self._await_copy(save, start)

    @mark
    def _await_copy(self, save: Save, start: float) -> None:
        # In a signal handler the copy may wait for a lock of the interrupted call: no time left.
        patience_s = 0.0 if is_nested() else self._timeout_s
        remaining = patience_s - (time.perf_counter() - start)
        try:
            save.release(max(0.0, remaining))
        except Exception:
            # A writer of the user's program waits in our hook, and a fault of ours must not end its
            # training (V8). The audit and the handle still report it.
            _log.exception(
                "portus: waiting for a save failed; this is a bug in portus: please report it"
            )
        self._drop(save)

    @mark
    def _drop(self, save: Save) -> None:
        with _lock:
            self._saves = tuple(other for other in self._saves if other is not save)
            _count_saves()


def steps_seen() -> int:
    """Return the number of optimizer steps that this process saw, with a fence or a listener."""
    return _steps


@mark
def listen(listener: Listener) -> None:
    """Call ``listener`` for each step and save from now on."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
        _hook_steps()


@mark
def unlisten(listener: Listener) -> None:
    """Stop calling ``listener``."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)
        _unhook_steps()


def began(save: Save, medium: str) -> None:
    """Tell all listeners that a save of this process is about to begin."""
    for listener in _listeners:
        listener.began(save, medium)


def before_write(storages: Collection[int] | None = None) -> None:
    """Wait for every save of this process that still reads one of these storages (data pointers;
    None: any storage). Call it before parameters are written by hand. Never raises."""
    if _in_flight:
        for fence in _fences:
            fence.wait(storages)


def _may_write(optimizer: Optimizer, save: Save) -> bool:
    """Return True also in doubt: waiting costs time, not waiting costs the version."""
    try:
        return writers.owns(optimizer, save.storages)
    except (RuntimeError, NotImplementedError, AttributeError, KeyError, TypeError):
        return True


# The hooks installed in torch, and their users. _fences is replaced, never changed, so that readers
# need no lock; the hooks check _in_flight first.

_lock = threading.RLock()
_fences: tuple[Fence, ...] = ()
_listeners: tuple[Listener, ...] = ()
_in_flight = 0
_hooks: Final[list[RemovableHandle]] = []
_steps = 0


def _hook_steps() -> None:
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _unhook_steps() -> None:
    if not _fences and not _listeners:
        while _hooks:
            _hooks.pop().remove()


def _count_saves() -> None:
    global _in_flight
    _in_flight = sum(len(fence._saves) for fence in _fences)


def _forget_in_child() -> None:
    """Drop all saves in a forked child. It has none of the threads that copy, so a wait would never
    end; and its memory is its own."""
    global _lock
    _lock = threading.RLock()
    for fence in _fences:
        fence._saves = ()
    _count_saves()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_in_child)

# The hooks.

_Named = dict[str, object]

_F = TypeVar("_F", bound=Callable[..., object])


def _no_compile(hook: _F) -> _F:
    """Keep torch.compile out of a hook.

    ``torch.compiler.disable`` would import the compiler now, which takes seconds in a process
    that only loads; torch's own decorator does it at the first step, when it is there anyway.
    """
    disable = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    return cast(_F, disable(hook))


@_no_compile
def _before_step(
    optimizer: Optimizer, arguments: Arguments, named: _Named
) -> tuple[Arguments, _Named] | None:
    """Torch's global step pre-hook; ``arguments[0]`` is the optimizer again. Never raises."""
    global _steps
    _steps += 1
    for listener in _listeners:
        listener.before_step(optimizer)
    if _fences:
        writers.learn(optimizer)
    closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
    if not callable(closure):
        _wait_for(optimizer)
        return None
    # Its step may write before it calls the closure (decision 0007).
    if _in_flight and not writers.updates_after_closure(optimizer):
        _wait_for(optimizer)
    # Also when nothing is in flight: a callback may save from within the closure.
    # Lightning runs forward and backward in the closure, so these overlap the copy.
    after = _then_wait(closure, optimizer)
    if "closure" in named:
        return arguments, {**named, "closure": after}
    return (arguments[0], after, *arguments[2:]), named


@_no_compile
def _after_step(optimizer: Optimizer, arguments: Arguments, named: _Named) -> None:
    """Torch's global step post-hook. Never raises."""
    for listener in _listeners:
        listener.after_step(optimizer)


def _then_wait(closure: Callable[[], object], optimizer: Optimizer) -> Callable[[], object]:
    def evaluate() -> object:
        result = closure()
        if _in_flight:
            _wait_for(optimizer)
        return result

    return evaluate


@_no_compile
def _wait_for(optimizer: Optimizer) -> None:
    if _in_flight:
        for fence in _fences:
            fence._wait_for(optimizer)


# The guarded functions.


_patched: Final[dict[GuardedFunction, Callable[[], None]]] = {}
"""For each patched function what restores it. Whoever changes it holds ``_lock``."""


def _put_on_guards() -> None:
    """Patch the functions that are loaded by now. Calling it again costs microseconds."""
    for guarded in GUARDED:
        if guarded not in _patched:
            restore = _patch(guarded)
            if restore is not None:
                _patched[guarded] = restore


def _patch(guarded: GuardedFunction) -> Callable[[], None] | None:
    """Install the guard, and return what restores the function; None if that is not loaded, or not
    in this version."""
    module_name, _, path = guarded.place.partition(":")
    owner: object = sys.modules.get(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part, None)
    # getattr would unwrap a staticmethod, and ``restore`` would put back a plain function.
    before = None if owner is None else inspect.getattr_static(owner, name, None)
    if before is None:
        return None
    inherited = name not in vars(owner)
    if isinstance(before, staticmethod):
        ours: object = staticmethod(_waiting(before.__func__, guarded))
    else:
        assert callable(before), f"{guarded.place} is no function"
        ours = _waiting(before, guarded)
    setattr(owner, name, ours)

    def restore() -> None:
        # Other code patched it since, over ours: restoring it would remove that. Our wrapper within
        # it only passes calls on.
        if vars(owner).get(name) is not ours:
            return
        # If it were set, the class would no longer see a change of its base.
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return restore


def _waiting(function: Callable[..., object], guarded: GuardedFunction) -> Callable[..., object]:
    @functools.wraps(function)
    def waits(*arguments: object, **named: object) -> object:
        # While torch.compile traces, nothing is written; the test is folded away.
        if not torch.compiler.is_compiling():
            _wait_before(guarded, arguments)
        return function(*arguments, **named)

    return waits


def _wait_before(guarded: GuardedFunction, arguments: Arguments) -> None:
    """Wait before a guarded function writes. Raises nothing."""
    if _in_flight:
        try:
            storages = guarded.written(arguments)
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, AssertionError):
            storages = None
        before_write(storages)
