"""A sharded save that is planned as the one before it was: agreed in a word, not planned anew.

torch's planning gathers every rank's plan at one rank, makes one of them, and sends it out: nine
collectives, and the whole description of the state is pickled three times. Most saves of a
training are of the same state. Each rank looks whether its own plan would be the same as last
time; then all say so, in one exchange, and all of them do the same: go on with what was planned
then, or let torch plan.

A plan is made of what a state looks like: the paths of its values, and of each tensor dtype, shape,
layout, whether it requires a gradient, and of a ``DTensor`` placements and mesh. So one walk over
the state tells, whichever objects it is made of now; where their bytes are is asked at each save
anew. Where there is anything else in a state, or torch takes it apart in another way than the walk
does, each rank makes its own plan as ever, and compares that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from portus.companions.job.exchange import UNPLANNED, Failures, RankReport, exchange, standing
from portus.engine.state.walk import PLAIN, PLAIN_TENSORS
from portus.errors import PortusError

Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class StateOutline:
    """What a state looks like. ``signs``: of each value its path, and what its plan is made of."""

    signs: list[tuple[Any, ...]]
    values: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """A rank's part in a planning that went well on all ranks.

    id: of the planning, the same on all ranks. local: this rank's own plan. final: what it was
    told to save. signs: of the state; None if only torch can tell. places: of the items of
    ``final``, in what a look finds.
    """

    id: bytes
    rank: int
    count: int
    local: SavePlan
    final: SavePlan
    signs: list[tuple[Any, ...]] | None
    places: list[int]

    @classmethod
    def of(
        cls, number: bytes, local: SavePlan, planner: Any, state: dict[str, Any], ranks: Any
    ) -> RankPlan:
        """What ``planner`` made of ``state``, for a save that was planned just now."""
        rank, count = standing(ranks)
        final: SavePlan = planner.plan
        signs, places = None, []
        found = look(state)
        flat: dict[str, Any] = planner.state_dict
        if found is not None and list(map(id, found.values)) == list(map(id, flat.values())):
            place_of = {name: place for place, name in enumerate(flat)}
            signs, places = found.signs, [place_of[item.index.fqn] for item in final.items]
        return cls(
            id=number, rank=rank, count=count, local=local, final=final, signs=signs, places=places
        )


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    """The state, as torch takes it: objects that have a ``state_dict`` are asked for it."""
    return {
        name: each.state_dict() if isinstance(each, Stateful) else each
        for name, each in state.items()
    }


def agree(
    planned: RankPlan | None,
    state: dict[str, Any],
    planner: DefaultSavePlanner,
    take: Callable[[list[Any]], Taken | None],
    word: RankReport,
    ranks: Any = None,
) -> tuple[tuple[bytes, Taken] | None, list[Failures]]:
    """The id of the save of this ``state``, and what this rank saves, if every rank may go on as
    ``planned``; else None. And which saves failed, by rank.

    take: makes what this rank saves of its values, by item: live shards, and objects themselves;
    None: it does not fit the planning. Raises ``UsageError`` for what cannot be saved; then all
    ranks raise it. word: what this rank says, but for the planning. ranks: their process group.
    Collective, once: all ranks get the same answer.
    """
    taken: Taken | None = None
    error: BaseException | None = None
    try:
        values = None if planned is None else _as_planned(planned, state, planner, ranks)
        taken = None if values is None else take(values)
    # Also Ctrl-C: the others wait in the exchange, and hear of it there.
    except BaseException as problem:
        error = problem
    known = planned.id if planned is not None and taken is not None else UNPLANNED
    number, failed, errors = exchange(replace(word, planning=known, error=_in_short(error)), ranks)
    if error is not None or errors:
        raise error or errors[0]
    if number is None or taken is None:
        return None, failed
    return (number, taken), failed


def _in_short(error: BaseException | None) -> Exception | None:
    """What other ranks hear of an error: not every one can be sent."""
    if error is None or isinstance(error, PortusError):
        return error
    return RuntimeError(f"rank {standing()[0]}: {error!r}")


def _as_planned(
    planned: RankPlan, state: dict[str, Any], planner: DefaultSavePlanner, ranks: Any
) -> list[Any] | None:
    """What this rank saves, by item, if its plan is what it was; else None."""
    if standing(ranks) != (planned.rank, planned.count):
        return None
    found = look(state) if planned.signs is not None else None
    # Equal looks, not identities: a tensor that was resized is the same object (decision 0213).
    if found is not None and found.signs == planned.signs:
        with torch.no_grad():  # or a view of it is made
            return [_live(found.values[place]) for place in planned.places]
    if not _plans_alike(planned, state, planner):
        return None
    return [_value_of(item, planner) for item in planned.final.items]


def _plans_alike(planned: RankPlan, state: dict[str, Any], planner: DefaultSavePlanner) -> bool:
    try:
        planner.set_up_planner(state_dict=state, is_coordinator=planned.rank == 0)
        local = planner.create_local_plan()
    except Exception:  # torch's planning meets it again, and tells all ranks
        return False
    before = planned.local
    return bool(local.items == before.items and local.planner_data == before.planner_data)


def look(state: dict[str, Any]) -> StateOutline | None:
    """What a state looks like, its values in the order of torch's; None for one with tensors of
    classes that only torch knows how to cut."""
    found = StateOutline([], [])
    is_known = all(_look_at(value, (str(name),), found) for name, value in state.items())
    return found if is_known else None


def _look_at(value: Any, path: tuple[str | int, ...], found: StateOutline) -> bool:
    kind = type(value)
    if kind in PLAIN_TENSORS:
        look = (value.dtype, value.shape, value.layout, value.requires_grad)
        found.signs.append((path, *look))
    elif kind is DTensor:
        look = (value.dtype, value.shape, value.layout, value.requires_grad)
        found.signs.append((path, *look, value.placements, value.device_mesh))
    elif isinstance(value, Mapping):
        return all(_look_at(each, (*path, str(key)), found) for key, each in value.items())
    elif isinstance(value, list) and not _is_leaf(value):
        return all(_look_at(each, (*path, place), found) for place, each in enumerate(value))
    elif isinstance(value, torch.Tensor) or hasattr(kind, "__create_write_items__"):
        return False
    else:
        found.signs.append((path,))
    found.values.append(value)
    return True


def _is_leaf(values: list[Any]) -> bool:
    """True if torch takes a list as one value: nothing in it is, or holds, a tensor or a dict."""
    if PLAIN.issuperset(map(type, values)):
        return True
    return not any(
        isinstance(each, (torch.Tensor, Mapping)) or (isinstance(each, list) and not _is_leaf(each))
        for each in values
    )


def _live(value: Any) -> Any:
    """The live shard, or the object itself."""
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.detach() if isinstance(value, torch.Tensor) else value


def _value_of(item: WriteItem, planner: DefaultSavePlanner) -> Any:
    if item.type == WriteItemType.BYTE_IO:
        return planner.lookup_object(item.index)
    return planner.resolve_data(item).detach()
