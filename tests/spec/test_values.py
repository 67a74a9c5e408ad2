"""Values are frozen, closed, and survive JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from muletrain.spec.ledger import Ledger, LedgerItem
from muletrain.spec.machine import Gpu, Machine
from muletrain.spec.model_shape import ModelShape
from muletrain.spec.recipe import RunConfig

GPU = Gpu(name="NVIDIA H200", memory_bytes=150 * 10**9, capability=(9, 0), driver="570.1")
MACHINE = Machine(hostname="böx", cpu="x", cores=4, host_memory_bytes=1 << 34, gpus=(GPU,))


def test_json_round_trip(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(MACHINE.to_json(), encoding="utf-8")
    assert Machine.load(tmp_path / "machine.json") == MACHINE
    assert "böx" in MACHINE.to_json()


def test_values_do_not_change_and_take_no_unknown_field() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        MACHINE.cores = 5  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        Machine.model_validate(MACHINE.model_dump() | {"colour": "red"})


def test_ledger_totals_by_place() -> None:
    items = [
        LedgerItem(part="a", place=place, size_bytes=size, formula="")
        for place, size in (("card", 1), ("host", 2), ("card", 4))
    ]
    assert (Ledger(items=tuple(items)).total("card"), Ledger(items=tuple(items)).total("host")) == (5, 2)


def test_flops_a_token() -> None:
    shape = ModelShape(
        name="x", family="llama", hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10, tied=True,
        max_positions=32, parameters=1000, block_parameters=400, matmul_parameters=900,
    )  # fmt: skip
    assert shape.flops_a_token(16) == 6 * 900 + 6 * 2 * 16 * 8


def test_every_key_is_documented() -> None:
    def undocumented(model: type, prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                found += undocumented(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                found.append(prefix + name)
        return found

    assert undocumented(RunConfig) == []
