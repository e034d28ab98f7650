"""The readable specification: every op in plain torch, bit for bit what the kernels compute.

Written for clarity, not for speed, and independent of the native library. All arithmetic on values is FP32 with
one rounding a step; FP64 appears only to decide which way an FP32 result rounds and in `norm`, which is defined
in FP64. docs/formats.md is the contract.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import layout
from .layout import FORMATS

# QLoRA's NormalFloat code book (arXiv 2305.14314, appendix E), as FP32 constants.
NF4_CODEBOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

# Elements of a row that `norm` sums in one go (docs/formats.md, "Norm").
NORM_CHUNK = 16384
NORM_LANES = 32

_INT_FORMATS = ("int8", "int6", "int5", "int4")


# --- code values ---------------------------------------------------------------------------------------------


def _float_magnitudes(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> Tensor:
    """Values of the bit patterns 0 .. count - 1 of a small IEEE-like format without its sign, in FP64."""
    pattern = torch.arange(count, dtype=torch.float64)
    exponent = torch.floor(pattern / 2**mantissa_bits)
    mantissa = pattern / 2**mantissa_bits - exponent
    subnormal = mantissa * 2.0 ** (1 - bias)
    normal = (1 + mantissa) * torch.pow(2.0, exponent - bias)
    return torch.where(exponent == 0, subnormal, normal)


def _magnitudes(format: str) -> Tensor:
    """Ascending FP64 magnitudes of a sign-magnitude format; the index is the bit pattern without the sign."""
    if format == "fp4_e2m1":
        return _float_magnitudes(2, 1, 1, 8)
    if format == "fp4_e3m0":
        return torch.tensor([0.0] + [2.0 ** (e - 7) for e in range(1, 8)], dtype=torch.float64)
    if format == "fp8_e4m3":
        return _float_magnitudes(4, 3, 7, 127)
    return _float_magnitudes(5, 2, 15, 124)  # fp8_e5m2


def code_values(format: str) -> Tensor:
    """FP32 value of every stored pattern of `format`, NaN for patterns that are not finite numbers: [2^bits]."""
    bits = FORMATS[format].bits
    stored = torch.arange(2**bits, dtype=torch.float32)
    if format == "int8":
        return torch.where(stored < 128, stored, stored - 256)
    if format in _INT_FORMATS:
        return stored - 2 ** (bits - 1)
    if format == "uint4":
        return stored
    if format == "nf4":
        return torch.tensor(NF4_CODEBOOK, dtype=torch.float32)
    magnitudes = _magnitudes(format).float()
    half = torch.full((2 ** (bits - 1),), torch.nan)
    half[: magnitudes.numel()] = magnitudes
    values = torch.cat([half, -half])
    if format == "fp4_e3m0":  # minus zero reads as zero
        values[8] = 0.0
    return values


# --- scales --------------------------------------------------------------------------------------------------


def _round_magnitude_up(x: Tensor) -> Tensor:
    """FP32 values moved away from zero to the next bf16 value (unchanged where they are one)."""
    bits = x.view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _round_magnitude_down(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32)


def _scale_of(amax: Tensor, qmax: int, scale_dtype: torch.dtype) -> Tensor:
    """amax / qmax rounded up to the scale's dtype, clamped to its largest finite value, as FP32."""
    exact = amax.double() / qmax  # never rounds onto a value of the scale's dtype unless it is one
    scale = exact.float()
    scale = torch.where(scale.double() < exact, torch.nextafter(scale, torch.tensor(torch.inf)), scale)
    if scale_dtype == torch.bfloat16:
        scale = _round_magnitude_up(scale)
    return scale.clamp(max=torch.finfo(scale_dtype).max)


def _scale_and_min(low: Tensor, high: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """uint4's scale and min of groups that span [low, high], as FP32."""
    limit = torch.finfo(scale_dtype).max
    minimum, nearest = low, low
    if scale_dtype == torch.bfloat16:
        minimum = torch.where(low < 0, _round_magnitude_up(low), _round_magnitude_down(low))
        nearest = low.clamp(-limit, limit).bfloat16().float()
    minimum = minimum.clamp(-limit, limit)
    scale = high / 15 - minimum / 15
    if scale_dtype == torch.bfloat16:
        scale = _round_magnitude_up(scale)
    constant = low == high
    scale = torch.where(constant, 0.0, scale.clamp(max=limit))
    return scale, torch.where(constant, nearest, minimum) + 0.0  # + 0.0: minus zero becomes zero


# --- rounding ------------------------------------------------------------------------------------------------


def philox(seed: int, index: Tensor) -> Tensor:
    """Random 32-bit words of the elements `index` (int64): Philox4x32-10, one counter for four elements."""
    mask = 0xFFFFFFFF
    counter, word = index >> 2, index & 3
    c = [counter & mask, (counter >> 32) & mask, torch.zeros_like(index), torch.zeros_like(index)]
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # wraps modulo 2^64, as wanted
        c = [((p1 >> 32) & mask) ^ c[1] ^ k0, p1 & mask, ((p0 >> 32) & mask) ^ c[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.where(word < 2, torch.where(word == 0, c[0], c[1]), torch.where(word == 2, c[2], c[3]))


def _uniform(seed: int, index: Tensor) -> Tensor:
    """FP32 uniforms in [0, 1) with 24 bits."""
    return (philox(seed, index) >> 8).float() * 2.0**-24


def _nearest_index(t: Tensor, values: Tensor) -> Tensor:
    """Index of the ascending FP64 value nearest to FP32 `t`, ties to the even index."""
    middles = (values[1:] + values[:-1]) / 2
    low = torch.bucketize(t.double(), middles, right=False)
    high = torch.bucketize(t.double(), middles, right=True)  # differs from low on a tie only
    return torch.where(low % 2 == 0, low, high)


def _encode_int(t: Tensor, format: str, u: Tensor | None) -> Tensor:
    if u is None:
        q = t.round()
    else:
        q = t.floor()
        q = q + (u < t - q)
    if format == "uint4":
        return q.clamp(0, 15).to(torch.int64)
    qmax = FORMATS[format].qmax
    q = q.clamp(-qmax, qmax).to(torch.int64)
    return q & 0xFF if format == "int8" else q + qmax + 1


def _encode_nf4(t: Tensor, u: Tensor | None) -> Tensor:
    values = torch.tensor(NF4_CODEBOOK, dtype=torch.float64)
    if u is None:
        return _nearest_index(t, values)
    low = (torch.bucketize(t.double(), values, right=True) - 1).clamp(0, 14)
    v0, v1 = values.float()[low], values.float()[low + 1]
    return low + (u < (t.clamp(-1, 1) - v0) / (v1 - v0))


def _encode_sign_magnitude(t: Tensor, format: str, u: Tensor | None) -> Tensor:
    values = _magnitudes(format)
    a, negative = t.abs(), torch.signbit(t)
    if u is None:
        index = _nearest_index(a, values)
    else:
        a = a.clamp(max=float(values[-1]))
        low = (torch.bucketize(a.double(), values, right=True) - 1).clamp(0, values.numel() - 2)
        v0, v1 = values.float()[low], values.float()[low + 1]
        # Neighbours in increasing order: (v0, v1) for t >= 0, (-v1, -v0) for t < 0.
        outward = torch.where(negative, u >= (v1 - a) / (v1 - v0), u < (a - v0) / (v1 - v0))
        index = low + outward
    sign = 2 ** (FORMATS[format].bits - 1)
    if format == "fp4_e3m0":
        negative = negative & (index > 0)
    return index + negative * sign


def _encode(t: Tensor, format: str, u: Tensor | None) -> Tensor:
    """Stored patterns (int64) of FP32 quotients `t`; `u` holds uniforms for stochastic rounding, or is None."""
    if format in _INT_FORMATS or format == "uint4":
        return _encode_int(t, format, u)
    if format == "nf4":
        return _encode_nf4(t, u)
    return _encode_sign_magnitude(t, format, u)


# --- packing -------------------------------------------------------------------------------------------------


def _bit_plane(bit: Tensor) -> Tensor:
    """[rows, n] bits, n a multiple of 32, as bytes: element j of 32 is bit j of a little-endian word."""
    weights = 2 ** torch.arange(8)
    return (bit.reshape(bit.shape[0], bit.shape[1] // 8, 8) * weights).sum(-1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """[rows, padded] stored patterns as uint8 [rows, padded * bits / 8]."""
    if bits == 8:
        return codes.to(torch.uint8)
    low = codes & 15
    planes = [low[:, 0::2] | (low[:, 1::2] << 4)]
    planes += [_bit_plane((codes >> b) & 1) for b in range(4, bits)]
    return torch.cat(planes, dim=1).to(torch.uint8)


def _unpack(packed: Tensor, padded: int, bits: int) -> Tensor:
    """The inverse of `_pack`: int64 [rows, padded]."""
    rows, data = packed.shape[0], packed.to(torch.int64)
    if bits == 8:
        return data
    nibbles = data[:, : padded // 2]
    codes = torch.stack([nibbles & 15, nibbles >> 4], dim=-1).reshape(rows, padded)
    for b in range(4, bits):
        start = padded // 2 + (b - 4) * padded // 8
        plane = data[:, start : start + padded // 8]
        bit = (plane[:, :, None] >> torch.arange(8)) & 1
        codes = codes | (bit.reshape(rows, padded) << b)
    return codes


def _one_nan(x: Tensor) -> Tensor:
    """`x` with every NaN in the one pattern (positive, quiet) that all devices write."""
    return torch.where(torch.isnan(x), torch.nan, x)


# --- ops -----------------------------------------------------------------------------------------------------


def quantize(
    x: Tensor,
    format: str,
    group_size: int,
    scale_dtype: torch.dtype,
    rounding: str,
    seed: Tensor | None,
    element_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x`, seen as [rows, cols]: uint8 [rows, row_bytes], scale_dtype [rows, groups(, 2)]."""
    rows, cols = layout.as_rows(x.shape)
    fmt, groups = FORMATS[format], layout.num_groups(cols, group_size)
    v = x.reshape(rows, cols).float()

    def grouped(fill: float) -> Tensor:
        pad = torch.full((rows, groups * group_size - cols), fill)
        return torch.cat([v, pad], dim=1).reshape(rows, groups, group_size)

    g = grouped(0.0)
    finite = torch.isfinite(g).all(-1)
    if rows * cols == 0:
        minimum = scale = g.new_zeros(rows, groups)
    elif fmt.has_min:
        scale, minimum = _scale_and_min(
            grouped(torch.inf).amin(-1), grouped(-torch.inf).amax(-1), scale_dtype
        )
        minimum = torch.where(finite, minimum, 0.0)
    else:
        scale, minimum = _scale_of(g.abs().amax(-1), fmt.qmax, scale_dtype), g.new_zeros(rows, groups)
    scale = torch.where(finite, scale, torch.nan)

    t = ((g - minimum[..., None]) / scale[..., None]) if fmt.has_min else g / scale[..., None]
    u = None
    if rounding == "stochastic":
        assert seed is not None
        index = torch.arange(rows)[:, None] * cols + torch.arange(groups * group_size)
        u = _uniform(int(seed), element_offset + index).reshape(t.shape)
    usable = finite & (scale > 0)
    codes = torch.where(usable[..., None], _encode(torch.nan_to_num(t), format, u), fmt.zero_code)

    padded = layout.round_up(cols, layout.ROW_ALIGNMENT)
    codes = codes.reshape(rows, groups * group_size)[:, :padded]
    codes = torch.cat([codes[:, :cols], codes.new_full((rows, padded - cols), fmt.zero_code)], dim=1)
    scales = torch.stack([scale, minimum], dim=-1) if fmt.has_min else scale
    return _pack(codes, fmt.bits), _one_nan(scales.to(scale_dtype))


def _decode(packed: Tensor, scales: Tensor, cols: int, format: str, group_size: int) -> Tensor:
    """FP32 values [rows, cols], not yet saturated; NaN throughout a group whose scale is not finite."""
    fmt, rows = FORMATS[format], packed.shape[0]
    padded = layout.round_up(cols, layout.ROW_ALIGNMENT)
    value = code_values(format)[_unpack(packed, padded, fmt.bits)[:, :cols]]
    s = scales.float().reshape(rows, layout.num_groups(cols, group_size), 2 if fmt.has_min else 1)
    s = s.repeat_interleave(group_size, dim=1)[:, :cols]
    out = value * s[..., 0]
    if fmt.has_min:
        out = out + s[..., 1]
    return torch.where(torch.isfinite(s).all(-1), out, torch.nan)


def dequantize(
    packed: Tensor, scales: Tensor, cols: int, format: str, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Values of the codes: `dtype` [rows, cols], saturated to its largest finite value."""
    limit = torch.finfo(dtype).max
    return _one_nan(_decode(packed, scales, cols, format, group_size).clamp(-limit, limit).to(dtype))


def accumulate_(
    packed: Tensor,
    scales: Tensor,
    x: Tensor,
    factor: float,
    format: str,
    group_size: int,
    rounding: str,
    seed: Tensor | None,
    element_offset: int = 0,
) -> None:
    """packed, scales <- quantize(dequantize(packed, scales) + factor * x), in FP32, in place."""
    rows, cols = layout.as_rows(x.shape)
    total = dequantize(packed, scales, cols, format, group_size, torch.float32)
    total = total + x.reshape(rows, cols).float() * torch.tensor(factor, dtype=torch.float32)
    new = quantize(total, format, group_size, scales.dtype, rounding, seed, element_offset)
    packed.copy_(new[0])
    scales.copy_(new[1])


def reduce(
    packed: Tensor, scales: Tensor, cols: int, format: str, group_size: int, factor: float, dtype: torch.dtype
) -> Tensor:
    """factor * (the FP32 sum of W shards in order): packed [W, rows, row_bytes] -> `dtype` [rows, cols]."""
    total = dequantize(packed[0], scales[0], cols, format, group_size, torch.float32)
    for rank in range(1, packed.shape[0]):
        total = total + dequantize(packed[rank], scales[rank], cols, format, group_size, torch.float32)
    total = total * torch.tensor(factor, dtype=torch.float32)
    return _one_nan(total.to(dtype))


def norm(packed: Tensor, scales: Tensor, cols: int, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    """(sum of squares of the values: float64 [], whether any value is not finite: bool []).

    The order of the FP64 additions is fixed: a row is cut into chunks of 16384 elements; in a chunk, lane j
    of 32 adds the squares of elements j, j + 32, ... in order, and the lanes are added in halves (j with j + 16,
    then j + 8, ...). The chunk sums, in row-major order, are added the same way.
    """
    value = dequantize(packed, scales, cols, format, group_size, torch.float32).double()
    chunks = max(1, -(-cols // NORM_CHUNK))
    value = torch.nn.functional.pad(value, (0, chunks * NORM_CHUNK - cols))
    partial = _lane_sum(value.square().reshape(-1, NORM_CHUNK))
    total = _lane_sum(partial.reshape(1, -1))[0]
    nonfinite = torch.isnan(total)
    return torch.where(nonfinite, torch.nan, total), nonfinite


def _lane_sum(x: Tensor) -> Tensor:
    """Sums of the rows of FP64 [n, k] in `norm`'s order: [n]."""
    n, k = x.shape
    x = torch.nn.functional.pad(x, (0, -k % NORM_LANES)).reshape(n, -(-k // NORM_LANES), NORM_LANES)
    lanes = x.new_zeros(n, NORM_LANES)
    for block in x.unbind(1):
        lanes = lanes + block
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
