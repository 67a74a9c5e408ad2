"""Memory by part: by hand, and against the buffers that a schedule really names."""

from __future__ import annotations

import pytest

from muletrain.schedule.build import build
from muletrain.schedule.memory import card_bytes, host_bytes, wave_positions
from muletrain.schedule.ops import Buffer
from tests.schedule.plans import plan, random_case, step, unit


def test_card_by_hand() -> None:
    units = (unit(0, (30, 20)), unit(1, (10,), kept=7), unit(1, (12,), kept=9), unit(1, (12,), kept=9), unit(2, (40,)))
    chosen = plan(units=units, waves=2, activations=("recompute", "keep", "offload", "recompute", "recompute"))
    assert wave_positions(chosen, step(8, 6, 5)) == 11
    assert card_bytes(chosen, step(8, 6, 5), logits_bytes=1000, context_bytes=2000) == {
        "slots": (50 + 2 * 12 + 40) * 2,
        "staging": 2 * 40 * 10,
        "gradients": (50 + 2 * 12 + 40) * 4,
        "state": 0,
        "inputs": 4 * 11 * 4 * 2,
        "hidden_gradients": 11 * 4 * 2,
        "kept": 7 * 11,
        "offload": 2 * 9 * 8,
        "working": 9 * 8,
        "logits": 1000,
        "context": 2000,
    }
    on_host = chosen.model_copy(update={"inputs": "host"})
    assert card_bytes(on_host, step(8, 6, 5))["inputs"] == 2 * 11 * 4 * 2


def test_host_by_hand() -> None:
    units = (unit(0), unit(1, trainable=False), unit(1), unit(1), unit(2))
    chosen = plan(units=units, inputs="host", activations=("recompute", "recompute", "offload", "recompute", "recompute"))
    expected = {"parameters": 50 * 2, "state": 40 * 6, "gradients": 40 * 2, "inputs": 2 * 14 * 8, "offload": 7 * 14}
    assert host_bytes(chosen, step(8, 6)) == expected
    assert host_bytes(chosen.model_copy(update={"update": "in_backward"}), step(8, 6))["gradients"] == 0
    assert host_bytes(chosen.model_copy(update={"inputs": "card"}), step(8, 6))["inputs"] == 0


@pytest.mark.parametrize("seed", range(100))
def test_a_schedule_names_no_more_than_is_counted(seed: int) -> None:
    chosen, shape = random_case(seed)
    used = {buffer for op in build(chosen, shape).ops for buffer in (*op.reads, *op.writes)}
    card, host, wave = card_bytes(chosen, shape), host_bytes(chosen, shape), wave_positions(chosen, shape)
    holders: dict[Buffer, int] = {}
    for op in build(chosen, shape).ops:
        for b in (*op.reads, *op.writes):
            if b.place in ("slot", "gradient"):
                buffer = Buffer(b.place, b.index[:2])
                holders[buffer] = max(holders.get(buffer, 0), chosen.units[op.unit].parameters)
    assert sum(n for b, n in holders.items() if b.place == "slot") * chosen.working_bytes <= card["slots"]
    assert sum(n for b, n in holders.items() if b.place == "gradient") * 4 <= card["gradients"]
    staying = [chosen.units[b.index[0]].pieces[b.index[1]] for b in used if b.place == "card_state"]
    assert sum(staying) * 6 <= card["state"]
    rows = {b.index[0] for b in used if b.place == "input"}
    assert len(rows) * wave * chosen.hidden * chosen.working_bytes <= card["inputs"]
    kept = {b.index[0] for b in used if b.place == "kept" and len(b.index) == 2}
    assert sum(chosen.units[u].kept_bytes_a_token for u in kept) * wave <= card["kept"]
    assert sum(b.place == "kept" and len(b.index) == 1 for b in used) <= chosen.offload_buffers
    assert sum(b.place == "staging" for b in used) <= chosen.staging
    sent = {b.index[0] for b in used if b.place == "host_input"}
    assert len(sent) * wave * chosen.hidden * chosen.working_bytes <= host["inputs"]
    sizes: dict[tuple[int, int], int] = {}  # by unit and wave: what is sent of it
    for op in build(chosen, shape).ops:
        if op.kind == "send" and op.piece == 1:
            sizes[op.unit, op.wave] = sizes.get((op.unit, op.wave), 0) + op.size_bytes
    largest = {unit: max(size for (u, _), size in sizes.items() if u == unit) for unit, _ in sizes}
    assert sum(largest.values()) <= host["offload"]
    stored = [chosen.units[b.index[0]].parameters for b in used if b.place == "host_gradient"]
    assert sum(stored) * chosen.gradient_bytes <= host["gradients"]


def test_a_unit_on_the_card_by_hand() -> None:
    """The embedding with all that belongs to it: parameters 2, master and moments 6, gradient 4 bytes; nothing on the host."""
    streamed, placed = plan(units=(unit(0, (30, 20)), unit(1), unit(2))), ("card", "streamed", "streamed")
    on_card = streamed.model_copy(update={"placement": placed})
    before, after = card_bytes(streamed, step(8)), card_bytes(on_card, step(8))
    assert after["state"] == 50 * 6 and before["state"] == 0
    assert (after["slots"], after["gradients"]) == (before["slots"], before["gradients"]) == (70 * 2, 70 * 4)
    assert after["staging"] == 2 * 10 * 10 and before["staging"] == 2 * 30 * 10
    less = {part: size - host_bytes(on_card, step(8))[part] for part, size in host_bytes(streamed, step(8)).items()}
    assert less == {"parameters": 100, "state": 300, "gradients": 100, "inputs": 0, "offload": 0}
