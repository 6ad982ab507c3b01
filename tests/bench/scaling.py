"""What many trainers get from some storage hosts: formulas over measured constants.

python -m tests.bench.scaling [--write]      prints the tables of docs/scaling.md, or renews them
                                             there, and the picture beside them

Every measured number is a ``Constant`` that names the row of the documents it comes from.
All else is given: how many, how big, how fast.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from portus.reach.daemon.places import Places
from tests.bench.pages import table, written

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class Constant:
    """``row`` of ``page`` in which it stands, as ``text``."""

    name: str
    value: float
    text: str
    page: str
    row: str
    what: str


_ONE, _FOUR = (
    f"saves of 64 KiB, {clients} at once, tmpfs: p99" for clients in ("1 client", "4 clients")
)

WIRE: Final = Constant(
    "wire",
    0.841,
    "0.841",
    "benchmarks.md",
    "pulled over tcp, hashed, 512 MiB: speed over a plain copy",
    "share of a plain socket copy's speed, both ends hashing",
)
CALL: Final = Constant(
    "call",
    6.426e-3,
    "6.426 ms",
    "benchmarks.md",
    "save() returns, 1,000 known tensors",
    "inside the call of save",
)
COMMIT: Final = Constant(
    "commit",
    12.55e-3,
    "12.55",
    "benchmarks.md",
    _ONE,
    "ms, a small save of one client, from the call to the commit (p99)",
)
RATE: Final = Constant(
    "rate",
    136.7,
    "136.7",
    "benchmarks.md",
    _FOUR,
    "small saves a second that one host commits, of 4 clients on its own two processors",
)
CONSTANTS: Final = (WIRE, CALL, COMMIT, RATE)

CONNECTIONS: Final = 4
"""That a trainer takes on its host, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """``ranks`` trainers, ``hosts`` storage hosts. Bytes and bytes a second; times in seconds.

    ``state``: of one rank. ``host_nic``, ``rank_nic``: of each. ``medium``: what a host's medium
    takes. ``window``: from one optimizer step to the next, without a save: what a copy may hide
    behind. ``mtbf``: mean time between failures of one rank.
    """

    ranks: int
    hosts: int
    state: float = 12 * GB
    host_nic: float = 50 * GB
    rank_nic: float = 25 * GB
    medium: float = 24 * GB
    window: float = 10.0
    mtbf: float = 50_000 * 3600.0

    @property
    def host_rate(self) -> float:
        """Bytes a second that one host receives, hashes and stores."""
        return min(WIRE.value * self.host_nic, self.medium)

    @property
    def pulled(self) -> float:
        """Seconds until the bytes of all ranks are pulled: the hosts' limit, or a rank's own."""
        shared = self.ranks * self.state / (self.hosts * self.host_rate)
        return max(shared, self.state / (WIRE.value * self.rank_nic))

    @property
    def committing(self) -> float:
        """Seconds from there until the last rank's part is committed."""
        return COMMIT.value + self.ranks / self.hosts / RATE.value

    @property
    def durable(self) -> float:
        """Seconds from the call until the group is complete."""
        return CALL.value + self.pulled + self.committing

    @property
    def blocked(self) -> float:
        """Seconds that training feels: the call, and what the window does not hide."""
        return CALL.value + max(0.0, self.pulled - self.window)

    @property
    def job_mtbf(self) -> float:
        """Seconds between two failures of the job: any rank's is one."""
        return self.mtbf / self.ranks

    @property
    def interval(self) -> float:
        """Seconds between saves that lose the least (Young, CACM 17(9), 1974: the square root of
        2 * stall * mtbf), but not less than a save takes."""
        return max(math.sqrt(2 * self.blocked * self.job_mtbf), self.durable)

    @property
    def lost(self) -> float:
        """Share of all time that is lost: blocked, and worked for nothing at a failure (half an
        interval, and what was not durable yet)."""
        return self.blocked / self.interval + (self.interval / 2 + self.durable) / self.job_mtbf

    @property
    def hosts_by_connections(self) -> int:
        """Hosts that it takes at least, since a host lets so many connections in."""
        return math.ceil(self.ranks * CONNECTIONS / Places().tenant_max)

    @property
    def hosts_to_hide(self) -> int:
        """Hosts that it takes until the window hides the copy, and connections fit."""
        hosts = math.ceil(self.ranks * self.state / (self.window * self.host_rate))
        return max(hosts, self.hosts_by_connections)


RANKS: Final = (8, 64, 512, 1024, 4096, 10_000)
HOSTS: Final = (1, 4, 16, 64, 256)


def constants_table() -> str:
    rows = [
        f"| {each.name} | {each.text} | {each.what} | [{each.page}]({each.page}): {each.row} |"
        for each in CONSTANTS
    ]
    return table("constant | value | what | row", rows)


def hosts_table() -> str:
    """Hosts for which training feels no more than the call."""
    rows = []
    for ranks in RANKS:
        site = Site(ranks=ranks, hosts=1)
        site = replace(site, hosts=site.hosts_to_hide)
        rows.append(
            f"| {ranks} | {site.hosts} | {site.pulled:.3g} s | {site.committing:.3g} s | "
            f"{1e3 * site.blocked:.3g} ms | {site.interval:.3g} s | {100 * site.lost:.2g} % |"
        )
    head = "ranks | hosts | pulled | then committed | blocked | save every | time lost"
    return table(head, rows)


def fewer_table() -> str:
    """The same ranks, and fewer hosts."""
    rows = []
    for hosts in HOSTS:
        site = Site(ranks=1024, hosts=hosts)
        fits = "yes" if hosts >= site.hosts_by_connections else "no"
        rows.append(
            f"| {hosts} | {site.pulled:.3g} s | {site.blocked:.3g} s | {site.durable:.3g} s | "
            f"{site.interval:.3g} s | {100 * site.lost:.2g} % | {fits} |"
        )
    head = "hosts | pulled | blocked | durable | save every | time lost | connections fit"
    return table(head, rows)


def tables() -> dict[str, str]:
    """By their marks in the page."""
    return {"constants": constants_table(), "hosts": hosts_table(), "fewer": fewer_table()}


def draw(path: Path) -> None:
    """Time blocked and time to durable over the number of ranks, for some numbers of hosts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = [round(8 * 10 ** (step / 20)) for step in range(63)]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for hosts in HOSTS:
        sites = [Site(ranks=count, hosts=hosts) for count in ranks]
        fitting = [site for site in sites if hosts >= site.hosts_by_connections]
        counts = [site.ranks for site in fitting]
        panels[0].plot(counts, [site.durable for site in fitting], label=f"{hosts} hosts")
        panels[1].plot(counts, [100 * site.lost for site in fitting], label=f"{hosts} hosts")
    panels[0].set_ylabel("seconds until all ranks are durable")
    panels[1].set_ylabel("time lost, % (blocked, and redone after failures)")
    for panel in panels:
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("ranks (a line ends where connections do)")
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="renew docs/scaling.md and its picture"
    )
    if not parser.parse_args().write:
        print("\n\n".join(tables().values()))
        return
    page = DOCS / "scaling.md"
    page.write_text(written(page.read_text(), tables()))
    draw(DOCS / "scaling.png")


if __name__ == "__main__":
    main()
