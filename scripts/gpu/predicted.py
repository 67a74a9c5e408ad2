"""What was predicted of a streamed point beside what was measured: rates of the probe in the same call, never of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from muletrain.bench.prediction import compare, save_timelines
from muletrain.probe.box import this_box
from muletrain.probe.measure import measure
from muletrain.spec.machine import Machine
from muletrain.spec.plan import Plan


def probed(out: Path) -> Machine:
    """This box, measured quickly; also written to `out`/machine.json."""
    machine = measure(this_box(), [], quick=True, say=str)
    (out / "machine.json").write_text(machine.to_json(), encoding="utf-8")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return machine


def beside(
    plan: Plan, machine: Machine, traced: list[Any], step_s: float, device_bytes: int, out: Path, name: str
) -> dict[str, Any]:
    """Prints the comparison and writes both timelines to `out`; nothing where no op was traced (on a CPU)."""
    if not traced:
        return {}
    first = traced[0][1]
    spans = [(op, first.elapsed_time(start) / 1e3, first.elapsed_time(end) / 1e3) for op, start, end in traced]
    compared, simulated, measured = compare(plan, machine, spans, step_s, device_bytes)
    save_timelines(out, name, simulated, measured)
    print(compared.text(), flush=True)
    held = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    print(f"   PyTorch's peak {', '.join(f'{what} {size / 2**30:.2f} GiB' for what, size in held.items())}", flush=True)
    return {**compared.model_dump(mode="json"), "peak_bytes": held}
