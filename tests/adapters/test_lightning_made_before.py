"""A ``PortusIO`` that was made before what it depends on: the process that saves, and the pool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import portus
from portus_lightning import PortusIO
from tests.warm import in_process

FORKED = """
import os
from portus_lightning import PortusIO
home = {home!r}
plugin = PortusIO(mirror="file://" + home + "/bucket")
child = os.fork()
if child == 0:
    plugin.run.begin(home)
    plugin.run.expect(home + "/ckpt", in_shards=False)
    with plugin.run.saving(is_late=True):
        plugin.save_checkpoint({{"global_step": 1}}, home + "/ckpt/1.ckpt")
    plugin.teardown()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.long
def test_a_run_in_a_forked_child_is_in_the_mirror_and_in_the_journal(tmp_path: Path) -> None:
    for each in ("bucket", "ckpt"):
        (tmp_path / each).mkdir()
    ran = in_process(FORKED.format(home=str(tmp_path)))
    assert ran.returncode == 0, ran.stderr
    assert list((tmp_path / "bucket").rglob("1.ckpt"))
    (journal,) = tmp_path.rglob("*.lines")
    assert "1.ckpt" in journal.read_text()


def test_the_pool_may_be_said_by_the_variable_after_the_plugin_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PORTUS_POOL", raising=False)
    plugin = PortusIO()
    monkeypatch.setenv("PORTUS_POOL", str(tmp_path / "pool.portus"))
    directory = tmp_path / "ckpt"
    directory.mkdir()
    plugin.run.begin(str(tmp_path))
    plugin.run.expect(str(directory), in_shards=False)
    plugin.save_checkpoint({"global_step": 1}, directory / "1.ckpt")
    plugin.teardown()
    assert portus.is_reference(directory / "1.ckpt")
    assert os.path.exists(tmp_path / "pool.portus")
