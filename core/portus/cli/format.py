"""``portus format DEVICE``: an empty pool on a DAX device."""

from __future__ import annotations

import os

from portus.cli import words
from portus.cli.machine import contents_of_device
from portus.cli.options import argument, flag
from portus.cli.output import Output
from portus.errors import UsageError
from portus.reach.index.directory import format_device
from portus.reach.media.dax import device_facts
from portus.reach.media.local import LocalFiles


def command(
    output: Output,
    device: str = argument("DEVICE", "a DAX device, such as /dev/dax0.0"),
    force: bool = flag("--force -f", "overwrite what the device holds"),
) -> None:
    """Make an empty pool on a DAX device."""
    path = os.path.abspath(device)
    facts = device_facts(path)
    if facts is None:
        raise UsageError(f"{path}: expected a DAX device; files are made by the first save")
    if not format_device(path, LocalFiles(), force=force):
        raise UsageError(f"{path}: not blank: {contents_of_device(path)}; --force makes it empty")
    volatile = "; VOLATILE: it belongs to no NVDIMM namespace" if facts.volatile else ""
    output.line(f"{path}: an empty pool of {words.size(facts.size)}{volatile}")
    output.document({"path": path, "size": facts.size, "volatile": facts.volatile})
