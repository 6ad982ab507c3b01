"""What a dense part that is older than the tables costs, as a picture of loss against the gap.

    python -m tests.bench.gap docs/gap.png

A small click model trains; at ``CRASH`` it goes on with the tables of that batch, and the dense
part, its Adam included, of ``gap`` batches before: what a load in relaxed mode gives
(``test_relaxed_the_dense_part_is_of_some_batches_before_and_a_load_says_of_which``). The loss is
that of batches that nobody trains on.
"""

from __future__ import annotations

import copy
import statistics
import sys
from typing import Any, Final

import torch

from portus.embedding import RowwiseAdagrad

TABLES: Final = 6
ROWS: Final = 2000
WIDTH: Final = 8
BATCH: Final = 256
CRASH: Final = 300
LATER: Final = (0, 25, 100)
"""Batches after the crash, at which the loss is looked at."""

GAPS: Final = (0, 1, 10, 30, 100, 299)
SEEDS: Final = 3


class Clicks:
    """Ids by Zipf's law, 4 numbers, and clicks that follow from both; a function of the number."""

    def __init__(self, seed: int) -> None:
        self._seed: Final = seed
        self._taste: Final = torch.randn(TABLES, ROWS, generator=self._chance(0))

    def __call__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chance = self._chance(number + 1)
        dense = torch.randn(BATCH, 4, generator=chance)
        rank = torch.rand(TABLES, BATCH, generator=chance, dtype=torch.float64)
        ids = torch.exp(rank * torch.log(torch.tensor(float(ROWS)))).long().clamp(1, ROWS) - 1
        liked = self._taste.gather(1, ids).sum(0) / TABLES**0.5 + dense[:, 0] * dense[:, 1]
        clicks = (torch.rand(BATCH, generator=chance) < torch.sigmoid(2 * liked)).float()
        return dense, ids, clicks

    def _chance(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(1_000_000 * self._seed + number)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(TABLES)
        )
        self.top = torch.nn.Sequential(
            torch.nn.Linear(TABLES * WIDTH + 4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        found = [table(row[:, None]) for table, row in zip(self.tables, ids, strict=True)]
        out: torch.Tensor = self.top(torch.cat([dense, *found], 1))
        return out.squeeze(1)


class Training:
    """A model, and an optimizer for its tables and for the rest."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.clicks = Model(), Clicks(seed)
        self.sparse = RowwiseAdagrad(self.model.tables.parameters(), lr=0.1)
        self.rest = torch.optim.Adam(self.model.top.parameters(), lr=3e-3)

    def step(self, number: int) -> None:
        for optimizer in (self.sparse, self.rest):
            optimizer.zero_grad()
        self._loss(number).backward()
        for optimizer in (self.sparse, self.rest):
            optimizer.step()

    def loss(self) -> float:
        """Of 20 batches that are not trained on."""
        with torch.no_grad():
            return statistics.mean(float(self._loss(500_000 + each)) for each in range(20))

    def dense_part(self) -> Any:
        return copy.deepcopy((self.model.top.state_dict(), self.rest.state_dict()))

    def load_dense_part(self, part: Any) -> None:
        model, optimizer = copy.deepcopy(part)
        self.model.top.load_state_dict(model)
        self.rest.load_state_dict(optimizer)

    def _loss(self, number: int) -> torch.Tensor:
        dense, ids, clicks = self.clicks(number)
        return torch.nn.functional.binary_cross_entropy_with_logits(self.model(dense, ids), clicks)


def losses(seed: int) -> dict[int, list[float]]:
    """For each gap the loss after each of ``LATER``."""
    training, parts = Training(seed), {}
    for number in range(1, CRASH + 1):
        training.step(number)
        if CRASH - number in GAPS:
            parts[CRASH - number] = training.dense_part()
    found: dict[int, list[float]] = {}
    for gap in GAPS:
        resumed = copy.deepcopy(training)
        resumed.sparse = RowwiseAdagrad(resumed.model.tables.parameters(), lr=0.1)
        resumed.sparse.load_state_dict(copy.deepcopy(training.sparse.state_dict()))
        resumed.rest = torch.optim.Adam(resumed.model.top.parameters(), lr=3e-3)
        resumed.load_dense_part(parts[gap])
        found[gap], done = [], 0
        for later in LATER:
            while done < later:
                done += 1
                resumed.step(CRASH + done)
            found[gap].append(resumed.loss())
    return found


def main() -> None:
    """Print a table, and draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    torch.set_num_threads(1)
    seeds = [losses(seed) for seed in range(SEEDS)]
    figure, panel = pyplot.subplots(figsize=(7, 4.5))
    print("| gap, batches |", " | ".join(f"{each} batches later" for each in LATER), "|")
    print("|---|" + "---|" * len(LATER))
    worse: dict[int, list[list[float]]] = {
        gap: [
            [100 * (each[gap][place] / each[0][place] - 1) for each in seeds]
            for place in range(len(LATER))
        ]
        for gap in GAPS
    }
    for gap, columns in worse.items():
        cells = [f"{statistics.mean(c):+.2f} % ({min(c):+.2f} to {max(c):+.2f})" for c in columns]
        print(f"| {gap} |", " | ".join(cells), "|")
    for place, later in enumerate(LATER):
        middle = [statistics.mean(worse[gap][place]) for gap in GAPS]
        spread = [
            [m - min(worse[gap][place]) for m, gap in zip(middle, GAPS, strict=True)],
            [max(worse[gap][place]) - m for m, gap in zip(middle, GAPS, strict=True)],
        ]
        label = f"{later} batches after the load" if later else "as loaded"
        panel.errorbar(GAPS, middle, yerr=spread, marker="o", capsize=2, label=label)
    panel.set_xscale("symlog", linthresh=1)
    panel.set_xticks(GAPS, [str(each) for each in GAPS])
    panel.set_xlabel("batches by which the dense part is older than the tables")
    panel.set_ylabel("loss over that of the same batch, %")
    panel.set_title(f"a crash at batch {CRASH}, relaxed; {SEEDS} seeds, mean and range")
    panel.axhline(0, color="lightgray")
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(sys.argv[-1], dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    main()
