"""What a device computes: matrix products by shape and format, attention, passes over its memory, starting an operation.

Operands are normal random numbers: zeros and ones switch fewer transistors, so a card that is limited by power multiplies them
faster than any model's values.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from muletrain.probe.timing import Effort, rate, sample, seconds, timed
from muletrain.spec.machine import AttentionRate, ComputeRates, Dtype, MatmulRate, Sample, SustainedRate

TORCH: dict[Dtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp64": torch.float64,
}


SQUARE = 8192
"""Of the product that stands for a card's best rate."""
Shape = tuple[int, int, int, bool]
"""(m, k, n, whether it is laid out as a weight's gradient: both factors transposed)."""


def matmul(device: torch.device, dtype: Dtype, m: int, k: int, n: int, effort: Effort, *, gradient: bool = False) -> MatmulRate:
    """A linear layer's product of m tokens, k inputs and n outputs, the weight stored n x k; or, as `gradient`, its weight's
    gradient: m outputs, k tokens, n inputs."""
    one, other = (
        torch.randn(*sizes, device=device, dtype=TORCH[dtype]) for sizes in (((k, m), (k, n)) if gradient else ((m, k), (n, k)))
    )
    left, right = (one.t(), other) if gradient else (one, other.t())
    out = torch.empty(m, n, device=device, dtype=TORCH[dtype])
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        took = seconds(lambda: torch.mm(left, right, out=out), device, effort)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return MatmulRate(dtype=dtype, m=m, k=k, n=n, flops_s=rate(2.0 * m * k * n, took))


def shapes(quick: bool) -> list[Shape]:
    """Squares, and what the blocks and heads of models from 1 B to 13 B multiply. Quick: those of a 7 B model."""
    seven = [(4096, 4096), (4096, 11008), (11008, 4096)]
    found: list[Shape] = [(SQUARE, SQUARE, SQUARE, False)]
    found += [(tokens, k, n, False) for tokens in (4096, 16384) for k, n in seven]
    found += [(n, 16384, k, True) for k, n in seven]
    found += [(4096, 4096, 102400, False), (4096, 102400, 4096, False), (102400, 4096, 4096, True)]
    if quick:
        return found
    two = [(2048, 2048), (2048, 8192), (8192, 2048)]
    found += [(size, size, size, False) for size in (1024, 2048, 4096)]
    found += [(tokens, k, n, False) for tokens in (1024, 2048, 8192) for k, n in seven]
    found += [(tokens, k, n, False) for tokens in (2048, 8192) for k, n in two]
    found += [(n, tokens, k, True) for tokens, pairs in ((4096, seven), (8192, two)) for k, n in pairs]
    found += [(16384, 4096, 1024, False), (1024, 16384, 4096, True), (16384, 5120, 13824, False), (13824, 16384, 5120, True)]
    found += [(4096, 2048, 32768, False), (4096, 32768, 2048, False), (32768, 4096, 2048, True)]
    return list(dict.fromkeys(found))


def sustained(device: torch.device, dtype: Dtype, busy: float, sustain_s: float) -> SustainedRate:
    """The best product over `sustain_s` seconds, `busy` of the time; the second half counts."""
    left, right, out = (torch.randn(SQUARE, SQUARE, device=device, dtype=TORCH[dtype]) for _ in range(3))
    calls, found, start = 8, [], time.perf_counter()
    while time.perf_counter() - start < sustain_s:
        took = timed(lambda: torch.mm(left, right, out=out), device, calls)
        if time.perf_counter() - start > sustain_s / 2:
            found.append(took)
        time.sleep(calls * took * (1 / busy - 1))
    return SustainedRate(busy=busy, flops_s=rate(2.0 * SQUARE**3, sample(found or [took])))


def attention(
    device: torch.device, dtype: Dtype, rows: int, sequence: int, heads: int, head_dim: int, effort: Effort
) -> AttentionRate:
    """Forward and backward of causal attention, each row one segment: the varlen kernel in half precision on a card."""
    shape = (rows, heads, sequence, head_dim)
    if device.type == "cuda" and TORCH[dtype].itemsize == 2:
        shape = (rows * sequence, heads, head_dim)  # type: ignore[assignment]
    inputs = [torch.randn(*shape, device=device, dtype=TORCH[dtype], requires_grad=True) for _ in range(3)]
    bounds = torch.arange(0, (rows + 1) * sequence, sequence, device=device, dtype=torch.int32)

    def forward() -> Tensor:
        if len(shape) == 3:
            found: Tensor = varlen_attn(*inputs, bounds, bounds, sequence, sequence, window_size=(-1, 0))
            return found
        return scaled_dot_product_attention(*inputs, is_causal=True)

    made = forward()
    incoming = torch.randn_like(made)
    forward_s = seconds(forward, device, effort)
    backward_s = seconds(lambda: torch.autograd.grad(made, inputs, incoming, retain_graph=True), device, effort)
    flops = 2.0 * rows * sequence**2 * heads * head_dim
    return AttentionRate(
        dtype=dtype,
        rows=rows,
        sequence=sequence,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        forward_flops_s=rate(flops, forward_s),
        backward_flops_s=rate(2.5 * flops, backward_s),
    )


def memory(device: torch.device, size_bytes: int, effort: Effort) -> Sample:
    """Bytes a second, read and written, of one array scaled into another."""
    source, target = (torch.ones(size_bytes // 4, device=device) for _ in range(2))
    return rate(2.0 * size_bytes, seconds(lambda: torch.mul(source, 1.5, out=target), device, effort))


def kernel(device: torch.device, effort: Effort) -> Sample:
    """Seconds from one tiny operation to the next."""
    x = torch.zeros(32, device=device)
    return seconds(lambda: x.add_(1.0), device, effort)


def card_rates(device: torch.device, name: str, quick: bool, effort: Effort) -> ComputeRates:
    """All of one card."""
    warm = Effort(effort.sample_s, 1, warm_s=0.5)
    matmul(device, "bf16", 4096, 4096, 4096, warm)  # a cold card is faster than one in use
    halves: list[Dtype] = ["bf16", "fp16"] if torch.cuda.get_device_capability(device) >= (8, 0) else ["fp16"]
    matmuls = []
    for dtype in halves:
        fewer = quick or dtype != halves[0]
        matmuls += [matmul(device, dtype, m, k, n, effort, gradient=gradient) for m, k, n, gradient in shapes(fewer)]
    for dtype in ("tf32", "fp32"):
        matmuls += [matmul(device, dtype, 4096, 4096, n, effort) for n in (4096, 11008)]
    lengths = (4096,) if quick else (1024, 2048, 4096, 16384)
    tokens = 16384
    return ComputeRates(
        device=name,
        matmuls=tuple(matmuls),
        attention=tuple(
            attention(device, halves[0], tokens // length, length, 4096 // head_dim, head_dim, effort)
            for head_dim in (64, 128)
            for length in lengths
        ),
        sustained=tuple(sustained(device, halves[0], busy, 0.8 if quick else 1.6) for busy in (0.5, 0.75, 1.0)),
        memory_bytes_s=memory(device, 2**30, effort),
        kernel_s=kernel(device, effort),
    )


def processor_rates(quick: bool, effort: Effort) -> ComputeRates:
    """All of the processor, in fp32: narrower formats are many times slower on most, and nothing trains in them there."""
    device = torch.device("cpu")
    sizes = [(512, 512, 512), (1024, 256, 256)]
    if not quick:
        sizes += [(2048, 2048, 2048), (1024, 256, 1024), (1024, 1024, 256), (256, 1024, 1024), (1024, 512, 4096)]
    lengths = (256,) if quick else (256, 1024)
    return ComputeRates(
        device="cpu",
        matmuls=tuple(matmul(device, "fp32", m, k, n, effort) for m, k, n in sizes),
        attention=tuple(attention(device, "fp32", 2, length, 4, 64, effort) for length in lengths),
        sustained=(),
        memory_bytes_s=memory(device, 2**26, effort),
        kernel_s=kernel(device, effort),
    )
