"""The ops on a GPU: the tests of test_codecs.py and test_fused_ops.py once more with CUDA tensors, and what only a GPU
can show.

Skipped without a GPU. AGOQ_TEST_DEVICE=cpu runs what is not about CUDA itself on the CPU, to test these tests.
"""

from __future__ import annotations

import inspect
import os
from types import ModuleType

import pytest
import test_autograd
import torch
from on_device import on_device, to_device

# Collected here once more; the fixture `device` moves the functions that they call.
from test_codecs import (  # noqa: F401
    assert_same_bits,
    heavy_tailed,
    op_samples,
    test_accumulate_equals_reference,
    test_chunks_draw_the_same_noise_as_the_whole,
    test_equals_reference,
    test_every_pattern_decodes_like_the_reference,
    test_extreme_values_stay_finite,
    test_largest_half_stays_finite,
    test_nonfinite_values_make_their_group_nan_and_no_other,
    test_norm_equals_reference,
    test_reduce_equals_reference,
    test_shapes,
    test_stochastic_rounding_is_unbiased,
    test_stochastic_rounding_never_moves_a_code_value,
    test_strides_and_offsets,
    test_zero_groups_decode_to_exact_zeros,
)
from test_fused_ops import (  # noqa: F401
    test_empty_tensors,
    test_equals_the_reference,
    test_every_pair_of_dtypes,
    test_more_rows_than_parts_and_batches_of_them,
    test_nothing_non_finite_is_hidden,
)
from torch import Tensor

from agoq_ext import fused_ops, info, layout, ops, quantize, reference

DEVICE = os.environ.get("AGOQ_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU, or torch has no CUDA"
)
only_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="about CUDA itself")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops called in this test, all on the device."""
    names: list[str] = []

    def record(name: str, function):
        def call(*args, **kwargs):
            names.append(name)
            return function(*args, **kwargs)

        return on_device(call, DEVICE)

    def public(module: ModuleType):
        own = inspect.getmembers(module, inspect.isfunction)
        return [(n, f) for n, f in own if f.__module__ == module.__name__ and not n.startswith("_")]

    for module in (ops, fused_ops):
        for name, function in public(module):
            if name not in ("seed_tensor", "cpu_isa"):
                monkeypatch.setattr(module, name, record(name, function))
    return names


def moved(value):
    return to_device(value, DEVICE) if isinstance(value, Tensor) else value


# --- what these tests stand on -------------------------------------------------------------------------------


@only_cuda
def test_the_library_is_loaded() -> None:
    facts = info.collect()["cuda"]
    assert facts["loaded"], facts["reason"]


@only_cuda
def test_every_op_has_a_cuda_kernel() -> None:
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("agoq::")}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [name for name in sorted(names) if has(name, "CPU") and not has(name, "CUDA")] == []


def test_calls_arrive_on_the_device(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = heavy_tailed(3, 70)
    q = quantize(x, "nf4", 64)
    assert calls == ["quantize"] and q.packed.device.type == "cpu"
    before = q.scales.clone()
    ops.accumulate_(q.packed, q.scales, x, 1.0, "nf4", 64)
    assert (q.scales > before).all(), "what is changed in place comes back"


def test_copies_keep_strides_and_offsets() -> None:
    base = heavy_tailed(6, 10)
    for view in (base, base[1:, 3:7], base.t(), base[:1].expand(4, 10), base[2, 5], base[:0]):
        copy = to_device(view, DEVICE)
        assert copy.device.type == DEVICE and copy.stride() == view.stride()
        assert copy.storage_offset() == view.storage_offset() and torch.equal(copy.cpu(), view)


# --- PyTorch around the ops ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name,args", op_samples(), ids=lambda v: v if isinstance(v, str) else "")
def test_opcheck(name: str, args: tuple) -> None:
    torch.library.opcheck(getattr(torch.ops.agoq, name).default, tuple(map(moved, args)))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("case", test_autograd.CASES, ids=repr)
def test_values_and_gradients(
    case: test_autograd.Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are the CPU's, up to the order of the sums in matrix products."""
    monkeypatch.undo()  # tensors of the device reach the ops themselves
    results = []
    for device in ("cpu", DEVICE):
        inputs = {k: x.detach().to(device).requires_grad_() for k, x in case.tensors(dtype).items()}
        outputs = test_autograd.outputs(case.call(*inputs.values(), **test_autograd.NF4))
        sum(((i + 1) * y.float().square().mean() for i, y in enumerate(outputs))).backward()
        results.append(
            [y.detach().cpu().double() for y in outputs] + [x.grad.cpu().double() for x in inputs.values()]
        )
    for want, got in zip(*results, strict=True):
        assert (got - want).abs().max() <= 8 * torch.finfo(dtype).eps * want.abs().max()


# --- CUDA ----------------------------------------------------------------------------------------------------


@only_cuda
def test_streams_order_the_kernels() -> None:
    """The kernel runs on the current stream: after what that stream still has to do."""
    x = heavy_tailed(64, 1024)
    late, stream = torch.zeros(64, 1024, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(x.pin_memory(), non_blocking=True)
        packed = torch.ops.agoq.quantize(late, "int4", 128, torch.bfloat16, "nearest", None, 0)[0]
    stream.synchronize()
    assert_same_bits(packed.cpu(), reference.quantize(x, "int4", 128, torch.bfloat16, "nearest", None)[0])


@only_cuda
def test_nothing_synchronizes(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [(name, tuple(map(moved, args))) for name, args in op_samples()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name, args in samples:
            getattr(torch.ops.agoq, name).default(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@only_cuda
def test_graphs_capture_the_kernels() -> None:
    x = torch.zeros(8, 512, device="cuda")
    packed, scales = torch.ops.agoq.quantize(x, "int8", 128, torch.float32, "nearest", None, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.agoq.quantize_out(x, "int8", 128, "nearest", None, 0, packed, scales)
    values = heavy_tailed(8, 512)
    x.copy_(values)
    graph.replay()
    want = reference.quantize(values, "int8", 128, torch.float32, "nearest", None)
    assert_same_bits(packed.cpu(), want[0])
    assert_same_bits(scales.cpu(), want[1])


@only_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_tensors_of_another_device_than_the_current_one() -> None:
    x = heavy_tailed(3, 300)
    with torch.cuda.device(0):
        packed, scales = torch.ops.agoq.quantize(
            x.to("cuda:1"), "int5", 64, torch.bfloat16, "nearest", None, 0
        )
        assert torch.cuda.current_device() == 0 and packed.device == torch.device("cuda:1")
    want = reference.quantize(x, "int5", 64, torch.bfloat16, "nearest", None)
    assert_same_bits(packed.cpu(), want[0])
    assert_same_bits(scales.cpu(), want[1])


@only_cuda
def test_more_than_2_to_the_31_elements() -> None:
    rows, cols = 2**19 + 3, 4096
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of GPU memory")
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    last = heavy_tailed(2, cols).bfloat16()
    x[-2:] = last.cuda()
    for format in ("int4", "int6"):
        codec = (format, 128, torch.bfloat16)
        packed, scales = torch.ops.agoq.quantize(x, *codec, "nearest", None, 0)
        want = reference.quantize(last, *codec, "nearest", None)
        assert_same_bits(packed[-2:].cpu(), want[0])
        out = torch.ops.agoq.dequantize(packed, scales, cols, format, 128, torch.bfloat16)
        assert_same_bits(out[-2:].cpu(), reference.dequantize(*want, cols, format, 128, torch.bfloat16))
        del packed, scales, out


@only_cuda
def test_codes_that_are_not_aligned_are_refused() -> None:
    bytes_of_row = layout.row_bytes(64, "int8")
    packed = torch.zeros(bytes_of_row + 1, dtype=torch.uint8, device="cuda")[1:][None]
    scales = torch.ones(1, 2, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(
        RuntimeError, match="dequantize: packed and its shards must start at multiples of 8 bytes"
    ):
        torch.ops.agoq.dequantize(packed, scales, 64, "int8", 32, torch.float32)
