"""Compiles the optional helper ``portus/engine/copying/native.c`` when a wheel is built.

A build never fails because of it: without a C compiler, or where it does not compile, the wheel
is the pure Python one, which is complete. The helper uses nothing of Python, so one file serves
every version of it on a platform, and the wheel says so in its tag.

By hand, for a working tree: ``python core/build_native.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # by hand, without the build system
    BuildHookInterface = object  # type: ignore[misc, assignment]

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "portus" / "engine" / "copying" / "native.c"
TARGET = HERE / "portus" / "engine" / "copying" / "_native.so"
COMPILE_S_MAX = 120


class NativeHelperHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the helper into the wheel, if it compiles."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it packs a wheel, or makes an editable one."""
        if self.target_name != "wheel":
            return
        problem = compile_helper(SOURCE, TARGET)
        if problem:
            self.app.display_warning(f"without the native helper: {problem}")
            return
        if version == "editable":
            return  # it lies in the tree, where it is looked for
        build_data["pure_python"] = False
        from packaging.tags import platform_tags

        # Not a "manylinux": what was compiled here may need the C library of this machine.
        tag = next(each for each in platform_tags() if each.startswith("linux_"))
        build_data["tag"] = f"py3-none-{tag}"
        build_data["force_include"][str(TARGET)] = "portus/engine/copying/_native.so"


def compile_helper(source: Path, target: Path) -> str:
    """Compile ``source``, and put it in its place at once. Returns why not; empty if it worked."""
    if not sys.platform.startswith("linux"):
        return f"it is made for Linux, and this is {sys.platform}"
    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")
    compiler = os.environ.get("CC", "").split() or found.split()
    if not compiler:
        return "found no C compiler (CC, cc, gcc, clang)"
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    command = [*compiler, "-std=gnu99", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread"]
    try:
        result = subprocess.run(
            [*command, "-o", str(unfinished), str(source)],
            capture_output=True,
            text=True,
            timeout=COMPILE_S_MAX,
            check=False,
        )
        if result.returncode:
            return f"{compiler[0]} failed: {result.stderr.strip()}"
        os.replace(unfinished, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        unfinished.unlink(missing_ok=True)
    return ""


if __name__ == "__main__":
    sys.exit(compile_helper(SOURCE, TARGET) or None)
