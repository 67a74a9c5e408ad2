"""What a device computes: matrix products by shape and format, attention, passes over its memory, starting an operation.

Operands are normal random numbers: zeros and ones switch fewer transistors, so a card that is limited by power multiplies them
faster than any model's values.
"""

from __future__ import annotations

import torch

from muletrain.probe.timing import Effort, rate, seconds
from muletrain.spec.machine import Dtype, MatmulRate

TORCH: dict[Dtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp64": torch.float64,
}


def matmul(device: torch.device, dtype: Dtype, m: int, k: int, n: int, effort: Effort) -> MatmulRate:
    """A linear layer's forward product: m tokens, k inputs, n outputs, the weight stored n x k."""
    x, weight = (torch.randn(*sizes, device=device, dtype=TORCH[dtype]) for sizes in ((m, k), (n, k)))
    out = torch.empty(m, n, device=device, dtype=TORCH[dtype])
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        took = seconds(lambda: torch.mm(x, weight.t(), out=out), device, effort)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return MatmulRate(dtype=dtype, m=m, k=k, n=n, flops_s=rate(2.0 * m * k * n, took))
