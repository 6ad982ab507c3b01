"""A sharded job of some ranks over gloo that saves and loads: ways of torch, and Portus.

python -m tests.bench.sharded_job DIRECTORY RANKS MIB ROUNDS WAY...

Prints a JSON object: for each way, by round, what ``Figures`` says. Every rank is a process. Each
holds its shard of the parameters of an AdamW and of its moments, as DTensors; between two steps it
multiplies matrices for a while, as a forward and a backward pass would.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from portus import SaveHandle
from portus.dcp import PortusStorageReader, PortusStorageWriter

MIB = 1 << 20
LAYERS = 16
WORK = 60
"""Products of two matrices between two steps."""

WARMUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one save and one load; over all ranks the largest time, and the sum of bytes.

    ``blocked_s``: what training waited for; ``commit_s``: from the call until all ranks' parts are
    there; ``written_mib``; ``memory_mib``: what the ranks and their helpers had at the highest
    above what they had before, without the checkpoint itself; ``restore_s``.
    """

    blocked_s: float
    commit_s: float
    written_mib: float
    memory_mib: float
    restore_s: float


class Job:
    """This rank's shards."""

    def __init__(self, size: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        width = size // 12 // LAYERS // dist.get_world_size()
        torch.manual_seed(dist.get_rank())
        self.parameters = [
            torch.nn.Parameter(DTensor.from_local(torch.randn(width), mesh, [Shard(0)]))
            for _ in range(LAYERS)
        ]
        self.optimizer = torch.optim.AdamW(self.parameters)
        self._matrix = torch.randn(384, 384)
        self.step()

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def work(self) -> None:
        for _ in range(WORK):
            self._matrix @ self._matrix

    def state(self) -> dict[str, Any]:
        moments = self.optimizer.state_dict()["state"]
        named = {f"layer{n}": value for n, value in enumerate(self.parameters)}
        return {"model": named, "optimizer": {f"layer{n}": moments[n] for n in moments}}


class Way:
    """One way to save. ``begin`` returns when training may go on; ``end`` when it is there."""

    def __init__(self, root: Path, name: str) -> None:
        self.place = root / name.replace(" ", "-")
        self.step = 0

    def begin(self, job: Job) -> None:
        dcp.save(job.state(), checkpoint_id=self.path)

    def end(self) -> None: ...

    def fence_s(self) -> float:
        return 0.0

    @property
    def path(self) -> str:
        return str(self.place / f"step_{self.step}")

    def written(self) -> int:
        """Bytes of the newest checkpoint; of all ranks on the first, none on the others."""
        if dist.get_rank():
            return 0
        return sum(each.stat().st_size for each in Path(self.path).iterdir())

    def load(self, job: Job) -> None:
        dcp.load(job.state(), checkpoint_id=self.path)

    def forget(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None: ...


class Asynchronous(Way):
    """``dcp.async_save``; its stage copies before it returns. ``reused``: into the same memory."""

    def __init__(self, root: Path, name: str, kind: AsyncCheckpointerType, *, reused: bool) -> None:
        super().__init__(root, name)
        self._kind = kind
        self._group = dist.new_group(backend="gloo")
        options = StagingOptions(False, False, False, False)
        self._stager = DefaultStager(options) if reused else None
        self._future: Any = None

    def begin(self, job: Job) -> None:
        self._future = dcp.async_save(
            job.state(),
            checkpoint_id=self.path,
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )

    def end(self) -> None:
        self._future.result()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class Portus(Way):
    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root, name)
        self.writer = PortusStorageWriter(on_error="raise")

    def begin(self, job: Job) -> None:
        self.writer.save(job.state(), self.path)

    def end(self) -> None:
        """On the first rank, of the whole checkpoint."""
        self._newest.wait()

    def fence_s(self) -> float:
        return self._newest.stats.fence_s

    def committed_s(self) -> float:
        """From the call on, without what the call waited for before."""
        stats = self._newest.stats
        return stats.total_s - stats.call_s

    def load(self, job: Job) -> None:
        dcp.load(job.state(), checkpoint_id=self.path, storage_reader=PortusStorageReader())

    def forget(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            self.writer.remove(self.path)

    def close(self) -> None:
        self.writer.close()

    @property
    def _newest(self) -> SaveHandle:
        assert self.writer.last is not None
        return self.writer.last


WAYS: dict[str, Callable[[Path, str], Way]] = {
    "dcp.save": Way,
    "async thread": lambda root, name: Asynchronous(
        root, name, AsyncCheckpointerType.THREAD, reused=False
    ),
    "async process": lambda root, name: Asynchronous(
        root, name, AsyncCheckpointerType.PROCESS, reused=False
    ),
    "async reused stager": lambda root, name: Asynchronous(
        root, name, AsyncCheckpointerType.THREAD, reused=True
    ),
    "async process, reused stager": lambda root, name: Asynchronous(
        root, name, AsyncCheckpointerType.PROCESS, reused=True
    ),
    "portus": Portus,
}


class Peak:
    """The most memory that this process and its children have had, looked at again and again."""

    def __init__(self, *, shared: bool) -> None:
        """shared: shared memory counts too. Not for Portus, which maps the files that it writes
        over: that on tmpfs they look like shared memory makes them no less the checkpoint."""
        self._names = ("RssAnon", "VmLck", "VmPin") + (("RssShmem",) if shared else ())
        self._over = threading.Event()
        self._before = self._highest = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def added(self) -> int:
        """Bytes above what there was at the start."""
        self._over.set()
        self._thread.join()
        return self._highest - self._before

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self._highest = max(self._highest, self._now())

    def _now(self) -> int:
        own = os.getpid()
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return sum(self._of(process) for process in (str(own), *children))

    def _of(self, process: str) -> int:
        try:
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
        except FileNotFoundError:
            return 0
        fields = dict(line.split(":", 1) for line in lines)
        return 1024 * sum(int(fields[n].split()[0]) for n in self._names if n in fields)


def measured(way: Way, job: Job) -> Figures:
    """One save, the work and the step after it, and a load."""
    job.step()
    way.step += 1
    dist.barrier()
    peak = Peak(shared=not isinstance(way, Portus))
    start = time.perf_counter()
    way.begin(job)
    called_s = time.perf_counter() - start
    job.work()
    job.step()
    way.end()
    worked_s = time.perf_counter() - start
    memory = peak.added()
    blocked_s = called_s + way.fence_s()
    commit_s = called_s if type(way) is Way else worked_s
    if isinstance(way, Portus):
        commit_s = called_s + way.committed_s()
    dist.barrier()
    start = time.perf_counter()
    way.load(job)
    restore_s = time.perf_counter() - start
    written = way.written()
    way.forget()
    return _over_all(
        Figures(
            blocked_s=blocked_s,
            commit_s=commit_s,
            written_mib=written / MIB,
            memory_mib=memory / MIB,
            restore_s=restore_s,
        )
    )


def _over_all(own: Figures) -> Figures:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, asdict(own))
    return Figures(
        **{
            name: (max if name.endswith("_s") else sum)(each[name] for each in found)
            for name in asdict(own)
        }
    )


def run(rank: int, count: int, store: str, arguments: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    root, size, rounds, ways = Path(arguments[0]), arguments[1], int(arguments[2]), arguments[3:]
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count)
    job = Job(int(size) * MIB)
    made = {name: WAYS[name](root, name) for name in ways}
    job.step()  # seen by Portus
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(WARMUPS + rounds):
        for name, way in made.items():
            found = asdict(measured(way, job))
            if number >= WARMUPS:
                figures[name].append(found)
    for way in made.values():
        way.close()
    if rank == 0:
        print(json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    root, ranks, *more = sys.argv[1:]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    count = int(ranks)
    with tempfile.TemporaryDirectory() as place:
        arguments = (count, f"{place}/store", [root, *more])
        mp.start_processes(run, arguments, count, start_method="fork")


if __name__ == "__main__":
    main()
