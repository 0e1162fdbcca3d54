"""Which GPU each rank has, and how ranks on GPUs find each other's memory."""

from __future__ import annotations

import os
import shutil

from predict.device import communicator, devices, library
from predict.errors import UserError
from predict.system.notes import LOG

SHARED_MIB = 32  # of /dev/shm that NCCL takes for a rank, where GPUs reach each other through it
MOST = 16  # Exchange::kMaxRanks in csrc/cuda/ranks/exchange.cuh


def gpus_of(device: str, size: int) -> list[int]:
    """The GPUs of `size` ranks, by --device (gpu, gpu:2,3). Imports no Paddle.

    Raises UserError where there are too few of them, or they cannot be ranks together.
    """
    named = devices.indices_of(device)
    info = devices.driver_info()
    if size > MOST:
        raise UserError(f"tensor_parallel_degree {size} on GPUs (allowed: up to {MOST})")
    if not named and size > max(len(info.gpus), 1):
        raise UserError(
            f"tensor_parallel_degree {size}: there are {len(info.gpus)} GPUs here, and each rank "
            "needs one of its own; lower it, or see CUDA_VISIBLE_DEVICES"
        )
    found = named or list(range(size))
    if len(found) != size or len(set(found)) != size:
        raise UserError(
            f"device {device} names {len(set(found))} GPUs, and tensor_parallel_degree is {size}; "
            f"name as many (gpu:{','.join(map(str, range(size)))}), or give --device gpu"
        )
    for index in found:
        devices.check_gpu(info, index, devices.built_architectures())
    gpus = [info.gpus[index] for index in found]
    for index, gpu in zip(found, gpus, strict=True):
        if " MIG " in f"{gpu.name} ":
            raise UserError(
                f"GPU {index} ({gpu.name}) is a part of one (MIG), which reaches no other's "
                "memory; give whole GPUs, or --tensor_parallel_degree 1"
            )
        if gpu != gpus[0]:
            raise UserError(
                f"GPU {index} ({gpu.name}, {gpu.total_bytes >> 20} MiB) is not like GPU "
                f"{found[0]} ({gpus[0].name}, {gpus[0].total_bytes >> 20} MiB); name GPUs that are "
                "alike (--device gpu:0,1)"
            )
    return found


def device_of(device: str, rank: int | None, size: int) -> str:
    """The device of one of `size` ranks; of the front (None), which computes nothing, the CPU."""
    if size == 1 or devices.kind_of(device) != "gpu":
        return device
    found = gpus_of(device, size)
    return "cpu" if rank is None else f"gpu:{found[rank]}"


def open_gpus(device: str, rank: int, size: int, batch_invariant: bool) -> None:
    """Opens all ranks' memory to this one's GPU, which is current, and NCCL where that is better.

    All ranks call it. batch_invariant: never NCCL, whose sums depend on their size. Raises
    UserError where a GPU reaches no other.
    """
    gpus = gpus_of(device, size)
    links = devices.driver_info().slowest_link(gpus)
    if batch_invariant and not links:
        raise UserError(
            f"{_without_links(gpus)}, and NCCL's sums depend on their size: leave out "
            "--batch_invariant, or use GPUs that are linked (nvidia-smi topo -p2p w)"
        )
    if not batch_invariant and communicator.wants_nccl(size, links):
        _open_nccl(gpus, rank, links)
    if links:
        communicator.open_gpus(gpus, rank, links)


def _without_links(gpus: list[int]) -> str:
    return f"GPUs {', '.join(map(str, gpus))} do not reach each other's memory (no peer access)"


def _open_nccl(gpus: list[int], rank: int, links: int) -> None:
    size = len(gpus)
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast is not ours to set up
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # graphs are recorded anew over other memory
    try:
        communicator.open_nccl(devices.nccl_path(), gpus[rank], rank, size, alone=not links)
    except library.LibraryError as error:
        if links:  # it would be faster, and no more
            if rank == 0:
                LOG.warning(f"sums of ranks go without NCCL: {error}")
            return
        room = shutil.disk_usage("/dev/shm").free
        hint = (
            f"; /dev/shm has {room >> 20} MiB of room, and NCCL wants some {SHARED_MIB} for each "
            "rank: start the container with --shm-size=1g"
            if room < size * SHARED_MIB << 20
            else "; install it (pip install nvidia-nccl-cu13), or use GPUs that are linked"
        )
        raise UserError(f"{_without_links(gpus)}, and NCCL does not start: {error}{hint}") from None


def sums_of(info: devices.DriverInfo) -> str:
    """How ranks on all GPUs of a machine would add their parts: a line for a user."""
    count = len(info.gpus)
    link = info.slowest_link(range(count))
    if not link:
        return f"{count} GPUs without peer access: by NCCL (pip install nvidia-nccl-cu13)"
    way = f"{count} GPUs write into each other's memory over {devices.LINKS[link]}"
    if link == 1 and count > 2:
        way += "; NCCL adds parts of more than 64 KiB, where it is installed"
    return way
