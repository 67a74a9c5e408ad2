"""`mule probe`: what this box is and really does, as a table and as the machine.json that plans can be made with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from muletrain.spec.machine import ComputeRates, Machine, Measured, Sample


def command(
    out: Annotated[Path | None, typer.Option(help="Write the measured machine here, e.g. machine.json.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and repeats: under 20 s.")] = False,
    folder: Annotated[
        list[Path] | None, typer.Option(help="Measure the disk of this folder (repeat it). Default: here and the cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the machine as JSON instead of the table.")] = False,
) -> None:
    """Measure this box: matrix products, attention, memory, links between host and cards, disks. Under a minute."""
    from muletrain.config.environment import cache_dir, visible_devices
    from muletrain.probe.box import this_box
    from muletrain.probe.measure import measure
    from muletrain.spec.errors import InputError

    if out is not None and not out.absolute().parent.is_dir():
        raise InputError(f"--out: the folder of {out} does not exist; make it first")
    machine = measure(this_box(visible_devices()), folder or [Path(), cache_dir()], quick=quick, say=_say)
    if out is not None:
        out.write_text(machine.to_json(), encoding="utf-8")
    print(machine.to_json() if as_json else _table(machine), end="")
    if out is not None and not as_json:
        print(f"saved: {out}")


def _say(what: str) -> None:
    if sys.stderr.isatty():
        print(f"measuring {what}", file=sys.stderr)


def _table(machine: Machine) -> str:
    from muletrain.spec.units import format_bytes

    found = machine.measured
    assert found is not None
    rows = [
        (machine.hostname, f"{machine.cpu}, {machine.cores} cores, {format_bytes(machine.host_memory_bytes)}", ""),
        *((f"card {n}", f"{gpu.name}, {format_bytes(gpu.memory_bytes)}", "") for n, gpu in enumerate(machine.gpus)),
        *(row for rates in found.compute for row in _compute_rows(rates)),
        *_link_rows(found),
        *((f"host copy, {c.threads} threads", *_shown(c.bytes_s, 1e9, "GB/s")) for c in found.host_copy),
        *(
            (f"disk of {disk.folder}, {what}", *_shown(rates, 1e9, "GB/s"))
            for disk in found.disks
            for what, rates in (("write", disk.write_bytes_s), ("read", disk.read_bytes_s))
        ),
        *(("not measured", what, "") for what in found.missing),
    ]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{name:{width}}  {value:>14}  {spread}".rstrip() for name, value, spread in rows]
    return "\n".join([*lines, f"measured in {found.seconds:.0f} s with PyTorch {found.torch}"]) + "\n"


def _compute_rows(rates: ComputeRates) -> list[tuple[str, str, str]]:
    rows = [(f"{rates.device} {p.dtype} {p.m} x {p.k} x {p.n}", *_shown(p.flops_s, 1e12, "TFLOP/s")) for p in rates.matmuls]
    for a in rates.attention:
        name = f"{rates.device} {a.dtype} attention, heads of {a.head_dim}, length {a.sequence}"
        rows += [
            (f"{name}, {way}", *_shown(sample, 1e12, "TFLOP/s"))
            for way, sample in (("forward", a.forward_flops_s), ("backward", a.backward_flops_s))
        ]
    rows += [
        (f"{rates.device} best product, {s.busy:.0%} of the time busy", *_shown(s.flops_s, 1e12, "TFLOP/s"))
        for s in rates.sustained
    ]
    return [
        *rows,
        (f"{rates.device} memory", *_shown(rates.memory_bytes_s, 1e9, "GB/s")),
        (f"{rates.device} operation to operation", *_shown(rates.kernel_s, 1e-6, "us")),
    ]


def _link_rows(found: Measured) -> list[tuple[str, str, str]]:
    ways = ("up", "down", "both")
    rows = [(f"card {link.gpu} link, {way}", *_shown(getattr(link, way), 1e9, "GB/s")) for link in found.links for way in ways]
    if found.together is not None:
        rows += [(f"all links at once, {way}", *_shown(getattr(found.together, way), 1e9, "GB/s")) for way in ways]
    for peer in found.peers:
        wrong = "" if peer.equal else "  BYTES DIFFER: do not use this route"
        value, spread = _shown(peer.bytes_s, 1e9, "GB/s")
        rows.append((f"card {peer.source} to {peer.target}, {peer.route}", value, spread + wrong))
    return rows


def _shown(sample: Sample, unit: float, name: str) -> tuple[str, str]:
    """(median, lowest to highest and n) for a person."""
    low, median, high = (f"{value / unit:.3g}" for value in (sample.low, sample.median, sample.high))
    return f"{median} {name}", f"{low} to {high}, n = {sample.n}"
