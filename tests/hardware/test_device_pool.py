"""A pool on a DAX device, as a user has it: ``Checkpointer(pool="/dev/dax0.0")``.

The one file here that imports torch, which takes about a minute in the lab.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from portus.client.files.host import HostPool
from portus.errors import BusyError, CorruptionError, UsageError
from portus.index.directory import format_device, has_pool, open_reader
from portus.media.dax import open_device
from portus.media.local import LocalFiles
from portus.spec import Extent
from tests.hardware.conftest import DEVDAX
from tests.hosts import serving, url

pytestmark = [pytest.mark.pmem, pytest.mark.timeout(900)]


@pytest.fixture
def blank() -> None:
    """A device whose header is zero."""
    medium = open_device(DEVDAX, writable=True)
    medium.store(0, bytes(1 << 20))
    medium.persist([Extent(0, 1 << 20)])
    medium.close()


@pytest.mark.usefixtures("blank")
def test_a_run_saves_to_a_device_and_its_references_lead_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    import portus

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "run" / "last.ckpt"
    weights = torch.arange(300_000.0)
    state = {"w": weights, "step": 3}
    assert not has_pool(DEVDAX)
    with portus.Checkpointer(DEVDAX, keep=1) as checkpointer:
        assert checkpointer.path == DEVDAX
        assert not has_pool(DEVDAX), "nothing is made before the first save"
        checkpointer.save(state, 3, reference=path).wait()
        checkpointer.save(state, 4).wait()
        with pytest.raises(BusyError):
            format_device(DEVDAX, LocalFiles(), force=True)
    with portus.Checkpointer(DEVDAX, keep=1) as checkpointer:
        for step in (5, 6, 7):
            checkpointer.save({"w": torch.zeros(300_000), "step": step}, step).wait()
        assert checkpointer.steps() == [3, 7], "the reference file holds step 3"
    assert len(list((tmp_path / "state" / "portus").glob("*.references"))) == 1
    monkeypatch.setenv("PORTUS_POOL", DEVDAX)
    loaded = torch.load(path)
    assert loaded["step"] == 3
    assert torch.equal(loaded["w"], weights)
    with pytest.raises(UsageError, match="max_bytes applies to files"):
        portus.Checkpointer(DEVDAX, max_bytes=1 << 20)
    with portus.open(DEVDAX) as view:
        assert view.steps() == [3, 7]
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
    with serving(DEVDAX) as server, portus.Checkpointer(url(server)) as checkpointer:
        for number in range(1, 5):
            handle = checkpointer.save(state(), number)
            weight = model.weight.detach().clone()
            step()  # behind the fence
            handle.wait(60)
            small = 2 * model.bias.nbytes
            assert handle.stats.bounced_bytes == small, "the big ones went straight"
            pool = checkpointer._pool.home._pool  # type: ignore[attr-defined]
            assert isinstance(pool, HostPool)
            assert pool.links.verbs is not None
            keys.append(sorted(each.region.remote_key for each in pool.links.verbs._known.values()))
        first, *later = keys
        assert first == [], "no step was fenced yet: all was copied inside the call"
        assert len(later[0]) == 2
        assert later[0] == later[1] == later[2], "weights and momenta stay registered"
        before = server._house.counters["verbs_bytes"]
        with portus.open(url(server)) as view:
            view.restore_into(state())
        assert torch.equal(model.weight, weight)
        assert server._house.counters["verbs_bytes"] - before >= 2 * weight.nbytes
        assert server._house.counters["bounced_bytes"] == 0


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
