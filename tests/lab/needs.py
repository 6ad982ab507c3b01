"""What the lab needs of this machine, and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

PROGRAMS: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "zstd": "zstd",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
    "setpriv": "util-linux",
    "ndctl": "ndctl",
    "mkfs.ext4": "e2fsprogs",
    "rdma": "iproute2",
    "ib_read_bw": "perftest",
}
"""Programs and the packages that have them."""

FILES: Final = {
    "/usr/share/seabios/bios-256k.bin": "seabios",
    "/usr/lib/ipxe/qemu/efi-virtio.rom": "ipxe-qemu",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
    "/usr/lib/python3/dist-packages/pyverbs/device.cpython-311-x86_64-linux-gnu.so": (
        "python3-pyverbs"
    ),
    "/usr/lib/x86_64-linux-gnu/libibverbs.so.1": "libibverbs1",
    "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so": "ibverbs-providers",
    "/usr/lib/x86_64-linux-gnu/libpmem.so.1": "libpmem1",
}
"""Files and the packages that have them, on Debian 12 (where pyverbs is built for Python 3.11)."""

RETRIES: Final = ("-o", "Acquire::Retries=3")
PYTHON: Final = (3, 11)
ADMIN_PATH: Final = "/usr/sbin:/sbin"


class LabError(Exception):
    """The lab cannot run here; says why, and what to do."""


def missing_packages() -> list[str]:
    """The packages of Debian that are still to be installed, sorted."""
    path = f"{os.environ.get('PATH', os.defpath)}:{ADMIN_PATH}"
    programs = [package for each, package in PROGRAMS.items() if not shutil.which(each, path=path)]
    files = [package for each, package in FILES.items() if not Path(each).exists()]
    return sorted({*programs, *files})


def check() -> None:
    """Raises ``LabError`` if the lab cannot run here."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise LabError("the lab needs Linux on x86-64")
    if sys.version_info[:2] != PYTHON:
        raise LabError(
            f"pyverbs of Debian 12 is for Python {'.'.join(map(str, PYTHON))}, and this is "
            f"{platform.python_version()}: PYTHON=python3.11 make setup"
        )
    missing = missing_packages()
    if missing:
        raise LabError(f"packages are missing; as root: apt-get install {' '.join(missing)}")


def install() -> None:
    """Install what is missing, as root on Debian. Raises ``LabError`` otherwise."""
    missing = missing_packages()
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        check()
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", *RETRIES, "update", "-qq"],
        ["apt-get", *RETRIES, "install", "-y", "-qq", "--no-install-recommends", *missing],
    ):
        if subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode:
            raise LabError(f"failed: {' '.join(command)}")
    check()
