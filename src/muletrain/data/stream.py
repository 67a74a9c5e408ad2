"""TrainingStream: the micro-batches of any window (global batch) for any worker, by look-up.

Window w is window k of epoch e, (e, k) = divmod(w, windows_per_epoch): rows k*R to (k+1)*R of the epoch's keyed order. Windows
never cross an epoch; the last of an epoch holds what is left and is trained as it is. Micro-batch j holds rows j*B to (j+1)*B
of the window and goes whole to worker j % workers, so what a step trains does not depend on the workers, and resuming is asking
for the next window. Rejected: samplers with state (what resumes is counted, not saved) and sharding rows over workers first.
"""

from __future__ import annotations

import numpy as np
import torch

from muletrain.data.batch import IGNORE, MicroBatch
from muletrain.data.dataset import Documents, Prepared, SplitName
from muletrain.data.order import IntArray, KeyedOrder
from muletrain.data.pack import Packing, RowTable, row_table

_UNPACKED_MULTIPLE = 64
_FEWEST_BOUNDS = 8


class TrainingStream:
    """Rows of a prepared data set as micro-batches. `rows` and `windows_per_epoch` are exact."""

    def __init__(
        self, prepared: Prepared, *, sequence_length: int, packing: Packing, micro_batch: int, micro_batches: int, seed: int
    ) -> None:
        self._train = _RowReader(prepared, "train", sequence_length, packing, seed)
        self._validation = _RowReader(prepared, "validation", sequence_length, packing, 0)
        self._micro_batch = micro_batch
        self._window_rows = micro_batch * micro_batches
        self._seed = seed
        self.rows = self._train.table.rows
        """Rows an epoch."""
        self.windows_per_epoch = -(-self.rows // self._window_rows)
        """Windows an epoch, a last partial one included: updates an epoch."""
        self.tokens_per_epoch = self._train.table.pairs
        """Trained tokens an epoch."""
        self.fill = self._train.table.fill
        """Share of positions in packed rows that are trained."""

    def window(self, window_index: int, worker: int, workers: int) -> list[MicroBatch]:
        """This worker's micro-batches of a window, the same number on every worker (filler where one has fewer)."""
        epoch, number = divmod(window_index, self.windows_per_epoch)
        first = number * self._window_rows
        positions = np.arange(first, min(first + self._window_rows, self.rows))
        rows = KeyedOrder(self.rows, "rows", self._seed, epoch)(positions)
        return self._deal(self._train, rows, worker, workers)

    def evaluation(self, sequences: int, worker: int, workers: int) -> tuple[list[MicroBatch], int]:
        """(this worker's micro-batches of the first `sequences` held-out rows, UTF-8 bytes that all workers' rows cover).

        The rows are the same at every call, seed and number of workers. Bits a byte = loss sum / ln 2 / bytes, the loss summed
        over workers. Without held-out documents: ([], 0).
        """
        total = self._validation.table.rows
        rows = KeyedOrder(total, "evaluation")(np.arange(min(sequences, total)))
        return self._deal(self._validation, rows, worker, workers), self._validation.text_bytes(rows)

    def longest(self) -> MicroBatch:
        """A micro-batch of the largest shape any window can have, of the fullest row repeated: for the dry run."""
        fullest = int(np.argmax(self._train.table.row_pairs()))
        return self._train.batch(0, np.full(self._micro_batch, fullest), self._micro_batch)

    def _deal(self, reader: _RowReader, rows: IntArray, worker: int, workers: int) -> list[MicroBatch]:
        if not len(rows):
            return []
        size = self._micro_batch
        count = -(-len(rows) // size)
        mine = [reader.batch(j, rows[j * size : (j + 1) * size], size) for j in range(worker, count, workers)]
        missing = -(-count // workers) - len(mine)
        if missing:
            model = mine[-1] if mine else reader.batch(0, rows[:size], size)
            mine += [model.filler()] * missing
        return mine


class _RowReader:
    """Rows of one split as tensors."""

    def __init__(self, prepared: Prepared, split: SplitName, sequence_length: int, packing: Packing, seed: int) -> None:
        self.table: RowTable = row_table(prepared, split, sequence_length, packing, seed)
        self._documents: Documents = prepared.documents(split)
        self._pad = prepared.manifest.pad
        self._packed = packing != "none"

    def batch(self, index: int, rows: IntArray, size: int) -> MicroBatch:
        """Rows as a micro-batch of `size` rows, the missing ones empty."""
        segments = [self._segments(int(row)) for row in rows]
        length = self._length([sum(count for _, count in row) for row in segments])
        ids = np.full((size, length), self._pad, dtype=np.int64)
        labels = np.full((size, length), IGNORE, dtype=np.int64)
        positions = np.empty((size, length), dtype=np.int64)
        ramp = np.arange(length)
        bounds = [0]
        tokens = 0
        for number in range(size):
            at = 0
            for start, count in segments[number] if number < len(segments) else ():
                pieces = self._documents.tokens(start, count + 1)
                ids[number, at : at + count] = pieces[:-1]
                labels[number, at : at + count] = pieces[1:]
                positions[number, at : at + count] = ramp[:count]
                at += count
                bounds.append(number * length + at)
            tokens += at
            if at < length:
                positions[number, at:] = ramp[: length - at]
                bounds.append((number + 1) * length)
        cu_seqlens, longest = _bounds(bounds, size, length)
        return MicroBatch(
            index=index,
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(positions),
            cu_seqlens=cu_seqlens,
            max_seqlen=longest,
            tokens=tokens,
            padding_tokens=size * length - tokens,
            sample_ids=tuple(int(row) for row in rows),
        )

    def text_bytes(self, rows: IntArray) -> int:
        """UTF-8 bytes that rows cover; a piece of a document counts in proportion to its pairs."""
        total = 0.0
        for row in rows:
            for start, count in self._segments(int(row)):
                document = int(np.searchsorted(self._documents.offsets, start, side="right")) - 1
                first, end = self._documents.offsets[document : document + 2]
                total += int(self._documents.text_bytes[document]) * count / int(end - first - 1)
        return round(total)

    def _segments(self, row: int) -> list[tuple[int, int]]:
        first, end = self.table.row_start[row : row + 2]
        starts, lengths = self.table.segment_start[first:end], self.table.segment_length[first:end]
        return list(zip(starts.tolist(), lengths.tolist(), strict=True))

    def _length(self, row_pairs: list[int]) -> int:
        """Packed rows have one shape; others are padded to the longest, rounded up so that compiled code sees few shapes."""
        whole = self.table.sequence_length
        return whole if self._packed else min(whole, -(-max(row_pairs) // _UNPACKED_MULTIPLE) * _UNPACKED_MULTIPLE)


def _bounds(bounds: list[int], size: int, length: int) -> tuple[torch.Tensor, int]:
    """(cu_seqlens, max_seqlen) of segment ends in the flattened batch; empty where every row is one full segment.

    max_seqlen is the row's length whatever the segments: an upper bound is all that attention needs, and a number that changed
    from batch to batch would have every block compiled anew.
    """
    if bounds == [number * length for number in range(size + 1)]:
        return torch.empty(0, dtype=torch.int32), length
    count = max(_FEWEST_BOUNDS, 1 << (len(bounds) - 1).bit_length())
    padded = torch.full((count,), bounds[-1], dtype=torch.int32)
    padded[: len(bounds)] = torch.tensor(bounds, dtype=torch.int32)
    return padded, length
