"""The hooks into imports that make the flag work with an unchanged script; and whether it does.

torch calls ``portus_accelerate.register`` at the end of ``import torch``, in every program on a
machine with Portus. If the flag is off, that does nothing. If it is on, that calls ``register``
here, which waits for the import of Accelerate and calls ``patch``. In the process of ``accelerate
launch``, with or without the flag, it waits for the code that reads the YAML, which refuses unknown
keys.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Final

from portus_accelerate import FLAG, OF_DEEPSPEED, is_launcher, is_on

failures: Final[list[str]] = []
"""The reasons why a patch failed in this process."""


def register() -> None:
    """Watch for the modules to patch: see the module."""
    if is_on():
        Watcher("accelerate.accelerator", "Accelerator", "portus_accelerate.patch")
        Watcher("transformers.trainer", "Trainer", "portus_accelerate.trainer")
        Watcher(
            "transformers.trainer_utils", "get_last_checkpoint", "portus_accelerate.directories"
        )
    if is_on() or is_on(OF_DEEPSPEED):
        Watcher("deepspeed.runtime.engine", "DeepSpeedEngine", "portus_accelerate.deepspeed")
    if is_launcher():
        place = "accelerate.commands.config.config_args"
        Watcher(place, "ClusterConfig", "portus_accelerate.settings")


class Watcher:
    """Calls ``install`` of the module ``hook`` as soon as ``module`` is loaded and has ``name``. A
    finder that finds no module: Python asks it at every import, so it sees each one."""

    def __init__(self, module: str, name: str, hook: str) -> None:
        self._module: Final = module
        self._name: Final = name
        self._hook: Final = hook
        # First: the search ends at the finder that knows a module.
        sys.meta_path.insert(0, self)
        self.look()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Look, and return None: a part of Python's protocol."""
        self.look()

    def look(self) -> None:
        """Install the hook if the module is loaded. Never raises."""
        module = sys.modules.get(self._module)
        if module is None or not hasattr(module, self._name):
            return
        spec = getattr(module, "__spec__", None)
        # A module is in sys.modules before its code has run to the end.
        if getattr(spec, "_initializing", False) or self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        try:
            # An exception from here would break an import, that of torch for one.
            importlib.import_module(self._hook).install()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # stock behaviour stays, and the user is told
            failures.append(f"{self._hook} could not be used: {error!r}")
            with contextlib.suppress(Exception):  # stderr may be closed, or None
                sys.stderr.write(f"portus: the flag has no effect: {error!r}\n")


ON = "on, "
"""The start of the answer if all is well."""

_told = ""


def tell(text: str) -> None:
    """Record what ``patch`` did, or why it did nothing."""
    global _told
    _told = text


def status() -> str:
    """Return one line that says whether Portus saves for Accelerate in this process. It begins with
    "on, " if so; otherwise it gives the reason."""
    if failures:
        return failures[-1]
    if not _told.startswith(ON):
        return _told or _why_not_told()
    import portus
    from portus_accelerate.settings import from_environment

    try:
        from_environment()
    except portus.UsageError as error:
        return f"the settings are wrong: {error}"
    if portus.is_disabled():
        return "PORTUS_DISABLE is set: Accelerate itself saves"
    return _told


def _why_not_told() -> str:
    if not is_on():
        return f"${FLAG} is not set in this process"
    if "accelerate.accelerator" not in sys.modules and any(
        isinstance(each, Watcher) for each in sys.meta_path
    ):
        return "Accelerate was not imported"
    return (
        "torch did not call Portus: TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns all such calls off, and "
        "so does a portus-checkpoint that is on the path and not installed"
    )


def why_unsupported(
    name: str, version: str, oldest: tuple[int, ...], newest: tuple[int, ...]
) -> str:
    """Return why Portus does not save for this version of a framework; "" if it does: ``version``
    is between the two, both included, by their first numbers."""
    parts = version.split("+")[0].split(".")
    numbers = tuple(int(part) for part in parts if part.isdigit())
    if oldest <= numbers[: len(oldest)] <= newest:
        return ""
    known = " to ".join(".".join(map(str, each)) for each in (oldest, newest))
    return (
        f"{name} {version} is not supported by this version of Portus ({known}): it saves without "
        "Portus"
    )
