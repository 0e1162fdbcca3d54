"""Which GPU each rank has, and how ranks on GPUs find each other's memory."""

from __future__ import annotations

from predict.device import communicator, devices
from predict.errors import UserError

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


def open_gpus(device: str, rank: int, size: int) -> None:
    """Opens all ranks' memory to this one's GPU, which is current. All ranks call it.

    Raises UserError where a GPU cannot reach another.
    """
    communicator.open_gpus(gpus_of(device, size), rank)
