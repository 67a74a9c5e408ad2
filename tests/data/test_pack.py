"""Packing: every pair once, rows never over-full, best fit as good as one by one, and the rows mixed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.data.dataset import Prepared
from muletrain.data.pack import Packing, RowTable, best_fit, build_rows, row_table

PACKINGS: tuple[Packing, ...] = ("best_fit", "concat", "none")


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def inputs_of(table: RowTable) -> list[int]:
    """Token positions that are an input, over all rows."""
    return [t for s, n in zip(table.segment_start, table.segment_length, strict=True) for t in range(s, s + n)]


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(2, 90), max_size=60), limit=st.integers(1, 70), seed=st.integers(0, 9))
@pytest.mark.parametrize("packing", PACKINGS)
def test_P04_every_pair_once(packing: Packing, lengths: list[int], limit: int, seed: int) -> None:
    offsets = offsets_of(lengths)
    table = build_rows(offsets, limit, packing, seed)
    ends = set((offsets[1:] - 1).tolist())
    assert sorted(inputs_of(table)) == [t for t in range(offsets[-1]) if t not in ends]
    assert table.pairs == sum(lengths) - len(lengths)
    if lengths:
        assert table.row_pairs().max() <= limit and table.row_pairs().min() >= 1
        assert table.segment_length.min() >= 1 and table.row_start[0] == 0 and table.row_start[-1] == len(table.segment_start)
    if packing == "concat":
        assert table.rows == -(-table.pairs // limit), "only the last row may have room"


@pytest.mark.parametrize("packing", PACKINGS)
def test_P04_37_rows_bin_64(packing: Packing) -> None:
    lengths = [2 + (i * 29) % 83 for i in range(37)]
    table = build_rows(offsets_of(lengths), 64, packing, 0)
    assert table.pairs == sum(lengths) - 37
    assert table.fill == pytest.approx(table.pairs / (table.rows * 64))


def one_by_one(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80), capacity=st.integers(30, 60))
def test_bulk_best_fit_packs_as_one_by_one(lengths: list[int], capacity: int) -> None:
    items = np.array(lengths, dtype=np.int64)
    order, row = best_fit(items, capacity, 0)
    packed = [int(items[order[row == number]].sum()) for number in range(row.max() + 1)]
    # Which of two rows with equal room takes an item is free; how full the rows become is not.
    assert sorted(packed) == sorted(map(sum, one_by_one(items, capacity)))
    assert sorted(order.tolist()) == list(range(len(lengths)))


def test_a_million_segments_in_seconds() -> None:
    lengths = np.minimum(4096, np.random.default_rng(0).lognormal(6, 1.2, 1_000_000).astype(np.int64) + 1)
    start = time.perf_counter()
    _, row = best_fit(lengths, 4096, 0)
    assert time.perf_counter() - start < 10
    assert lengths.sum() / (4096 * (row.max() + 1)) > 0.99


def test_P05_rows_mix_by_seed() -> None:
    offsets = offsets_of([9] * 400)
    tables = [build_rows(offsets, 64, "best_fit", seed) for seed in (0, 0, 1)]
    assert np.array_equal(tables[0].segment_start, tables[1].segment_start)
    assert not np.array_equal(tables[0].segment_start, tables[2].segment_start)
    assert tables[0].rows == tables[2].rows, "the number of steps does not depend on the seed"
    documents = tables[0].segment_start // 9
    assert np.mean(np.abs(np.diff(documents)) == 1) < 0.05, "neighbours in the corpus share a row"


@pytest.mark.parametrize("packing", PACKINGS)
def test_table_is_kept_and_found(rows_of, packing: Packing) -> None:  # type: ignore[no-untyped-def]
    prepared: Prepared = rows_of(30)
    first = row_table(prepared, "train", 16, packing, 3)
    folders = sorted((prepared.folder / "rows").iterdir())
    assert len(folders) == 1 and not folders[0].name.startswith(".")
    again = row_table(prepared, "train", 16, packing, 3)
    assert isinstance(again.segment_start, np.memmap)
    fresh = build_rows(prepared.documents("train").offsets, 16, packing, 3)
    for table in (first, again):
        assert all(
            np.array_equal(getattr(table, n), getattr(fresh, n)) for n in ("row_start", "segment_start", "segment_length")
        )


def test_table_of_a_read_only_data_set_stays_in_memory(rows_of, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    prepared = rows_of(5)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("muletrain.data.pack.tempfile.mkdtemp", refuse)
    assert row_table(prepared, "train", 16, "best_fit", 0).pairs > 0
