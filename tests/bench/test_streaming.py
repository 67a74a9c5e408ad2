"""Simulated points: their own arithmetic, the choice between layouts, what is shared by several cards, what is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muletrain.bench.streaming import (
    Cards,
    SimulatedTable,
    Work,
    best,
    built,
    cards_of,
    markdown,
    micro_batches,
    point,
    points,
)
from muletrain.catalog.families import model_shape
from muletrain.catalog.models import model_config
from muletrain.spec.errors import DoesNotFitError, InputError

GIB = 2**30
SHAPE = model_shape(model_config("smollm2-135m") | {"num_hidden_layers": 6}, "smollm2-135m")
WORK = Work(SHAPE, tokens=4096, sequence=512, cards=1, moments="bf16", clip=True)


def small(card_gib: float = 24, **rates: float) -> Cards:
    box = cards_of("RTX 4090", 64 * GIB, *(rates.get(name, 0.0) for name in ("product", "link", "host")))
    return replace(box, card_bytes=round(card_gib * GIB))


def test_a_point_is_its_fastest_micro_batch() -> None:
    found = point(WORK, small(2.5))
    sizes = micro_batches(WORK)
    every = [built(WORK, small(2.5), size) for size in sizes]
    assert found.built == max(every, key=lambda answer: answer.tokens_per_s)
    assert found.built.tokens_per_s == pytest.approx(4096 / found.built.step_s)
    assert found.best.tokens_per_s >= found.built.tokens_per_s
    assert found.built.card_gib < 2.5


def test_the_solver_keeps_where_there_is_room() -> None:
    """With room for all activations nothing is computed again; the planner's layout of today always does."""
    assert "keep" in best(WORK, small(), 2).layout and "recompute" not in best(WORK, small(), 2).layout
    assert "6 recompute" in built(WORK, small(), 2).layout


@pytest.mark.parametrize(
    ("tokens", "cards", "sizes"), [(4096, 1, [2, 4, 8]), (4096, 3, [1]), (512, 4, [1]), (512 * 96, 3, [8, 16, 32])]
)
def test_micro_batches_leave_the_busiest_card_the_fewest_rows(tokens: int, cards: int, sizes: list[int]) -> None:
    assert micro_batches(replace(WORK, tokens=tokens, cards=cards)) == sizes


def test_slower_links_and_shared_host_memory_cost_time() -> None:
    """Three cards on slow links: host memory that lets each move 1.8 GB/s in all is worse than 2 each way and better than 1."""
    work = replace(WORK, tokens=512 * 12, cards=3)
    fast, slow = (built(work, small(link=rate), 2).step_s for rate in (2e9, 1e9))
    assert fast < built(work, small(link=2e9, host=3 * 1.8e9), 2).step_s < slow
    assert built(work, small(link=2e9, host=1e12), 2).step_s == fast < 0.6 * slow


def test_without_a_clip_one_card_updates_in_backward() -> None:
    slow = small(2.5, link=2e9)
    assert built(replace(WORK, clip=False), slow, 2).step_s < built(WORK, slow, 2).step_s


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(DoesNotFitError, match=r"smollm2-135m does not fit: memory.strategy streamed .* GiB short"):
        built(WORK, small(0.5), 8)
    with pytest.raises(DoesNotFitError, match="GiB"):
        point(WORK, small(0.5))


def test_a_step_shorter_than_a_row_is_told() -> None:
    with pytest.raises(InputError, match="--tokens: 256 is less than a row of 512; set --sequence lower"):
        points(SHAPE, small(), [256], [1], ["bf16"], 512, True)


def test_the_table_says_that_it_is_simulated_and_compares_by_card() -> None:
    box = small(product=150e12, link=24.5e9)
    found = points(SHAPE, box, [4096], [1, 2], ["bf16", "8bit"], 512, True)
    assert [(p.cards, p.moments) for p in found] == [(1, "bf16"), (2, "bf16"), (1, "8bit"), (2, "8bit")]
    table = SimulatedTable(model="m", gpu="g", sequence=512, rates=box.speed.source, points=tuple(found))
    text = markdown(table, 1000.0)
    assert text.startswith("SIMULATED: m on g, rows of 512 tokens, rates: catalogue: RTX 4090")
    assert "products at 150 TFLOP/s; link 24.5 GB/s each way, 44.1 both" in text
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| 4,096")]
    assert len(rows) == 4 and all(len(row) == len(rows[0]) for row in rows)
    assert float(rows[1][9]) == round(found[1].best.tokens_per_s / 2 / 1000.0, 2)
    assert "reference" not in markdown(table, 0.0)
