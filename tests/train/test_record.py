"""The communication profile of a GPU run, on a device timeline that is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muletrain.spec.plan import ExpectedPlan
from muletrain.train import record
from muletrain.train.record import CommunicationProfile

from .tiny import make_materials, make_plan, record_of, run


class Profiler:
    """A device that computes for 0.6 s of each second and communicates for 0.5 s, 0.1 s of it alone."""

    running = False
    started = 0

    def start(self) -> None:
        Profiler.running, Profiler.started = True, Profiler.started + 1

    def stop(self) -> None:
        Profiler.running = False

    def events(self) -> list[Any]:
        def kernel(name: str, start: float, end: float) -> Any:
            return SimpleNamespace(
                name=name, device_type="DeviceType.CUDA", time_range=SimpleNamespace(start=start * 1e6, end=end * 1e6)
            )

        return [kernel("gemm", 0.0, 0.6), kernel("ncclDevKernel_AllGather", 0.2, 0.7)]


def test_shares_come_from_the_steps_asked_for_after_the_first_ones(monkeypatch):
    clock = iter([10.0, 11.0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: Profiler())
    monkeypatch.setattr(record, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    profile = CommunicationProfile(2)
    profiled, plan = [], SimpleNamespace(memory=SimpleNamespace(strategy="zero3"))
    for step in range(1, 9):
        profiled.append(Profiler.running)
        profile.after_step(SimpleNamespace(meter=SimpleNamespace(steps=step), plan=plan), None)  # type: ignore[arg-type]
    assert profiled == [False, False, False, True, True, False, False, False]
    assert (profile.exposed, profile.overlapped) == (pytest.approx(0.1), pytest.approx(0.4))
    assert Profiler.started == 1


def test_without_a_gpu_nothing_is_profiled_and_nothing_made_up():
    profile = CommunicationProfile(2)
    for step in range(1, 9):
        profile.after_step(SimpleNamespace(meter=SimpleNamespace(steps=step)), None)  # type: ignore[arg-type]
    assert profile.exposed is None and profile.overlapped is None


def test_speed_is_laid_beside_what_the_plan_expected(tmp_path):
    materials = make_materials(tmp_path)
    plan = make_plan(materials, tmp_path / "run")
    assert run(materials, plan.model_copy(update={"expected": ExpectedPlan(tokens_per_s=1000.0, source="probe")})) == 0
    found = record_of(tmp_path / "run")
    assert found.predicted_tokens_per_s == 1000.0
    assert found.of_predicted_speed == pytest.approx(found.tokens_per_s / 1000)
    assert found.planned_memory_bytes is None  # on a CPU the plan is of all workers together


def test_nothing_is_compared_where_nothing_was_predicted(tmp_path):
    materials = make_materials(tmp_path)
    assert run(materials, make_plan(materials, tmp_path / "run")) == 0
    found = record_of(tmp_path / "run")
    assert (found.predicted_tokens_per_s, found.of_predicted_speed) == (None, None)
