"""The stream: each row once an epoch, the same for any number of workers, shapes fixed, segments kept apart."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from subprocess import run

import numpy as np
import pytest
import torch

from muletrain.data.batch import IGNORE, MicroBatch
from muletrain.data.dataset import Prepared
from muletrain.data.pack import Packing
from muletrain.data.prepare import prepare
from muletrain.data.stream import TrainingStream
from muletrain.spec.plan import DataPlan
from tests.data.conftest import text_of, write_rows

PACKINGS: tuple[Packing, ...] = ("best_fit", "concat", "none")
Rows = Callable[..., Prepared]


def stream_of(prepared: Prepared, **changes: object) -> TrainingStream:
    values: dict[str, object] = {"sequence_length": 64, "packing": "none", "micro_batch": 2, "micro_batches": 3, "seed": 0}
    return TrainingStream(prepared, **(values | changes))  # type: ignore[arg-type]


def signature(batch: MicroBatch) -> tuple[object, ...]:
    tensors = (batch.input_ids, batch.labels, batch.position_ids, batch.cu_seqlens)
    return (batch.index, batch.sample_ids, batch.tokens, *(tuple(tensor.flatten().tolist()) for tensor in tensors))


@pytest.mark.parametrize("rows", [199, 200])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_D12_each_row_once_an_epoch_for_any_workers(rows_of: Rows, rows: int, workers: int) -> None:
    stream = stream_of(rows_of(rows))
    assert stream.rows == rows and stream.windows_per_epoch == math.ceil(rows / 6)
    orders = []
    for epoch in range(2):
        seen: list[int] = []
        for window in range(epoch * stream.windows_per_epoch, (epoch + 1) * stream.windows_per_epoch):
            batches = [batch for worker in range(workers) for batch in stream.window(window, worker, workers)]
            alone = {batch.index: signature(batch) for batch in stream.window(window, 0, 1)}
            assert {batch.index: signature(batch) for batch in batches if batch.index >= 0} == alone
            seen += [row for _, batch in sorted((b.index, b) for b in batches if b.index >= 0) for row in batch.sample_ids]
        assert sorted(seen) == list(range(rows))
        orders.append(seen)
    assert orders[0] != orders[1]
    again = stream_of(rows_of(rows))
    assert [signature(b) for b in again.window(3, 0, 1)] == [signature(b) for b in stream.window(3, 0, 1)]
    other = stream_of(rows_of(rows), seed=1)
    assert [b.sample_ids for b in other.window(3, 0, 1)] != [b.sample_ids for b in stream.window(3, 0, 1)]


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_D13_every_worker_has_the_same_number_of_batches(rows_of: Rows, workers: int) -> None:
    stream = stream_of(rows_of(13), packing="best_fit", sequence_length=16, micro_batches=7)
    for window in range(2 * stream.windows_per_epoch):
        dealt = [stream.window(window, worker, workers) for worker in range(workers)]
        assert len({len(batches) for batches in dealt}) == 1
        real = [batch for batches in dealt for batch in batches if batch.index >= 0]
        assert sorted(batch.index for batch in real) == list(range(len(real)))
        for worker, batches in enumerate(dealt):
            for batch in batches:
                assert batch.input_ids.shape == (2, 16)
                if batch.index < 0:
                    assert batch.tokens == 0 and (batch.labels == IGNORE).all() and batch.sample_ids == ()
                else:
                    assert batch.index % workers == worker


def test_D08_fewer_rows_than_a_window(rows_of: Rows) -> None:
    stream = stream_of(rows_of(3), micro_batches=4)
    assert stream.windows_per_epoch == 1
    for window in range(3):
        dealt = [batch for worker in range(2) for batch in stream.window(window, worker, 2)]
        assert sorted(row for batch in dealt for row in batch.sample_ids) == [0, 1, 2]
    alone = stream_of(rows_of(1), micro_batches=4)
    idle = alone.window(0, 1, 2)
    assert len(idle) == 1 and idle[0].index == -1 and idle[0].input_ids.shape == alone.window(0, 0, 2)[0].input_ids.shape


@pytest.mark.parametrize(("micro_batches_an_epoch", "sizes"), [(7, [4, 3]), (3, [3]), (8, [4, 4])])
def test_N09_the_last_window_is_what_is_left(rows_of: Rows, micro_batches_an_epoch: int, sizes: list[int]) -> None:
    stream = stream_of(rows_of(micro_batches_an_epoch), micro_batch=1, micro_batches=4)
    assert stream.windows_per_epoch == len(sizes)
    windows = [stream.window(window, 0, 1) for window in range(2 * len(sizes))]
    assert [len(batches) for batches in windows] == sizes * 2
    assert sum(batch.tokens for batches in windows for batch in batches) == 2 * stream.tokens_per_epoch


@pytest.mark.parametrize("packing", PACKINGS)
def test_P04_S02_tokens_and_windows_are_exact(rows_of: Rows, packing: Packing) -> None:
    prepared = rows_of(37)
    stream = stream_of(prepared, packing=packing)
    trained, windows = 0, 0
    while windows < stream.windows_per_epoch:
        trained += sum(batch.tokens for batch in stream.window(windows, 0, 1))
        windows += 1
    counts = prepared.manifest.train
    assert trained == counts.tokens - counts.documents == stream.tokens_per_epoch
    assert windows == math.ceil(stream.rows / 6)


@pytest.mark.parametrize("packing", PACKINGS)
def test_labels_positions_and_bounds_agree_with_the_documents(rows_of: Rows, packing: Packing) -> None:
    prepared = rows_of(23)
    stream = stream_of(prepared, packing=packing, sequence_length=40)
    documents = prepared.documents("train")
    expected: Counter[tuple[int, int]] = Counter()
    for number in range(23):
        ids = documents.document(number).tolist()
        expected.update(pairwise(ids))
    met: Counter[tuple[int, int]] = Counter()
    for window in range(stream.windows_per_epoch):
        for batch in stream.window(window, 0, 1):
            size, length = batch.input_ids.shape
            ids, labels, positions = (t.flatten().tolist() for t in (batch.input_ids, batch.labels, batch.position_ids))
            bounds = sorted(set(batch.cu_seqlens.tolist())) or list(range(0, size * length + 1, length))
            assert bounds[0] == 0 and bounds[-1] == size * length
            assert set(range(0, size * length + 1, length)) <= set(bounds), "no segment crosses a row"
            assert batch.max_seqlen == batch.input_ids.shape[1] >= max(b - a for a, b in pairwise(bounds))
            for a, b in pairwise(bounds):
                assert positions[a:b] == list(range(b - a))
                real = [label != IGNORE for label in labels[a:b]]
                assert all(real) or not any(real), "padding is a segment of its own"
                if real[0]:
                    assert ids[a + 1 : b] == labels[a : b - 1], "the label is the next input"
            met.update((i, label) for i, label in zip(ids, labels, strict=True) if label != IGNORE)
            assert batch.tokens == sum(label != IGNORE for label in labels)
            assert batch.padding_tokens == size * length - batch.tokens
    assert met == expected


def test_bounds_come_in_few_lengths_and_full_rows_need_none(
    tmp_path: Path, plan: Callable[..., DataPlan], rows_of: Rows
) -> None:
    stream = stream_of(rows_of(100), packing="best_fit")
    lengths = {len(batch.cu_seqlens) for window in range(stream.windows_per_epoch) for batch in stream.window(window, 0, 1)}
    assert all(length & (length - 1) == 0 and length >= 8 for length in lengths)
    long = prepare(plan(write_rows(tmp_path / "long.jsonl", [{"text": text_of(i, 400)} for i in range(4)])))
    full = stream_of(long, packing="none", sequence_length=8, micro_batch=1)
    batches = [batch for window in range(full.windows_per_epoch) for batch in full.window(window, 0, 1)]
    assert any(len(batch.cu_seqlens) == 0 and batch.padding_tokens == 0 and batch.max_seqlen == 8 for batch in batches)
    assert all(len(batch.cu_seqlens) == 0 for batch in batches if batch.padding_tokens == 0)


def test_unpacked_rows_are_padded_to_the_longest_of_64s(tmp_path: Path, plan: Callable[..., DataPlan]) -> None:
    rows = [{"text": text_of(i, 1 + i % 3 * 60)} for i in range(12)]
    prepared = prepare(plan(write_rows(tmp_path / "a.jsonl", rows)))
    stream = stream_of(prepared, sequence_length=200, micro_batch=1)
    shapes = {tuple(b.input_ids.shape) for w in range(stream.windows_per_epoch) for b in stream.window(w, 0, 1)}
    assert {length for _, length in shapes} <= {64, 128, 192, 200} and len(shapes) > 1
    assert stream.longest().input_ids.shape == max(shapes)


def test_P01_eos_is_a_label_though_it_is_the_padding(rows_of: Rows) -> None:
    batches = stream_of(rows_of(6)).window(0, 0, 1)
    ends = sum(int((batch.labels == 1).sum()) for batch in batches)
    assert ends == 6, "each document's end is learnt, though padding has the same id"
    assert all((batch.input_ids[batch.labels == IGNORE] == 1).all() for batch in batches)


@pytest.mark.parametrize("packing", PACKINGS)
def test_longest_is_the_largest_shape(rows_of: Rows, packing: Packing) -> None:
    stream = stream_of(rows_of(50), packing=packing, sequence_length=48)
    longest = stream.longest()
    batches = [batch for window in range(stream.windows_per_epoch) for batch in stream.window(window, 0, 1)]
    assert longest.input_ids.shape[1] == max(batch.input_ids.shape[1] for batch in batches)
    assert longest.tokens >= max(batch.tokens for batch in batches)


@pytest.mark.parametrize("packing", PACKINGS)
def test_evaluation_is_fixed_and_its_bytes_exact(rows_of: Rows, packing: Packing) -> None:
    prepared = rows_of(60, validation_fraction=0.4)
    counts = prepared.manifest.validation
    one, two = (stream_of(prepared, packing=packing, seed=seed) for seed in (0, 1))
    batches, size = one.evaluation(10_000, 0, 1)
    assert size == counts.text_bytes and sum(batch.tokens for batch in batches) == counts.tokens - counts.documents
    some, some_size = one.evaluation(3, 0, 1)
    assert sum(len(batch.sample_ids) for batch in some) == 3 and 0 < some_size < size
    dealt = [two.evaluation(3, worker, 3) for worker in range(3)]
    assert {pair[1] for pair in dealt} == {some_size} and {len(pair[0]) for pair in dealt} == {1}
    real = sorted((batch for pair in dealt for batch in pair[0] if batch.index >= 0), key=lambda batch: batch.index)
    assert [signature(batch) for batch in real] == [signature(batch) for batch in some]


def test_no_held_out_documents_give_nothing(rows_of: Rows) -> None:
    assert stream_of(rows_of(5)).evaluation(10, 0, 2) == ([], 0)


def test_a_window_takes_milliseconds(tmp_path: Path, plan: Callable[..., DataPlan]) -> None:
    prepared = prepare(plan(write_rows(tmp_path / "a.jsonl", [{"text": text_of(i, 100 + i % 300)} for i in range(600)])))
    stream = stream_of(prepared, packing="best_fit", sequence_length=1024, micro_batch=8, micro_batches=8)
    stream.window(0, 0, 1)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        batches = stream.window(0, 0, 1)
        times.append(time.perf_counter() - begin)
    assert sum(batch.input_ids.numel() for batch in batches) == 65_536
    assert min(times) < 0.1, "64k tokens"


def test_types_are_those_of_the_contract(rows_of: Rows) -> None:
    batch = stream_of(rows_of(9), packing="best_fit").window(0, 0, 1)[0]
    assert [t.dtype for t in (batch.input_ids, batch.labels, batch.position_ids)] == [torch.int64] * 3
    assert batch.cu_seqlens.dtype == torch.int32 and np.diff(batch.cu_seqlens.numpy()).min() >= 0


def test_preparing_imports_no_torch() -> None:
    program = (
        "import sys, muletrain.data.prepare, muletrain.data.report, muletrain.cli.data\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "set()"
