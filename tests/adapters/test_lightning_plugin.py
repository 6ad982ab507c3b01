"""``PortusIO`` by itself: both copies of Lightning, paths, names, switches, errors."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

import portus
from portus_lightning import PortusIO, stock
from portus_lightning.companion import bypass, warnings_for
from portus_lightning.patch import may_be_late

STATE = {"global_step": 3, "weight": torch.arange(6.0), "note": "x"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def io(root: Path) -> Any:
    made = PortusIO()
    made.run.begin(str(root))
    yield made
    made.teardown()


def equal(loaded: Any) -> bool:
    return bool(loaded["note"] == "x" and torch.equal(loaded["weight"], STATE["weight"]))  # type: ignore[arg-type]


# --- what it is ---


def test_it_is_a_plugin_of_both_copies_of_lightning() -> None:
    assert isinstance(PortusIO(), CheckpointIO)
    other = importlib.import_module("lightning_fabric.plugins").CheckpointIO
    assert other is not CheckpointIO
    assert isinstance(PortusIO(), other)
    assert issubclass(PortusIO, other)
    assert bool(PortusIO()) is True  # Lightning asks


@pytest.mark.long
def test_it_is_one_whatever_is_imported_first() -> None:
    program = (
        "from portus_lightning import PortusIO\n"
        "plugin = PortusIO()\n"
        "import pytorch_lightning as L\n"
        "trainer = L.Trainer(accelerator='cpu', plugins=[plugin], logger=False,\n"
        "    enable_progress_bar=False, enable_checkpointing=False)\n"
        "assert trainer.strategy.checkpoint_io is plugin\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_neither_torch_nor_lightning() -> None:
    program = (
        "import sys, portus_lightning, portus_lightning.callbacks as c\n"
        "assert c.companion_callbacks() == c.companion_callbacks_for_pytorch_lightning() == []\n"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=os.environ | path)


def test_it_is_pickled_and_copied_before_and_after_use(io: PortusIO, root: Path) -> None:
    fresh = PortusIO(root / "m.portus", model="m", max_bytes=1 << 30)
    for made in (copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh))):
        made.save_checkpoint(STATE, root / "ckpt" / "a.ckpt")
        made.teardown()
    assert (root / "m.portus").is_file()
    io.save_checkpoint(STATE, root / "ckpt" / "b.ckpt")
    other = pickle.loads(pickle.dumps(copy.deepcopy(io)))
    assert equal(other.load_checkpoint(root / "ckpt" / "b.ckpt"))


def test_arguments_out_of_range_say_so() -> None:
    with pytest.raises(portus.UsageError, match="on_error"):
        PortusIO(on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(portus.UsageError, match="fence_timeout"):
        PortusIO(fence_timeout=0)
    with pytest.raises(portus.UsageError, match="fixed_batch"):
        PortusIO(fixed_batch="both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ({"max_bytes": 1 << 30}, "files"),
        ({"durable": 2}, "storage hosts"),
    ],
)
def test_an_argument_that_files_have_no_use_for_says_what_to_do(
    argument: Any, instead: str
) -> None:
    with pytest.raises(portus.UsageError, match=f"{next(iter(argument))}: .*{instead}"):
        PortusIO(**argument)


# --- paths ---


@pytest.mark.smoke
def test_what_is_saved_loads_here_and_in_a_new_plugin(io: PortusIO, root: Path) -> None:
    path = root / "ckpt" / "deep" / "a.ckpt"
    io.save_checkpoint(STATE, path)
    assert equal(io.load_checkpoint(path))
    assert equal(PortusIO().load_checkpoint(path, map_location=lambda s, _: s, weights_only=True))
    assert equal(PortusIO().load_checkpoint(f"file://{path}", map_location="cpu"))
    assert PortusIO().load_checkpoint(path, map_location="meta")["weight"].device.type == "meta"


def test_a_relative_path_means_the_directory_at_the_call(
    io: PortusIO, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io.save_checkpoint(STATE, "ckpt/a.ckpt")
    monkeypatch.chdir("/")
    assert equal(io.load_checkpoint(root / "ckpt" / "a.ckpt"))


@pytest.mark.smoke
def test_checkpoints_of_others_and_urls_are_left_to_lightning(io: PortusIO, root: Path) -> None:
    torch.save(STATE, root / "foreign.ckpt")
    assert equal(io.load_checkpoint(root / "foreign.ckpt"))
    io.remove_checkpoint(root / "foreign.ckpt")
    assert not (root / "foreign.ckpt").exists()
    io.save_checkpoint(STATE, "memory://box/a.ckpt")
    assert equal(io.load_checkpoint("memory://box/a.ckpt"))
    io.remove_checkpoint("memory://box/a.ckpt")
    assert not fsspec.filesystem("memory").exists("/box/a.ckpt")
    (root / "sharded").mkdir()
    (root / "sharded" / "part").write_text("x")
    io.remove_checkpoint(root / "sharded")
    assert os.listdir(root) == []
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(root / "missing.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint(STATE, root / "a.ckpt", storage_options={"a": 1})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/b.ckpt", "/a/b.ckpt"),
        ("file:///a/b.ckpt", "/a/b.ckpt"),
        ("s3://bucket/b.ckpt", None),
        ("memory://b.ckpt", None),
        ("simplecache::s3://bucket/b.ckpt", None),
        ("https://host/b.ckpt", None),
    ],
)
def test_only_paths_of_this_machine_are_local(path: str, expected: str | None) -> None:
    assert stock.local_path(path) == expected


def test_a_removal_waits_for_the_save_that_replaces_it(io: PortusIO, root: Path) -> None:
    first, second = root / "ckpt" / "a.ckpt", root / "ckpt" / "b.ckpt"
    io.save_checkpoint(STATE, first)
    with io.run.saving(is_late=True):
        io.save_checkpoint(STATE, second)
        io.remove_checkpoint(first)
    assert not io.run.is_there(os.fspath(first)), "for its user it is gone"
    io.teardown()
    assert os.listdir(root / "ckpt") == ["b.ckpt"]
    io.remove_checkpoint(second)
    assert os.listdir(root / "ckpt") == []


def test_steps_come_from_the_checkpoint_or_are_counted(root: Path) -> None:
    io = PortusIO(root / "run.portus")
    for number, state in enumerate([{"global_step": 70}, {"iteration": 71}, {"a": 1}, {"b": 2}]):
        io.save_checkpoint(state, root / "ckpt" / f"{number}")
    io.teardown()
    with portus.open(root / "run.portus") as pool:
        assert [info.step for info in pool.versions()] == [70, 71, 1, 2]


# --- where the journal is, and a pool ---


def test_the_journal_is_under_the_root_and_never_in_the_checkpoint_directory(root: Path) -> None:
    def root_of(directory: Path, default: Path | None) -> str:
        io = PortusIO()
        io.run.begin(None if default is None else str(default))
        links = io.run.run_of(str(directory)).links
        return os.path.dirname(links)

    assert root_of(root / "runs" / "ckpt", root / "runs") == str(root / "runs")
    assert root_of(root / "runs" / "ckpt", None) == str(root)
    assert root_of(root.parent / "other" / "ckpt", None) == str(root.parent / "other")
    assert root_of(root.parent / "other" / "ckpt", root) == str(root)
    if os.stat("/dev/shm").st_dev != os.stat(root).st_dev:
        # On the file system of the checkpoints, so that hard links can be.
        assert root_of(Path("/dev/shm/portus-test/ckpt"), root) == "/dev/shm/portus-test"


def test_a_working_directory_that_is_gone_keeps_nothing_from_being_saved(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "gone").mkdir()
    monkeypatch.chdir(root / "gone")
    (root / "gone").rmdir()
    io = PortusIO()
    io.run.begin(str(root))
    io.save_checkpoint(STATE, root / "run/a.ckpt")
    io.teardown()
    assert equal(io.load_checkpoint(root / "run/a.ckpt"))
    assert os.listdir(root / "run") == ["a.ckpt"]


def test_a_variable_that_names_a_directory_leaves_files_where_they_belong(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is for shards alone."""
    monkeypatch.setenv("PORTUS_POOL", str(root / "shared"))
    io = PortusIO()
    io.save_checkpoint(STATE, root / "a" / "ckpt" / "x.ckpt")
    io.teardown()
    assert zipfile.is_zipfile(root / "a" / "ckpt" / "x.ckpt")
    assert not (root / "shared").exists()


# --- switches and errors ---


def test_switched_off_it_saves_as_lightning_does_and_still_loads(
    io: PortusIO, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io.save_checkpoint(STATE, root / "ckpt" / "a.ckpt")
    io.teardown()
    monkeypatch.setenv("PORTUS_DISABLE", "1")
    io.save_checkpoint(STATE, root / "ckpt" / "b.ckpt")
    assert not portus.is_reference(root / "ckpt" / "b.ckpt")
    assert equal(io.load_checkpoint(root / "ckpt" / "a.ckpt"))
    assert equal(io.load_checkpoint(root / "ckpt" / "b.ckpt"))
    monkeypatch.setenv("PORTUS_DISABLE", "0")
    assert stock.is_on()


def test_on_other_systems_it_says_so_once_and_saves_as_lightning_does(
    io: PortusIO, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    for name in ("a", "b"):
        io.save_checkpoint(STATE, root / "ckpt" / name)
    assert caplog.text.count("saves on Linux only") == 1
    assert not portus.is_reference(root / "ckpt" / "a")


def test_what_cannot_be_pickled_is_refused_by_its_place_and_harms_nothing(
    io: PortusIO, root: Path
) -> None:
    path = root / "ckpt" / "a.ckpt"
    with io.run.saving(is_late=True):
        io.save_checkpoint(STATE, path)
        with pytest.raises(portus.UsageError, match=r"state\['hyper_parameters'\]\['odd'\]"):
            io.save_checkpoint(STATE | {"hyper_parameters": {"odd": lambda: None}}, path)
    io.teardown()
    assert equal(torch.load(path))
    assert os.listdir(root / "ckpt") == ["a.ckpt"]


def test_a_pool_that_cannot_be_opened_raises_at_the_first_save(root: Path) -> None:
    (root / "file.portus").write_bytes(b"this is no pool" * 1000)
    with pytest.raises(portus.PortusError):
        PortusIO(root / "file.portus").save_checkpoint(STATE, root / "ckpt" / "a.ckpt")
    assert not (root / "ckpt").exists()


def test_a_forked_child_loads_and_saves_by_itself(io: PortusIO, root: Path) -> None:
    io.save_checkpoint(STATE, root / "ckpt" / "a.ckpt")
    child = os.fork()
    if child == 0:
        try:
            assert equal(io.load_checkpoint(root / "ckpt" / "a.ckpt"))
            io.save_checkpoint(STATE, root / "ckpt" / "b.ckpt")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert equal(io.load_checkpoint(root / "ckpt" / "b.ckpt"))


# --- what is said at setup ---


class Fake:
    """Stands for a Trainer: ``warnings_for`` reads no more of it."""

    def __init__(self, strategy: object, *loggers: object) -> None:
        self.strategy, self.loggers = strategy, loggers
        self.checkpoint_callbacks: list[object] = []


def named(name: str, *bases: type, **attributes: object) -> Any:
    return type(name, bases, {})() if not attributes else _with(type(name, bases, {})(), attributes)


def _with(thing: Any, attributes: dict[str, object]) -> Any:
    for name, value in attributes.items():
        setattr(thing, name, value)
    return thing


Strategy = type("Strategy", (), {"save_checkpoint": lambda self: None})
Deep = type("DeepSpeedStrategy", (Strategy,), {"save_checkpoint": lambda self: None})


@pytest.mark.parametrize(
    ("strategy", "passes"),
    [
        (named("DDPStrategy", Strategy), True),
        (named("SingleDeviceStrategy", Strategy), True),
        (named("Mine", Deep), False),
        (type("Unknown", (Strategy,), {"save_checkpoint": lambda self: None})(), False),
    ],
)
def test_a_strategy_that_bypasses_the_plugin_is_named(strategy: Any, passes: bool) -> None:
    assert (bypass(strategy, PortusIO().run) == "") == passes
    said = warnings_for(Fake(strategy), PortusIO().run)
    assert passes == (said == [])
    assert passes or "do NOT go through Portus" in said[0]


def lightnings(name: str, **attributes: object) -> Any:
    """A strategy of Lightning, of which nothing was set up."""
    strategies = importlib.import_module("lightning.pytorch.strategies")
    return _with(object.__new__(getattr(strategies, name)), attributes)


def test_the_strategies_of_lightning_are_told_apart() -> None:
    for name in ("SingleDeviceStrategy", "DDPStrategy"):
        assert bypass(lightnings(name), PortusIO().run) == ""
    assert bypass(lightnings("DeepSpeedStrategy"), PortusIO().run) == "DeepSpeedStrategy"


@pytest.mark.parametrize(
    ("strategy", "is_sharded"),
    [
        (lightnings("FSDPStrategy", _state_dict_type="sharded"), True),
        (lightnings("FSDPStrategy", _state_dict_type="full"), False),
        (lightnings("ModelParallelStrategy", _save_distributed_checkpoint=True), True),
        (lightnings("ModelParallelStrategy", _save_distributed_checkpoint=False), False),
    ],
)
def test_strategies_that_save_in_shards_go_through_directories_or_a_host(
    strategy: Any, is_sharded: bool, tmp_path: Path
) -> None:
    assert bypass(strategy, PortusIO().run) == ""
    assert bypass(strategy, PortusIO(pool="portus://host:7117").run) == ""
    (tmp_path / "one.portus").touch()
    refused = bypass(strategy, PortusIO(pool=tmp_path / "one.portus").run)
    assert ("shards go to a directory, or to a storage host" in refused) == is_sharded
    with pytest.raises(portus.UsageError, match="a storage host is no mirror"):
        PortusIO(mirror="portus://host:7117")
    for io in (PortusIO(), PortusIO(pool="portus://host:7117")):
        assert warnings_for(Fake(strategy), io.run) == []


def logger(name: str, **attributes: object) -> Any:
    """A logger of Lightning, of which nothing was set up."""
    loggers = importlib.import_module("lightning.pytorch.loggers")
    return _with(object.__new__(getattr(loggers, name)), attributes)


def waits(*loggers: object, top_k: int = 1) -> bool:
    """Whether training waits for each save because of these loggers; it is said then."""
    fake: Any = Fake(named("DDPStrategy", Strategy), *loggers)
    fake.checkpoint_callbacks = [ModelCheckpoint(monitor="loss", save_top_k=top_k)]
    fake.lightning_module = torch.nn.Linear(1, 1)
    is_late = may_be_late(fake, fake.checkpoint_callbacks[0])
    said = warnings_for(fake, PortusIO().run)
    assert is_late == (said == [])
    return not is_late


def test_training_waits_for_loggers_that_upload_each_checkpoint() -> None:
    """As WandbLogger and MLFlowLogger say it: at the end, unless ``save_top_k`` is -1."""
    assert waits(logger("WandbLogger", _log_model="all"))
    assert not waits(logger("WandbLogger", _log_model=True))
    assert waits(logger("WandbLogger", _log_model=True), top_k=-1)
    assert not waits(logger("MLFlowLogger", _log_model=False), top_k=-1)


@pytest.mark.parametrize(
    ("base", "looks"), [("Logger", False), ("Logger", True), ("TensorBoardLogger", False)]
)
def test_training_waits_for_a_logger_that_nobody_knows_and_that_looks_at_checkpoints(
    base: str, looks: bool
) -> None:
    loggers = importlib.import_module("lightning.pytorch.loggers")
    methods = {"after_save_checkpoint": lambda self, callback: None} if looks else {}
    mine = type("Mine", (getattr(loggers, base),), methods)
    setattr(mine, "__abstractmethods__", frozenset())  # noqa: B010  # it is never used
    assert waits(object.__new__(mine)) == looks


@pytest.mark.parametrize(
    ("methods", "is_late"),
    [
        ({}, True),
        ({"format_checkpoint_name": lambda self, *_: "x", "state_key": "y"}, True),
        ({"_save_checkpoint": lambda self, *_: None}, False),
        ({"on_train_epoch_end": lambda self, *_: None}, False),
        ({"on_validation_end": lambda self, *_: None}, False),
        ({"_remove_checkpoint": lambda self, *_: None}, False),
    ],
)
def test_training_waits_for_a_callback_that_does_more_than_lightnings(
    methods: dict[str, Any], is_late: bool
) -> None:
    fake: Any = Fake(named("DDPStrategy", Strategy))
    fake.lightning_module = torch.nn.Linear(1, 1)
    mine = type("Mine", (ModelCheckpoint,), methods)()
    fake.checkpoint_callbacks = [ModelCheckpoint(), mine]
    assert may_be_late(fake, mine) == is_late
    assert may_be_late(fake, fake.checkpoint_callbacks[0]) == is_late, "it may look there too"


def test_metrics_have_units_in_their_names() -> None:
    stats = portus.SaveStats(call_s=0.002, fence_s=0.001, total_s=0.5, state_bytes=10**9)
    metrics = stats.metrics()
    assert metrics["portus/blocked_ms"] == pytest.approx(3.0)
    assert metrics["portus/save_gb_per_s"] == pytest.approx(2.0)
    assert portus.SaveStats().metrics()["portus/save_gb_per_s"] == 0


def test_stock_plugins_come_from_the_copy_that_is_loaded() -> None:
    assert type(stock.torch_io()) is TorchCheckpointIO


def test_a_file_that_is_not_there_is_said_in_the_words_of_lightning(tmp_path: Path) -> None:
    from lightning.fabric.plugins import TorchCheckpointIO

    path = str(tmp_path / "none.ckpt")
    with pytest.raises(FileNotFoundError) as stock:
        TorchCheckpointIO().load_checkpoint(path)
    with pytest.raises(FileNotFoundError) as ours:
        PortusIO().load_checkpoint(path)
    assert str(ours.value) == str(stock.value)
