"""A pool on a DAX device, as a user has it: ``Checkpointer(pool="/dev/dax0.0")``.

The one file here that imports torch, which takes about a minute in the lab. And tables in place,
which are larger than the memory that the process may take.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from portus.engine.spec import Extent
from portus.errors import BusyError, CorruptionError, UsageError
from portus.reach.index.directory import format_device, has_pool, open_reader
from portus.reach.media.dax import open_device
from portus.reach.media.local import LocalFiles
from portus.reach.versions.host import HostPool
from tests.hardware.conftest import DEVDAX, FSDAX
from tests.hosts import serving, url

pytestmark = [pytest.mark.pmem, pytest.mark.timeout(900)]

MORE = 48 << 20
"""Bytes of memory of its own that a process with tables in place may take in addition."""


@pytest.fixture
def blank() -> None:
    """A device whose header is zero."""
    medium = open_device(DEVDAX, writable=True)
    medium.store(0, bytes(1 << 20))
    medium.persist([Extent(0, 1 << 20)])
    medium.close()


@pytest.mark.usefixtures("blank")
def test_a_run_saves_to_a_device_and_its_pointers_lead_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    import portus

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "run" / "last.ckpt"
    path.parent.mkdir()
    weights = torch.arange(300_000.0)
    state = {"w": weights, "step": 3}
    assert not has_pool(DEVDAX)
    with portus.PoolCheckpointer(DEVDAX, keep=1) as checkpointer:
        assert checkpointer.path == DEVDAX
        assert not has_pool(DEVDAX), "nothing is made before the first save"
        checkpointer.save(state, 3).wait()
        checkpointer.save(state, 4).wait()
        with pytest.raises(BusyError):
            format_device(DEVDAX, LocalFiles(), force=True)
    with portus.PoolCheckpointer(DEVDAX, keep=1) as checkpointer:
        for step in (5, 6, 7):
            checkpointer.save({"w": torch.zeros(300_000), "step": step}, step).wait()
        assert checkpointer.steps() == [7]
    files = portus.TrainingFiles(portus.Settings(), pool=portus.Place.parse(DEVDAX))
    files.begin("run", str(tmp_path / "run" / ".portus"), str(path.parent))
    files.save(state, str(path), 3).wait()
    files.close()
    assert portus.is_reference(path)
    portus.register_reference_loader()
    loaded = torch.load(path)
    assert loaded["step"] == 3
    assert torch.equal(loaded["w"], weights)
    with pytest.raises(UsageError, match="max_bytes applies to files"):
        portus.PoolCheckpointer(DEVDAX, max_bytes=1 << 20)
    with portus.open(DEVDAX) as view:
        assert view.steps() == [7]
        assert view.steps("run") == [3]
    assert not [each for each in portus.check(DEVDAX) if each.severity.value == "error"]


@pytest.mark.rdma
@pytest.mark.usefixtures("blank")
def test_a_training_saves_to_a_host_by_verbs_and_is_restored_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    import portus

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PORTUS_TRANSPORT", "verbs")
    format_device(DEVDAX, LocalFiles(), force=True)
    model = torch.nn.Linear(1000, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).square().sum().backward()
        optimizer.step()

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    step()
    keys = []
    with serving(DEVDAX) as server, portus.PoolCheckpointer(url(server)) as checkpointer:
        for number in range(1, 5):
            handle = checkpointer.save(state(), number)
            weight = model.weight.detach().clone()
            step()  # behind the fence
            handle.wait(60)
            small = 2 * model.bias.nbytes
            assert handle.stats.bounced_bytes == small, "the big ones went straight"
            pool = checkpointer._steps.pool.open()
            assert isinstance(pool, HostPool)
            assert pool.links.verbs is not None
            keys.append(sorted(each.region.remote_key for each in pool.links.verbs._known.values()))
        first, *later = keys
        assert first == [], "no step was fenced yet: all was copied inside the call"
        assert len(later[0]) == 2
        assert later[0] == later[1] == later[2], "weights and momenta stay registered"
        before = server.house.counters.counts["verbs_bytes"]
        with portus.open(url(server)) as view:
            view.restore_into(state())
        assert torch.equal(model.weight, weight)
        assert server.house.counters.counts["verbs_bytes"] - before >= 2 * weight.nbytes
        assert server.house.counters.counts["bounced_bytes"] == 0


def _said(name: str) -> int:
    """Bytes, as the kernel counts them for this process."""
    [found] = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) << 10


@pytest.fixture
def little_memory() -> Iterator[int]:
    """What the process has; the kernel refuses it more than ``MORE`` in addition."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_said("VmData") + MORE, before[1]))
    yield _said("RssAnon")
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize(
    ("pool", "rows"),
    [(DEVDAX, 750_000), (f"{FSDAX}/larger.portus", 500_000)],
    ids=["device", "file"],
)
def test_tables_larger_than_the_memory_train_and_load_in_place(
    pool: str, rows: int, blank: None, request: pytest.FixtureRequest
) -> None:
    """Rows of each batch are all over a table, and the log is folded in. A smaller table in memory
    first: what the first step needs for itself is there then."""
    import torch

    from portus.embedding import RowwiseAdagrad, protect

    batches, shown = 12, torch.empty(0)
    chosen = [torch.arange(number, rows, rows // 2000) for number in range(batches)]

    def made(count: int = rows, device: str = "meta") -> tuple[Any, list[Any]]:
        table = torch.nn.EmbeddingBag(count, 64, mode="sum", sparse=True, device=device)
        model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(64, 1)})
        sparse = RowwiseAdagrad(table.parameters(), lr=0.1)
        return model, [sparse, torch.optim.Adam(model["top"].parameters())]

    def step(model: Any, optimizers: list[Any], ids: torch.Tensor) -> None:
        for each in optimizers:
            each.zero_grad()
        model["top"](model["table"](ids.reshape(-1, 1))).square().mean().backward()
        for each in optimizers:
            each.step()

    if pool != DEVDAX:
        Path(pool).unlink(missing_ok=True)
    step(*made(10, "cpu"), chosen[0] % 10)
    before, most, logs = request.getfixturevalue("little_memory"), 0, set()
    for begin in (0, batches // 2):
        model, optimizers = made()
        with protect(model, optimizers, pool=pool, log_bytes=2 << 20, in_place=True) as tables:
            resumed = tables.load()
            assert (0 if resumed is None else resumed.batch) == begin
            if resumed is None:
                torch.nn.init.ones_(model["table"].weight)
            else:
                assert torch.equal(model["table"].weight[chosen[begin - 1]], shown)
            most = max(most, _said("RssAnon"))
            for number in range(begin, begin + batches // 2):
                step(model, optimizers, chosen[number])
                tables.wait()
                most = max(most, _said("RssAnon"))
                logs.add(tables._store._log.log.name)  # type: ignore[union-attr]
            shown = model["table"].weight[chosen[number]].detach().clone()
            size = model["table"].weight.nbytes
    print(f"tables of {size >> 20} MiB, resident {(most - before) / (1 << 20):.1f} MiB more")
    assert len(logs) > 1, "the log was never folded in"
    assert size > 2.5 * MORE
    assert most - before < MORE
    if pool != DEVDAX:
        Path(pool).unlink()


@pytest.mark.usefixtures("blank")
def test_what_is_no_pool_is_left_alone_until_force_is_used() -> None:
    medium = open_device(DEVDAX, writable=True)
    medium.store(1080, b"\x53\xef")  # as ext4 has it
    medium.persist([Extent(1080, 2)])
    medium.close()
    assert has_pool(DEVDAX)
    assert not format_device(DEVDAX, LocalFiles())
    with pytest.raises(CorruptionError, match="portus format"):
        open_reader(DEVDAX)
    command = [sys.executable, "-m", "portus.cli.main", "format", DEVDAX, "--force"]
    subprocess.run(command, check=True)
    open_reader(DEVDAX).close()
    assert not format_device(DEVDAX, LocalFiles()), "an empty pool is a pool"
