"""What a step consists of: written out by hand where it is small, by its rules where it is not."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from muletrain.schedule.build import build, waves_of
from muletrain.schedule.ops import Schedule, ScheduleError, StepShape, StreamPlan
from muletrain.schedule.simulate import simulate
from tests.schedule.plans import BIG_RATES, lines, plan, random_case, seven_billion, step, unit


def numbered(text: str) -> list[str]:
    """The lines of `text` without their numbers, which are for the reader and must be right."""
    rows = [row.split(maxsplit=1) for row in text.strip().splitlines()]
    assert [int(number) for number, _ in rows] == list(range(len(rows)))
    return [rest.strip() for _, rest in rows]


def test_training_step_of_two_blocks_and_two_micro_batches() -> None:
    """Both blocks stay in their slots, so nothing is fetched twice; staging has two buffers, so the third piece waits;
    the head's publish stands behind the forward three units earlier."""
    assert lines(build(plan(), step(8, 8, pending=True))) == numbered("""
         0 fetch_state u0 p0
         1 update u0 p0 <0
         2 publish u0 p0 <1
         3 fetch_state u1 p0
         4 update u1 p0 <3
         5 publish u1 p0 <4
         6 fetch_state u2 p0 <2
         7 update u2 p0 <6
         8 publish u2 p0 <7
         9 fetch_state u3 p0 <5
        10 update u3 p0 <9
        11 forward u0 m0 <1
        12 forward u0 m1
        13 publish u3 p0 <10
        14 forward u1 m0 <4
        15 forward u1 m1
        16 forward u2 m0 <7
        17 forward u2 m1
        18 epilogue u3 m0 <10
        19 epilogue u3 m1
        20 store u3 <19
        21 norm u3
        22 backward u2 m0
        23 backward u2 m1
        24 store u2 <23
        25 norm u2
        26 backward u1 m0
        27 backward u1 m1
        28 store u1 <27
        29 norm u1
        30 backward u0 m0
        31 backward u0 m1
        32 store u0 <31
        33 norm u0
        34 decide <33
    """)


def test_evaluation_with_one_slot() -> None:
    assert lines(build(plan(slots=1), step(8, mode="evaluate"))) == numbered("""
        0 fetch u0
        1 fetch u1
        2 forward u0 m0 <0
        3 forward u1 m0 <1
        4 fetch u2 <3
        5 fetch u3
        6 forward u2 m0 <4
        7 epilogue u3 m0 <5
    """)


def test_activations_on_the_host() -> None:
    """Three blocks, the middle one offloads. The last block's input is still there at the turn and does not travel."""
    policies = ("recompute", "recompute", "offload", "recompute", "recompute")
    assert lines(build(plan(3, inputs="host", activations=policies), step(8))) == numbered("""
         0 fetch u0
         1 fetch u1
         2 fetch u2
         3 forward u0 m0 <0
         4 send u1 m0 p0 <3
         5 forward u1 m0 <1
         6 send u2 m0 p0 <5
         7 fetch u3 <5
         8 fetch u4
         9 forward u2 m0 <2 <4
        10 send u2 m0 p1 <9
        11 receive u2 m0 p1 <10
        12 forward u3 m0 <6 <7
        13 epilogue u4 m0 <8
        14 store u4 <13
        15 receive u2 m0 p0 <13
        16 norm u4
        17 backward u3 m0
        18 store u3 <17
        19 fetch u1 <17
        20 receive u1 m0 p0
        21 norm u3
        22 backward u2 m0 <15
        23 store u2 <22
        24 norm u2
        25 backward u1 m0 <18 <20
        26 store u1 <25
        27 norm u1
        28 backward u0 m0
        29 store u0 <28
        30 norm u0
        31 decide <30
    """)


def test_update_in_backward_moves_no_gradient_and_waits_for_its_own_norm() -> None:
    schedule = build(plan(1, update="in_backward"), step(8))
    assert lines(schedule) == numbered("""
         0 fetch u0
         1 fetch u1
         2 fetch u2
         3 fetch_state u2 p0
         4 fetch_state u1 p0
         5 forward u0 m0 <0
         6 forward u1 m0 <1
         7 epilogue u2 m0 <2
         8 norm u2
         9 update u2 p0 <3 <8
        10 publish u2 p0 <9
        11 fetch_state u0 p0 <10
        12 backward u1 m0
        13 norm u1
        14 update u1 p0 <4 <13
        15 publish u1 p0 <14
        16 backward u0 m0
        17 norm u0
        18 update u0 p0 <11 <17
        19 publish u0 p0 <18
        20 decide <17
    """)
    moved = [op.size_bytes for op in schedule.ops if op.kind == "fetch_state"]
    assert moved == [80, 80, 80], "10 bytes a parameter but for the gradient's 2"
    half = build(plan(1, update="in_backward", working_in_master=True), step(8))
    assert [op.size_bytes for op in half.ops if op.kind == "fetch_state"] == [60, 60, 60], "nor the half that is in the slot"


def test_what_stays_on_the_card_does_not_travel() -> None:
    """The embedding with its state is updated where it is; of the head, whose parameters stay, only state travels."""
    placement = ("card", "streamed", "parameters")
    ops = build(plan(1, placement=placement, waves=2), step(8, 8, pending=True)).ops
    assert [(op.unit, op.wave) for op in ops if op.kind in ("fetch", "fetch_gradient")] == []
    assert [op.unit for op in ops if op.kind == "fetch_state"] == [1, 2]
    assert [op.unit for op in ops if op.kind == "update"] == [0, 1, 2]
    assert [op.unit for op in ops if op.kind == "store"] == [2, 1]
    assert lines(build(plan(1, placement=placement), step(8, mode="evaluate"))) == [
        "fetch u1",
        "forward u0 m0",
        "forward u1 m0 <0",
        "epilogue u2 m0",
    ]


def test_flush_is_updates_only() -> None:
    kinds = Counter(op.kind for op in build(plan(4), step(pending=True, mode="flush")).ops)
    assert kinds == {"fetch_state": 6, "update": 6, "publish": 6}


def test_later_waves_add_to_the_stored_gradient() -> None:
    """Blocks share gradient buffers and so store theirs each wave; embedding and head have buffers of their own."""
    ops = build(plan(4, waves=2), step(8, 8, 8)).ops
    assert waves_of(plan(waves=2), step(8, 8, 8)) == [range(0, 1), range(1, 3)]
    assert [op.unit for op in ops if op.kind == "store" and op.wave == 0] == [4, 3, 2, 1]
    assert [op.unit for op in ops if op.kind == "store" and op.wave == 1] == [5, 4, 3, 2, 1, 0]
    fetched = [op for op in ops if op.kind == "fetch_gradient"]
    assert [(op.unit, op.wave, op.size_bytes) for op in fetched] == [(u, 1, 20) for u in (4, 3, 2, 1)]
    assert {op.wave for op in ops if op.kind == "norm"} == {1}
    # At the turn of the waves the lower blocks are still in their slots.
    assert [op.unit for op in ops if op.kind == "fetch" and op.wave == 1] == [3, 4, 2, 1]


def test_work_and_bytes() -> None:
    units = (unit(0, flops=0), unit(1, (6, 4)), unit(1, trainable=False), unit(2, (5,), flops=100))
    policies = ("recompute", "recompute", "keep", "recompute")
    ops = build(plan(units=units, activations=policies, inputs="host", recompute_factor=0.5), step(8, pending=True)).ops
    flops = {(op.kind, op.unit): op.flops for op in ops if op.resource == "compute" and op.kind != "norm"}
    assert flops == {
        ("forward", 0): 0,
        ("forward", 1): 160,
        ("forward", 2): 160,
        ("epilogue", 3): 3 * 800,
        ("backward", 2): 160,  # frozen: no weight gradient, kept: nothing again
        ("backward", 1): 2.5 * 160,
        ("backward", 0): 0,
    }
    moved = {(op.kind, op.unit, op.piece): op.size_bytes for op in ops if op.resource in ("up", "down")}
    assert moved == {
        ("fetch_state", 0, 0): 100,
        ("publish", 0, 0): 80,
        ("fetch_state", 1, 0): 60,
        ("fetch_state", 1, 1): 40,
        ("publish", 1, 0): 48,
        ("publish", 1, 1): 32,
        ("fetch", 2, -1): 20,
        ("fetch_state", 3, 0): 50,
        ("publish", 3, 0): 40,
        ("send", 1, 0): 8 * 4 * 2,
        ("receive", 1, 0): 8 * 4 * 2,
        ("store", 3, -1): 10,
        ("store", 1, -1): 20,
        ("store", 0, -1): 20,
    }


@pytest.mark.parametrize("seed", range(60))
def test_every_unit_does_its_part(seed: int) -> None:
    """For random plans: each micro-batch goes through each unit once each way, each trainable unit is finished once."""
    chosen, shape = random_case(seed)
    ops = build(chosen, shape).ops
    counts = Counter((op.kind, op.unit, op.micro_batch) for op in ops if op.micro_batch >= 0 and op.resource == "compute")
    head, micro_batches = len(chosen.units) - 1, range(len(shape.micro_batches))
    trainable = [u for u, one in enumerate(chosen.units) if one.trainable]
    pieces = {(u, p) for u in trainable for p in range(len(chosen.units[u].pieces))}
    expected: Counter[tuple[str, int, int]] = Counter()
    if shape.mode != "flush":
        expected.update(("forward", u, m) for u in range(head) for m in micro_batches)
        expected.update(("epilogue", head, m) for m in micro_batches)
    if shape.mode == "train":
        lowest = 0 if chosen.units[0].trainable else 1
        expected.update(("backward", u, m) for u in range(lowest, head) for m in micro_batches)
    assert counts == expected
    updates = Counter((op.unit, op.piece) for op in ops if op.kind == "update")
    updating = shape.pending or (shape.mode == "train" and chosen.update == "in_backward")
    assert updates == (Counter(pieces) if updating else Counter())
    travelling = Counter(key for key in updates if chosen.placed(key[0]) != "card")
    for kind in ("fetch_state", "publish"):
        assert Counter((op.unit, op.piece) for op in ops if op.kind == kind) == travelling
    norms = sorted(op.unit for op in ops if op.kind == "norm")
    assert norms == (trainable if shape.mode == "train" else [])
    sent = Counter((op.unit, op.micro_batch, op.piece) for op in ops if op.kind == "send")
    assert sent == Counter((op.unit, op.micro_batch, op.piece) for op in ops if op.kind == "receive")
    assert [op.id for op in ops] == list(range(len(ops)))
    if shape.mode == "train":
        last = [op for op in ops if op.resource in ("compute", "host")][-1]
        assert last.kind == "decide"


def test_fetches_run_ahead_as_far_as_slots_allow() -> None:
    """With three slots a block's fetch is issued before the forward two blocks earlier."""
    for slots in (1, 2, 3):
        ops = build(plan(8, slots=slots), step(8)).ops
        place = {(op.kind, op.unit): op.id for op in reversed(ops)}  # the first of each
        for u in range(1 + slots, 9):
            assert place["forward", u - slots] < place["fetch", u] < place["forward", u - slots + 1]


def test_more_slots_never_cost_time() -> None:
    """Updates of units far ahead do not stand before the sends that forward needs next."""
    shape = StepShape(micro_batches=(8192,) * 8, sequence_length=4096, pending=True, mode="train")
    fast = BIG_RATES.model_copy(
        update={"compute_flops": 600e12, "up_bytes_s": 55e9, "down_bytes_s": 55e9, "both_bytes_s": 101e9}
    )
    times = [simulate(build(seven_billion(slots=slots), shape), fast).step_s for slots in (1, 2, 3, 4)]
    assert times == sorted(times, reverse=True)


def test_json_round_trip() -> None:
    schedule = build(plan(), step(8, 8, pending=True))
    again = Schedule.from_json(schedule.to_json())
    assert again == schedule
    assert again.ops[5].reads[0].place == "staging"


def test_twenty_thousand_ops_in_well_under_a_second() -> None:
    chosen = seven_billion(waves=2, activations=("recompute", *["offload"] * 30, "recompute"))
    shape = StepShape(micro_batches=(4096,) * 104, sequence_length=4096, pending=True, mode="train")
    started = time.process_time()
    schedule = build(chosen, shape)
    assert len(schedule.ops) > 20_000
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("chosen", "shape", "message"),
    [
        (plan(units=(unit(0), unit(2))), step(8), "an embedding, blocks and a head; 2 units given"),
        (plan(activations=("keep",)), step(8), "activations names 1 units of 4"),
        (plan(placement=("card",)), step(8), "placement names 1 units of 4"),
        (plan(units=(unit(0), unit(1).model_copy(update={"parameters": 11}), unit(2))), step(8), "pieces of unit 1 sum to 10"),
        (plan(slots=0), step(8), "slots, staging and waves"),
        (plan(), step(mode="flush"), "none are pending"),
        (plan(), step(), "train without micro-batches"),
        (plan(), step(8, pending=True, mode="evaluate"), "must be flushed before evaluation"),
        (plan(update="in_backward"), step(8, pending=True), "leave nothing pending"),
    ],
)
def test_contradictions_are_told(chosen: StreamPlan, shape: StepShape, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(chosen, shape)
