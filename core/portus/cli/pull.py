"""``portus pull MIRROR [DIR]``: the files, or the pool, of a fresh node."""

from __future__ import annotations

import contextlib
import os
from typing import Final

from portus.cli import words
from portus.cli.options import Text, argument, option
from portus.cli.output import FOUND, Json, Output, counter
from portus.cli.pools import version_document
from portus.engine.directory.folder import FOLDER
from portus.errors import UsageError
from portus.reach.files.home import FileHome
from portus.reach.index.place import DEFAULT_DIRECTORY, Place
from portus.reach.mirror.address import StoreAddress, parse
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.mirrors import Mirrors, resolve

_HOW: Final = "portus export takes one version out of a mirror"


def command(
    output: Output,
    mirror: str = argument("MIRROR[/MODEL]", "all models of a mirror, or one"),
    directory: Text = argument(
        "[DIR]", "the run's directory, made if there is none; default: the current directory", None
    ),
    pool: Text = option("--pool -p PATH", "where the pools go; default: .portus in DIR"),
) -> None:
    """Fetch what a run on a machine with an empty disk would fetch.

    For a run that saves files: all files that are not in DIR; exit code 1 if some are damaged
    there, which are skipped. For a pool: all versions; portus export writes their files. An
    interrupted pull resumes when it is restarted.
    """
    address, model = _address_and_model(mirror)
    root = os.path.abspath(os.path.expanduser(directory or "."))
    if os.path.exists(root) and not os.path.isdir(root):
        raise UsageError(f"{root} is not a directory; name one, or omit DIR")
    place = Place.parse(pool or os.path.join(root, DEFAULT_DIRECTORY), "--pool")
    if place.local_path is None:
        raise UsageError(f"--pool {place}: a mirror is pulled into pools of this machine")
    documents: list[Json] = []
    with Mirrors(address) as mirrors:
        models = mirrors.models()
        if model is not None:  # or its ranks
            ranks = [each for each in models if each.startswith(f"{model}/rank-")]
            models = [model] if mirrors.has(model) else ranks
        if not models:
            raise UsageError(f"{address}: there is no mirror")
        if len({place.pool_of(each) for each in models}) < len(models):
            raise UsageError(
                f"--pool {place}: expected a directory for the pools of {len(models)} models"
            )
        os.makedirs(root, exist_ok=True)
        for each in models:
            if any(added.path for added in mirrors.of(each).read().added):
                documents.append(_pull_files(address, each, root, output))
            else:
                documents.append(_pull(mirrors.of(each), place.pool_of(each), output))
    output.document({"pulled": documents})


def _address_and_model(url: str) -> tuple[StoreAddress, str | None]:
    """Return the store of the mirrors, and the model that the URL names, or None for all."""
    address = parse(url, "MIRROR")
    with Mirrors(address) as mirrors:
        if mirrors.models():
            return address, None
    found = resolve(url, "MIRROR")
    if found.step is not None:
        raise UsageError(f"{url}: a pull takes all versions of a model; {_HOW}")
    return found.address, found.model


def _pull_files(address: StoreAddress, model: str, root: str, output: Output) -> Json:
    from portus.engine.job.settings import Settings
    from portus.reach.training.file_mirror import DirectoryMirror  # it needs torch

    home, settings = os.path.join(root, FOLDER), Settings(mirror_wait=0)
    with contextlib.closing(
        DirectoryMirror(address, model, settings, root=root, checkpoints=root, home=home)
    ) as mirror:
        paths, is_whole = mirror.pull()
    if not is_whole:  # the log of Python says what, and why
        output.code = FOUND
    output.line(f"{root}: {model}: {words.count(len(paths), 'file')} from {address}")
    return {"model": model, "files": [os.path.join(root, each) for each in paths]}


def _pull(mirror: Mirror, place: Place, output: Output) -> Json:
    state = mirror.read()
    home = FileHome(place, mirror.model)
    writer = home.pool
    try:
        found = writer.catalogue().models.get(mirror.model)
        infos = [entry.info for entry in found] if found else []
        own = [info for info in infos if state.version(info.token) is None]
        if own:
            raise UsageError(
                f"{place} has versions of {mirror.model!r} that {mirror.name} lacks, the "
                f"newest of step {own[-1].step}: move that pool away, or name another DIR. "
                f"{_HOW}"
            )
        wanted = state.missing(infos)
        total = sum(each.size for each in wanted)
        with counter(f"{mirror.model} from {mirror.name}", total) as add:
            fetched = mirror.fill(writer, wanted, add)
    finally:
        home.close()
    size = sum(each.size for each in fetched)
    output.line(
        f"{place}: {mirror.model}: {words.count(len(fetched), 'version')}, {words.size(size)} "
        f"from {mirror.name}"
    )
    numbers = {each.token: n for n, each in enumerate(state.missing(()), 1)}
    return {
        "model": mirror.model,
        "pool": place.path,
        "versions": [
            version_document(each.info(mirror.model, numbers[each.token])) for each in fetched
        ],
    }
