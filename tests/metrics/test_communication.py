"""Exposed and overlapped time, on timelines whose answer is plain to see."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muletrain.metrics.communication import CommunicationMeter, device_intervals, exposed_and_overlapped, union


@pytest.mark.parametrize(
    ("compute", "communication", "expected"),
    [
        ([(0, 10)], [(2, 5)], (0, 3)),
        ([(0, 10)], [(10, 14)], (4, 0)),
        ([(0, 4), (6, 10)], [(3, 8)], (2, 3)),
        ([(0, 4), (1, 2), (3, 5)], [(4, 6), (4, 7)], (2, 1)),
        ([], [(1, 2), (4, 6)], (3, 0)),
        ([(0, 10)], [], (0, 0)),
        ([(0, 10)], [(0, 1), (2, 3), (20, 21)], (1, 2)),
    ],
)
def test_exposed_is_what_no_compute_covers(compute, communication, expected):
    assert exposed_and_overlapped(compute, communication) == expected


_intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


@given(_intervals, _intervals)
def test_agrees_with_counting_ticks(compute, communication):
    def covered(intervals, tick):
        return any(start <= tick < end for start, end in intervals)

    ticks = [t for t in range(50) if covered(communication, t)]
    overlapped = sum(covered(compute, t) for t in ticks)
    assert exposed_and_overlapped(compute, communication) == (len(ticks) - overlapped, overlapped)


def test_union_is_disjoint_and_ordered():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_only_device_kernels_count_and_nccl_is_known_by_name():
    def event(name, device, start, end):
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))

    compute, communication = device_intervals(
        [
            event("gemm", "DeviceType.CUDA", 0, 1_000_000),
            event("ncclDevKernel_AllGather", "DeviceType.CUDA", 500_000, 2_000_000),
            event("aten::mm", "DeviceType.CPU", 0, 9_000_000),
        ]
    )
    assert compute == [(0.0, 1.0)]
    assert communication == [(0.5, 2.0)]
    assert exposed_and_overlapped(compute, communication) == (1.0, 0.5)


def test_copies_are_communication_where_workers_meet_in_host_memory():
    def event(name, start, end):
        return SimpleNamespace(name=name, device_type="DeviceType.CUDA", time_range=SimpleNamespace(start=start, end=end))

    names = ["Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)", "Memcpy DtoD (Device -> Device)", "gemm"]
    events = [event(name, start * 1_000_000, start * 1_000_000 + 1_000_000) for start, name in enumerate(names)]
    assert device_intervals(events, copies=True) == ([(2.0, 3.0), (3.0, 4.0)], [(0.0, 1.0), (1.0, 2.0)])
    assert device_intervals(events) == ([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)], [])


def test_meter_counts_nested_waits_once_and_survives_an_error():
    meter = CommunicationMeter()
    with meter.wait(), meter.wait():
        time.sleep(0.02)
    with pytest.raises(RuntimeError, match="peer"), meter.wait():  # noqa: PT012 - the sleep is what is timed
        time.sleep(0.02)
        raise RuntimeError("peer gone")
    assert 0.04 <= meter.take() < 0.4
    assert meter.take() == 0.0
