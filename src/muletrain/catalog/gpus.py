"""GPU peak rates by the exact name the driver gives.

Exact, because parts of a name lie: "RTX 4090" is in the names of the 4090 D (11 % fewer units) and of the laptop chip (another
die), and a wrong peak makes every utilisation figure wrong. A GPU that is not in the catalogue has no peak, and nothing is
reported against one. Rates are dense with fp32 accumulation, which is what training runs at.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

_COLUMNS = {
    "fp32": "fp32_tflops",
    "tf32": "tf32_tensor_tflops",
    "bf16": "bf16_tensor_tflops",
    "fp16": "fp16_tensor_fp32acc_tflops",
    "fp8": "fp8_tensor_fp32acc_tflops",
}


@cache
def gpu_rows() -> dict[str, dict[str, str]]:
    """The catalogue's rows by driver name."""
    text = files("muletrain.catalog").joinpath("data/gpus.csv").read_text(encoding="utf-8")
    return {name.strip(): row for row in csv.DictReader(text.splitlines()) for name in row["driver_names"].split(";")}


def gpu_peak(name: str, dtype: str) -> float | None:
    """Dense FLOP/s with fp32 accumulation for a number format (fp32, tf32, bf16, fp16, fp8); None where it is not known."""
    row, column = gpu_rows().get(name), _COLUMNS.get(dtype)
    if row is None or column is None or not row[column]:
        return None
    return float(row[column]) * 1e12
