"""What a rank looks at in a commit and in a load, with pools of so many ranks.

python -m tests.bench.discovery [RANKS ...]         1024 and 4096 by default
python -m tests.bench.discovery --host [RANKS ...]  240: parts on a storage host, and what it costs
                                                    the next save that all others committed

Every rank's pool is real, with its parts of two groups. Of the ranks one runs at a time; what the
others say in an exchange is what it says itself (torch's "fake" process group), so all of them have
committed what it has; and it is always the last that commits. Calls are counted below Python
(``tests.faults.calls``), in the pools and their checkpoint directory alone; a list has a call for
each name. Bytes are those of all reads of the process. What is read through a mapping is not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.testing._internal.distributed.fake_pg import FakeStore

import portus.client.dcp.group_writer
import portus.dcp
from portus.client.job.exchange import Tally
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.client.shards.cuts import FORMAT_KEY
from portus.client.shards.grouped import shard_name
from portus.dcp import GroupReader, GroupWriter
from portus.index import roll
from portus.index.groups import ID_SIZE, part_model, part_token
from tests.faults import calls
from tests.faults.calls import Call
from tests.hosts import serving, url

RANKS: Final = (1024, 4096)
HOST_RANKS: Final = 240
TIMEOUT_S: Final = 7200
_HOST_SAVES: Final = 6

KINDS: Final = {"opens": Call.OPEN, "reads": Call.READ, "stats": Call.STAT, "lists": Call.LIST}

Counts = dict[str, int]


def of(ranks: int) -> dict[str, Counts]:
    """The counts of each moment, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="portus-discovery-") as root:
        done = subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tests.bench.discovery",
                "--in",
                root,
                f"{ranks}",
            ],
            env={**os.environ, **calls.environment()},
            stdout=subprocess.PIPE,
            check=True,
            timeout=TIMEOUT_S,
        )
    found: dict[str, Counts] = json.loads(done.stdout.splitlines()[-1])
    return found


def counted(act: Callable[[], object]) -> Counts:
    """What ``act`` does."""
    before = _now()
    act()
    return {name: count - before[name] for name, count in _now().items()}


def _now() -> Counts:
    by_kind: dict[Call, int] = {}
    for call, _, count in calls.counts():
        by_kind[call] = by_kind.get(call, 0) + count
    found = {name: by_kind.get(call, 0) for name, call in KINDS.items()}
    with open("/proc/self/io", encoding="ascii") as file:
        found["bytes read"] = int(file.readline().split()[1])
    return found


def _measure(root: Path, ranks: int) -> dict[str, Counts]:
    pools, links = root / ".portus", str(root / "links")
    directory = root / "checkpoint"
    calls.begin(str(root))
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    state = {"t": torch.zeros(64)}

    def saved(writer: GroupWriter, step: int) -> bytes:
        if step == 2:
            writer.save_directory(state, directory, step=step)
        else:
            writer.save(state, step=step)
        assert writer.last is not None
        info = writer.last.wait()
        writer.wait()  # and the roll is written
        return info.token[:ID_SIZE]

    def writer_of_this_rank() -> GroupWriter:
        with mock.patch.object(portus.client.dcp.group_writer, "Tally", _Last):
            return GroupWriter(pools, "run", keep=4, links=links)

    writer = writer_of_this_rank()
    ids = [saved(writer, step) for step in (1, 2)]
    writer.close()
    for rank in range(1, ranks):
        with PoolCheckpointer(
            pools, part_model("run", rank, ranks), keep=None, links=links
        ) as part:
            shard = {str(directory / shard_name(rank, ranks)): FORMAT_KEY}
            for group, references in zip(ids, (None, shard), strict=True):
                token, step = part_token(group, rank), 1 if references is None else 2
                part.save({FORMAT_KEY: 1}, step, token=token, reference=references).wait()
    assert [group.is_complete for group in portus.dcp.groups(pools, "run")] == [True, True]

    def load(reader: GroupReader, **more: Any) -> None:
        target = {"t": torch.ones(64)}
        assert portus.dcp.load(target, reader, **more).step == 2
        assert not target["t"].any()

    def load_plainly(reader: GroupReader | None) -> None:
        assert reader is not None
        target = {"t": torch.ones(64)}
        dcp.load(target, storage_reader=reader)
        assert not target["t"].any()

    looking, told = (GroupReader(pools, "run") for _ in range(2))
    found = {"load, the rank that looks": counted(lambda: load(looking))}
    told._given = looking._find()
    told._saved = looking._metadata_in(told._given[0])
    found["load, every other rank"] = counted(lambda: load(told, no_dist=True))
    found["load by `dcp.load`, every rank"] = counted(
        lambda: load_plainly(GroupReader(pools, "run"))
    )
    found["load of a directory by `dcp.load`, every rank"] = counted(
        lambda: load_plainly(GroupReader.at(directory))
    )
    roll.remove(str(pools), "run")
    found["load without a roll, the rank that looks"] = counted(
        lambda: load(GroupReader(pools, "run"))
    )
    writer = writer_of_this_rank()
    found["first commit, the rank that looks"] = counted(lambda: saved(writer, 3))
    for step in (4, 5):
        saved(writer, step)
    found["commit"] = counted(lambda: saved(writer, 6))
    writer.close()
    return found


class _Last(Tally):
    """This rank is the last that commits."""

    def is_last(self, group: bytes, count: int) -> bool:
        return True


def table(found: dict[int, dict[str, Counts]]) -> str:
    """For documents."""
    names = [*KINDS, "bytes read"]
    lines = [f"| what | ranks | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    moments = next(iter(found.values()))
    for moment in moments:
        for ranks, counts in found.items():
            numbers = " | ".join(f"{counts[moment][name]:,}" for name in names)
            lines.append(f"| {moment} | {ranks:,} | {numbers} |")
    return "\n".join(lines)


def on_a_host(ranks: int) -> tuple[float, float]:
    """Seconds of a save after all other ranks committed, and of one after that; the medians."""
    took: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory(prefix="portus-discovery-") as root:
        os.chdir(root)  # where the server of the test looks for its secret
        with serving(Path(root, "host")) as server:
            address, links = url(server), f"{root}/links"

            def part(rank: int) -> PoolCheckpointer:
                return PoolCheckpointer(
                    address, part_model("run", rank, ranks), keep=1, links=links
                )

            with part(0) as own:
                own.save({"t": torch.zeros(64)}, 0).wait()
                for step in range(1, _HOST_SAVES + 1):
                    for rank in range(1, ranks):
                        with part(rank) as other:
                            other.save({"t": torch.zeros(64)}, step).wait()
                    both = []
                    for number in (2 * step, 2 * step + 1):
                        start = time.perf_counter()
                        own.save({"t": torch.zeros(64)}, number).wait()
                        both.append(time.perf_counter() - start)
                    took.append(tuple(both))
    after, next_one = zip(*took[1:], strict=True)
    return statistics.median(after), statistics.median(next_one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ranks", nargs="*", type=int, help="how many")
    parser.add_argument("--host", action="store_true", help="parts on a storage host")
    parser.add_argument("--in", dest="root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.root is not None:
        warnings.simplefilter("ignore")
        print(json.dumps(_measure(options.root, options.ranks[0])))
        return
    if options.host:
        for ranks in options.ranks or [HOST_RANKS]:
            after, next_one = on_a_host(ranks)
            print(f"{ranks} parts: {1e3 * after:.0f} ms, and {1e3 * next_one:.0f} ms for the next")
        return
    print(table({ranks: of(ranks) for ranks in options.ranks or RANKS}))


if __name__ == "__main__":
    main()
