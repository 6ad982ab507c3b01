"""What was measured beside CheckFreq's figures, as a picture.

python -m tests.bench.beside_paper RESULTS.json [RESULTS.json ...] PICTURE.png

Rows are found by their names, in the files that ``make bench`` left; those that are in none are
left out of the picture.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any, Final

from tests.bench.paced import BOUND, SHAPES, TORCH_SAVE

# Source: Mohan et al., "CheckFreq", FAST'21, figures and text as they are read there.
SYNCHRONOUS: Final = {"ResNet": 24.0, "VGG": 30.0, "BERT": 73.0}
"""Figure 7: overhead of synchronous saves at CheckFreq's interval, %; ResNet50, VGG16, BERT."""

SPEEDUP: Final = {"ResNet50": 2.0, "ResNeXt101": 1.6}
"""Figure 8: time to accuracy with epochs' checkpoints over CheckFreq, a kill every 5 h."""

INTERVALS: Final = (14, 19)
"""Table 5: the interval alone, and with another job on the GPU."""


def main() -> None:
    """Draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows: dict[str, Any] = {}
    loads = []
    for path in sys.argv[1:-1]:
        found = json.loads(Path(path).read_text())
        loads.append(f"{found['machine']['load']:.0f}")
        rows |= {row["name"]: row for row in found["rows"]}
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 8))
    _overhead(panels[0][0], rows)
    _breakdown(panels[0][1], rows)
    _hog(panels[1][0], rows)
    _time_to_loss(panels[1][1], rows)
    figure.suptitle(f"load of the machine (2 cores) at the ends of the runs: {', '.join(loads)}")
    figure.tight_layout()
    figure.savefig(sys.argv[-1], dpi=90, metadata={"Software": None})


def _overhead(panel: Any, rows: dict[str, Any]) -> None:
    names = [each for each in SHAPES if f"overhead at the chosen interval, {each}-shaped" in rows]
    bars = {
        "Portus": ("portus", 0.0),
        "torch.save at the same k": (TORCH_SAVE, 0.2),
    }
    for label, (figure, shift) in bars.items():
        values = [
            rows[f"overhead at the chosen interval, {each}-shaped"]["figures"][figure]
            for each in names
        ]
        middle = [statistics.median(each) for each in values]
        spread = [
            [m - min(v) for m, v in zip(middle, values, strict=True)],
            [max(v) - m for m, v in zip(middle, values, strict=True)],
        ]
        places = [place + shift for place in range(len(names))]
        panel.bar(places, middle, 0.2, yerr=spread, capsize=2, label=label)
    places = [place + 0.4 for place in range(len(names))]
    panel.bar(places, [SYNCHRONOUS[each] for each in names], 0.2, color="lightgray",
              label="paper: synchronous, same k")  # fmt: skip
    panel.axhline(100 * BOUND, color="black", linestyle="--", label="the bound; paper: CheckFreq")
    panel.set_xticks([place + 0.2 for place in range(len(names))], names)
    panel.set_ylabel("overhead, %")
    panel.set_title("at the chosen interval (Figure 7)")
    panel.legend(fontsize=7)


def _breakdown(panel: Any, rows: dict[str, Any]) -> None:
    costs = rows.get("a save adds to training, VGG-shaped")
    if costs is None:
        return
    names = list(costs["figures"])
    panel.bar(names, [statistics.median(costs["figures"][each]) for each in names])
    parts = rows["of a save of Portus, VGG-shaped"]["figures"]
    text = ", ".join(f"{name} {statistics.median(each):.0f}" for name, each in parts.items())
    panel.set_title(f"a save, VGG-shaped (Figure 4)\nPortus, ms: {text}", fontsize=9)
    panel.set_ylabel("added to training, ms")


def _hog(panel: Any, rows: dict[str, Any]) -> None:
    row = rows.get("interval while a hog is on a core, over the one before it")
    if row is None:
        return
    figures = row["figures"]
    panel.step(figures["at"], figures["k"], where="post", label="Portus")
    hogged = [at for at, phase in zip(figures["at"], figures["phase"], strict=True) if phase == 1]
    panel.axvspan(min(hogged), max(hogged), color="gray", alpha=0.15, label="a hog on a core")
    alone, shared = INTERVALS
    panel.set_title(f"the interval (Table 5: {alone}, and {shared} with another job)", fontsize=9)
    panel.set_xlabel("seconds")
    panel.set_ylabel("k, steps")
    panel.set_yscale("log")
    panel.legend(fontsize=7)


def _time_to_loss(panel: Any, rows: dict[str, Any]) -> None:
    row = rows.get("time to a loss, killed: epochs' checkpoints over Portus")
    if row is None:
        return
    ours = statistics.median(row["figures"]["portus"])
    bars = {name: statistics.median(each) / ours for name, each in row["figures"].items()}
    panel.bar(list(bars), list(bars.values()))
    panel.bar([f"paper: epoch,\n{name}" for name in SPEEDUP], list(SPEEDUP.values()),
              color="lightgray")  # fmt: skip
    panel.set_title("time to a loss with kills, over Portus or CheckFreq (Figure 8)", fontsize=9)
    panel.tick_params(axis="x", labelsize=7)


if __name__ == "__main__":
    main()
