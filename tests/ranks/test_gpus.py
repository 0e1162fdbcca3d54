"""How ranks on GPUs would add their parts, by how the GPUs reach each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from predict.device import communicator, devices, library
from predict.errors import UserError
from predict.ranks import gpus

NVLINK, PCIE, NOTHING = 2, 1, 0


def of_links(monkeypatch: pytest.MonkeyPatch, link: int, count: int = 2) -> devices.DriverInfo:
    """A machine of GPUs of which the first and the last are linked so, all others by NVLink."""
    rows = [[NVLINK] * count for _ in range(count)]
    rows[0][-1] = rows[-1][0] = link
    gpu = devices.Gpu("one", (9, 0), 1 << 30, 132)
    info = devices.DriverInfo(13000, 13000, "", (gpu,) * count, tuple(map(tuple, rows)))
    monkeypatch.setattr(devices, "driver_info", lambda: info)
    monkeypatch.setattr(devices, "built_architectures", lambda: ("90a",))
    return info


@pytest.mark.parametrize(
    ("link", "count", "said"),
    [
        (NVLINK, 2, "2 GPUs write into each other's memory over NVLink"),
        (PCIE, 2, "2 GPUs write into each other's memory over PCIe"),
        (PCIE, 4, "over PCIe; NCCL adds parts of more than 64 KiB"),
        (NOTHING, 2, "2 GPUs without peer access: by NCCL"),
    ],
)
def test_the_slowest_link_says_how_sums_are_made(
    link: int, count: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said in gpus.sums_of(of_links(monkeypatch, link, count))


@pytest.mark.parametrize(
    ("link", "batch_invariant", "opened"),
    [(NVLINK, False, ["memory"]), (PCIE, True, ["memory"]), (NOTHING, False, ["NCCL alone"])],
)
def test_what_is_opened_follows_the_link(
    link: int, batch_invariant: bool, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_links(monkeypatch, link)
    found: list[str] = []

    def open_nccl(*_: Any, alone: bool) -> None:
        found.append("NCCL alone" if alone else "NCCL")

    monkeypatch.setattr(communicator, "wants_nccl", lambda size, link: link == NOTHING)
    monkeypatch.setattr(communicator, "open_nccl", open_nccl)
    monkeypatch.setattr(communicator, "open_gpus", lambda *_: found.append("memory"))
    gpus.open_gpus("gpu", 0, 2, batch_invariant)
    assert found == opened


@pytest.mark.parametrize(("room", "said"), [(1 << 20, "--shm-size=1g"), (1 << 40, "install it")])
def test_gpus_without_links_and_nccl_are_refused_by_name(
    room: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_links(monkeypatch, NOTHING)
    with pytest.raises(UserError, match=r"GPUs 0, 1 do not reach each other.*--batch_invariant"):
        gpus.open_gpus("gpu", 0, 2, batch_invariant=True)

    def absent(*_: Any, **__: Any) -> None:
        raise library.LibraryError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(communicator, "wants_nccl", lambda *_: True)
    monkeypatch.setattr(communicator, "open_nccl", absent)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=room))
    with pytest.raises(UserError, match=f"NCCL does not start: libnccl.*{said}"):
        gpus.open_gpus("gpu", 0, 2, batch_invariant=False)
