"""A sharded save that reuses the plan of the one before: the ranks agree in one exchange.

torch's planning gathers every rank's plan at one rank, combines them, and sends the result: nine
collectives, and the whole description of the state is pickled three times. Most saves of a training
are of the same state. Each rank compares its state with the last one; all report the result in one
exchange. Then all of them do the same: reuse the last plan, or let torch plan.

A plan depends on the outline of a state: the paths of its values, and for each tensor its dtype,
shape, layout, whether it requires a gradient, and for a ``DTensor`` placements and mesh. So one
walk over the state is enough, whatever its objects are now; the addresses of their bytes are taken
at each save. If a state has anything else, or torch splits it in another way than the walk, torch
plans each save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from portus.companions.job.exchange import UNPLANNED, Failures, RankReport, exchange, standing
from portus.engine.state.walk import PLAIN, PLAIN_TENSORS
from portus.errors import PortusError
from portus.reach.shards.rank_contents import ShardContents


class StateOutline(NamedTuple):
    """The outline of a state. ``signs``: for each value its path, and what its plan uses."""

    signs: list[tuple[Any, ...]]
    values: list[Any]


@dataclass(slots=True, kw_only=True)
class RankPlan:
    """A rank's part in a planning that succeeded on all ranks.

    id: of the planning, the same on all ranks. items: what this rank saves. signs: of the state.
    places: of the items in its outline. sizes: of the items. metadata: of the newest save by this
    planning: all ranks' items and their places; None on a rank that does not coordinate.
    """

    id: bytes
    rank: int
    count: int
    items: Sequence[WriteItem]
    signs: list[tuple[Any, ...]]
    places: list[int]
    sizes: list[int]
    metadata: Metadata | None

    @classmethod
    def of(
        cls,
        number: bytes,
        planner: Any,
        state: dict[str, Any],
        ranks: Any,
        sizes: list[int],
        metadata: Metadata | None,
    ) -> RankPlan | None:
        """Return the plan that ``planner`` made of ``state``, for a save planned just now; None if
        an outline does not tell whether the next save has the same."""
        found, flat = look(state), planner.state_dict
        if found is None or list(map(id, found.values)) != list(map(id, flat.values())):
            return None
        (rank, count), items = standing(ranks), planner.plan.items
        place_of = {name: place for place, name in enumerate(flat)}
        places = [place_of[item.index.fqn] for item in items]
        return cls(
            id=number, rank=rank, count=count, items=items, signs=found.signs, places=places,
            sizes=sizes, metadata=metadata,
        )  # fmt: skip


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as torch takes it: objects with a ``state_dict`` are asked for that."""
    return {
        name: each.state_dict() if isinstance(each, Stateful) else each
        for name, each in state.items()
    }


def agree(
    planned: RankPlan | None,
    state: dict[str, Any],
    take: Callable[[list[Any]], ShardContents | None],
    word: RankReport,
    ranks: Any = None,
) -> tuple[tuple[bytes, ShardContents] | None, list[Failures]]:
    """Return the id of the save of this ``state``, and this rank's values, if every rank may reuse
    ``planned``, else None; and the saves that failed, by rank.

    take: makes this rank's contents of its values, by item: live shards, and objects themselves;
    None: they do not fit the planning. Raises ``UsageError`` for values that cannot be saved; then
    all ranks raise it. word: this rank's report, without the planning. ranks: their process group.
    Collective, once: all ranks get the same answer.
    """
    taken: ShardContents | None = None
    error: BaseException | None = None
    try:
        values = None if planned is None else _as_planned(planned, state, ranks)
        taken = None if values is None else take(values)
    # Also Ctrl-C: the others wait in the exchange, and learn of it there.
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
    """Return an error to send to other ranks: not every one can be pickled."""
    if error is None or isinstance(error, PortusError):
        return error
    return RuntimeError(f"rank {standing()[0]}: {error!r}")


def _as_planned(planned: RankPlan, state: dict[str, Any], ranks: Any) -> list[Any] | None:
    """Return the values that this rank saves, by item, if its plan is the same; else None."""
    found = look(state) if standing(ranks) == (planned.rank, planned.count) else None
    # Equal outlines, not identities: a resized tensor is the same object (decision 0213).
    if found is None or found.signs != planned.signs:
        return None
    with torch.no_grad():  # with gradients, torch returns a view
        return [_live(found.values[place]) for place in planned.places]


def look(state: dict[str, Any]) -> StateOutline | None:
    """Return the outline of a state, its values in torch's order; None for a state with tensors of
    classes that only torch can split."""
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
    """Return True if torch takes a list as one value: it contains no tensor and no dict."""
    if PLAIN.issuperset(map(type, values)):
        return True
    return not any(
        isinstance(each, (torch.Tensor, Mapping)) or (isinstance(each, list) and not _is_leaf(each))
        for each in values
    )


def _live(value: Any) -> Any:
    """Return the live shard, or the object itself."""
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.detach() if isinstance(value, torch.Tensor) else value
