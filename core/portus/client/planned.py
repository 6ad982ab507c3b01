"""A sharded save that is planned as the one before it was: agreed in a word, not planned anew.

torch's planning gathers every rank's plan at one rank, makes one of them, and sends it out: nine
collectives, and the whole description of the state is pickled three times. Most saves of a
training are of the same state. Each rank makes its own plan, as ever, and compares it with its
plan of the last time; then all say whether it is the same, in one exchange, and all of them do the
same: go on with what was planned then, or let torch plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from portus.client.exchange import News, gathered, standing
from portus.errors import PortusError
from portus.index.groups import new_id

_NOT_THE_SAME: Final = b""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A rank's part in a planning that went well on all ranks.

    id: of the planning, the same on all ranks. local: this rank's own plan. final: what it was
    told to save.
    """

    id: bytes
    rank: int
    count: int
    local: SavePlan
    final: SavePlan


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    """The state, as torch takes it: objects that have a ``state_dict`` are asked for it."""
    return {
        name: each.state_dict() if isinstance(each, Stateful) else each
        for name, each in state.items()
    }


def agreed(
    planned: Planned | None,
    state: dict[str, Any],
    planner: SavePlanner,
    named: tuple[int, str | None],
    news: News,
    ranks: Any = None,
) -> tuple[bytes | None, list[News]]:
    """The id for a group of this ``state``, if every rank may go on as ``planned``; else None. And
    the ``news`` of all of them.

    named: its step, and the id that it is saved as. ranks: their process group. Collective: all
    ranks get the same answer. ``planner`` is set up with ``state`` then.
    """
    known = b""
    if planned is not None and _is_same(planned, state, planner, ranks):
        known = planned.id
    said = gathered((known, named, new_id(), news), ranks)
    all_news = [each[3] for each in said]
    if known == _NOT_THE_SAME or any(each[:2] != (known, named) for each in said):
        return None, all_news
    group: bytes = said[0][2]
    return group, all_news


def all_or_none(act: Callable[[], T], ranks: Any = None) -> T:
    """``act``, on all ranks. Where it fails on one, all of them raise what the lowest met."""
    try:
        result, error = act(), None
    except BaseException as problem:
        result, error = None, problem
    said = gathered(error is None, ranks)
    if all(said):
        assert result is not None
        return result
    met = [each for each in gathered(_in_short(error), ranks) if each is not None]
    raise error or met[0]


def _in_short(error: BaseException | None) -> Exception | None:
    """What other ranks hear of an error: not every one can be sent."""
    if error is None or isinstance(error, PortusError):
        return error
    return RuntimeError(f"rank {standing()[0]}: {error!r}")


def _is_same(planned: Planned, state: dict[str, Any], planner: SavePlanner, ranks: Any) -> bool:
    rank, count = standing(ranks)
    if (rank, count) != (planned.rank, planned.count):
        return False
    try:
        planner.set_up_planner(state_dict=state, is_coordinator=rank == 0)
        local = planner.create_local_plan()
    except Exception:  # torch's planning meets it again, and tells all ranks
        return False
    before = planned.local
    return bool(local.items == before.items and local.planner_data == before.planner_data)


__all__ = ["Planned", "agreed", "all_or_none", "values_of"]
