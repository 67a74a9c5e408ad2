"""Predictions are sums of what compute, schedule and ledger say, from the plan and the box alone."""

from __future__ import annotations

from typing import Any

import pytest

from muletrain.planner.compute import compute_time, optimizer_s
from muletrain.planner.memory import ledger
from muletrain.planner.prediction import footprint, predict, with_expectation
from muletrain.planner.resolve import resolve
from muletrain.planner.speed import speed_of
from muletrain.spec.errors import InputError
from muletrain.spec.machine import LinkRates, Sample
from muletrain.spec.plan import Plan
from tests.planner.boxes import H200, box, measured_box, request

MACHINE = box(H200, host_gib=512)


def planned(strategy: str, **changes: Any) -> Plan:
    keys = {"memory.strategy": strategy, "precision.compute": "bf16", "train.micro_batch": 2, "parallel.workers": 1} | changes
    return resolve(request(keys), MACHINE if strategy != "zero3" else box(H200, H200))


def test_a_resident_step_is_its_arithmetic_and_its_update() -> None:
    plan = planned("resident")
    found, run, speed = predict(plan, MACHINE), footprint(plan), speed_of(MACHINE, "bf16")
    shape = plan.model.shape
    expected = compute_time(shape, run, speed).total_s + optimizer_s(shape.parameters, run, speed)
    assert found.step_s == found.bound_s == sum(found.time_s.values()) == pytest.approx(expected)
    assert found.tokens_per_s == plan.tokens_per_step / found.step_s and found.tokens == 4096
    assert found.ledger == plan.memory.ledger and found.timeline is None
    assert found.source == "catalogue: H200 SXM 141GB, shares of its dense peak"


def test_a_streamed_step_is_its_timeline() -> None:
    plan = planned("streamed")
    found = predict(plan, MACHINE)
    assert found.timeline is not None and found.timeline.source == "simulated"
    assert found.step_s == found.timeline.step_s >= found.bound_s >= found.resource_bound_s > 0
    assert found.ledger == plan.memory.ledger == ledger(plan.model.shape, footprint(plan))
    busy = found.timeline.busy_s()
    assert busy["update"] == pytest.approx(found.time_s["update"])
    compute = sum(found.time_s[part] for part in ("matmul", "attention", "elementwise", "launch"))
    modelled = busy["forward"] + busy["backward"] + busy["epilogue"]
    overhead = 10e-6 * sum(op.kind in ("forward", "backward", "epilogue") for op in found.timeline.ops)
    assert modelled == pytest.approx(compute + overhead)


def test_an_adapter_beside_a_streamed_model_takes_less_and_updates_nothing_that_travels() -> None:
    full = predict(planned("streamed", **{"memory.placement": 0}), MACHINE)
    plan = planned("streamed", **{"memory.placement": 0, "model.adapter.kind": "lora"})
    found = predict(plan, MACHINE)
    assert found.ledger == plan.memory.ledger and found.step_s < full.step_s
    assert found.timeline is not None
    kinds = {op.kind for op in found.timeline.ops}
    assert kinds == {"fetch", "forward", "send", "receive", "backward", "epilogue", "decide"}
    assert predict(planned("resident", **{"model.adapter.kind": "lora"}), MACHINE).step_s < predict(
        planned("resident"), MACHINE
    ).step_s  # fmt: skip


def test_updates_in_backward_leave_nothing_pending() -> None:
    found = predict(planned("streamed", **{"train.clip_norm": 0}), MACHINE)
    assert found.timeline is not None
    assert [op.kind for op in found.timeline.ops].index("update") > [op.kind for op in found.timeline.ops].index("epilogue")


def test_several_streamed_workers_share_the_work() -> None:
    keys = {"train.tokens_per_step": 49152, "train.micro_batch": 8, "memory.placement": 0}
    one = predict(planned("streamed", **keys), MACHINE)
    three = box(H200, H200, H200, host_gib=512)
    plan = resolve(request(keys | {"memory.strategy": "streamed", "precision.compute": "bf16", "parallel.workers": 3}), three)
    found = predict(plan, three)
    assert found.tokens == one.tokens and found.step_s >= found.bound_s >= found.resource_bound_s > 0
    assert one.step_s / 3 < found.step_s < one.step_s / 1.5
    assert found.timeline is not None and {"store_part", "sum", "wait"} <= {op.kind for op in found.timeline.ops}


def test_what_is_not_predicted_is_told() -> None:
    with pytest.raises(InputError, match="the time of zero3 on 2 workers is not predicted; streamed on GPUs is"):
        predict(planned("zero3", **{"parallel.workers": 2}), box(H200, H200))
    plan = planned("resident", **{"parallel.device": "cpu", "precision.compute": "fp32"})
    with pytest.raises(InputError, match="the processor of box is not measured"):
        predict(plan, MACHINE)


def test_a_step_without_pauses_computes_as_power_lets_it() -> None:
    """On a measured card that keeps 0.8 of its rates when it never pauses: a resident step does not, a streamed one may."""
    machine = measured_box(H200, device=H200.name)
    assert machine.measured is not None
    slow = Sample(median=1e-6, low=1e-6, high=1e-6, n=1)
    link = LinkRates(gpu=0, up=slow, down=slow, both=slow, copy_s=slow)
    machine = machine.model_copy(update={"measured": machine.measured.model_copy(update={"links": (link,)})})
    speed, plan = speed_of(machine, "bf16"), planned("resident")
    found = predict(plan, machine)
    assert found.time_s["matmul"] == pytest.approx(compute_time(plan.model.shape, footprint(plan), speed).matmul_s / 0.8)
    streamed = planned("streamed")
    waiting = predict(streamed, machine)
    assert waiting.time_s["waiting"] > 0.5 * waiting.step_s
    assert waiting.time_s["matmul"] == compute_time(streamed.model.shape, footprint(streamed), speed).matmul_s


def test_workers_share_what_they_have_one_of() -> None:
    """Three workers: on three cards each has its own, on one they take turns."""
    keys = {"parallel.workers": 3, "train.micro_batch": 1, "train.tokens_per_step": 512 * 9}
    keys |= {"memory.strategy": "streamed", "precision.compute": "bf16"}
    three = box(H200, H200, H200, host_gib=512)
    plan = resolve(request(keys), three)
    apart, turns = predict(plan, three), predict(plan, MACHINE)
    assert apart.tokens == turns.tokens == 512 * 9
    speed = speed_of(MACHINE, "bf16")
    assert apart.time_s["matmul"] == compute_time(plan.model.shape, footprint(plan), speed).matmul_s
    assert turns.time_s["matmul"] == pytest.approx(3 * apart.time_s["matmul"])
    assert 1.2 * apart.step_s < turns.step_s < 3.1 * apart.step_s  # starting operations takes each its own host's time


def test_a_plan_says_what_it_expects_where_that_is_known() -> None:
    plan = planned("resident")
    told = with_expectation(plan, MACHINE)
    assert told.expected.tokens_per_s == predict(plan, MACHINE).tokens_per_s
    assert told.expected.source == "catalogue: H200 SXM 141GB, shares of its dense peak"
    assert told.model_copy(update={"expected": plan.expected}) == plan
    sharded = planned("zero3", **{"parallel.workers": 2})
    assert with_expectation(sharded, box(H200, H200)) == sharded
