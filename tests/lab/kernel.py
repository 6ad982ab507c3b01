"""A kernel of Debian, unpacked and not installed, and the small first root that a guest boots from.

The kernel comes from the suite of backports if this is Debian 12, whose own is too old for parts of
Soft-RoCE. It is fetched once, by apt and from the mirrors that apt uses here, into the cache.
"""

from __future__ import annotations

import lzma
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.lab.needs import ADMIN_PATH, RETRIES, LabError

SUITES: Final = {"bookworm": "bookworm-backports"}
"""Where the kernel comes from, by the name of the release, if not from that release itself."""

KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"

# In this order. No program loads modules by itself in there: crc32 is for rxe and ext4.
MODULES: Final = (
    *("crc32c_generic", "crc32_generic", "virtio_pci", "virtio_console", "9pnet_virtio", "9p"),
    *("overlay", "virtio_net", "virtio_rng", "nfit", "nd_pmem", "dax_pmem", "device_dax"),
    *("dax_hmem", "ext4", "ib_uverbs", "rdma_ucm", "rdma_cm", "rdma_rxe"),
)

INIT: Final = Path(__file__).with_name("init")

_SETUP_SECTS, _SECTOR = 0x1F1, 512
_PAYLOAD: Final = struct.Struct("<II")
_PAYLOAD_OFFSET: Final = 0x248
"""Source: the setup header in the kernel's Documentation/arch/x86/boot.rst."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """``image``: an uncompressed kernel. ``modules``: in the order in which they are loaded."""

    image: Path
    modules: tuple[Path, ...]

    def write_initrd(self, path: Path) -> None:
        """The first root: busybox, ``init`` and the modules."""
        busybox = shutil.which("busybox")
        if busybox is None:
            raise LabError("there is no busybox; install busybox-static")
        order = "".join(f"{module.name}\n" for module in self.modules)
        files = [
            ("init", INIT.read_bytes()),
            ("bin/busybox", Path(busybox).read_bytes()),
            ("modules/order", order.encode()),
            *((f"modules/{module.name}", module.read_bytes()) for module in self.modules),
        ]
        path.write_bytes(b"".join(_archive(files)))


def cache() -> Path:
    """Where the lab keeps what it fetched."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "portus-lab"


def fetched() -> Kernel:
    """The kernel, from the cache or by apt. Raises ``LabError``."""
    suite = _suite()
    place = cache() / f"kernel-{suite}"
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".new-") as work:
            made = Path(work) / "made"
            made.mkdir()
            _unpack(_download(suite, Path(work)), made)
            try:
                made.rename(place)
            except OSError:
                if not place.is_dir():  # else somebody was faster
                    raise
    names = (place / "order").read_text().split()
    return Kernel(place / "vmlinux", tuple(place / name for name in names))


def _suite() -> str:
    release = dict(
        line.split("=", 1)
        for line in Path("/etc/os-release").read_text().splitlines()
        if "=" in line
    )
    codename = release.get("VERSION_CODENAME", "").strip('"')
    if release.get("ID", "").strip('"') != "debian" or not codename:
        raise LabError("the lab takes its kernel from Debian, by apt: this is another system")
    return SUITES.get(codename, codename)


def _download(suite: str, work: Path) -> Path:
    """The unpacked packages of the newest kernel in ``suite``."""
    for name in ("lists/partial", "debs", "root"):
        (work / name).mkdir(parents=True)
    sources = work / "kernel.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {_mirror()} {suite} main\n")
    options = [
        f"Dir::Etc::sourcelist={sources}",
        "Dir::Etc::sourceparts=-",
        f"Dir::State::lists={work / 'lists'}",
        "Dir::Cache::pkgcache=",
        "Dir::Cache::srcpkgcache=",
        "APT::Sandbox::User=root",
    ]
    apt = [*RETRIES, *(part for option in options for part in ("-o", option))]
    _output(["apt-get", *apt, "update", "-qq"])
    depends = _output(["apt-cache", *apt, "depends", "linux-image-amd64"]).split()
    names = [word for word in depends if word.startswith("linux-image-") and "." in word]
    if not names:
        raise LabError(f"there is no kernel in {suite}: {depends}")
    version = names[0].removeprefix("linux-image-")
    for kind in ("image", "binary", "modules"):  # newer kernels come in three packages
        package = f"linux-{kind}-{version}"
        if kind == "image" or _output(["apt-cache", *apt, "pkgnames", package]).split():
            _output(["apt-get", *apt, "download", "-qq", package], cwd=work / "debs")
    for package_file in (work / "debs").iterdir():
        _output(["dpkg-deb", "-x", str(package_file), str(work / "root")])
    return work / "root"


def _mirror() -> str:
    """Where apt gets Debian from on this machine."""
    lines = _output(["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)"])
    for line in lines.splitlines():
        uri, codename, component = line.split()
        if component == "main" and "-" not in codename:
            return uri
    raise LabError("apt knows no mirror of Debian here; run apt-get update")


def _unpack(root: Path, target: Path) -> None:
    """An uncompressed kernel, modules and the order of these, from unpacked packages."""
    [tree] = [each for each in root.glob("**/lib/modules/*") if (each / "kernel").is_dir()]
    [image] = [*root.glob("boot/vmlinuz-*"), *tree.glob("vmlinuz")]
    (target / "vmlinux").write_bytes(_uncompressed_kernel(image.read_bytes()))
    base = root
    if tree.is_relative_to(root / "usr"):
        base = root / "usr"
    _output(["depmod", "-b", str(base), tree.name])
    names = []
    for module in _in_order(tree):
        name, data = module.name, module.read_bytes()
        if name.endswith((".xz", ".zst")):
            data = lzma.decompress(data) if name.endswith(".xz") else _unzstd(data)
            name = name.rpartition(".")[0]
        (target / name).write_bytes(data)
        names.append(name)
    (target / "order").write_text("\n".join(names))


def _in_order(tree: Path) -> list[Path]:
    """The files of ``MODULES`` and of what they need. What the kernel has built in has no file."""
    needs: dict[str, list[str]] = {}
    for line in (tree / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
    by_name = {Path(path).name.split(".")[0].replace("-", "_"): path for path in needs}
    found: dict[str, None] = {}
    for name in MODULES:
        if name in by_name:
            path = by_name[name]
            found.update(dict.fromkeys([*reversed(needs[path]), path]))
    return [tree / path for path in found]


def _uncompressed_kernel(image: bytes) -> bytes:
    """What a compressed kernel unpacks at boot, which takes seconds when it is emulated."""
    start = ((image[_SETUP_SECTS] or 4) + 1) * _SECTOR
    offset, length = _PAYLOAD.unpack_from(image, _PAYLOAD_OFFSET)
    # The last four bytes are the length of what is in it.
    payload = image[start + offset : start + offset + length - 4]
    if payload.startswith(b"\xfd7zXZ\0"):
        return lzma.decompress(payload)
    if payload.startswith(b"\x28\xb5\x2f\xfd"):
        return _unzstd(payload)
    raise LabError(f"the kernel is compressed in an unknown way: {payload[:6].hex()}")


def _unzstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-dcq"], input=data, stdout=subprocess.PIPE, check=True).stdout


def _archive(files: Sequence[tuple[str, bytes]]) -> Iterator[bytes]:
    """A cpio archive as the kernel reads it; every file may be executed."""
    directories = dict.fromkeys(str(Path(name).parent) for name, _ in files)
    for name in [*directories, "proc", "sys", "dev", "lower", "rw", "newroot"]:
        if name != ".":
            yield _entry(name, 0o040755)
    for name, data in files:
        yield _entry(name, 0o100755, data)
    yield _entry("TRAILER!!!", 0)


def _entry(name: str, mode: int, data: bytes = b"") -> bytes:
    encoded = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


def _output(command: list[str], cwd: Path | None = None) -> str:
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:{ADMIN_PATH}"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise LabError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
