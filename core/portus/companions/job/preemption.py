"""``Preemption``: a job receives a signal to stop, and its training saves and leaves.

A handler only notes the signal. The training asks after each step. If several processes train, all
of them know a step later whether any received a signal: a byte is reduced over the ranks, begun at
one step and read at the next, so no rank waits for it. A validation may have another number of
batches on each rank: a rank at its end repeats that until all are there.

After a time the process ends, if the training does not reach its next step, or a save does not end.
The log then names the newest committed step. A thread does that, since the main one may hang in a
call that runs no Python.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist

from portus.companions.job.exchange import standing
from portus.engine.pipeline import handle
from portus.engine.settings.fits import parse_seconds
from portus.errors import UsageError

_log: Final = logging.getLogger("portus")

SIGNALS: Final = tuple(each for each in signal.Signals if each.name in ("SIGTERM", "SIGUSR1"))
"""The signals of schedulers: a job of SLURM asks for the second with ``--signal=USR1@90``."""

WITHIN_S: Final = 60.0

_DONE, _VALIDATING, _TOLD = 0, 1, 2
"""The words of a rank: the highest counts. The first is also that of a rank that trains."""

_PATIENCE: Final = datetime.timedelta(days=1)
"""The time for which ranks wait for others: Portus does not limit other waits of a training."""

_END_S: Final = 5.0
"""The longest time in which a thread that was asked to end does so on a busy machine."""

_CREDENTIALS: Final = struct.Struct("iII")
"""Linux's description of a message's sender: process, user, group."""

_LOG_S: Final = 5.0
"""The longest that the end of the process waits for the log, which may be what hangs."""

_OVER: Final = 0
"""The number that closes a watch: no signal has it."""


class Preemption:
    """Tells a training to save and exit after its job has received a signal to stop.

    ```python
    with portus.Preemption() as preemption, portus.Checkpointer("checkpoints") as checkpointer:
        for step, batch in enumerate(loader):
            ...
            optimizer.step()
            leaves = preemption.should_leave()
            if leaves or step % 100 == 0:
                checkpointer.save(state, step)
            if leaves:
                break  # the checkpointer is closed first, and waits for the commit
    ```

    Args:
        preempt_within: Seconds since the signal, or a text like "90s". If the training is still
            running by then, because a batch, a save or another rank hangs, the process logs the
            newest committed version and ends with exit code 128 + the signal's number. Choose less
            than the time between the signal and the kill.
        signals: The signals that stop the job. A handler that existed before is called after the
            signal was noted, and is restored at the end. With (), only ``note`` counts.
        process_group: The ranks that save together; None: all. A gloo group is made beside it at
            the first step.

    It handles signals from when it is entered until it is closed. Handlers can be set in the main
    thread only; in another thread only ``note`` counts, and a warning says so. Raises
    ``UsageError`` for a value that is not allowed.
    """

    SIGNALS: Final = SIGNALS
    """The signals that are handled by default."""

    def __init__(
        self,
        preempt_within: float | str = WITHIN_S,
        *,
        signals: Iterable[signal.Signals] = SIGNALS,
        process_group: Any = None,
    ) -> None:
        self.within_s: Final = parse_seconds("preempt_within", preempt_within)
        self.told: signal.Signals | None = None
        """The first signal that this process received; None without one."""
        self.leaving = False
        """True once ``should_leave`` has returned True, on all ranks at the same step."""
        self._signals: Final = tuple(map(signal.Signals, signals))
        if signal.SIGINT in self._signals:
            raise UsageError("signals: SIGINT is Ctrl-C, which ends a training at once")
        self._ranks: Final = _Ranks(process_group)
        self._before: dict[signal.Signals, Any] = {}
        self._watch: _Watch | None = None

    def start(self) -> Preemption:
        """Handle signals from now on; until then ``note`` does nothing."""
        global _open
        if self._watch is not None:
            return self
        self._watch = _Watch(self.within_s)
        _open = (*_open, self)
        for number in self._signals:
            self.hear(number)
        return self

    def hear(self, number: signal.Signals) -> None:
        """Handle this signal too."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "Portus: %s is not handled, because handlers can be set in the main thread only: "
                "start the training there",
                number.name,
            )
        elif number not in self._before:
            self.expect(number)
            self._before[number] = signal.signal(number, self._handle)

    def expect(self, number: signal.Signals) -> None:
        """Count the time from the arrival of a signal that a framework's handler notes, whatever
        the main thread does then."""
        if self._watch is not None:
            self._watch.expect(number)

    def note(self, number: int) -> None:
        """Report a signal, from the handler of a framework. Takes no lock."""
        watch = self._watch
        if watch is not None:
            self.told = self.told or signal.Signals(number)
            watch.expect(number)
            watch.note(number)

    def should_leave(self) -> bool:
        """Return True if the training should save its state and exit. Call it after each step, on
        all ranks. It returns True on all of them at the same step, and from then on.

        With one process it costs less than a microsecond. With several, it reads the result of an
        exchange that was started one step ago, so it waits only for ranks that are more than a step
        behind.
        """
        return self.leaving or self._leave(self._ranks.step(self.told is not None))

    def should_leave_validation(self) -> bool:
        """Return True if the training should save the step before the validation and exit. Every
        rank has to call ``validation_ends`` after its last batch, before any collective."""
        return self.leaving or self._leave(self._ranks.step(self.told is not None, _VALIDATING))

    def validation_ends(self) -> bool:
        """Return True if the training should save and exit. Call it in place of
        ``should_leave_validation`` after the last batch: it blocks until all ranks are there, or
        one received a signal."""
        return self.leaving or self._leave(self._ranks.meet(self.told is not None))

    def close(self) -> None:
        """Stop handling signals, and restore the handlers from before."""
        global _open
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if sys.exc_info()[0] is not None:  # other ranks may never come any more
            self._ranks.give_up()
        _open = tuple(each for each in _open if each is not self)
        self._unhear()
        watch.close()
        self._ranks.close()

    def __enter__(self) -> Preemption:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _leave(self, leaves: bool) -> bool:
        global _times
        if leaves:
            self.leaving = True
            _times += 1
        return leaves

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.note(number)
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
        elif self._watch is None:  # closed on another thread, which cannot set handlers
            self._unhear()
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.raise_signal(number)

    def _unhear(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # the handlers left note nothing, and yield to the ones before
        befores, self._before = self._before, {}
        for number, before in befores.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)

    @property
    def signals(self) -> Iterable[signal.Signals]:
        """Return the signals that have a handler of this object."""
        return self._before

    def restore_in_child(self) -> None:
        """Restore the handlers from before in a forked child. It is not part of the training, so a
        signal ends it as usual."""
        watch, self._watch = self._watch, None
        self._unhear()
        if watch is not None:
            watch.forget()


def times_preempted() -> int:
    """Return the number of trainings of this process that had to save and leave. If it changed
    during a training, skip all work that can wait."""
    return _times


_open: tuple[Preemption, ...] = ()
_times = 0


_masks: Final = threading.local()


def _before_fork() -> None:
    # A child would lose the signals that come before its handlers are restored.
    handled = {number for each in _open for number in each.signals}
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _in_child() -> None:
    global _open
    still_open, _open = _open, ()
    for each in still_open:
        each.restore_in_child()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


class _Ranks:
    """The exchange that lets all ranks know of any signal. One reduction is in flight, at most."""

    def __init__(self, group: Any) -> None:
        self._of: Final = group
        self._own: Any = None
        self._work: Any = None
        self._said = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._are_alone: bool | None = None

    def step(self, told: bool, otherwise: int = _DONE) -> bool:
        """Wait for the reduction that began at the step before, and begin the next."""
        if self._alone():
            return told
        if self._reduce() == _TOLD:
            return True
        self._begin(_TOLD if told else otherwise)
        return False

    def meet(self, told: bool) -> bool:
        """Wait until all ranks are here; no reduction is in flight then."""
        if self._alone():
            return told
        heard = self._reduce()
        # Until all are at their last batch: letting each rank leave alone hung (decision 0131).
        while heard != _TOLD:
            self._begin(_TOLD if told else _DONE)
            heard = self._reduce()
            if heard == _DONE:
                return False
        return True

    def give_up(self) -> None:
        """Forget the reduction in flight."""
        self._work = self._own = None

    def close(self) -> None:
        """End the exchange with the other ranks, which all do so at the same point."""
        own, self._own = self._own, None
        self._reduce()
        if own is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the job's groups ended before
                dist.destroy_process_group(own)

    def _alone(self) -> bool:
        if self._are_alone is None:
            self._are_alone = standing(self._of)[1] == 1
        return self._are_alone

    def _begin(self, said: int) -> None:
        if self._own is None:
            among = None if self._of is None else dist.get_process_group_ranks(self._of)
            # A group of its own: another timeout (`_PATIENCE`), a byte on the CPU (decision 0131).
            self._own = dist.new_group(
                among,
                timeout=_PATIENCE,
                backend="gloo",
                use_local_synchronization=among is not None,
            )
        self._said[0] = said
        # Begun here and read at the next step: so no rank waits for it (decision 0131).
        self._work = dist.all_reduce(self._said, dist.ReduceOp.MAX, group=self._own, async_op=True)

    def _reduce(self) -> int:
        work, self._work = self._work, None
        if work is None:
            return _DONE
        try:
            work.wait()
        except RuntimeError as error:  # a rank is gone: training will report it
            _log.warning("Portus: cannot tell whether other ranks got the signal: %s", error)
            self._are_alone = True
            return _DONE
        return int(self._said.item())


class _Watch:
    """A thread that ends the process ``within_s`` after a signal, unless it is closed before.

    Python also writes the numbers of signals to it, below any handler, if no other code uses that:
    so it sees a signal while the main thread is in a call that runs no Python.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s: Final = within_s
        self._ears, self._mouth = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._mouth.setblocking(False)
        knows_who = hasattr(socket, "SO_PASSCRED")
        if knows_who:
            # The kernel names the sender: a child just forked has the socket, too (decision 0131).
            self._ears.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._expected: frozenset[int] = frozenset({_OVER})
        """The signals to react to: Python writes numbers of other signals too."""
        self._is_woken = False
        if knows_who and threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
            # A process has one such descriptor: asyncio may have it, and keeps it.
            self._is_woken = before == -1
            if not self._is_woken:
                signal.set_wakeup_fd(before)
        self._thread: Final = threading.Thread(
            target=self._run, name="portus-preemption", daemon=True
        )
        self._thread.start()

    def expect(self, number: int) -> None:
        """React to the signal ``number`` from now on."""
        self._expected |= {number}

    def note(self, number: int) -> None:
        """Send ``number`` to the thread. Takes no lock, so signal handlers may call it."""
        with contextlib.suppress(OSError):  # full, or closed: it was sent before
            self._mouth.send(bytes([number]))

    def close(self) -> None:
        """Return when the thread has ended, which is at once. Outside the main thread Python
        continues to write numbers, and the sockets stay open: their descriptors must not become
        other files."""
        self._sleep()
        self.note(_OVER)
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def forget(self) -> None:
        """Close the sockets in a forked child: they are the parent's, and so is the thread."""
        self._sleep()
        self._ears.close()
        self._mouth.close()

    def _sleep(self) -> None:
        if self._is_woken and threading.current_thread() is threading.main_thread():
            self._is_woken = False
            found = signal.set_wakeup_fd(-1)
            if found != self._mouth.fileno():  # other code has set it since
                signal.set_wakeup_fd(found)

    def _run(self) -> None:
        number = self._next(None)
        assert number is not None
        if number != _OVER:
            until = time.monotonic() + self._within_s
            _in_background(
                logging.WARNING,
                "Portus: %s: the training saves at the end of this step and leaves, within %g s; "
                "the newest committed version is %s",
                signal.Signals(number).name,
                self._within_s,
                _newest_text(),
            )
            while (left_s := until - time.monotonic()) > 0:
                if self._next(left_s) == _OVER:
                    break
            else:
                self._end(number)
        for each in (self._ears, self._mouth):
            if self._is_woken:
                # Left open: Python may still write to the descriptor, which must not be another
                # file's.
                each.detach()
            else:
                each.close()

    def _next(self, timeout_s: float | None) -> int | None:
        """Return the next expected number; None if none comes in time."""
        while select.select([self._ears], [], [], timeout_s)[0]:
            data, about, _, _ = self._ears.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            # A child that was just forked still has the socket, and may receive signals.
            ours = all(_CREDENTIALS.unpack(each)[0] == os.getpid() for _, _, each in about)
            if ours and data[0] in self._expected:
                return data[0]
        return None

    def _end(self, number: int) -> None:
        said = _in_background(
            logging.CRITICAL,
            "Portus: %g s after %s the training has not left: the process ends now. The "
            "newest committed version is %s",
            self._within_s,
            signal.Signals(number).name,
            _newest_text(),
        )
        said.join(_LOG_S)
        # Not sys.exit, which ends this thread alone: the main one hangs. Shells use 128 + n.
        os._exit(128 + number)


def _in_background(level: int, message: str, *values: object) -> threading.Thread:
    """Log a message on a thread; return the thread, which ends after it."""
    # On a thread: the main one may hang with the lock of a log handler.
    logs = threading.Thread(target=_log.log, args=(level, message, *values), daemon=True)
    logs.start()
    return logs


def _newest_text() -> str:
    newest = handle.newest()
    if newest is None:
        return "the one that this run began with: this process has committed none"
    return f"step {newest.step} of model {newest.model!r}"
