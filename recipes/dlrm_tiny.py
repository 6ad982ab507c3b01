"""A small DLRM whose tables are durable after each batch; killed, it continues with the same bits.

    python recipes/dlrm_tiny.py runs/dlrm.portus              train; run it again after a crash
    python recipes/dlrm_tiny.py runs/dlrm.portus --demo       kill it, resume it, compare

The model is that of https://arxiv.org/abs/1906.00091: an MLP for 13 numbers, 26 tables, the dot
products of all pairs, an MLP on top. The stream has the shape of Criteo's: ids by Zipf's law, and
clicks that depend on some of them. Batch n is a function of n, so a resumed run sees each once.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import portus.embedding

DENSE = 13
TABLES = 26


@dataclass(frozen=True)
class Sizes:
    rows: int
    width: int
    batch: int


class Stream:
    """The numbers, ids (one for each table) and clicks of each batch."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        chance = torch.Generator().manual_seed(1)
        self._shift = torch.randint(0, sizes.rows, (TABLES,), generator=chance)
        self._taste = torch.randn(TABLES, 64, generator=chance)

    def __call__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self._sizes
        chance = torch.Generator().manual_seed(number)
        dense = torch.randn(sizes.batch, DENSE, generator=chance)
        # Zipf's law by its inverse: for ranks 1 to rows, each with a weight of 1 / rank.
        rank = torch.rand(sizes.batch, TABLES, generator=chance, dtype=torch.float64)
        rank = torch.exp(rank * torch.log(torch.tensor(float(sizes.rows)))).long() - 1
        ids = (rank.clamp(0, sizes.rows - 1) * 7919 + self._shift) % sizes.rows
        liked = self._taste.gather(1, (ids % 64).t()).sum(0) / TABLES**0.5 + dense[:, 0]
        clicks = (torch.rand(sizes.batch, generator=chance) < torch.sigmoid(liked)).float()
        return dense, ids, clicks


class Dlrm(torch.nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(sizes.rows, sizes.width, mode="sum", sparse=True)
            for _ in range(TABLES)
        )
        self.bottom = mlp(DENSE, 64, sizes.width)
        pairs = TABLES * (TABLES + 1) // 2
        self.top = mlp(pairs + sizes.width, 128, 1)
        self.register_buffer("pairs", torch.combinations(torch.arange(TABLES + 1)), False)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        number = self.bottom(dense)
        found = [table(ids[:, [each]]) for each, table in enumerate(self.tables)]
        all_ = torch.stack([number, *found], 1)
        dots = torch.bmm(all_, all_.transpose(1, 2))
        one, other = self.pairs.unbind(1)  # type: ignore[operator]
        out: torch.Tensor = self.top(torch.cat([number, dots[:, one, other]], 1))
        return out.squeeze(1)


def mlp(*widths: int) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for first, second in itertools.pairwise(widths):
        layers += [torch.nn.Linear(first, second), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def train(pool: Path, sizes: Sizes, batches: int) -> None:
    torch.manual_seed(0)
    model, stream = Dlrm(sizes), Stream(sizes)
    sparse = portus.embedding.RowwiseAdagrad(model.tables.parameters(), lr=0.05)
    rest = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=1e-3)
    pool.parent.mkdir(parents=True, exist_ok=True)
    with portus.embedding.protect(model, [sparse, rest], pool=pool) as tables:
        resumed = tables.load()
        done = resumed.batch if resumed else 0
        print(f"from batch {done}", flush=True)
        for number in range(done + 1, batches + 1):
            start = time.perf_counter()
            dense, ids, clicks = stream(number)
            with tables.batch():
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    model(dense, ids), clicks
                )
                sparse.zero_grad()
                rest.zero_grad()
                loss.backward()
                sparse.step()
                rest.step()
            took_ms = (time.perf_counter() - start) * 1e3
            print(f"batch {number}: loss {float(loss.detach()):.6f}, {took_ms:.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("pool", type=Path, nargs="?", default=Path("runs/dlrm/tables.portus"))
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rows", type=int, default=20_000, help="of each of the 26 tables")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128, help="samples of a batch")
    parser.add_argument("--demo", action="store_true", help="kill, resume, compare")
    parser.add_argument("--kills", type=int, default=2, help="of the demo")
    wish = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order
    if wish.demo:
        demo(wish)
    else:
        train(wish.pool, Sizes(wish.rows, wish.width, wish.batch), wish.batches)


# --- the demo -------------------------------------------------------------------------------


def demo(wish: argparse.Namespace) -> None:
    """Kill, resume and compare. Exit with code 1 if anything is not bit-identical."""
    whole, killed = (wish.pool.with_name(f"{name}.portus") for name in ("whole", "killed"))
    for pool in (whole, killed):
        pool.unlink(missing_ok=True)
    print(f"1. {wish.batches} batches without interruption")
    run(wish, whole)
    for number in (wish.batches * each // (wish.kills + 1) for each in range(1, wish.kills + 1)):
        print(f"2. the same, killed (SIGKILL) right after batch {number}")
        run(wish, killed, kill_at=number)
    print("3. resumed")
    first = run(wish, killed)
    same = is_same(state_of(whole), state_of(killed))
    print(
        f"It was killed {wish.kills} times, resumed {first} at last, and ended "
        f"{'BIT-IDENTICAL to' if same else 'DIFFERENT from'} a "
        "run that was never interrupted: tables, their optimizer, and the rest."
    )
    print(f"Look into it: {Path(sys.executable).parent / 'portus'} ls {killed}")
    sys.exit(not same)


def run(wish: argparse.Namespace, pool: Path, kill_at: int = 0) -> str:
    """Train in a new process, killed after a batch; return its first line."""
    command = [sys.executable, __file__, str(pool)]
    for name in ("batches", "rows", "width", "batch"):
        command += [f"--{name}", str(getattr(wish, name))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        print(f"    {first}", flush=True)
        for line in process.stdout:
            number = int(line.split()[1].rstrip(":"))
            if number % max(1, wish.batches // 8) == 0:
                print(f"    {line}", end="", flush=True)
            if number == kill_at:
                process.kill()
                break
    if process.returncode not in (0, -signal.SIGKILL if kill_at else 0):
        sys.exit(f"the training ended with exit code {process.returncode}")
    return first


def state_of(pool: Path) -> Any:
    with portus.open(pool) as view:
        return view.load("embedding")


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


if __name__ == "__main__":
    main()
