"""DeepSpeed: ``engine.save_checkpoint`` saves the same files as stock, in the background.

For an engine that Portus does not save for, these methods stay stock's.

name of ``DeepSpeedEngine``      what changes
``save_checkpoint``              ``EngineFiles`` saves its files; ``latest`` comes last
``load_checkpoint``              waits for saves in flight; verifies files
``_take_model_step``             waits until no save reads the tensors that it writes
``destroy``                      finishes saves first

Stock hands each file to ``engine.checkpoint_engine``, of which there is none for outsiders: others
stand in for its methods for as long as a call runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

import portus
from portus.dcp import RankFiles
from portus_accelerate.autoload import why_unsupported
from portus_accelerate.settings import Settings, from_environment, from_mapping

_log: Final = logging.getLogger("portus_accelerate")

OLDEST: Final = (0, 16)
NEWEST: Final = (0, 19)
"""The first and last versions of DeepSpeed that this was made for."""

_FRAMEWORKS: Final = frozenset({"accelerate", "lightning", "pytorch_lightning", "transformers"})
"""Callers that remove older checkpoints as soon as a newer one was saved."""

_STOCK_SAVES: Final = "portus: DeepSpeed saves this engine as it always did: %s"

_FILES: Final = "_portus_files"
_PATCHED: Final = "_portus_is_here"


def install() -> None:
    """Have Portus save for every engine that is made from now on. Leave a version outside the range
    alone, and report it."""
    _patch(is_for_all=True)


def enable(engine: Any, **settings: object) -> None:
    """Have Portus save for one engine. settings: see ``Settings``. Raises ``UsageError`` for an
    engine that Portus cannot save, with the reason."""
    chosen = from_mapping(settings, "enable()") if settings else from_environment()
    reason = why_not(engine, chosen)
    if reason is not None:
        raise portus.UsageError(f"Portus does not save for this engine: {reason}")
    reason = _patch(is_for_all=False)
    if reason:
        raise portus.UsageError(reason)
    setattr(engine, _FILES, EngineFiles(engine, chosen))


def files_of(engine: Any) -> EngineFiles | None:
    """Return the files of an engine; None if stock saves it, or nothing was saved."""
    found: EngineFiles | None = getattr(engine, "__dict__", {}).get(_FILES)
    return found


def _patch(*, is_for_all: bool) -> str:
    """Patch DeepSpeed. Return why its version is left alone; "" if it is patched."""
    # DeepSpeed's ``__init__`` may not have ended yet.
    version = str(getattr(sys.modules.get("deepspeed.git_version_info"), "version", "?"))
    reason = why_unsupported("DeepSpeed", version, OLDEST, NEWEST)
    if reason:
        _log.warning("Portus: %s", reason)
        return reason
    engine = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    setattr(engine, _PATCHED, is_for_all or getattr(engine, _PATCHED, False))
    if getattr(engine.save_checkpoint, _PATCHED, False):
        return ""
    for name, function in (
        ("save_checkpoint", _save),
        ("load_checkpoint", _load),
        # The fence: torch's own hooks of an optimizer fire once for each group here, and show one.
        ("_take_model_step", _first(EngineFiles.fence)),
        ("destroy", _first(EngineFiles.close)),
    ):
        change = portus.around(engine, name, function)
        setattr(change[2], _PATCHED, True)
        setattr(*change)
    return ""


def _files_of(engine: Any) -> EngineFiles | None:
    """Return the files of an engine; None if stock saves it, and the reason was reported."""
    if _FILES not in engine.__dict__:
        files = None
        if getattr(engine, _PATCHED) and not portus.is_disabled():
            settings = from_environment()
            reason = why_not(engine, settings)
            if reason is None:
                files = EngineFiles(engine, settings, may_give_up=True)
            elif engine.global_rank == 0:
                _log.warning(_STOCK_SAVES, reason)
        setattr(engine, _FILES, files)
    return files_of(engine)


def _save(
    stock: Callable[..., Any],
    self: Any,
    save_dir: str,
    tag: object = None,
    *given: Any,
    **named: Any,
) -> Any:
    files = _files_of(self) if save_dir else None
    if files is None:
        return stock(self, save_dir, tag, *given, **named)
    caller = str(sys._getframe(2).f_globals.get("__name__"))  # behind the frames of ``around``
    try:
        return files.save_checkpoint(
            functools.partial(stock, self),
            os.fspath(save_dir),
            tag,
            *given,
            is_of_framework=caller.split(".")[0] in _FRAMEWORKS,
            **named,
        )
    except portus.UsageError as error:  # the same on all ranks
        if not files.may_give_up:
            raise
        if self.global_rank == 0:
            _log.warning(_STOCK_SAVES, error)
        setattr(self, _FILES, None)
        files.close()
        return stock(self, save_dir, tag, *given, **named)


def _load(
    stock: Callable[..., Any],
    self: Any,
    load_dir: str,
    tag: str | None = None,
    *given: Any,
    **named: Any,
) -> Any:
    files = _files_of(self)
    # DeepSpeed's own tool wrote those files: they have no digests.
    if files is None or self.load_universal_checkpoint():
        return stock(self, load_dir, tag, *given, **named)
    return files.load_checkpoint(
        functools.partial(stock, self), os.fspath(load_dir), tag, *given, **named
    )


def _first(act: Callable[[EngineFiles], None]) -> Callable[..., Any]:
    """Return a method that does ``act`` with an engine's files, and then what stock does."""

    def call(stock: Callable[..., Any], self: Any, *given: Any, **named: Any) -> Any:
        files = files_of(self)
        if files is not None:
            act(files)
        return stock(self, *given, **named)

    return call


LATEST: Final = "latest"
"""The file that names the newest checkpoint beside it."""

_OF_FIRST_RANK: Final = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",  # ZeRO-3
)
"""The file of a checkpoint that its first rank writes, which comes last."""

_STOCK_ENGINE: Final = "TorchCheckpointEngine"


def why_not(engine: Any, settings: Settings) -> str | None:
    """Return why stock has to save this engine; None if Portus can."""
    writer, config = engine.checkpoint_engine, engine._config
    real = type(writer).__name__
    is_pipeline = any(each.__name__ == "PipelineEngine" for each in type(engine).__mro__)
    reasons = (
        (
            settings.pool is not None,
            "pool: its checkpoints are files, in the directory that the script names",
        ),
        (real != _STOCK_ENGINE, f"its configuration chooses another way to write ({real})"),
        (
            not getattr(writer, "zipfile_serialization", True),
            "its configuration asks for files in torch's old format",
        ),
        (engine.has_moe_layers, "it has mixtures of experts, whose files Portus does not know"),
        (is_pipeline, "it is a pipeline"),
        (engine.zero_nvme_offload_optimizer(), "its optimizer's state is offloaded to NVMe"),
        (getattr(engine, "zenflow", False), "ZenFlow writes weights between steps"),
        (engine.use_node_local_storage(), "its checkpoints are on each node's own disk"),
        (
            getattr(getattr(config, "hybrid_engine", None), "enabled", False),
            "the hybrid engine writes weights between steps",
        ),
    )
    return next((reason for holds, reason in reasons if holds), None)


_Leader = tuple[str | None, bool, list[portus.SaveHandle]]
"""A framework's save that includes the engine's: see ``gather_engine_files``."""

_leader: ContextVar[_Leader | None] = ContextVar("portus_leader", default=None)


@contextlib.contextmanager
def gather_engine_files(base: str, *, now: bool) -> Iterator[list[portus.SaveHandle]]:
    """Make saves of engines inside part of a checkpoint whose other files become visible after
    them; yield the handles of these saves. base: the directory above it whose hidden folder has the
    drafts. now: the saves return when they are complete."""
    handles: list[portus.SaveHandle] = []
    token = _leader.set((base, now, handles))
    try:
        yield handles
    finally:
        _leader.reset(token)


class EngineFiles(RankFiles):
    """The checkpoints of one DeepSpeed engine, with the names and bytes of stock's. Its methods are
    called on every rank."""

    def __init__(self, engine: Any, settings: Settings, *, may_give_up: bool = False) -> None:
        """Prepare for one engine. may_give_up: stock saves from then on what Portus cannot."""
        super().__init__(settings, settings.model)
        self.may_give_up: Final = may_give_up
        self._engine: Final = engine
        self._chosen: Final = settings

    def save_checkpoint(
        self,
        stock: Callable[..., Any],
        save_dir: str,
        tag: object,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,  # DeepSpeed's
        *,
        is_of_framework: bool = False,
        **named: Any,
    ) -> Any:
        """Save as ``DeepSpeedEngine.save_checkpoint``, but in the background. is_of_framework: a
        framework calls whose save is not Portus's, and that may remove older checkpoints at once:
        so return when the checkpoint is complete."""
        engine = self._engine
        named_tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        root = os.path.realpath(save_dir)
        directory = os.path.join(root, named_tag)
        returned: Any = None

        def collect() -> tuple[Mapping[str, object], list[torch.Tensor]]:
            nonlocal returned
            parts: dict[str, object] = {}

            def note(state_dict: object, path: str) -> None:  # the names are DeepSpeed's
                parts[os.path.relpath(os.path.realpath(path), directory)] = state_dict

            with self._standing_in(save=note, commit=lambda *given: True):
                returned = stock(
                    save_dir,
                    tag=named_tag,
                    client_state={} if client_state is None else client_state,
                    # Stock writes it in place: a kill leaves an empty one, and nothing loads.
                    save_latest=False,
                    **named,
                )
            return parts, _tensors_of_step(engine)

        leader = _leader.get()
        if leader is None and self._chosen.mirror not in (None, "none"):
            raise portus.UsageError(
                "mirror: of DeepSpeed's checkpoints there is one under Accelerate and Trainer "
                "alone; leave it out"
            )
        latest = (os.path.join(root, LATEST), named_tag) if save_latest else None
        # For a framework the root is one checkpoint.
        alone: _Leader = os.path.dirname(root) if is_of_framework else None, is_of_framework, []
        base, now, gathered = leader or alone
        handles = self.save_ranks(
            directory,
            collect,
            int(engine.global_steps),
            latest=latest,
            base=base,
            now=self._chosen.blocking or now,
        )
        gathered.extend(handles)
        return returned

    def load_checkpoint(
        self, stock: Callable[..., Any], load_dir: str, tag: str | None, *given: Any, **named: Any
    ) -> Any:
        """Load as ``DeepSpeedEngine.load_checkpoint``, verified. Without a tag, skip a damaged
        checkpoint for the one before it. Raise ``CorruptionError`` for a damaged one that was
        named, and if all are damaged."""
        root = os.path.realpath(load_dir)
        self.wait_for(root)
        wanted = [tag] if tag is not None else _tags_in(root)
        if not wanted:
            return stock(load_dir, None, *given, **named)
        errors = []
        for each in wanted:
            try:
                return self._load(stock, load_dir, each, *given, **named)
            except portus.CorruptionError as error:
                errors.append(error)
                if tag is None and self._engine.global_rank == 0:
                    _log.error("portus: %s is passed over: %s", os.path.join(load_dir, each), error)
        raise errors[0]

    def _load(
        self, stock: Callable[..., Any], load_dir: str, tag: str, *given: Any, **named: Any
    ) -> Any:
        directory = os.path.join(os.path.realpath(load_dir), tag)
        self.wait_for(directory)
        names: list[str] = []
        returned, problem = None, None

        def load(path: str, map_location: Any = None) -> Any:
            names.append(os.path.relpath(os.path.realpath(path), directory))
            # As stock loads: files have objects of DeepSpeed, such as its loss scaler.
            return portus.load(path, map_location=map_location, weights_only=False)

        try:
            with self._standing_in(load=load):
                returned = stock(load_dir, tag, *given, **named)
        except portus.PortusError as error:
            problem = error
        # Collective: all ranks continue to the same checkpoint, or all raise.
        self.check_loaded(directory, names, problem)
        return returned

    @contextlib.contextmanager
    def _standing_in(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Replace methods of the engine's checkpoint engine by ``methods`` inside."""
        own = vars(self._engine.checkpoint_engine)
        own.update(methods)
        try:
            yield
        finally:
            for name in methods:
                del own[name]


def _tensors_of_step(engine: Any) -> list[torch.Tensor]:
    """Return the tensors that ``_take_model_step`` alone writes: trained weights, their masters,
    and the state of the optimizer."""
    found = [each for each in engine.module.parameters() if each.requires_grad]
    optimizer, seen = engine.optimizer, set[int]()
    while optimizer is not None and id(optimizer) not in seen:
        # Optimizers wrap one another; the innermost is torch's, the others hold the masters.
        seen.add(id(optimizer))
        found += tensors_of(optimizer)
        optimizer = getattr(optimizer, "optimizer", None)
    return found


def tensors_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters and the states of an optimizer."""
    found = [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]
    state = dict(getattr(optimizer, "state", {}))
    found += (each for each in state if isinstance(each, torch.Tensor))
    leaves = tree_leaves(list(state.values()))
    return [*found, *(each for each in leaves if isinstance(each, torch.Tensor))]


def _tags_in(root: str) -> list[str]:
    """Return the tag that ``latest`` names, then the others, newest first. None without that file:
    the training starts anew, as with stock."""
    try:
        with open(os.path.join(root, LATEST), encoding="utf-8") as file:
            named = file.read().strip()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise portus.CorruptionError(f"{os.path.join(root, LATEST)}: {error}") from error
    others = [
        each
        for each in os.scandir(root)
        if each.is_dir() and any(os.path.exists(f"{each.path}/{name}") for name in _OF_FIRST_RANK)
    ]
    others.sort(key=lambda each: each.stat().st_mtime_ns, reverse=True)
    return ([named] if named else []) + [each.name for each in others if each.name != named]
