"""A guest: started, spoken to, and ended by one process of the host."""

from __future__ import annotations

import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from tests.hardware.conftest import DEVDAX_IN_LAB, EXPANDER_IN_LAB, FSDAX_IN_LAB
from tests.lab import kernel, needs
from tests.lab.needs import LabError

ROOT: Final = Path(__file__).resolve().parents[2]
READY: Final = "lab: ready"
BOOT_S_MAX: Final = 240.0
"""Seconds from start to ready: ten on an idle machine with two processors."""

_PANIC: Final = "Kernel panic"
_PANICS_MAX: Final = 2
_PAUSE_S: Final = 0.1
_DEVICES: Final = Path(__file__).with_name("devices")
_DIST_PACKAGES: Final = "/usr/lib/python3/dist-packages"

_TERMINAL: Final = ("-chardev", "stdio,id=words,signal=off", "-serial", "chardev:words")
_PIPE: Final = (
    *("-device", "virtio-serial-pci", "-chardev", "file,id=words,path=/proc/self/fd/1"),
    *("-device", "virtserialport,chardev=words"),
)
"""Where words go: to the terminal of whoever started QEMU, or to the pipe that is its stdout."""

_KERNEL_WORDS: Final = (
    "console=ttyS0 loglevel=4 panic=-1 mitigations=off nowatchdog apparmor=0 audit=0 "
    "random.trust_cpu=on"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a guest has.

    nvdimms: files of its NVDIMMs, made if they are missing; the first becomes /dev/dax0.0, the
        second an ext4 with DAX at /mnt/fsdax.
    processors: with two, the same work took twice as much of this machine's.
    expander_mib: memory that shows up as a DAX device of its own, as that of a CXL expander does.
    address: its own on the link, such as "10.9.0.1/24". link: the sockets, files, of this end of
        the link and of the other; either guest may come and go.
    """

    devices: str = "rdma pmem"
    nvdimms: tuple[Path, ...] = ()
    nvdimm_mib: int = 256
    expander_mib: int = 0
    memory_mib: int = 3072
    processors: int = 1
    address: str = ""
    link: tuple[Path, Path] | None = None
    environment: dict[str, str] = field(default_factory=dict)


class Guest:
    """One guest that runs one command, from the folder of this repository.

    What the command says comes by ``line`` and ``rest``. It is killed, if it still runs, at the
    end of a ``with``, and whenever this process dies.
    """

    _process: subprocess.Popen[bytes]
    _lines: queue.SimpleQueue[str | None]
    _over: bool

    def __init__(self, machine: Machine, command: Sequence[str], *, shell: bool = False) -> None:
        """Start. shell: what the command reads and says goes to this terminal, and not to here."""
        self._folder: Final = tempfile.TemporaryDirectory(prefix="portus-lab-")
        self._out: Final = Path(self._folder.name)
        self._shell: Final = shell
        initrd = self._out / "initrd"
        found = kernel.fetched()
        found.write_initrd(initrd)
        (self._out / "command").write_text(_script(machine, command, shell=shell))
        self._arguments: Final = _arguments(machine, found.image, initrd, self._out, shell=shell)
        self._start()

    def boot(self, timeout_s: float = BOOT_S_MAX) -> float:
        """Wait until the command begins; the seconds it took. Raises ``LabError``.

        A kernel that panics before is started again, twice at most, and that is said: under
        emulation, on a busy machine, one in fifty was seen to do so within its first seconds.
        """
        panics = 0
        while True:  # ends: a guest is ready, or not, or panicked once too often
            begin_s = time.monotonic()
            try:
                self._wait_until_ready(timeout_s)
            except LabError as error:
                panics += 1
                if _PANIC not in self._last() or panics > _PANICS_MAX:
                    raise
                print(f"lab: started again: {error}", file=sys.stderr, flush=True)
                self._start()
            else:
                return time.monotonic() - begin_s

    def line(self, timeout_s: float) -> str:
        """The next line that is said. Raises ``LabError`` if none comes in time, or ever."""
        line = self._next(timeout_s)
        if line is None:
            raise LabError(f"a guest ended too early; {self._last()}")
        return line

    def lines(self, timeout_s: float) -> Iterator[str]:
        """What is said until the guest ends. Raises ``LabError`` if it has not in that time."""
        until_s = time.monotonic() + timeout_s
        while (line := self._next(until_s - time.monotonic())) is not None:
            yield line

    def rest(self) -> list[str]:
        """What was said and not read yet; after ``kill`` or ``wait``, all of it."""
        lines: list[str] = []
        while not self._over:
            try:
                line = self._lines.get(timeout=5 if self._process.poll() is not None else 0)
            except queue.Empty:
                break
            self._over = line is None
            lines += [] if line is None else [line]
        return lines

    def wait(self, timeout_s: float | None) -> int:
        """The exit status of the command. Raises ``LabError`` if it does not end in time, or if
        the guest ends without it. None waits for ever: for a person at a shell."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise LabError(f"a guest ran longer than {timeout_s:.0f} s; {self._last()}") from None
        status = self._out / "status"
        if not status.exists():
            raise LabError(f"a guest ended without a word; {self._last()}")
        return int(status.read_text())

    def kill(self) -> None:
        """End it at once, as a power failure would; a second call does nothing."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Guest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._let_go()
        self._folder.cleanup()

    def _start(self) -> None:
        self._over = False
        self._lines = queue.SimpleQueue()
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *self._arguments],
            stdin=None if self._shell else subprocess.DEVNULL,
            stdout=None if self._shell else subprocess.PIPE,
        )
        if self._process.stdout is not None:
            reader = threading.Thread(
                target=_read, args=(self._process.stdout, self._lines), daemon=True
            )
            reader.start()

    def _let_go(self) -> None:
        """Of what is left of a guest that ended."""
        if self._process.stdout is not None:
            self.rest()
            self._process.stdout.close()

    def _wait_until_ready(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        if self._shell:
            self._wait_for_shell(until_s)
            return
        said: list[str] = []
        while READY not in said:
            try:
                said.append(self.line(until_s - time.monotonic()))
            except LabError as error:
                self.kill()
                self._let_go()
                raise LabError("\n".join([*said, str(error)])) from error

    def _next(self, timeout_s: float) -> str | None:
        """The next line; None when the guest has ended."""
        try:
            line = None if self._over else self._lines.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            self.kill()
            raise LabError(f"a guest said nothing for {timeout_s:.0f} s; {self._last()}") from None
        self._over = line is None
        return line

    def _wait_for_shell(self, until_s: float) -> None:
        while not (self._out / "ready").exists():
            if self._process.poll() is not None or time.monotonic() > until_s:
                self.kill()
                raise LabError(f"no shell came up; {self._last()}")
            time.sleep(_PAUSE_S)

    def _last(self) -> str:
        """The end of the kernel's log."""
        console = self._out / "console"
        text = console.read_text(errors="replace")[-3000:] if console.exists() else ""
        return f"its console:\n{text}"


def _read(pipe: IO[bytes], lines: queue.SimpleQueue[str | None]) -> None:
    for line in pipe:
        lines.put(line.decode(errors="replace").rstrip("\r\n"))
    lines.put(None)


def _script(machine: Machine, command: Sequence[str], *, shell: bool) -> str:
    """What the guest runs: its devices, then the command."""
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ.get('PATH', os.defpath)}:{needs.ADMIN_PATH}"
    settings = {
        "PATH": path,
        "HOME": "/root",
        "PORTUS_LAB": "guest",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(_pyverbs()),
        "LAB_DEVICES": machine.devices,
        "LAB_ADDRESS": machine.address,
        "PORTUS_TEST_DEVDAX": DEVDAX_IN_LAB,
        "PORTUS_TEST_FSDAX": FSDAX_IN_LAB,
        "PORTUS_TEST_EXPANDER": EXPANDER_IN_LAB,
        **machine.environment,
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    words = shlex.join(command)
    terminal = "/dev/ttyS1" if shell else "$(echo /dev/vport*p1)"
    lines = [
        *exports,
        f"cd {shlex.quote(str(ROOT))}",
        f"bash {shlex.quote(str(_DEVICES))} 2>&1 | cat > {terminal}",
        "[ ${PIPESTATUS[0]} = 0 ] || exit 1",
        f"echo {READY} > {terminal}",
    ]
    if shell:
        lines.append("touch /out/ready")
        lines += [f"setsid -cw {words} < {terminal} &> {terminal}", "echo $? > /out/status"]
    else:
        lines += [f"{words} < /dev/null 2>&1 | cat > {terminal}"]
        lines += ["echo ${PIPESTATUS[0]} > /out/status"]
    return "\n".join([*lines, ""])


def _pyverbs() -> Path:
    """A folder with Debian's pyverbs in it, and nothing else of Debian's."""
    folder = kernel.cache() / "python"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "pyverbs"
    if not link.is_symlink():
        try:
            link.symlink_to(f"{_DIST_PACKAGES}/pyverbs")
        except FileExistsError:
            pass
    return folder


def _arguments(machine: Machine, image: Path, initrd: Path, out: Path, *, shell: bool) -> list[str]:
    """How QEMU is started. Emulated always: that a machine has /dev/kvm does not say that it can
    run this kernel."""
    share = "local,path={},security_model=none,multidevs=remap"
    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-reboot", "-display", "none"),
        *("-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max"),
        *("-smp", str(machine.processors), "-kernel", str(image), "-initrd", str(initrd)),
        *("-append", _kernel_words(machine)),
        *("-chardev", f"file,id=console,path={out}/console", "-serial", "chardev:console"),
        *("-device", "virtio-rng-pci"),
        *("-fsdev", share.format("/") + ",id=root,readonly=on"),
        *("-device", "virtio-9p-pci,fsdev=root,mount_tag=hostroot"),
        *("-fsdev", share.format(out) + ",id=out"),
        *("-device", "virtio-9p-pci,fsdev=out,mount_tag=out"),
        *(_TERMINAL if shell else _PIPE),
        *_memory(machine),
        *_link(machine),
    ]


def _memory(machine: Machine) -> list[str]:
    memory = f"{machine.memory_mib + machine.expander_mib}M"
    if not machine.nvdimms:
        return ["-machine", "q35", "-m", memory]
    arguments = ["-machine", "q35,nvdimm=on,nvdimm-persistence=mem-ctrl"]
    arguments += ["-m", f"{memory},slots=8,maxmem=64G"]
    for number, file in enumerate(machine.nvdimms):
        backend = f"memory-backend-file,id=m{number},share=on,mem-path={file},align=2M"
        arguments += ["-object", f"{backend},size={machine.nvdimm_mib}M"]
        arguments += ["-device", f"nvdimm,id=nvdimm{number},memdev=m{number}"]
    return arguments


def _link(machine: Machine) -> list[str]:
    if machine.link is None:
        return []
    mine, other = machine.link
    mine.unlink(missing_ok=True)  # of a guest before, that was killed
    ends = f"local.type=unix,local.path={mine},remote.type=unix,remote.path={other}"
    mac = machine.address.partition("/")[0].rpartition(".")[2].zfill(2)
    device = f"virtio-net-pci,netdev=link,host_mtu=9000,mac=52:54:00:00:00:{mac}"
    return ["-netdev", f"dgram,id=link,{ends}", "-device", device]


def _kernel_words(machine: Machine) -> str:
    if not machine.expander_mib:
        return _KERNEL_WORDS
    # Of the memory above 4 GiB, the first part is to be "soft reserved": for a driver to give out.
    # There is memory above 4 GiB if it has 2816 MiB in all.
    return f"{_KERNEL_WORDS} memmap={machine.expander_mib}M%4G-1+0xefffffff"


def whole(folder: Path) -> Machine:
    """A machine that has all that the lab can give. folder: keeps the files of its NVDIMMs."""
    return Machine(nvdimms=(folder / "nvdimm0", folder / "nvdimm1"), expander_mib=256)


def run(machine: Machine, command: Sequence[str], *, timeout_s: float) -> int:
    """Boot, run ``command``, show what it says; its exit status. Raises ``LabError``."""
    with Guest(machine, command) as guest:
        print(f"lab: ready in {guest.boot():.1f} s", file=sys.stderr, flush=True)
        for line in guest.lines(timeout_s):
            print(line, flush=True)
        return guest.wait(60)
