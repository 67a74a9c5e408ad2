"""Checkpoints on one worker: complete or absent, whatever happens; the right ones kept; the right one chosen."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import signal
import time

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from muletrain.checkpoint import load, save
from muletrain.checkpoint.layout import latest_complete, problem_with, published, step_folder, unfinished
from muletrain.checkpoint.together import CheckpointError
from muletrain.spec.errors import InputError
from tests.checkpoint.toy import ToyStrategy, progress, write_model


def _save(root, step, keep=2, strategy=None):
    return save.save(root, strategy or ToyStrategy(step), progress(step), write_model, keep)


def _no_warning(message):
    raise AssertionError(message)


def test_a_checkpoint_comes_back_in_place(tmp_path):
    saved = ToyStrategy(1)
    saved.scale = 8.0
    result = _save(tmp_path, 3, strategy=saved)
    assert result.path == step_folder(tmp_path, 3)
    assert result.size_bytes == sum(
        f.stat().st_size for f in result.path.rglob("*") if f.is_file() and f.name != "manifest.json"
    )
    other = ToyStrategy(2)
    before = other.state["parameter"]["embed.weight"].data_ptr()
    position = load.read_progress(load.choose(tmp_path, _no_warning))
    load.load(result.path, other, position)
    assert position.update == 3 and position.window == 3
    assert other.everything() == saved.everything()
    assert other.state["parameter"]["embed.weight"].data_ptr() == before
    assert other.scale == 8.0 and other.refreshed == 1


def test_R07_position_is_plain_json_and_no_pickle_is_executed(tmp_path, monkeypatch):
    path = _save(tmp_path, 3).path
    assert json.loads((path / "progress.json").read_text())["scalars"] == {"loss_scale": 1.0}
    real, used = torch.load, []
    monkeypatch.setattr(torch, "load", lambda *a, **k: used.append(k.get("weights_only")) or real(*a, **k))
    load.load(path, ToyStrategy(), load.read_progress(path))
    assert used and all(used)


class _Harmful:
    """Unpickled, it makes a file: any function could be called so."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return type(self.file).touch, (self.file,)


@pytest.mark.parametrize("wrapped", [False, True])
def test_R07_an_index_from_elsewhere_runs_no_code(tmp_path, wrapped):
    path, victim = _save(tmp_path, 3).path, tmp_path / "code-was-run"
    index = pickle.loads((path / "state" / ".metadata").read_bytes())
    index.planner_data = _Harmful(victim)
    (path / "state" / ".metadata").write_bytes(pickle.dumps(index if wrapped else _Harmful(victim)))
    strategy = ToyStrategy()
    before = strategy.everything()
    with pytest.raises(InputError, match=r"\.metadata: not read: it names .*could run code"):
        load.load(path, strategy, load.read_progress(path))
    assert not victim.exists() and strategy.everything() == before
    pickle.loads(pickle.dumps(_Harmful(victim)))
    assert victim.exists(), "an ordinary unpickler would have run it"


@pytest.mark.parametrize(("content", "why"), [(b"", "Ran out of input"), (pickle.dumps({}), "holds dict and no index")])
def test_R07_what_is_no_index_is_said_to_be_none(tmp_path, content, why):
    path = _save(tmp_path, 3).path
    (path / "state" / ".metadata").write_bytes(content)
    with pytest.raises(InputError, match=why):
        load.load(path, ToyStrategy(), load.read_progress(path))


def test_R07_an_entry_that_is_no_tensor_is_refused(tmp_path):
    """DCP would unpickle its bytes."""
    path = _save(tmp_path, 3).path
    index = pickle.loads((path / "state" / ".metadata").read_bytes())
    index.state_dict_metadata["parameter/embed.weight"] = BytesStorageMetadata()
    (path / "state" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(InputError, match=r"parameter/embed.weight: absent in the checkpoint"):
        load.load(path, ToyStrategy(), load.read_progress(path))


def _truncate_model(folder):
    with (folder / "model" / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) // 2)


def _delete_state(folder):
    next((folder / "state").glob("*.distcp")).unlink()


def _flip_a_byte(folder):
    with (folder / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def _empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def _break_manifest(folder):
    (folder / "manifest.json").write_text("{")


def _edit_manifest(folder, **changes):
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | changes))


def _delete_position(folder):
    (folder / "progress.json").unlink()


def _list_no_files(folder):
    _edit_manifest(folder, files={})


def _from_another_version(folder):
    _edit_manifest(folder, schema_version=99)


def _copy_under_a_later_name(folder):
    """Its content is of an earlier step than its name: every resume would begin there again."""
    _edit_manifest(folder, step=12)


DAMAGES = [
    _truncate_model, _delete_state, _flip_a_byte, _empty, _break_manifest, _delete_position, _list_no_files,
    _from_another_version, _copy_under_a_later_name,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_R10_a_broken_newest_is_named_and_passed_over(tmp_path, damage):
    _save(tmp_path, 10)
    damage(_save(tmp_path, 20).path)
    (tmp_path / "checkpoint-30-tmp").mkdir()
    (tmp_path / ".step-00000040.tmp-abc").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "gone")
    (tmp_path / "step-00000999").symlink_to(tmp_path / "gone")
    (tmp_path / "step-00000998").touch()
    warnings: list[str] = []
    assert load.choose(tmp_path, warnings.append) == step_folder(tmp_path, 10)
    assert len(warnings) == 1 and "step-00000020" in warnings[0]


def test_R10_none_good_is_an_error_never_a_fresh_start(tmp_path):
    _empty(_save(tmp_path, 10).path)
    (tmp_path / "step-00000999").mkdir()
    with pytest.raises(InputError, match=r"(?s)none of its checkpoints is complete.*step-00000999.*step-00000010"):
        load.choose(tmp_path, lambda message: None)


def test_R10_an_empty_folder_is_a_fresh_start(tmp_path):
    assert load.choose(tmp_path, _no_warning) is None
    assert load.choose(tmp_path / "absent", _no_warning) is None


def test_C03_rotation_goes_by_number_and_counts_complete_ones_only(tmp_path):
    for step in (9900, 10000, 10100):
        _save(tmp_path, step, keep=5)
    _empty(step_folder(tmp_path, 10000))
    _save(tmp_path, 10200)
    assert [step for step, _ in published(tmp_path)] == [10000, 10100, 10200], "the damaged one is the user's to look at"
    _save(tmp_path, 10300, keep=1)
    assert [step for step, folder in published(tmp_path) if problem_with(folder) is None] == [10300]


def test_C03_a_lower_step_in_an_old_folder_is_not_rotated_away_by_its_own_save(tmp_path):
    _save(tmp_path, 100)
    _save(tmp_path, 200)
    _save(tmp_path, 5)
    assert step_folder(tmp_path, 5) in [folder for _, folder in published(tmp_path)]


def test_C03_nothing_is_removed_unless_the_new_one_is_proven_good(tmp_path, monkeypatch):
    _save(tmp_path, 1, keep=1)
    monkeypatch.setattr(save, "problem_with", lambda folder: "bad disk")
    with pytest.raises(CheckpointError, match="bad disk"):
        _save(tmp_path, 2, keep=1)
    assert problem_with(step_folder(tmp_path, 1)) is None


def test_saving_the_same_step_again_replaces_it(tmp_path):
    _save(tmp_path, 1)
    again = ToyStrategy(99)
    _save(tmp_path, 1, strategy=again)
    other = ToyStrategy()
    load.load(step_folder(tmp_path, 1), other, load.read_progress(step_folder(tmp_path, 1)))
    assert other.everything() == again.everything()
    assert not unfinished(tmp_path)


def _in_child(action) -> int:
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:  # an assertion included: the exit code is the test's answer
            os.write(2, repr(error).encode())
            os._exit(1)
    return child


@pytest.mark.parametrize("seed", range(24))
def test_C01_killed_in_mid_save_a_loadable_one_always_exists(tmp_path, seed):
    _save(tmp_path, 0, keep=1)

    def save_for_ever():
        for step in range(1, 10_000):
            _save(tmp_path, step, keep=1)

    child = _in_child(save_for_ever)
    time.sleep(0.02 + random.Random(seed).random() * 0.2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    save.clean_up(tmp_path)
    assert not unfinished(tmp_path)
    found = load.choose(tmp_path, _no_warning)
    position = load.read_progress(found)
    strategy = ToyStrategy()
    load.load(found, strategy, position)
    assert strategy.everything() == ToyStrategy(position.update).everything()


def test_C02_a_full_disk_fails_cleanly_and_names_the_cause(tmp_path):
    _save(tmp_path, 1, keep=1)
    big = {"weight": (300, 300)}

    def save_with_no_room():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(
            CheckpointError, match=r"was not saved: the disk did not take all.*free there; earlier .* untouched"
        ):
            _save(tmp_path, 2, keep=1, strategy=ToyStrategy(shapes=big))

    assert os.waitpid(_in_child(save_with_no_room), 0)[1] == 0
    assert not unfinished(tmp_path), "no half files"
    assert [step for step, _ in published(tmp_path)] == [1]
    assert latest_complete(tmp_path, _no_warning) == step_folder(tmp_path, 1)


def test_another_model_is_refused_before_anything_changes(tmp_path):
    path = _save(tmp_path, 1).path
    other = ToyStrategy(5, shapes={"embed.weight": (7, 4), "block.weight": (5, 2), "extra.weight": (3,)})
    before = other.everything()
    with pytest.raises(
        InputError, match=r"(?s)embed.weight: \[7, 3\] in the checkpoint, \[7, 4\] in the model.*extra.weight: absent"
    ):
        load.load(path, other, load.read_progress(path))
    assert other.everything() == before
