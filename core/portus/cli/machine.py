"""The facilities of this machine for Portus: media, libpmem, RDMA, GPUs. Read only. No torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from portus.companions.media.private import tells
from portus.engine.copying import native
from portus.errors import MediumError, PortusError, TransportError
from portus.reach.index.reader import PoolReader
from portus.reach.index.roots import is_blank
from portus.reach.media.dax import DeviceFacts, device_facts, open_device
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.pmem import processor
from portus.reach.transport.cuda import Driver, driver

_MODES: Final = {"dax": "devdax", "memory": "fsdax", "safe": "sector"}
"""The modes of a namespace: ndctl's name for each name of the kernel."""

# The best first: libpmem takes the first that the processor has.
_FLUSHES: Final = ("clwb", "clflushopt", "clflush")


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """A finding about the machine. ``advice``: the action to take; empty if none is needed."""

    topic: str
    name: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine below ``root``, which tests replace. ``cuda``: returns the driver."""

    root: Path = Path("/")
    cuda: Callable[[], Driver] = driver

    def findings(self) -> Iterator[MachineFinding]:
        """Yield all findings, topic by topic."""
        yield from self.dax_devices()
        yield from self.namespaces()
        yield self.libpmem()
        yield from self.rdma()
        yield from self.gpus()
        yield self.helper()
        yield self.shelves()

    def dax_devices(self) -> Iterator[MachineFinding]:
        """Yield each DAX device, whether a driver serves it or not."""
        places = _entries(self.root / "sys/bus/dax/devices")
        for place in places:
            path = f"/dev/{place.name}"
            if not (place / "driver").exists():
                text = f"{_number(place / 'size')} bytes, served by no driver"
                advice = f"daxctl reconfigure-device --mode=devdax {place.name}"
                yield MachineFinding("DAX device", path, text, advice)
            elif (facts := device_facts(path)) is not None:
                yield MachineFinding("DAX device", path, *_device_text(facts))
        if not places:
            yield MachineFinding("DAX device", "-", "none: pools are in files")

    def namespaces(self) -> Iterator[MachineFinding]:
        """Yield each NVDIMM namespace that is in use, with its persistence domain."""
        for region in _entries(self.root / "sys/bus/nd/devices", "region"):
            domain = _text(region / "persistence_domain") or "unknown"
            for place in _entries(region, "namespace"):
                size = _number(place / "size")
                mode = _MODES.get(_text(place / "mode"), "raw")
                text = f"{size} bytes, {mode}, persistence domain {domain}"
                advice = (
                    f"ndctl create-namespace -f -e {place.name} -m devdax -M mem (all of it "
                    "for one pool), or -m fsdax (for a file system with -o dax)"
                )
                if size:
                    yield MachineFinding(
                        "NVDIMM namespace", place.name, text, advice if mode == "raw" else ""
                    )

    def libpmem(self) -> MachineFinding:
        """Return whether caches can be written back, and how."""
        found = re.search(r"^flags\s*:(.*)", _text(self.root / "proc/cpuinfo"), re.MULTILINE)
        flags = found[1].split() if found else ()
        how = next((each for each in _FLUSHES if each in flags), "no flush that we know of")
        try:
            processor()
        except MediumError as error:
            advice = "apt-get install libpmem1, or dnf install libpmem; only for persistent memory"
            return MachineFinding("libpmem", "-", f"not usable: {error.strerror}", advice)
        return MachineFinding("libpmem", "libpmem.so.1", f"loaded; this processor has {how}")

    def rdma(self) -> Iterator[MachineFinding]:
        """Yield each RDMA device, and whether this process could use it."""
        topic = "RDMA device"
        places = _entries(self.root / "sys/class/infiniband")
        for place in places:
            is_soft = (place / "parent").exists()  # the network device under it
            for port in _entries(place / "ports"):
                state = _text(port / "state").rpartition(": ")[2] or "unknown"
                rate, link = _text(port / "rate"), _text(port / "link_layer")
                soft = ", in software (Soft-RoCE)" if is_soft else ""
                text = f"port {port.name} {state}, {link}, {rate}{soft}"
                advice = "" if state == "ACTIVE" else f"bring the link of {place.name} up"
                yield MachineFinding(topic, place.name, text, advice)
        if not places:
            yield MachineFinding(topic, "-", "none: storage hosts are reached over sockets")
            return
        if importlib.util.find_spec("pyverbs") is None:
            advice = (
                "apt-get install python3-pyverbs, and put a folder on PYTHONPATH that holds a link "
                "`pyverbs` to /usr/lib/python3/dist-packages/pyverbs (Python of the system's "
                "version)"
            )
            yield MachineFinding(topic, "pyverbs", "is not installed", advice)
        import resource  # not on every platform, as RDMA is not

        soft_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft_limit == resource.RLIM_INFINITY:
            yield MachineFinding(topic, "locked memory", "unlimited")
            return
        advice = "ulimit -l unlimited (LimitMEMLOCK=infinity for a service): tensors are registered"
        yield MachineFinding(topic, "locked memory", f"limited to {soft_limit} bytes", advice)

    def gpus(self) -> Iterator[MachineFinding]:
        """Yield NVIDIA devices, and whether a network card can read their memory."""
        names = [each.name for each in _entries(self.root / "dev", "nvidia")]
        devices = [name for name in names if name.removeprefix("nvidia").isdigit()]
        driver = _text(self.root / "proc/driver/nvidia/version").partition("\n")[0]
        driver = driver.removeprefix("NVRM version: ").strip() or "its driver reports nothing"
        for name in devices:
            yield MachineFinding("GPU", f"/dev/{name}", driver)
        if not devices:
            yield MachineFinding("GPU", "-", "none that a driver of NVIDIA serves")
            return
        why, advice = self._why_no_dmabuf(), ""
        peer = (self.root / "sys/module/nvidia_peermem").exists()
        if not why:
            other = ", or else by nvidia_peermem" if peer else ""
            text = f"a network card can read it as a dmabuf{other}"
        elif peer:
            text = f"a network card can read it by nvidia_peermem; no dmabuf: {why}"
        else:
            text = "staged in pinned memory of this machine; to a storage host over the socket"
            text = f"{text}; no nvidia_peermem; no dmabuf: {why}"
            advice = (
                "modprobe nvidia_peermem, or NVIDIA's open kernel modules, whose driver gives "
                "dmabufs (Linux 5.12, CUDA 11.7); only with RDMA"
            )
        yield MachineFinding("GPU", "memory", text, advice)

    def _why_no_dmabuf(self) -> str:
        """Return why a GPU's memory cannot be exported as a dmabuf; "" if that of every GPU can."""
        try:
            found = self.cuda()
            count = found.count()
            lacking = [str(device) for device in range(count) if not found.exports(device)]
        except TransportError as error:
            return str(error)
        if not count:
            return "the CUDA driver lets this process see no device"
        return f"the driver gives none of device {', '.join(lacking)}" if lacking else ""

    def helper(self) -> MachineFinding:
        """Return whether the compiled helper copies and hashes without Python's lock."""
        if native.helper() is not None:
            return MachineFinding("copy helper", "_native.so", "in use")
        text = "not in use: copies are made by Python, and slow small-step training more"
        advice = "install a C compiler, and portus-checkpoint again"
        return MachineFinding("copy helper", "-", text, advice)

    def shelves(self) -> MachineFinding:
        """Return how a shelf detects changes in its views."""
        if tells():
            text = "reports which pages of an array were changed"
            return MachineFinding("shelf", "/proc/self/pagemap", text)
        text = "this system does not report which pages were changed: each commit compares all"
        return MachineFinding("shelf", "-", text)


def _device_text(facts: DeviceFacts) -> tuple[str, str]:
    kind = "VOLATILE (no NVDIMM namespace)" if facts.volatile else "persistent"
    text = f"{facts.size} bytes, {kind}, mapped by {facts.alignment}, written back by the processor"
    try:
        held = contents_of_device(facts.path)
    except MediumError as error:
        advice = f"give this user access: chgrp, chmod g+rw {facts.path}, by a rule of udev"
        return f"{text}; cannot be opened: {error.strerror}", advice
    advice = f'a pool is made there by Checkpointer("{facts.path}")' if held == "blank" else ""
    return f"{text}; {held}", advice


def contents_of_device(path: str) -> str:
    """Return what a DAX device holds, for people. Raise ``MediumError`` if it cannot be opened."""
    with contextlib.closing(open_device(path, writable=False)) as medium:
        try:
            if is_blank(medium):
                return "blank"
            return (
                f"a pool with {len(PoolReader(medium, ProcessLocks()).catalogue().ids())} versions"
            )
        except PortusError as error:
            return str(error)


def _entries(directory: Path, prefix: str = "") -> list[Path]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return [directory / name for name in names if name.startswith(prefix)]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0
