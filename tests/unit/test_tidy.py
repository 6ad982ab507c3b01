"""The habits of this repository that no linter knows, one test each."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages import FOLDERS, ROOT

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTION_LINES_MAX = 80
FORBIDDEN_STEMS = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}

# Where a broad except is right, as "file: function", and why.
BROAD_EXCEPT = {
    "core/portus_in_torch.py: _register": "an error would break import torch for everybody",
    "core/portus/cli/doctor.py: adapters": "an adapter that is broken is a finding, not an end",
    "core/portus/reach/pools/weights_only.py: refusing": "what torch makes of nonsense; told",
    "core/portus/engine/state/pickling.py: _place_of_failure": "looks for the part that fails",
    "core/portus/engine/state/pickling.py: pickle_state": "code of a user; told with its place",
    "core/portus/engine/image/key_paths.py: is_ordinary": (
        "what cannot be followed is not ordinary, and is loaded the long way"
    ),
    "core/portus/engine/image/key_paths.py: storage_places": (
        "a message without it is better than none"
    ),
    "core/portus/engine/image/key_paths.py: storages_in": (
        "what is no pickle is a finding of a check"
    ),
    "core/portus/engine/fence/fence.py: _await_copy": "in the user's step; must not end training",
    "core/portus/reach/mirror/background_copier.py: _run": "the top of its thread; it is told",
    "core/portus/reach/shards/directories.py: read_metadata": "what torch's metadata hold; told",
    "core/portus/reach/shards/rank_contents.py: _naming": "code of a planner; told with its name",
    "core/portus/reach/shards/plans.py: agree": "other ranks wait for a word; raised after",
    "core/portus/reach/versions/parallel.py: abreast": "raised where the result is taken",
    "core/portus/reach/versions/parallel.py: take_part": "raised where the result is taken",
    "core/portus/engine/copying/thread.py: finish": "raised when the threads are over",
    "core/portus/engine/copying/thread.py: share_work": "raised when the threads are over",
    "core/portus/engine/copying/thread.py: take_part": "raised when the threads are over",
    "core/portus/companions/embedding/committer.py: _error_of": (
        "the top of the worker thread; it is kept"
    ),
    "core/portus/companions/embedding/committer.py: _catch_error": "raised by the waiting thread",
    "core/portus/engine/files/queue.py: _run": "the top of the worker thread; the error is kept",
    "portus_accelerate/loading.py: _positions_in": "what Accelerate passes over, too; it is logged",
    "portus_accelerate/autoload.py: look": "inside of an import; it is said, and stock goes on",
}

# Who names one place outside of places, and why. The list only becomes shorter.
NAMED_PLACES = {
    "core/portus/cli/files.py": "commands on paths, which are those of files",
    "core/portus/cli/mirror.py": "compares a mirror with the pool that it is of",
    "core/portus/cli/rm.py": "a pointer leads to a version, which goes with the last one",
    "core/portus/cli/training.py": "journals of runs are files in directories",
}

# Words that no docstring begins with: what they stand for is in the name above, or nowhere.
FRAGMENTS = (
    "of by at in on for from to with without within into onto over below above between behind "
    "beside through until before after during since as it they them these those this that its "
    "their who whom whose which he so if there"
)

# Who may unpickle or write a pickle, and why. Nothing read from a pool ever is (V6).
PLAIN_THREADS = {
    "core/portus/engine/files/queue.py": (
        "a condition says that it ended; it is joined after that"
    ),
    "core/portus/companions/job/preemption.py": "uses nothing of who waits for it, a limited time",
    "core/portus/reach/transport/host.py": "nobody waits for it",
    "core/portus/reach/daemon/admin.py": "nobody waits for it",
    "core/portus/reach/daemon/metrics.py": "nobody waits for it",
    "core/portus/reach/daemon/scrubber.py": "in a process where signals raise nothing",
    "core/portus/reach/daemon/server.py": "in a process where signals raise nothing",
}
"""Modules that start threads which are no ``JoinableThread``, and why they may."""

LARGE = {
    "reach/dcp/directory_writer: PortusStorageWriter": "torch's interface has 12 calls,"
    " and each has a part for the rank and one for the coordinator",
    "reach/versions/host": "one save's conversation with a host, request by request",
    "companions/loaders/cursor": "a loader with its position: iteration and state are"
    " one thing, which must agree at each batch",
    "companions/loaders/cursor: DataCursor": (
        "stands for a DataLoader, whose attributes it passes on"
    ),
    "reach/training/file_mirror": "what a mirror has against what a run has: both"
    " halves change under one lock",
    "reach/training/file_mirror: DirectoryMirror": "the same: one lock, one note",
    "engine/directory/publisher": "one state machine: drafts, holds, spares, redo markers",
    "engine/directory/publisher: Publisher": "one state machine, under one lock",
    "reach/index/pool: PoolWriter": "space, commits and retirement change one root; what"
    " can be apart is (free_space, line, roots, keep)",
    "engine/pipeline/run: Save": "the stages of one save, under one lock",
    "reach/protocol/messages": "every message, declared in one place",
    "companions/shelf/shelf: Shelf": "most methods are those of a mapping",
    "reach/transport/host": "a client's connections to one host",
    "reach/transport/stream": "one framing: its two ends are read together",
    "reach/transport/stream: Link": "one connection's frames, deadlines and stops",
}
"""Modules of more than 500 lines, and classes of more than 25 methods, and why they are one."""

PARTICIPLES = {
    "engine/pipeline/handle: SaveHandle.done": "public, and called as that of a Future",
    "engine/pipeline/handle: SaveHandle.committed": "public, a property beside `done`",
}
"""Methods with a participle for a name, and why."""

MODULE_LINES_MAX = 500
METHODS_MAX = 25

PICKLE = {
    "core/portus/engine/state/pickling.py": "makes the pickle of torch.save; loads none",
    "core/portus/engine/image/key_paths.py": (
        "every class is a stand-in, so nothing of a pickle runs"
    ),
    "core/portus/engine/loading/torch_file.py": "has torch load a file, by its own rules",
    "core/portus/reach/leaving/export.py": "loads with weights_only, and saves plain tensors",
    "core/portus/reach/leaving/outline.py": "shows a file, with weights_only and without bytes",
    "core/portus/reach/pools/weights_only.py": "loads tables, by torch's rules of weights_only",
    "core/portus/reach/shards/rank_contents.py": "saves other values as torch's planner does",
    "core/portus/reach/shards/directories.py": "torch's own metadata, as torch loads them",
}


def package_files() -> list[Path]:
    """Every module that is shipped."""
    found = sorted(path for folder in FOLDERS.values() for path in folder.rglob("*.py"))
    found.append(ROOT / "core" / "portus_in_torch.py")
    assert len(found) > 10
    return found


def all_files() -> list[Path]:
    """Every text file that belongs to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git clone")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A module, parsed once for all tests here."""
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions of a module, inner ones too, as ("core/portus/x.py: name", node)."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{path.relative_to(ROOT)}: {node.name}", node


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, FUNCTION)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines, without the docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def test_no_module_is_a_drawer_for_everything() -> None:
    assert [p for p in package_files() if FORBIDDEN_STEMS & set(p.stem.strip("_").split("_"))] == []


def test_no_function_is_long() -> None:
    long = {name: length(node) for path in package_files() for name, node in functions(path)}
    assert {name: lines for name, lines in long.items() if lines > FUNCTION_LINES_MAX} == {}


def test_what_is_large_has_a_reason() -> None:
    large = set()
    for path in package_files():
        name = str(path.relative_to(ROOT).with_suffix("")).removeprefix("core/portus/")
        if path.read_text().count("\n") > MODULE_LINES_MAX:
            large.add(name)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and len(methods(node)) > METHODS_MAX:
                large.add(f"{name}: {node.name}")
    assert sorted(large - {*LARGE}) == []
    assert sorted({*LARGE} - large) == [], "they are small by now"


def test_no_class_is_called_a_manager() -> None:
    names = [
        node.name
        for path in package_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    ]
    assert [name for name in names if re.search("Manager|Utils?$", name)] == []


def test_nothing_that_is_called_has_a_participle_for_a_name() -> None:
    """ "checked", "held_in": neither a verb nor a noun. "hidden_name" is a noun."""
    found = []
    for path in package_files():
        module = str(path.relative_to(ROOT).with_suffix("")).removeprefix("core/portus/")
        owners = {
            id(each): f"{node.name}."
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.ClassDef)
            for each in methods(node)
        }
        names = [path.stem]
        for _, node in functions(path):
            names.append(f"{owners.get(id(node), '')}{node.name}")
        found += [f"{module}: {name}" for name in names if _is_participle(name.split(".")[-1])]
    assert sorted({*found} - {*PARTICIPLES}) == []
    assert sorted({*PARTICIPLES} - {*found}) == [], "these have other names by now"


EVENTS = {
    "core/portus/reach/protocol/messages.py": "answers of a host: COMMITTED, PULLED",
    "core/portus/reach/mirror/objects.py": "facts of a log",
    "core/portus/companions/journal/lines.py": "facts of a journal",
}
"""Modules whose classes may be called by what happened, and why."""


def test_a_class_is_called_by_a_noun() -> None:
    """ "Restored" leaves open what is; "RestoreReport" does not."""
    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in package_files()
        if str(path.relative_to(ROOT)) not in EVENTS
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
        and _is_participle(re.sub("(?<=[a-z])(?=[A-Z])", "_", node.name).lower())
    ]
    assert found == []


_IRREGULAR = """asked begun built chosen done drawn driven found given gone got heard held hidden
    hung kept known laid led left lost made meant met said seen sent shown spoken taken told
    written"""
_VERBS = "deepspeed embed feed heed seed shed"
_PREPOSITIONS = "as at before behind below beyond by for from in of on out over to up"


def _is_participle(name: str) -> bool:
    first, *others = name.strip("_").split("_")
    is_regular = first.endswith("ed") and first not in _VERBS.split()
    return (is_regular or first in _IRREGULAR.split()) and (
        not others or others[0] in _PREPOSITIONS.split()
    )


def test_a_docstring_begins_with_what_is_returned_or_done() -> None:
    """It is read in an editor, far from the name."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for path in package_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        if text.split()[0].strip(",.:;`").lower() in FRAGMENTS.split()
    ]
    assert found == []


def test_threads_that_are_waited_for_are_waited_for_after_ctrl_c_too() -> None:
    """``threading.Thread.join`` that was interrupted takes the thread for ended, before 3.13."""
    plain = set()
    for path in package_files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("threading.Thread"):
                plain.add(str(path.relative_to(ROOT)))
    assert plain == set(PLAIN_THREADS)


def broad_excepts(path: Path) -> Iterator[str]:
    """The functions in which everything is caught and kept, as in ``BROAD_EXCEPT``."""
    for name, function in functions(path):
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node) and not _goes_on(node):
                yield name


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(k is None or ast.unparse(k) in {"Exception", "BaseException"} for k in kinds)


def _goes_on(handler: ast.ExceptHandler) -> bool:
    """True if the error is raised again after cleaning up, whatever happens."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_everything_is_caught_only_where_a_reason_is_given() -> None:
    found = {name for path in package_files() for name in broad_excepts(path)}
    assert found == set(BROAD_EXCEPT)


def unpickles(node: ast.AST) -> bool:
    """True for code that runs, or may run, what a pickle says."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
        return any(n.split(".")[0] in {"pickle", "cloudpickle", "dill", "shelve"} for n in names)
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    asked_safe = any(
        k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
    )
    return called in {"eval", "exec", "torch.save"} or (called == "torch.load" and not asked_safe)


def test_nobody_outside_of_places_asks_for_a_kind() -> None:
    own = {
        ROOT / "core/portus/reach/index/place.py",
        *(ROOT / "core/portus/reach/places").glob("*.py"),
    }
    others = [path for path in package_files() if path not in own]
    assert [str(path) for path in others if asks_for_kind(path)] == []
    named = re.compile(r"portus\.reach\.places\.(directory|pool|host|mirror) import")
    naming = {str(path.relative_to(ROOT)) for path in others if named.search(path.read_text())}
    assert naming == set(NAMED_PLACES)


def asks_for_kind(path: Path) -> bool:
    """Whether a module uses ``PlaceKind``, or the class of an open place to tell places apart."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and any(n.name == "PlaceKind" for n in node.names):
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("is_host", "PlaceKind"):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            named = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
            if any(
                name.endswith(("Place", "Home", "HostPool")) and name != "Place" for name in named
            ):
                return True
    return False


def test_nothing_is_unpickled_but_where_a_reason_is_given() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in package_files()
        for node in ast.walk(parsed(path))
        if unpickles(node)
    }
    assert found == set(PICKLE)


def test_only_the_command_line_prints() -> None:
    printing = {
        str(path.relative_to(ROOT))
        for path in package_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "rich.print"}
    }
    assert {name for name in printing if not name.startswith("core/portus/cli/")} == set()


def test_no_file_names_a_place_on_one_machine() -> None:
    place = re.compile(r"(?<![\w.$}>])/(?:home/\w|root/|Users/\w|work/|opt/\w)")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in all_files()
        if path.suffix in {".py", ".c", ".md", ".toml", ".txt", ".cfg", ".yaml", ""}
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1)
        if place.search(line) and path != Path(__file__).resolve()
    ]
    assert found == []


def owners(text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each function and class that the page of invariants says to keep one."""
    for line in text.splitlines():
        module = ""
        for word in re.findall("`([^`]+)`", line) if "**Owner**" in line else ():
            if word.endswith(".py"):
                module = word
            elif module and re.fullmatch(r"[A-Za-z_.]+", word):
                yield module, word.rpartition(".")[2]


def test_the_owners_of_invariants_are_in_their_modules() -> None:
    found = list(owners((ROOT / "docs" / "invariants.md").read_text()))
    assert len(found) > 50
    absent = []
    for module, name in found:
        path = ROOT / module if module.startswith("portus_") else ROOT / "core/portus" / module
        if not re.search(rf"^ *((async )?def|class) {name}\b|^{name}\b", path.read_text(), re.M):
            absent.append(f"{module}: {name}")
    assert absent == []


def attacks(text: str) -> Iterator[tuple[str, str, str]]:
    """(promise, file, test) of each test that the page of invariants names."""
    promise, file = "", ""
    for line in text.splitlines():
        if line.startswith("## "):
            promise = line[3:].split()[0]
        for word in re.findall("`([^`]+)`", line) if "**Attacked by**" in line else ():
            if word.endswith(".py"):
                file = word
            elif word.startswith("test_"):
                yield promise, file, word


def is_quick(file: str, name: str) -> bool:
    """Whether `make test` runs some case of a test."""
    for path, node in functions(ROOT / "tests" / file):
        if path.endswith(f": {name}"):
            marks = map(ast.unparse, node.decorator_list)
            return not any(mark.startswith("pytest.mark.long") for mark in marks)
    return False


def test_every_promise_is_attacked_within_minutes() -> None:
    """What takes long is in `make long`, and leaves some attack of each promise in `make test`."""
    found: dict[str, bool] = {}
    for promise, file, name in attacks((ROOT / "docs" / "invariants.md").read_text()):
        found[promise] = found.get(promise, False) or is_quick(file, name)
    assert len(found) > 10
    assert [promise for promise, quick in found.items() if not quick] == []


def test_every_reason_is_one() -> None:
    assert all(
        len(reason.split()) > 3
        for table in (BROAD_EXCEPT, PICKLE, LARGE, PARTICIPLES)
        for reason in table.values()
    )
