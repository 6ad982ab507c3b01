"""What the S3 server needs of this machine, and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Final

PROGRAMS: Final = {
    "ceph": "ceph-common",
    "ceph-mon": "ceph-mon",
    "ceph-osd": "ceph-osd",
    "radosgw": "radosgw",
    "radosgw-admin": "radosgw",
    "monmaptool": "ceph-common",
    "ceph-authtool": "ceph-common",
    "setpriv": "util-linux",
}
"""Programs and the packages of Debian that have them."""

RETRIES: Final = ("-o", "Acquire::Retries=3")


class ServerError(Exception):
    """The S3 server cannot run here; says why, and what to do."""


def missing_packages() -> list[str]:
    """The packages of Debian that are still to be installed, sorted."""
    return sorted({package for each, package in PROGRAMS.items() if not shutil.which(each)})


def check() -> None:
    """Raises ``ServerError`` if the server cannot run here."""
    if platform.system() != "Linux":
        raise ServerError("Ceph needs Linux")
    missing = missing_packages()
    if missing:
        raise ServerError(
            f"packages are missing; make setup-s3 as root, or apt-get install {' '.join(missing)}"
        )


def install() -> None:
    """Install what is missing, as root on Debian. Raises ``ServerError`` otherwise."""
    missing = missing_packages()
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        check()
    # RUNLEVEL=1: the packages' own scripts start no service.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (
        ["apt-get", *RETRIES, "update", "-qq"],
        ["apt-get", *RETRIES, "install", "-y", "-qq", "--no-install-recommends", *missing],
    ):
        if subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode:
            raise ServerError(f"failed: {' '.join(command)}")
    check()
