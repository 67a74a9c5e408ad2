"""Checkpoints across workers: any number writes, any other reads, and all agree on the name and on failure."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from muletrain.checkpoint import load, save, state
from muletrain.checkpoint.layout import latest_complete, published, unfinished
from muletrain.checkpoint.together import CheckpointError
from muletrain.spec.errors import InputError
from tests.checkpoint.toy import ToyStrategy, progress, write_model
from tests.dist.workers import run_workers


def _save(rank: int, workers: int, root: str, sharded: bool = True) -> None:
    save.save(Path(root), ToyStrategy(7, sharded=sharded), progress(5), write_model, keep=2)


def _load(rank: int, workers: int, root: str, sharded: bool = True) -> dict[str, list[float]]:
    strategy = ToyStrategy(0, sharded=sharded)
    found = load.choose(Path(root), print)
    assert found is not None
    load.load(found, strategy, load.read_progress(found))
    return strategy.everything()


@pytest.mark.parametrize("chunk_bytes", [2**23, 20])
@pytest.mark.parametrize("writers", [2, 3])
def test_R05_saved_on_some_workers_read_on_any_other(tmp_path, monkeypatch, writers, chunk_bytes):
    """Whole shards, or cut into chunks of a row."""
    monkeypatch.setattr(state, "_CHUNK_BYTES", chunk_bytes)
    run_workers(writers, _save, str(tmp_path))
    expected = ToyStrategy(7).everything()
    for readers in (3, 4):
        assert run_workers(readers, _load, str(tmp_path)) == [expected] * readers
    assert _load(0, 1, str(tmp_path), sharded=False) == expected, "and into plain tensors without a group"


def test_R05_plain_tensors_are_read_into_shards(tmp_path):
    _save(0, 1, str(tmp_path), sharded=False)
    assert run_workers(3, _load, str(tmp_path)) == [ToyStrategy(7).everything()] * 3


@pytest.mark.parametrize("chunk_bytes", [2**23, 20])
def test_replicated_plain_tensors_are_written_once(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(state, "_CHUNK_BYTES", chunk_bytes)
    run_workers(2, _save, str(tmp_path / "two"), False)
    _save(0, 1, str(tmp_path / "one"), sharded=False)

    def size(root: str) -> int:
        return sum(f.stat().st_size for f in (tmp_path / root).rglob("*.distcp"))

    assert size("two") < 1.5 * size("one")
    assert _load(0, 1, str(tmp_path / "two"), sharded=False) == ToyStrategy(7).everything()


def _save_late(rank: int, workers: int, root: str) -> None:
    if rank == 1:
        time.sleep(1.1)
    _save(rank, workers, root)


def test_C04_all_workers_write_into_the_folder_that_worker_0_named(tmp_path):
    run_workers(2, _save_late, str(tmp_path))
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000005"]
    assert len(list((tmp_path / "step-00000005" / "state").glob("*.distcp"))) == 2


def _model_write_fails(rank: int, workers: int, root: str) -> str:
    def broken(folder: Path, parameters: object) -> None:
        next(parameters)  # type: ignore[call-overload]
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError) as caught:
        save.save(Path(root), ToyStrategy(8, sharded=True), progress(6), broken, keep=1)
    return str(caught.value)


def _state_write_fails_on_one(rank: int, workers: int, root: str) -> str:
    if rank == 1:
        import torch.distributed.checkpoint as dcp

        def full(*args: object, **kwargs: object) -> None:
            raise OSError(28, "No space left on device")

        dcp.FileSystemWriter.write_data = full  # type: ignore[method-assign,assignment]
    with pytest.raises(CheckpointError) as caught:
        save.save(Path(root), ToyStrategy(8, sharded=True), progress(6), write_model, keep=1)
    return str(caught.value)


@pytest.mark.parametrize("failing", [_model_write_fails, _state_write_fails_on_one])
def test_C02_one_worker_out_of_space_fails_all_of_them_cleanly(tmp_path, failing):
    run_workers(2, _save, str(tmp_path))
    messages = run_workers(2, failing, str(tmp_path))
    assert messages[0] == messages[1]
    assert "No space left on device" in messages[0] and "step-00000006" in messages[0]
    assert not unfinished(tmp_path)
    assert [step for step, _ in published(tmp_path)] == [5]
    assert latest_complete(tmp_path, print) is not None


def _choose_broken(rank: int, workers: int, root: str) -> str:
    with pytest.raises(InputError) as caught:
        load.choose(Path(root), print)
    return str(caught.value)


def test_R10_all_workers_refuse_together(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    messages = run_workers(2, _choose_broken, str(tmp_path))
    assert messages[0] == messages[1] and "none of its checkpoints is complete" in messages[0]
