"""From a reference file to its state: what may be opened, what is waited for, what is said."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch

import portus
from portus.client.files import reference as ref
from portus.client.loading.resolve import POOLS, KnownPools, load_reference, load_text, pool_of
from portus.errors import CorruptionError, StaleError, UsageError
from portus.format.reference import Reference, encode
from portus.index import roots
from portus.index.directory import links_directory
from portus.index.place import Place
from portus.index.pool import format_pool
from portus.index.roots import read_superblock
from portus.media.local import LocalFiles
from portus.spec import VersionInfo

FILES = LocalFiles(mapped=False)


class Content:
    """Pools as this test knows them: by path, what each version holds. Opens real pool files."""

    def __init__(self) -> None:
        self.versions: dict[bytes, object] = {}
        self.another_writes: Callable[[], bool] = lambda: False
        self.opened: list[str] = []

    def open(self, pool: Place) -> OneView:
        self.opened.append(pool.path)
        medium = FILES.open(pool.path, writable=False)
        try:
            return OneView(self, read_superblock(medium).uuid)
        finally:
            medium.close()


@dataclasses.dataclass
class OneView:
    content: Content
    uuid: bytes
    closed: bool = False

    def versions(self) -> list[VersionInfo]:
        return [VersionInfo("m", 0, 0, 0, token, 0, 0) for token in self.content.versions]

    def has_writer(self) -> bool:
        return self.content.another_writes()

    def load_version(self, token: bytes, part: str | None = None) -> object:
        assert not self.closed
        assert part is None
        if token not in self.content.versions:
            raise StaleError(f"no version {token.hex()}")
        return self.content.versions[token]

    def use_version(self, token: bytes, use: Callable[[Any, Any], Any]) -> Any:
        raise AssertionError("whoever only loads has no use for it")

    def close(self) -> None:
        self.closed = True


class Saving:
    """A pool open in this process, with one save under way until ``finish``."""

    def __init__(self, view: OneView, token: str, path: Path) -> None:
        self.uuid, self._view = view.uuid, view
        self._token, self._path, self._done = bytes.fromhex(token), str(path), threading.Event()
        self.asked = threading.Event()
        self.under_way = True

    def load_version(self, token: bytes, part: str | None = None) -> object:
        return self._view.load_version(token, part)

    def use_version(self, token: bytes, use: Callable[[Any, Any], Any]) -> Any:
        return self._view.use_version(token, use)

    def await_saves(self, path: str | None, token: bytes) -> bool:
        if not self.under_way or (token != self._token and path != self._path):
            return False
        self.asked.set()
        assert self._done.wait(20)
        return True

    def finish(self, act: Callable[[], object]) -> None:
        act()
        self.under_way = False
        self._done.set()


class Run:
    """A training run: ``home/run/.portus/p.portus`` and checkpoints in ``home/run/ckpt``."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.content = Content()
        self.pools = KnownPools(self.content.open)
        self.pool = home / "run" / ".portus" / "p.portus"
        self.ckpt = home / "run" / "ckpt"
        for directory in (self.pool.parent, self.ckpt, Path(links_directory(str(self.pool)))):
            directory.mkdir(parents=True)
        self.uuid = make_pool(self.pool)
        self.made = 0

    def reference(self, path: Path, **changes: object) -> Reference:
        self.made += 1
        made = Reference(
            id=f"{self.made:032x}",
            token=f"{self.made + 4096:032x}",
            pool=self.uuid.hex(),
            pool_path=str(self.pool),
            pool_relative=os.path.relpath(self.pool, path.parent),
            model="m",
            step=self.made,
            written_path=str(path),
            written_ns=0,
        )
        return dataclasses.replace(made, **changes)  # type: ignore[arg-type]

    def save(self, name: str, *, commit: bool = True, **changes: object) -> Path:
        path = self.ckpt / name
        made = self.reference(path, **changes)
        ref.place(str(path), made, FILES, links_directory(str(self.pool)))
        if commit:
            self.commit(made)
        return path

    def commit(self, made: Reference) -> None:
        self.content.versions[bytes.fromhex(made.token)] = {"step": made.step}


def decoded(path: Path) -> Reference:
    found = ref.read(path)
    assert found is not None
    return found


def make_pool(path: Path) -> bytes:
    medium = FILES.create(str(path), 64 << 10)
    format_pool(medium)
    uuid = read_superblock(medium).uuid
    medium.close()
    return uuid


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def run_of_process(run: Run) -> Iterator[Run]:
    """The pools of this process are the run's, and torch knows the global."""
    before = POOLS.opener
    POOLS.opener = run.content.open
    portus.register_reference_loader()
    yield run
    POOLS.opener = before


# --- what may be opened (V6) ---


def test_a_pool_beside_the_reference_or_above_it_is_found(run: Run) -> None:
    path = run.save("deep.ckpt")
    assert load_reference(path, run.pools) == {"step": 1}
    deeper = run.ckpt / "a" / "b" / "copy.ckpt"
    deeper.parent.mkdir(parents=True)
    shutil.copy(path, deeper)
    assert load_reference(deeper, run.pools) == {"step": 1}


def test_a_run_moved_as_a_whole_still_loads_and_so_does_a_relative_path(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save("a.ckpt")
    (run.home / "run").rename(run.home / "elsewhere")
    monkeypatch.chdir(run.home / "elsewhere")
    assert load_reference("ckpt/a.ckpt", run.pools) == {"step": 1}


def test_a_reference_moved_away_leads_back_by_its_hard_link(run: Run) -> None:
    path = run.save("a.ckpt")
    away = run.home / "away.ckpt"
    path.rename(away)
    assert load_reference(away, run.pools) == {"step": 1}


def test_a_copy_elsewhere_names_the_pool_and_what_allows_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copy(run.save("a.ckpt"), run.home / "copy.ckpt"))
    with pytest.raises(UsageError) as caught:
        load_reference(copy, run.pools)
    assert run.uuid.hex() in str(caught.value)
    assert f"PORTUS_POOL={run.pool}" in str(caught.value)
    assert run.content.opened == []
    for allowed in (run.pool, run.pool.parent):
        monkeypatch.setenv("PORTUS_POOL", str(allowed))
        assert load_reference(copy, run.pools) == {"step": 1}


def test_an_allowed_pool_is_found_under_another_name(run: Run) -> None:
    copy = Path(shutil.copy(run.save("a.ckpt"), run.home / "copy.ckpt"))
    make_pool(run.pool.parent / "other.portus")
    (run.pool.parent / "note.txt").write_text("x")
    os.mkfifo(run.pool.parent / "pipe")
    run.pool.rename(run.pool.parent / "renamed.portus")
    run.pools.allow(Place.named(run.pool.parent))
    assert load_reference(copy, run.pools) == {"step": 1}


def test_the_pool_must_have_the_identity_that_the_reference_names(run: Run) -> None:
    path = run.save("a.ckpt")
    run.pool.unlink()
    make_pool(run.pool)
    with pytest.raises(UsageError, match="leads to pool"):
        load_reference(path, run.pools)
    assert run.content.opened == []


def test_a_pool_that_cannot_be_read_is_named_with_what_is_wrong_with_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.save("a.ckpt")
    os.truncate(run.pool, 4096)
    with pytest.raises(CorruptionError, match=rf"found 4096.*portus rescue {run.pool}"):
        load_reference(path, run.pools)
    make_pool(run.pool.parent / "p+2.portus")  # its successor, which can be read
    with pytest.raises(CorruptionError, match="found 4096"):
        pool_of(path, run.pools)
    monkeypatch.setenv("PORTUS_POOL", str(run.pool))
    copy = shutil.copy(path, run.home / "copy.ckpt")
    run.pool.write_bytes(b"x" * 100_000)
    with pytest.raises(CorruptionError, match="is not a Portus pool"):
        load_reference(copy, run.pools)


def test_a_pool_of_a_newer_portus_says_that_this_one_is_to_be_upgraded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.save("a.ckpt")
    monkeypatch.setattr(roots, "FORMAT_VERSION", 0)
    with pytest.raises(UsageError, match=r"newer Portus.*Upgrade"):
        load_reference(path, run.pools)


def crafted(run: Run, path: Path, **changes: object) -> Path:
    path.write_bytes(encode(run.reference(path, **changes)))
    return path


def test_a_crafted_reference_opens_nothing_of_its_choosing(run: Run, tmp_path: Path) -> None:
    victim = tmp_path / "victim" / "secret.portus"
    victim.parent.mkdir()
    uuid = make_pool(victim)
    stranger = tmp_path / "downloads" / "nice.ckpt"
    stranger.parent.mkdir()
    alias = tmp_path / "alias"
    alias.symlink_to(victim.parent)
    for named in (
        str(victim),
        str(alias / "secret.portus"),
        "//host/share/secret.portus",
        "\\\\host\\share\\secret.portus",
        "victim/secret.portus",
        "/proc/self/root" + str(victim),
    ):
        crafted(
            run,
            stranger,
            pool=uuid.hex(),
            pool_path=named,
            pool_relative="../victim/secret.portus",
        )
        with pytest.raises(UsageError, match="may not choose"):
            load_reference(stranger, run.pools)
    assert run.content.opened == []


def test_a_hard_link_is_believed_only_through_real_directories(run: Run, tmp_path: Path) -> None:
    away = tmp_path / "away.ckpt"
    run.save("a.ckpt").rename(away)
    (run.home / "run").rename(run.home / "real")
    (run.home / "run").symlink_to("real")
    with pytest.raises(UsageError, match="may not choose"):
        load_reference(away, run.pools)


def test_a_name_in_the_pool_directory_cannot_climb_out_of_it(run: Run, tmp_path: Path) -> None:
    uuid = make_pool(tmp_path / "secret.portus")
    path = crafted(run, run.ckpt / "x.ckpt", pool=uuid.hex(), pool_path="/a/../secret.portus")
    with pytest.raises(UsageError):
        load_reference(path, run.pools)


# --- V11 and what a pending reference does ---


def waiting(
    run: Run, path: Path, token: str, act: Callable[[], object], loaded: Path | None = None
) -> object:
    """What a load gives that starts while a save of ``path`` is under way; ``act`` ends it."""
    saving = Saving(run.content.open(Place.named(run.pool)), token, path)
    run.pools.opened(saving)
    results: list[object] = []

    def load() -> None:
        try:
            results.append(load_reference(loaded or path, run.pools))
        except UsageError as error:
            results.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    assert saving.asked.wait(20)
    assert results == []
    saving.finish(act)
    thread.join(20)
    run.pools.closed(saving)
    return results[0]


def test_a_load_waits_for_the_save_of_a_pending_reference(run: Run) -> None:
    path = run.save("a.ckpt", commit=False)
    made = ref.read(path)
    assert made is not None
    assert waiting(run, path, made.token, lambda: run.commit(made)) == {"step": 1}


def test_a_load_waits_for_the_save_that_replaces_the_file_also_through_a_link(run: Run) -> None:
    path = run.save("a.ckpt")
    assert waiting(run, path, "f" * 32, lambda: run.save("a.ckpt")) == {"step": 2}
    (run.ckpt / "last.ckpt").symlink_to("a.ckpt")
    linked = run.ckpt / "last.ckpt"
    assert waiting(run, path, "f" * 32, lambda: run.save("a.ckpt"), linked) == {"step": 3}


def test_a_save_that_failed_falls_back_and_names_both_steps(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.save("a.ckpt")
    path = run.save("b.ckpt", commit=False, fallback=f"{4097:032x}", fallback_step=1)
    with caplog.at_level(logging.WARNING, "portus"):
        assert load_reference(path, run.pools) == {"step": 1}
    assert "step 2" in caplog.text
    assert "loaded step 1" in caplog.text
    assert str(path) in caplog.text


def test_a_save_that_failed_falls_back_first_to_the_one_that_was_in_flight_before_it(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.save("a.ckpt")
    flying = run.save("last.ckpt", commit=False)
    before = {"fallback": f"{4097:032x}", "fallback_step": 1}
    path = run.save("b.ckpt", commit=False, in_flight=f"{4098:032x}", in_flight_step=2, **before)
    assert load_reference(path, run.pools) == {"step": 1}
    made = ref.read(flying)
    assert made is not None
    run.commit(made)
    del run.content.versions[bytes.fromhex(f"{4097:032x}")]  # by that commit
    with caplog.at_level(logging.WARNING, "portus"):
        assert load_reference(path, run.pools) == {"step": 2}
    assert "loaded step 2" in caplog.text


def test_a_save_that_failed_with_nothing_before_it_says_so(run: Run) -> None:
    path = run.save("a.ckpt", commit=False)
    with pytest.raises(UsageError, match=r"step 1 of model 'm' was never committed.*portus ls"):
        load_reference(path, run.pools)
    lost = run.save("b.ckpt", commit=False, fallback="e" * 32, fallback_step=1)
    with pytest.raises(UsageError, match="and so was step 1"):
        load_reference(lost, run.pools)


def test_a_load_waits_for_another_process_that_is_about_to_commit(run: Run) -> None:
    path = run.save("a.ckpt", commit=False, written_ns=time.time_ns())
    made = ref.read(path)
    assert made is not None
    asked = []

    def another_writes() -> bool:
        asked.append(True)
        if len(asked) == 3:
            run.commit(made)
        return True

    run.content.another_writes = another_writes
    assert load_reference(path, run.pools) == {"step": 1}
    assert len(asked) == 3


def test_a_file_that_is_replaced_while_it_is_waited_for_is_read_again(run: Run) -> None:
    path = run.save("a.ckpt", commit=False, written_ns=time.time_ns())
    asked = []

    def another_writes() -> bool:
        asked.append(True)
        if len(asked) == 3:  # what was waited for was committed, and retired again
            run.save("a.ckpt", written_ns=time.time_ns())
        return True

    run.content.another_writes = another_writes
    assert load_reference(path, run.pools) == {"step": 2}
    assert len(asked) == 3


def test_nobody_waits_for_a_writer_that_died_or_a_reference_that_is_old(run: Run) -> None:
    run.save("a.ckpt")
    fallback = {"fallback": f"{4097:032x}", "fallback_step": 1}
    asked = []

    def another_writes() -> bool:
        asked.append(True)
        return len(asked) < 3  # then it is killed

    run.content.another_writes = another_writes
    killed = run.save("b.ckpt", commit=False, written_ns=time.time_ns(), **fallback)
    assert load_reference(killed, run.pools) == {"step": 1}
    assert len(asked) == 3
    run.content.another_writes = lambda: True
    for age_s in (61, -10):
        written_ns = time.time_ns() - age_s * 10**9
        old = run.save("c.ckpt", commit=False, written_ns=written_ns, **fallback)
        assert load_reference(old, run.pools) == {"step": 1}


def test_a_file_replaced_between_reading_and_loading_is_read_again(run: Run) -> None:
    path = run.save("a.ckpt")
    old = ref.read(path)
    assert old is not None
    opener = run.pools.opener

    def replace_then_open(pool: Place) -> OneView:
        if run.made < 3:
            run.content.versions.clear()
            run.save("a.ckpt")
        return opener(pool)  # type: ignore[return-value]

    assert load_reference(path, KnownPools(replace_then_open)) == {"step": 3}


def test_a_file_replaced_by_one_that_was_never_committed_falls_back(run: Run) -> None:
    path, before = run.save("a.ckpt"), run.save("b.ckpt")
    opener = run.pools.opener
    fallback = {"fallback": decoded(before).token, "fallback_step": 2}

    def replace_then_open(pool: Place) -> OneView:
        if len(run.content.versions) == 2:
            del run.content.versions[next(iter(run.content.versions))]
            run.save("a.ckpt", commit=False, **fallback)
        return opener(pool)  # type: ignore[return-value]

    assert load_reference(path, KnownPools(replace_then_open)) == {"step": 2}


def test_a_commit_while_a_load_falls_back_is_no_loss(run: Run) -> None:
    """Of the save in flight: it retires what is fallen back to, and comes in its place."""
    before, flying = run.save("a.ckpt"), run.save("b.ckpt", commit=False)
    first, second = decoded(before), decoded(flying)
    instead = {"in_flight": second.token, "in_flight_step": 2}
    fallback = {"fallback": first.token, "fallback_step": 1}
    path = run.save("c.ckpt", commit=False, **instead, **fallback)
    looked: list[bytes] = []

    class Committing(OneView):
        def load_version(self, token: bytes, part: str | None = None) -> object:
            looked.append(token)
            if token.hex() == first.token:
                run.content.versions.clear()
                run.commit(second)
            return super().load_version(token, part)

    def open_one(pool: Place) -> OneView:
        return Committing(run.content, run.content.open(pool).uuid)

    assert load_reference(path, KnownPools(open_one)) == {"step": 2}
    assert len(looked) == 4


def test_an_open_pool_is_used_as_it_is_wherever_it_lies(run: Run) -> None:
    copy = Path(shutil.copy(run.save("a.ckpt"), run.home / "copy.ckpt"))
    saving = Saving(run.content.open(Place.named(run.pool)), "f" * 32, copy)
    saving.under_way = False
    run.pools.opened(saving)
    run.content.opened.clear()
    assert load_reference(copy, run.pools) == {"step": 1}
    assert run.content.opened == []
    run.pools.closed(saving)
    with pytest.raises(UsageError):
        load_reference(copy, run.pools)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_knows_no_open_pool(run: Run) -> None:
    saving = Saving(run.content.open(Place.named(run.pool)), "f" * 32, run.ckpt / "a.ckpt")
    run.pools.opened(saving)
    child = os.fork()
    if child == 0:
        os._exit(0 if not run.pools.open_ones() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run.pools.open_ones() == [saving]


def test_what_is_no_reference_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "real.ckpt")
    for name in ("real.ckpt", "missing.ckpt"):
        with pytest.raises(UsageError, match=name):
            load_reference(tmp_path / name, run.pools)


# --- through torch.load ---

MODES: list[dict[str, object]] = [
    {},
    {"weights_only": True},
    {"weights_only": True, "mmap": True},
    {"weights_only": False},
    {"weights_only": False, "mmap": True},
    {"map_location": "cpu"},
    {"map_location": "cpu", "mmap": True},
    {"map_location": torch.device("cpu"), "weights_only": False},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_torch_load_gives_the_state_in_every_mode(
    run_of_process: Run, mode: dict[str, object]
) -> None:
    path = run_of_process.save("a.ckpt")
    weight = torch.nn.Parameter(torch.arange(4.0))
    run_of_process.content.versions[(4097).to_bytes(16, "big")] = {"w": weight}
    loaded = torch.load(path, **mode)  # type: ignore[arg-type]
    assert loaded["w"] is weight


def test_torch_load_gives_the_state_from_every_kind_of_file(
    run_of_process: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_of_process.save("a.ckpt")
    monkeypatch.chdir(path.parent)
    for named in (path, str(path), "a.ckpt", os.fsencode(path).decode()):
        assert torch.load(named) == {"step": 1}
    with open(path, "rb") as file, fsspec.open(f"file://{path}", "rb") as remote:
        assert torch.load(file) == torch.load(remote) == {"step": 1}
    with open(path, "rb", buffering=0) as raw, io.BufferedReader(raw) as wrapped:
        assert torch.load(wrapped) == {"step": 1}


def test_bytes_without_a_path_lead_only_to_configured_pools(
    run_of_process: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = run_of_process.save("a.ckpt").read_bytes()
    with pytest.raises(UsageError, match="this reference leads to pool"):
        torch.load(io.BytesIO(data))
    monkeypatch.setenv("PORTUS_POOL", str(run_of_process.pool))
    assert torch.load(io.BytesIO(data)) == {"step": 1}


def test_a_text_that_was_changed_is_damage(run_of_process: Run) -> None:
    path = run_of_process.save("a.ckpt")
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":2'))
    for weights_only in (True, False):
        with pytest.raises(CorruptionError):
            torch.load(path, weights_only=weights_only)
    with pytest.raises(CorruptionError):
        load_text("")


# --- where Portus is not imported, or not there ---


def fresh(program: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | environment,
    )


@pytest.mark.long
def test_a_machine_without_portus_is_told_what_to_do(run: Run) -> None:
    path = run.save("a.ckpt")
    told = fresh("import torch, sys; torch.load(sys.argv[1])", path, **WITHOUT_ENTRY_POINTS)
    assert "portus.this_is_a_pointer_run_portus_export" in told.stderr


WITHOUT_ENTRY_POINTS = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@pytest.mark.long
def test_torch_loads_a_reference_where_only_the_entry_point_ran(run: Run, tmp_path: Path) -> None:
    path = run.save("a.ckpt")
    information = tmp_path / "site" / "portus_checkpoint-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: portus-checkpoint\n")
    (information / "entry_points.txt").write_text(
        "[torch.backends]\nportus = portus_in_torch:allow_references\n"
    )
    core = str(Path(portus.__file__).parents[1])
    told = fresh(
        "import sys, torch\n"
        "assert 'portus.client' not in sys.modules, 'too much was imported'\n"
        "torch.load(sys.argv[1])\n",
        path,
        PYTHONPATH=f"{tmp_path / 'site'}{os.pathsep}{core}",
    )
    # The global is allowed, and Portus looks for the version; the pool of this test is empty.
    assert "was never committed" in told.stderr, told.stderr


def test_registering_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.serialization", None)
    portus.register_reference_loader()
