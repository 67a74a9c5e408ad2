"""The search: what fits, what is fastest, why, and what it hangs on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from muletrain.catalog.families import model_shape
from muletrain.catalog.models import model_config
from muletrain.planner.answer import PlanAnswer, answer
from muletrain.planner.assumptions import Assumptions
from muletrain.planner.estimate import choose, estimate, quick_s
from muletrain.planner.fleet import Fleet, parse_fleet
from muletrain.planner.job_time import step_time
from muletrain.planner.memory import ledger
from muletrain.planner.money import Prices, parse_prices
from muletrain.planner.ways import Way, Work, card_counts, network_of, ways
from muletrain.spec.errors import InputError

A = Assumptions()


def work(model: str = "deepseek-llm-7b", **changes: Any) -> Work:
    plain = Work(model_shape(model_config(model), model), sequence=4096, tokens=10**9, tokens_per_step=98_304)
    return replace(plain, **changes)


def planned(on: str, ram: str | None = "128GiB", prices: Prices | None = None, **changes: Any) -> PlanAnswer:
    boxes = changes.pop("boxes", 1)
    fleet = parse_fleet(on, ram, boxes, "100Gb/s" if boxes > 1 else None)
    return answer(work(**changes), fleet, prices or Prices(), A)


def group(fleet: Fleet, asked: Work, strategy: str, cards: int) -> list[Way]:
    return next(g for g in ways(asked, fleet, A) if g[0].strategy == strategy and g[0].all_cards == cards and not g[0].paper)


def test_a_7b_on_three_4090s_is_streamed_and_its_memory_is_the_ledgers() -> None:
    fleet, asked = parse_fleet("3x RTX 4090", "128GiB"), work()
    found = answer(asked, fleet, Prices(), A)
    assert found.choice is not None
    assert found.choice.name.startswith("streamed on 3 cards")
    way = choose(group(fleet, asked, "streamed", 3), fleet, A)
    assert way.run is not None
    assert found.choice.card_bytes == ledger(asked.shape, way.run).total("card")
    assert found.choice.host_bytes == ledger(asked.shape, way.run).total("host") <= 128 * 2**30
    assert found.choice.keys["memory.strategy"] == "streamed"
    assert "short on each card" in found.binding
    assert found.sensitive_to


def test_ways_that_run_here_come_first_then_paper_then_what_does_not_fit() -> None:
    found = planned("3x RTX 4090")
    order = [0 if way.fits and not way.paper else 1 if way.fits else 2 for way in found.ways]
    assert order == sorted(order)
    assert {way.paper for way in found.ways if "pipeline" in way.name} == {"pipeline parallelism is not built yet"}
    first = [way.tokens_per_s for way in found.ways if way.fits and not way.paper]
    assert first == sorted(first, reverse=True)


def test_a_model_that_fits_the_card_is_resident() -> None:
    found = planned("1x RTX 4090", model="qwen2.5-0.5b")
    assert found.choice is not None
    assert found.choice.name == "resident, activations kept"
    assert found.choice.card_spare_bytes >= 0


def test_nothing_fits() -> None:
    found = planned("1x RTX 4090", "16GiB", model="llama-3.1-405b")
    assert found.choice is None
    assert found.binding.startswith("memory: the closest that runs here is ")
    assert "short on the host" in found.binding
    assert (found.runner_up, found.sensitive_to) == ("none", "")


def test_H07_more_cards_are_not_always_worth_it() -> None:
    # a small step on two cards without peer access: a way on one of them is there to be compared, and communication is shown
    found = planned("2x RTX 4090", model="qwen2.5-1.5b", sequence=512, tokens_per_step=1024)
    two = [way for way in found.ways if way.cards == 2 and way.name.startswith("zero3") and not way.paper]
    one = [way for way in found.ways if way.cards == 1 and way.fits and not way.paper]
    assert min(way.communication for way in two) > 0.3
    assert max(way.tokens_per_s for way in one) > max(way.tokens_per_s for way in two)


def test_H12_two_good_cards_beat_three_that_wait() -> None:
    found = planned("2x RTX 4090 + RTX 3090", model="qwen2.5-0.5b")
    assert found.choice is not None
    assert found.choice.cards == 2
    all_three = next(way for way in found.ways if way.cards == 3)
    assert "RTX 3090 sets the pace: 43% of RTX 4090" in all_three.notes
    assert "RTX 3090" in found.box


def test_M06_a_large_vocabulary_is_in_the_ledger() -> None:
    found = planned("1x RTX 4090", model="qwen2.5-0.5b")
    assert found.choice is not None
    assert found.choice.card_parts["logits"] > 0


def test_M07_host_memory_decides() -> None:
    plenty, little = planned("1x RTX 4090", "128GiB"), planned("1x RTX 4090", "32GiB")
    assert plenty.choice is not None
    assert little.choice is None
    assert "short on the host" in little.binding


def test_H13_fp8_is_planned_only_where_the_card_has_it() -> None:
    assert any("fp8" in way.name for way in planned("1x RTX 4090").ways)
    assert not any("fp8" in way.name for way in planned("1x RTX 3090").ways)
    with pytest.raises(InputError, match="T4 has no bf16 tensor units"):
        planned("1x T4", model="gpt2", sequence=1024)


def test_money_and_power_are_intervals_by_hand() -> None:
    found = planned("3x RTX 4090", prices=parse_prices("2CNY/h", "0.8CNY/kWh", None))
    row = found.choice
    assert row is not None
    hours = 10**9 / row.tokens_per_s / 3600
    assert row.hours == pytest.approx((hours * A.step_low, hours * A.step_high))
    assert row.kwh == pytest.approx(tuple(each * row.watts / 1000 for each in row.hours))
    assert row.cost.rent == pytest.approx(tuple(each * 3 * 2 for each in row.hours))
    assert row.tokens_per_s_range == pytest.approx((row.tokens_per_s / A.step_high, row.tokens_per_s / A.step_low))


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters(method: str) -> None:
    found = planned("1x RTX 4090", method=method, tokens_per_step=16_384)
    # rank 16 on seven matrices of 30 blocks
    assert found.trained_parameters == 16 * 30 * (4 * (4096 + 4096) + 2 * (4096 + 11008) + (11008 + 4096))
    fits = [way for way in found.ways if way.fits]
    assert fits
    assert all(bool(way.paper) == (method == "qlora") for way in fits)
    if method == "qlora":
        assert found.choice is None
        assert "closest that runs here" in found.binding


def test_several_boxes_are_on_paper() -> None:
    found = planned("8x RTX 4090", "1TiB", boxes=2, model="qwen2.5-0.5b", tokens_per_step=2**20)
    assert found.choice is None
    assert {way.cards for way in found.ways} == {16}
    assert all(way.paper for way in found.ways)


def test_rates_between_cards() -> None:
    plain = parse_fleet("4x RTX 4090", None)
    card = plain.cards[0]
    assert network_of(card, 1, plain, A) is None
    two, eight = network_of(card, 2, plain, A), network_of(card, 8, plain, A)
    assert two is not None and two.inside == pytest.approx(card.link_bytes_s / 2)
    assert eight is not None and eight.inside == pytest.approx(85e9 / 16)
    a100 = parse_fleet("8x A100 SXM4 80GB", None)
    linked = network_of(a100.cards[0], 8, a100, A)
    assert linked is not None and linked.inside == pytest.approx(225e9)
    l40s = parse_fleet("2x L40S", None)
    peers = network_of(l40s.cards[0], 2, l40s, A)
    assert peers is not None and peers.inside == pytest.approx(0.75 * l40s.cards[0].link_bytes_s)


@pytest.mark.parametrize(
    ("on", "counts"),
    [
        ("RTX 4090", [1]),
        ("3x RTX 4090", [3, 1]),
        ("7x RTX 4090", [7, 3, 1]),
        ("8x RTX 4090", [8, 4, 2, 1]),
        ("2x RTX 4090 + 3x RTX 3090", [5, 2, 1]),
    ],
)
def test_card_counts_worth_trying(on: str, counts: list[int]) -> None:
    assert card_counts(parse_fleet(on, None)) == counts


def test_quick_times_choose_and_schedules_tell() -> None:
    fleet, asked = parse_fleet("RTX 4090", "128GiB"), work()
    way = choose(group(fleet, asked, "streamed", 1), fleet, A)
    assert quick_s(way, fleet, A) == pytest.approx(estimate(way, fleet, asked, A).step_s, rel=0.2)
    kept = choose(group(fleet, asked, "resident", 1), fleet, A)
    assert quick_s(kept, fleet, A) == step_time(kept.job, A).step_s


def test_utilisation_is_never_above_all() -> None:
    for on in ("1x RTX 4090", "1x H200", "8x RTX 4090"):
        assert all(way.utilisation <= 1 for way in planned(on, "2TiB", model="llama-2-13b", sequence=2048).ways)
