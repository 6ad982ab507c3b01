"""``EngineFiles``: the checkpoints of one DeepSpeed engine, with the names and bytes of stock's."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final

import torch

import portus
from portus.dcp import FilesOfRank, LatestFile, RankFiles
from portus_accelerate.settings import Settings

_log: Final = logging.getLogger("portus_accelerate")

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
    if settings.pool is not None:
        return "pool: its checkpoints are files, in the directory that the script names"
    real = type(engine.checkpoint_engine).__name__
    config = engine._config
    if real != _STOCK_ENGINE:
        return f"its configuration chooses another way to write ({real})"
    if not getattr(engine.checkpoint_engine, "zipfile_serialization", True):
        return "its configuration asks for files in torch's old format"
    if engine.has_moe_layers:
        return "it has mixtures of experts, whose files Portus does not know"
    if any(each.__name__ == "PipelineEngine" for each in type(engine).__mro__):
        return "it is a pipeline"
    if engine.zero_nvme_offload_optimizer():
        return "its optimizer's state is offloaded to NVMe"
    if getattr(engine, "zenflow", False):
        return "ZenFlow writes weights between steps"
    if engine.use_node_local_storage():
        return "its checkpoints are on each node's own disk"
    if getattr(getattr(config, "hybrid_engine", None), "enabled", False):
        return "the hybrid engine writes weights between steps"
    return None


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


class EngineFiles:
    """The checkpoints of DeepSpeed's engines. Its methods are called on every rank."""

    def __init__(self, engine: Any, settings: Settings, *, may_give_up: bool = False) -> None:
        """Prepare for one engine. may_give_up: stock saves from then on what Portus cannot."""
        self.may_give_up: Final = may_give_up
        self._engine: Final = engine
        self._settings: Final = settings
        self.files: Final = RankFiles(settings, settings.model)

    def save(
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

        def collect() -> FilesOfRank:
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
            return FilesOfRank(parts, _tensors_of_step(engine))

        leader = _leader.get()
        if leader is None and self._settings.mirror not in (None, "none"):
            raise portus.UsageError(
                "mirror: of DeepSpeed's checkpoints there is one under Accelerate and Trainer "
                "alone; leave it out"
            )
        latest = LatestFile(os.path.join(root, LATEST), named_tag) if save_latest else None
        # For a framework the root is one checkpoint.
        alone: _Leader = os.path.dirname(root) if is_of_framework else None, is_of_framework, []
        base, now, gathered = leader or alone
        handles = self.files.save_ranks(
            directory,
            collect,
            int(engine.global_steps),
            latest=latest,
            base=base,
            now=self._settings.blocking or now,
        )
        gathered.extend(handles)
        return returned

    def load(
        self, stock: Callable[..., Any], load_dir: str, tag: str | None, *given: Any, **named: Any
    ) -> Any:
        """Load as ``DeepSpeedEngine.load_checkpoint``, verified. Without a tag, skip a damaged
        checkpoint for the one before it. Raise ``CorruptionError`` for a damaged one that was
        named, and if all are damaged."""
        root = os.path.realpath(load_dir)
        self.files.wait_for(root)
        wanted = [tag] if tag is not None else _tags_in(root)
        if not wanted:
            return stock(load_dir, None, *given, **named)
        first: portus.CorruptionError | None = None
        for each in wanted:
            try:
                return self._load(stock, load_dir, each, *given, **named)
            except portus.CorruptionError as error:
                first = first or error
                if tag is None and self._engine.global_rank == 0:
                    _log.error("portus: %s is passed over: %s", os.path.join(load_dir, each), error)
        assert first is not None
        raise first

    def _load(
        self,
        stock: Callable[..., Any],
        load_dir: str,
        tag: str,
        *given: Any,
        **named: Any,
    ) -> Any:
        directory = os.path.join(os.path.realpath(load_dir), tag)
        self.files.wait_for(directory)
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
        self.files.check_loaded(directory, names, problem)
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
    for parameter, state in dict(getattr(optimizer, "state", {})).items():
        found += _tensors_in(parameter) + _tensors_in(state)
    return found


def _tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [each for inner in value.values() for each in _tensors_in(inner)]
    return []


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
