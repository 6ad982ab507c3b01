"""Which port of which device is used, on a machine with none: /sys is a folder here."""

from __future__ import annotations

from pathlib import Path

import pytest

from portus.errors import TransportError
from portus.reach.transport import verbs
from portus.reach.transport.verbs import port_for

HERE = "10.9.0.1"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a09:0001"
LOCAL = "fe80:0000:0000:0000:0000:0000:0000:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


class Sys:
    """/sys/class/infiniband, as a kernel shows it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(
        self,
        device: str,
        gids: list[tuple[str, str]],
        *,
        state: str = "4: ACTIVE",
        layer: str = "Ethernet",
    ) -> None:
        place = self.path / device / "ports" / "1"
        (place / "gids").mkdir(parents=True)
        (place / "gid_attrs" / "types").mkdir(parents=True)
        self.set(device, "state", state)
        self.set(device, "link_layer", layer)
        for index, (gid, kind) in enumerate(gids):
            self.set(device, f"gids/{index}", gid)
            self.set(device, f"gid_attrs/types/{index}", kind)

    def set(self, device: str, name: str, value: str) -> None:
        (self.path / device / "ports" / "1" / name).write_text(f"{value}\n")


@pytest.fixture
def sys_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sys:
    monkeypatch.setattr(verbs, "_SYS", str(tmp_path))
    monkeypatch.setattr(verbs, "_FOUND", {})
    return Sys(tmp_path)


def test_the_port_with_the_address_is_used_by_roce_v2(sys_folder: Sys) -> None:
    sys_folder.add("a", [(LOCAL, "RoCE v2")])
    sys_folder.add("b", [(LOCAL, "RoCE v2"), (MAPPED, "IB/RoCE v1"), (MAPPED, "RoCE v2")])
    port = port_for(HERE)
    assert (port.device, port.number, port.gid_index) == ("b", 1, 2)
    assert port.gid == bytes(10) + b"\xff\xff" + bytes([10, 9, 0, 1])


def test_a_port_that_went_or_moved_is_looked_for_again(sys_folder: Sys) -> None:
    sys_folder.add("a", [(EMPTY, ""), (MAPPED, "RoCE v2")])
    assert port_for(HERE).gid_index == 1
    sys_folder.set("a", "gids/0", MAPPED)
    sys_folder.set("a", "gid_attrs/types/0", "RoCE v2")
    sys_folder.set("a", "gids/1", EMPTY)
    assert port_for(HERE).gid_index == 0
    sys_folder.set("a", "state", "1: DOWN")
    with pytest.raises(TransportError, match="no RDMA device of a has an active port"):
        port_for(HERE)


def test_infiniband_has_no_ip_addresses_and_is_used(sys_folder: Sys) -> None:
    sys_folder.add("ib", [(LOCAL, "IB/RoCE v1")], layer="InfiniBand")
    assert port_for(HERE).device == "ib"


def test_a_named_device_is_used_and_a_wrong_name_is_told(
    sys_folder: Sys, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys_folder.add("a", [(MAPPED, "RoCE v2")])
    sys_folder.add("b", [(LOCAL, "RoCE v2")])
    monkeypatch.setenv("PORTUS_RDMA_DEVICE", "b")
    assert port_for(HERE).device == "b"
    monkeypatch.setenv("PORTUS_RDMA_DEVICE", "c")
    with pytest.raises(TransportError, match="no such RDMA device, but a, b"):
        port_for(HERE)


def test_a_unix_socket_takes_any_active_port(sys_folder: Sys) -> None:
    sys_folder.add("a", [(LOCAL, "RoCE v2"), (MAPPED, "RoCE v2")])
    assert port_for("").gid_index == 1


def test_a_machine_without_a_device_says_so(sys_folder: Sys) -> None:
    with pytest.raises(TransportError, match="this machine has no RDMA device"):
        port_for(HERE)
