"""The plugin as Paddle's device: tensors, streams, memory, graphs, programs, and the way out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict.device import cuda, devices, library
from predict.errors import UserError
from tests.gpu.conftest import MOST_KEPT, give_back
from tests.support.paths import ROOT

Op = Callable[..., Any]
MIB = 1 << 20
DTYPES = ("float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool")


def paddle_module() -> Any:
    import paddle

    return paddle


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_comes_back_as_it_went(gpu: devices.Device, dtype: str) -> None:
    paddle = paddle_module()
    values = np.random.default_rng(0).integers(0, 2, size=(3, 5, 7))
    tensor = paddle.to_tensor(values).astype(dtype)
    assert str(tensor.place) == str(paddle.empty([1]).place)
    assert (tensor.astype("int64").numpy() == values).all()
    assert (tensor.cpu().astype("int64").numpy() == values).all()


def test_paddle_kernels_fall_back_to_the_cpu_and_return(gpu: devices.Device) -> None:
    paddle = paddle_module()
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    tensor = paddle.to_tensor(x)
    results = {
        "add": (tensor + 1, x + 1),
        "matmul": (tensor @ tensor.transpose([1, 0]), x @ x.T),
        "concat": (paddle.concat([tensor, tensor]), np.concatenate([x, x])),
        "slice": (tensor[1:3, ::2], x[1:3, ::2]),
        "argmax": (tensor.argmax(-1), x.argmax(-1)),
        "softmax": (
            paddle.nn.functional.softmax(tensor),
            np.exp(x) / np.exp(x).sum(-1, keepdims=True),
        ),
        "zeros": (paddle.zeros([3], "int32"), np.zeros(3, "int32")),
    }
    for name, (got, expected) in results.items():
        assert str(got.place) == str(tensor.place), name
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_read_and_written_by_their_strides(gpu: devices.Device, dtype: str) -> None:
    paddle = paddle_module()
    values = np.random.default_rng(0).integers(0, 2, size=(6, 5, 4, 3))
    tensor = paddle.to_tensor(values).astype(dtype)
    got = {
        "transpose": (tensor.transpose([3, 1, 0, 2]), values.transpose(3, 1, 0, 2)),
        "slice": (tensor[1:5:2, :, 3], values[1:5:2, :, 3]),
        "transposed slice": (tensor[2].transpose([2, 0, 1]), values[2].transpose(2, 0, 1)),
        "empty": (tensor[3:3], values[3:3]),
    }
    for name, (view, expected) in got.items():
        assert not view.is_contiguous() or name == "empty", name
        copied = view.contiguous()
        assert copied.is_contiguous()
        assert str(copied.place) == str(tensor.place)
        assert (copied.astype("int64").numpy() == expected).all(), name
    tensor[1:3, :, 0] = paddle.zeros([2, 5, 3]).astype(dtype)
    values[1:3, :, 0] = 0
    assert (tensor.astype("int64").numpy() == values).all()


def test_view_can_be_captured(gpu: devices.Device, axpb: Op) -> None:
    paddle = paddle_module()
    x = paddle.zeros([30, 40])
    graph = cuda.GraphPool(gpu).capture(
        lambda: axpb(x[:20].transpose([1, 0]).contiguous(), 2.0, 1.0)
    )
    assert graph.num_nodes == 2
    value = np.random.default_rng(0).normal(size=(30, 40)).astype("float32")
    x.set_value(value)
    graph.replay()
    np.testing.assert_array_equal(graph.outputs.numpy(), 2 * value[:20].T + 1)


def test_operator_runs_on_the_tensors_device(gpu: devices.Device, axpb: Op) -> None:
    paddle = paddle_module()
    x = np.arange(1000, dtype="float32")
    for place in (gpu.place(), paddle.CPUPlace()):
        y = axpb(paddle.to_tensor(x, place=place), 2.0, 1.0)
        assert str(y.place) == str(place)
        assert (y.numpy() == 2 * x + 1).all()


def test_operator_refuses_tensors_of_two_devices(gpu: devices.Device, scale_into: Op) -> None:
    paddle = paddle_module()
    with pytest.raises(ValueError, match=r"x is on Place.cpu., the other tensors are on"):
        scale_into(paddle.zeros([8]), paddle.ones([8]).cpu(), 1.0)


def test_allocations_never_overlap(gpu: devices.Device, axpb: Op) -> None:
    paddle = paddle_module()
    generator = np.random.default_rng(0)
    base = paddle.ones([3 << 18])
    live: dict[int, Any] = {}
    for step in range(600):
        if len(live) > 40 or (live and generator.random() < 0.4):
            key = list(live)[generator.integers(len(live))]
            assert (live.pop(key).numpy() == key).all()
        length = int(2 ** generator.uniform(0, 19.5))
        live[step] = axpb(base[:length], 0.0, float(step))
    for key, tensor in live.items():
        assert (tensor.numpy() == key).all()
    # Larger than what tests before this one left room for: it has memory that goes back whole.
    large = paddle.empty([256 * MIB], "uint8")
    before = devices.memory_info(gpu)
    assert before.in_use <= before.held <= before.total
    del live, tensor, large
    paddle.device.synchronize()
    devices.release_cached(gpu)
    after = devices.memory_info(gpu)
    assert after.held < before.held
    assert after.peak_in_use >= before.in_use


def test_out_of_memory_says_what_was_asked_and_leaves_a_usable_device(gpu: devices.Device) -> None:
    paddle = paddle_module()
    held = [paddle.empty([64 * MIB], "uint8")]
    total = devices.memory_info(gpu).total
    message = rf"GPU 0 .* is out of memory: .* \({total} bytes\), .* free, .* holds .* in use; no"
    with pytest.raises(UserError, match=message), devices.explained_out_of_memory(gpu, "no advice"):
        paddle.empty([total], "uint8")
    # Memory that Paddle and the pool only cache is found again.
    idle = [paddle.empty([1 << 30], "uint8") for _ in range(4)]
    del idle
    free = devices.memory_info(gpu).free
    held.append(paddle.empty([free + (2 << 30)], "uint8"))
    assert (paddle.zeros([8]).numpy() == 0).all()


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_tests_large_memory_goes_back(gpu: devices.Device, in_a_cycle: bool) -> None:
    held: list[Any] = [paddle_module().empty([MOST_KEPT + MIB], "uint8")]
    if in_a_cycle:
        held.append(held)
    before = devices.memory_info(gpu).held
    del held
    give_back(gpu)
    assert devices.memory_info(gpu).held <= before - MOST_KEPT


def test_memory_statistics_follow_tensors(gpu: devices.Device) -> None:
    paddle = paddle_module()
    devices.release_cached(gpu)
    before = devices.memory_info(gpu)
    tensor = paddle.empty([512 * MIB], "uint8")
    during = devices.memory_info(gpu)
    assert during.in_use - before.in_use == 512 * MIB
    assert before.free - during.free >= 512 * MIB
    assert paddle.device.memory_allocated(gpu.name) >= 512 * MIB
    del tensor
    assert devices.release_cached(gpu) >= 512 * MIB
    after = devices.memory_info(gpu)
    assert (after.held, after.in_use) == (before.held, before.in_use)


def test_pinned_copies_keep_their_order(gpu: devices.Device, axpb: Op) -> None:
    paddle = paddle_module()
    stream = cuda.current_stream(gpu)
    there, back = cuda.pinned([1 << 20], "float32"), cuda.pinned([1 << 20], "float32")
    tensor = paddle.zeros([1 << 20])
    for value in range(5):
        there[:] = value
        cuda.copy_to_device(tensor, there, stream)
        cuda.copy_front_to_host(back, axpb(tensor, 2.0, 1.0), stream)
        event = cuda.Event()
        event.record(stream)
        event.synchronize()
        assert (back == 2 * value + 1).all()


def test_copy_of_another_size_is_refused(gpu: devices.Device) -> None:
    tensor = paddle_module().zeros([8])
    with pytest.raises(ValueError, match="16 bytes and the tensor 32"):
        cuda.copy_to_device(tensor, cuda.pinned([4], "float32"), cuda.current_stream(gpu))


def test_events_time_the_work_between_them(gpu: devices.Device, axpb: Op) -> None:
    paddle = paddle_module()
    x = paddle.ones([64 << 20])
    start, end = cuda.Event(timing=True), cuda.Event(timing=True)
    start.record(cuda.current_stream(gpu))
    y = x
    for _ in range(20):
        y = axpb(y, 1.0, 1.0)
    end.record(cuda.current_stream(gpu))
    end.synchronize()
    assert float(y[-1]) == 21
    assert end.milliseconds_since(start) > 0


def chain(axpb: Op, x: Any, length: int = 50) -> Any:
    for _ in range(length):
        x = axpb(x, 1.0, 1.0)
    return x


def test_graph_replay_equals_eager(gpu: devices.Device, axpb: Op) -> None:
    paddle = paddle_module()
    x = paddle.zeros([1000])
    pool = cuda.GraphPool(gpu)
    graph = pool.capture(lambda: chain(axpb, x))
    assert graph.num_nodes == 50
    for value in (0.0, 3.5, -7.25):
        x.set_value(np.full(1000, value, "float32"))
        graph.replay()
        assert (graph.outputs.numpy() == chain(axpb, x).numpy()).all()


def test_graph_memory_is_not_given_to_later_tensors(gpu: devices.Device, axpb: Op) -> None:
    paddle = paddle_module()
    x = paddle.ones([1 << 20])
    pool = cuda.GraphPool(gpu)
    graphs = [pool.capture(partial(chain, axpb, x, length)) for length in (3, 10, 30)]
    later = [axpb(paddle.zeros([1 << 20]), 1.0, float(i)) for i in range(60)]
    for graph, expected in zip(graphs, (4, 11, 31), strict=True):
        graph.replay()
        assert (graph.outputs.numpy() == expected).all()
    for i, tensor in enumerate(later):
        assert (tensor.numpy() == i).all()


def test_graph_updates_a_cache_in_place(gpu: devices.Device, scale_into: Op) -> None:
    paddle = paddle_module()
    x, cache = paddle.ones([64]), paddle.zeros([64])
    graph = cuda.GraphPool(gpu).capture(lambda: scale_into(cache, x, 3.0))
    x.set_value(np.full(64, 5, "float32"))
    graph.replay()
    assert (cache.numpy() == 15).all()


def test_capture_of_a_cpu_fallback_is_refused_and_harmless(gpu: devices.Device, axpb: Op) -> None:
    paddle = paddle_module()
    x = paddle.ones([64])
    pool = cuda.GraphPool(gpu)
    with pytest.raises(OSError, match="CustomDevice error"):
        pool.capture(lambda: axpb(x + 1, 1.0, 1.0))
    graph = pool.capture(lambda: axpb(x, 1.0, 1.0))
    graph.replay()
    assert (graph.outputs.numpy() == 2).all()


def save_program(axpb: Op, scale_into: Op, prefix: str) -> Any:
    paddle = paddle_module()

    class Network(paddle.nn.Layer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", paddle.full([8], 5.0))

        def forward(self, x: Any, cache: Any) -> Any:
            y = chain(axpb, axpb(x, 2.0, 1.0), 20)
            return y, axpb(self.weight, 3.0, 0.0), scale_into(cache, y, 1.0)

    network = Network()
    network.eval()
    spec = [paddle.static.InputSpec([None], "float32", name) for name in ("x", "cache")]
    traced = paddle.jit.to_static(network, input_spec=spec, full_graph=True)
    paddle.jit.save(traced, prefix)
    return network


def load_predictor(gpu: devices.Device, prefix: str) -> Any:
    import paddle.inference

    config = paddle.inference.Config(f"{prefix}.json", f"{prefix}.pdiparams")
    if gpu.is_plugin:
        config.enable_custom_device(devices.PLUGIN_TYPE, gpu.index)
    else:
        config.enable_use_gpu(100, gpu.index)
    config.enable_new_executor()
    config.enable_new_ir()
    return paddle.inference.create_predictor(config)


def test_exported_program_equals_dynamic_and_replays(
    gpu: devices.Device, axpb: Op, scale_into: Op, tmp_path: Path
) -> None:
    paddle = paddle_module()
    network = save_program(axpb, scale_into, str(tmp_path / "model"))
    predictor = load_predictor(gpu, str(tmp_path / "model"))
    x, cache = paddle.arange(8, dtype="float32"), paddle.zeros([8])
    expected = [tensor.numpy() for tensor in network(x, paddle.zeros([8]))]
    outputs = predictor.run([x, cache])
    for got, want in zip(outputs, expected, strict=True):
        assert (got.numpy() == want).all()
    assert (cache.numpy() == expected[2]).all()  # the caller's tensor, not a copy

    graph = cuda.GraphPool(gpu).capture(lambda: predictor.run([x, cache]))
    x.set_value(np.full(8, 7, "float32"))
    graph.replay()
    assert (graph.outputs[0].numpy() == 2 * 7 + 1 + 20).all()
    assert (cache.numpy() == 35).all()


START = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/csrc"]
from predict.device import cuda
from predict.device import devices as device
gpu = device.choose("gpu")
device.activate(gpu)
import paddle
from paddle.base import core
from paddle import _C_ops
core.load_op_meta_info_and_register_op({ops!r})
axpb = lambda x: _C_ops._run_custom_op("regatta_test_axpb", x, 1.0, 1.0)[0]
x = paddle.ones([8])
"""
EXIT = """
pool = cuda.GraphPool(gpu)
graph = pool.capture(lambda: axpb(axpb(x)))
graph.replay()
buffer = cuda.pinned([1024], "float32")
event = cuda.Event()
stream = paddle.device.Stream(gpu.place())
"""


def run(test_ops: Path, program: str) -> tuple[int, str]:
    """Exit status and stderr of a program behind START, in a process of its own."""
    start = START.format(root=str(ROOT), ops=str(test_ops))
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + program],
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, process.stderr


@pytest.mark.parametrize(
    "ending", ["", "raise SystemExit(0)", "axpb(x)", "graph.replay()", "pool.reset()"]
)
def test_process_ends_cleanly_with_graphs_and_tensors_alive(
    gpu: devices.Device, test_ops: Path, ending: str
) -> None:
    assert run(test_ops, EXIT + ending) == (0, "")


# Paddle's own class.
CUDA_GRAPH = """
from paddle.device.cuda.graphs import CUDAGraph
def step():
    y = x
    for _ in range(5):
        y = axpb(y)
    return y
step()
graph = CUDAGraph(place=gpu.place(), mode={mode!r})
graph.capture_begin()
y = step()
graph.capture_end()
x.set_value(x * 10)
graph.replay()
assert (y.numpy() == 15).all(), y
graph.reset()
"""


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_paddles_graphs_capture_in_each_mode(
    gpu: devices.Device, test_ops: Path, mode: str
) -> None:
    status, said = run(test_ops, CUDA_GRAPH.format(mode=mode))
    assert status == 0, said


def test_peer_copies_arrive(gpu: devices.Device, axpb: Op) -> None:
    paddle = paddle_module()
    count = len(devices.driver_info().gpus)
    if count < 2:
        pytest.skip("one GPU")
    x = np.arange(1 << 20, dtype="float32")
    here = axpb(paddle.to_tensor(x), 2.0, 0.0)
    for index in range(1, count):
        there = here._copy_to(paddle.CustomPlace(devices.PLUGIN_TYPE, index), True)
        assert str(there.place) == f"Place({devices.PLUGIN_TYPE}:{index})"
        assert (axpb(there, 1.0, 1.0).numpy() == 2 * x + 1).all()
        assert (there.numpy() == 2 * x).all()


def test_cuda_library_holds_the_cpu_operators_too(
    gpu: devices.Device, cuda_library: library.Library
) -> None:
    paddle = paddle_module()
    assert cuda_library.path.name == devices.CUDA_LIBRARY_NAME
    gate_up = paddle.to_tensor(np.arange(8, dtype="float32").reshape(1, 8), place=paddle.CPUPlace())
    (out,) = cuda_library.op("regatta_activate")(gate_up, 0, True, 0.0, 1.0, 0.0)
    gate, up = np.split(np.arange(8, dtype="float32"), 2)
    np.testing.assert_allclose(out.numpy()[0], gate / (1 + np.exp(-gate)) * up, rtol=1e-5)
