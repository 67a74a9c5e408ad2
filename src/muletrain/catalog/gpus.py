"""GPUs: what each can do, by the exact name that the driver gives or the one on the box.

Exact, because parts of a name lie: "RTX 4090" is in the names of the 4090 D (11 % fewer units) and of the laptop chip (another
die), and a wrong peak makes every figure wrong. A GPU that is not in the catalogue has no figures: nothing is reported against
one that the driver names, and one that a person names is an error with the nearest names. Rates are dense with fp32
accumulation, which is what training runs at; every row of data/gpus.csv has the source of its numbers.
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from muletrain.spec.errors import InputError

_COLUMNS = {
    "fp32": "fp32_tflops",
    "tf32": "tf32_tensor_tflops",
    "bf16": "bf16_tensor_tflops",
    "fp16": "fp16_tensor_fp32acc_tflops",
    "fp8": "fp8_tensor_fp32acc_tflops",
}
_GIB = 2**30
_INLINE_ECC = 15 / 16
"""Of GDDR memory that holds its own check bits, as data-centre cards come: an L40S of 48 GB shows 46,068 MiB."""


@dataclass(frozen=True)
class GpuSpec:
    """One catalogue row in SI units."""

    name: str
    driver_name: str
    segment: str
    architecture: str
    capability: tuple[int, int]
    memory_bytes: int
    """What the driver shows, to about 0.5 %."""
    bandwidth_bytes_s: float
    flops: dict[str, float]
    """Dense FLOP/s with fp32 accumulation by number format; a format that the card has no units for is absent."""
    fp16_fp16_flops: float
    """fp16 with fp16 accumulation: twice the fp32 one on GeForce cards, and not what training should run at."""
    pcie_generation: int
    pcie_lanes: int
    nvlink_bytes_s: float
    """Both ways together; 0: none."""
    nvlink_pair: bool
    """Only through a bridge between two cards."""
    peer_to_peer: bool
    """Cards reach each other over PCIe with the driver as it comes; else everything goes through host memory."""
    tdp_w: float
    launch_price_usd: float
    """0: none published."""
    rent_usd_h: tuple[float, float]
    """Lowest and highest listing of one card; (0, 0): none found."""
    rent_source: str
    measured_bf16_flops: float
    """Best measured large bf16 matrix product; 0: none found."""
    source: str
    confidence: str

    @property
    def link_bytes_s(self) -> float:
        """Host to card, one way, pinned, as measured in practice: 0.79 of PCIe's own rate, 24.8 GB/s for generation 4 x16."""
        return _PCIE_LANE[self.pcie_generation] * (self.pcie_lanes or 16) * 0.79

    @property
    def geforce(self) -> bool:
        """A consumer card: halved tensor rates and no peer-to-peer."""
        return self.segment.startswith("GeForce")


_PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
"""Bytes a second a lane each way, after line coding (PCI-SIG)."""


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


def gpu_names() -> tuple[str, ...]:
    """Catalogue names, once each."""
    return tuple({row["gpu"]: None for row in gpu_rows().values()})


@cache
def driver_spec(name: str) -> GpuSpec | None:
    """The card that the driver calls `name`; None where the catalogue has no such card."""
    row = gpu_rows().get(name)
    return _spec(row, name) if row else None


def find_gpu(text: str) -> GpuSpec:
    """The card that a person calls `text`: a catalogue name or a driver name, whatever its case, with or without NVIDIA,
    GeForce and RTX, with or without the memory size where that leaves one. Raises InputError with the nearest names."""
    wanted = _words(text)
    exact, without_size = [], []
    for driver, row in gpu_rows().items():
        names = [_words(driver), *(_words(name) for name in _sized(row["gpu"], driver))]
        if wanted in names:
            exact.append(driver)
        elif wanted in [_words(_SIZE.sub("", name)) for name in (driver, row["gpu"])]:
            without_size.append(driver)
    found = exact or without_size
    cards = {gpu_rows()[driver]["gpu"] for driver in found}
    if len(cards) == 1 and (exact or len(found) == 1):
        return _spec(gpu_rows()[found[0]], found[0])
    if cards:
        raise InputError(f"{text!r} may be {_listed(found)}; write one of these")
    raise InputError(f"{text!r} is not in the GPU catalogue; {_nearest(text)}")


_SIZE = re.compile(r"\s*\b[\d/]+\s*GB\b", re.IGNORECASE)


def _words(name: str) -> str:
    plain = re.sub(r"\brtx(?=\d)", "", re.sub(r"[\s_-]+", " ", name.lower()))
    return " ".join(word for word in plain.split() if word not in ("nvidia", "geforce", "tesla", "rtx"))


def _sized(name: str, driver: str) -> list[str]:
    """Names of a row; "V100 PCIe 16/32GB" is two cards, of which `driver` is one."""
    size = re.search(r"(\d+)GB$", driver)
    return [re.sub(r"\d+/\d+GB", size[0], name)] if "/" in name and size else [name]


def _listed(drivers: list[str]) -> str:
    return " or ".join(dict.fromkeys(gpu_rows()[d]["gpu"] if len(gpu_rows()[d]["gpu"].split("/")) == 1 else d for d in drivers))


def _nearest(text: str) -> str:
    by_words = {_words(name): name for name in gpu_names()}
    parts = set(_words(text).split())
    near = [words for words in by_words if parts and (parts <= set(words.split()) or set(words.split()) <= parts)]
    near += [words for words in difflib.get_close_matches(_words(text), by_words, n=3, cutoff=0.5) if words not in near]
    near = near[:5]
    if near:
        return f"did you mean {' or '.join(by_words[name] for name in near)}?"
    return f"it has {', '.join(gpu_names())}"


def _spec(row: dict[str, str], driver: str) -> GpuSpec:
    def number(column: str) -> float:
        return float(row[column]) if row[column] else 0.0

    major, _, minor = row["compute_capability"].partition(".")
    flops = {dtype: number(column) * 1e12 for dtype, column in _COLUMNS.items() if row[column]}
    ecc = "ECC" in row["memory_type"] and row["segment"].startswith("data centre")
    return GpuSpec(
        name=_sized(row["gpu"], driver)[0],
        driver_name=driver,
        segment=row["segment"],
        architecture=row["architecture"],
        capability=(int(major), int(minor)),
        memory_bytes=round(_gigabytes(row["memory_gb"], driver) * _GIB * (_INLINE_ECC if ecc else 0.996)),
        bandwidth_bytes_s=number("bandwidth_gb_s") * 1e9,
        flops=flops,
        fp16_fp16_flops=number("fp16_tensor_fp16acc_tflops") * 1e12,
        pcie_generation=int(row["pcie_gen"]),
        pcie_lanes=int(number("pcie_lanes")),
        nvlink_bytes_s=number("nvlink_gb_s_bidirectional") * 1e9,
        nvlink_pair="bridge" in row["p2p_note"],
        peer_to_peer=row["p2p_over_pcie_stock_driver"] == "yes",
        tdp_w=number("tdp_w"),
        launch_price_usd=number("launch_price_usd"),
        rent_usd_h=(number("rent_usd_per_hour_low"), number("rent_usd_per_hour_high")),
        rent_source=row["rent_source"],
        measured_bf16_flops=number("measured_bf16_matmul_tflops") * 1e12,
        source=row["source"],
        confidence=row["confidence"],
    )


def _gigabytes(text: str, driver: str) -> float:
    """ "16 or 32": the driver's name says which."""
    sizes = [float(size) for size in re.findall(r"[\d.]+", text)]
    named = re.search(r"(\d+)GB$", driver)
    return float(named[1]) if len(sizes) > 1 and named else sizes[0]
