"""`mule train` as a user types it: what is found before loading, what is written, how it stops and goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muletrain.cli.app import app
from muletrain.cli.train import _decide, train
from muletrain.config.load import load_recipe
from muletrain.spec.errors import EXIT_DONE, EXIT_INPUT, EXIT_STOPPED, InputError
from muletrain.spec.machine import Machine
from muletrain.spec.place import WorkerPlace
from muletrain.spec.plan import Plan
from tests.cli.training import command, mule, write_recipe


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A recipe that all quick tests read; each takes a run folder of its own."""
    return write_recipe(tmp_path_factory.mktemp("recipe"))


def _quiet(recipe: Path, run_dir: Path, *changes: str) -> int:
    """In this process: torch is imported already, and the workers are forked from here."""
    return train(load_recipe(recipe, [f"run_dir={json.dumps(str(run_dir))}", "log.console=quiet", *changes]))


def test_a_run_stops_goes_on_elsewhere_and_leaves_a_whole_folder(tmp_path):
    recipe = write_recipe(tmp_path)
    first = mule("train", recipe, "--stop-after", 3, "model.weights=auto")
    assert first.returncode == EXIT_STOPPED, first.stderr
    assert "plan: " in first.stdout and "data: 40 rows read" in first.stdout and "packing concat at 32" in first.stdout
    assert "saved checkpoints/step-00000003" in first.stdout
    assert "model.weights = " in first.stdout
    second = mule("train", recipe, "parallel.workers=3", "model.weights=auto")
    assert second.returncode == EXIT_DONE, second.stderr
    assert "resumes from step-00000003: update 3, window 3" in second.stdout
    assert "model.weights = " not in second.stdout, "they come from the checkpoint"
    assert "parallel.workers was 2, is now 3: the same updates" in second.stdout
    run = tmp_path / "run"
    names = {"request.yaml", "machine.json", "plan.json", "events.jsonl", "record.json", "checkpoints"}
    assert names <= {child.name for child in run.iterdir()}
    assert load_recipe(run / "request.yaml") == load_recipe(recipe, ["parallel.workers=3", "model.weights=auto"])
    assert Plan.load(run / "plan.json").parallel.workers == 3
    assert Machine.load(run / "machine.json").cores >= 1


def test_O04_two_runs_at_once_on_one_box(tmp_path, shared):
    both = [
        subprocess.Popen(
            command("train", shared, f"run_dir={tmp_path / name}"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for name in ("a", "b")
    ]
    for process in both:
        _, said = process.communicate(timeout=120)
        assert process.returncode == EXIT_DONE, said
    losses = [[json.loads(line).get("loss") for line in (tmp_path / name / "events.jsonl").open()] for name in ("a", "b")]
    assert losses[0] == losses[1]


def test_C08_a_run_folder_may_have_spaces_other_letters_and_links(tmp_path, shared):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    assert _quiet(shared, tmp_path / "link" / "my runs" / "骡子 один", "train.steps=1") == EXIT_DONE
    assert (real / "my runs" / "骡子 один" / "checkpoints" / "step-00000001" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("x"), "is a file; choose a folder"),
        (lambda path: path.symlink_to(path.parent / "gone"), "is a symbolic link to nothing"),
    ],
)
def test_C08_a_bad_run_folder_is_found_before_anything_is_loaded(tmp_path, shared, monkeypatch, make, words):
    monkeypatch.setattr("muletrain.data.prepare.prepare", lambda *_, **__: pytest.fail("went on to the data"))
    make(tmp_path / "bad")
    for run_dir in (tmp_path / "bad", tmp_path / "bad" / "inside"):
        with pytest.raises(InputError, match=words):
            _quiet(shared, run_dir)


def test_C08_a_folder_that_cannot_be_written_is_named(shared):
    with pytest.raises(InputError, match=r"run_dir: /proc/runs cannot be written .*choose a folder that you may write to"):
        _quiet(shared, Path("/proc/runs"))


def test_resume_never_and_require_mean_what_they_say(tmp_path, shared):
    with pytest.raises(InputError, match=r"has no checkpoint to resume from, and checkpoint.resume=require"):
        _quiet(shared, tmp_path / "new", "checkpoint.resume=require")
    assert _quiet(shared, tmp_path / "used", "train.steps=1", "parallel.workers=1") == EXIT_DONE
    with pytest.raises(InputError, match=r"already holds checkpoints and checkpoint.resume=never"):
        _quiet(shared, tmp_path / "used", "checkpoint.resume=never")


def test_R10_a_run_folder_with_only_broken_checkpoints_is_refused(tmp_path, shared):
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    with pytest.raises(InputError, match="none of its checkpoints is complete"):
        _quiet(shared, tmp_path)


_HOLDER = """
import sys, time
from pathlib import Path
from muletrain.launch.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_C08_a_folder_of_a_live_run_is_refused_and_free_again_when_it_dies(tmp_path, shared):
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(InputError, match=rf"is in use by a live run \(process {holder.pid}\)"):
        _quiet(shared, tmp_path)
    holder.kill()
    holder.wait()
    assert _quiet(shared, tmp_path, "train.steps=1", "parallel.workers=1") == EXIT_DONE


def test_D11_no_process_group_waits_while_data_is_prepared(tmp_path, shared, monkeypatch):
    import torch.distributed as dist

    from muletrain.data import prepare as room

    real, seen = room.prepare, []

    def slow(*arguments, **options):
        seen.append(dist.is_initialized())
        time.sleep(4.0)
        return real(*arguments, **options)

    monkeypatch.setattr(room, "prepare", slow)
    monkeypatch.setattr("muletrain.train.worker._COLLECTIVE_TIMEOUT_S", 3.5)
    assert _quiet(shared, tmp_path) == EXIT_DONE
    assert seen == [False], "once, in the launcher, before any worker is there"


def test_O06_sigterm_while_data_is_prepared_is_a_stop_not_a_failure(tmp_path, shared, monkeypatch):
    from muletrain.data import prepare as room

    monkeypatch.setattr(room, "prepare", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    result = CliRunner().invoke(app, ["train", str(shared), f"run_dir={tmp_path / 'run'}"])
    assert result.exit_code == EXIT_STOPPED
    assert "stopped while preparing data; the same command goes on" in result.output


def _served_by_a_hub(monkeypatch, cache: Path, repository: Path) -> list[str]:
    """The hub's team/model is a folder here; what was fetched of it."""
    fetched: list[str] = []

    def snapshot_download(name, *, revision=None, allow_patterns):
        assert name == "team/model", name
        snapshot = cache / "models--team--model" / "snapshots" / "c0ffee"
        snapshot.mkdir(parents=True, exist_ok=True)
        (cache / "models--team--model" / "refs").mkdir(exist_ok=True)
        (cache / "models--team--model" / "refs" / "main").write_text("c0ffee")
        for file in repository.iterdir():
            if file.name in allow_patterns:
                shutil.copyfile(file, snapshot / file.name)
                fetched.append(file.name)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return fetched


def test_a_hub_name_is_fetched_trained_and_saved_with_its_tokenizer(tmp_path, shared, monkeypatch):
    from safetensors.torch import load_file

    repository = load_recipe(shared).model.source
    (Path(repository) / "pytorch_model.bin").write_bytes(b"never")
    fetched = _served_by_a_hub(monkeypatch, tmp_path / "hub", Path(repository))
    named = ("model.source=team/model", "model.weights=auto", "parallel.workers=1", "train.steps=1")
    frozen = ("train.optimizer.learning_rate=0", "train.optimizer.weight_decay=0")
    assert _quiet(shared, tmp_path / "run", *named, *frozen) == EXIT_DONE
    assert "model.safetensors" in fetched and "tokenizer.json" in fetched and "pytorch_model.bin" not in fetched
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.model.shape.name == "team/model" and plan.model.source == plan.data.tokenizer == str(
        tmp_path / "hub" / "models--team--model" / "snapshots" / "c0ffee"
    )
    saved = tmp_path / "run" / "checkpoints" / "step-00000001" / "model"
    assert (saved / "tokenizer.json").read_bytes() == (Path(repository) / "tokenizer.json").read_bytes()
    before, after = load_file(Path(repository) / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("it is here already"))
    assert _quiet(shared, tmp_path / "run", *named, "train.steps=2") == EXIT_DONE


def test_a_hub_name_without_a_network_stops_before_anything_else(tmp_path, shared, monkeypatch):
    from huggingface_hub.errors import OfflineModeIsEnabled

    def snapshot_download(*_, **__):
        raise OfflineModeIsEnabled("offline mode is enabled")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    result = CliRunner().invoke(app, ["train", str(shared), f"run_dir={tmp_path / 'run'}", "model.source=team/model"])
    assert result.exit_code == EXIT_INPUT
    assert "team/model is not whole on this machine and could not be fetched: offline mode is enabled" in result.output
    assert "run: hf download team/model" in result.output and not (tmp_path / "run").exists()


def test_R01_a_moved_corpus_goes_on_where_it_was(tmp_path, shared):
    text = Path(load_recipe(shared).data.source[0])
    options = ["parallel.workers=1", "log.console=quiet", f"run_dir={json.dumps(str(tmp_path / 'run'))}"]
    (tmp_path / "here.jsonl").write_bytes(text.read_bytes())
    request = load_recipe(shared, [*options, f"data.source={tmp_path / 'here.jsonl'}"])
    assert train(request, stop_after=3) == EXIT_STOPPED
    (tmp_path / "here.jsonl").rename(tmp_path / "there.jsonl")
    assert train(load_recipe(shared, [*options, f"data.source={tmp_path / 'there.jsonl'}"])) == EXIT_DONE
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert [event["window"] for event in events if event["kind"] == "step"] == [1, 2, 3, 4, 5, 6]


def test_a_users_mistake_is_a_message_and_exit_code_2(tmp_path, shared):
    result = CliRunner().invoke(app, ["train", str(shared), "train.stps=3"])
    assert result.exit_code == EXIT_INPUT
    assert "train.steps" in result.output


def test_O07_a_reader_that_goes_away_ends_no_run(tmp_path, shared):
    line = command("train", shared, f"run_dir={tmp_path}", "train.steps=3", "log.console=plain", "parallel.workers=2")
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline().startswith(b"plan: ")
    process.stdout.close()  # as `| head -1` does
    assert process.stderr is not None and process.wait(120) == EXIT_DONE, process.stderr.read()
    assert (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").exists()


def test_C02_too_little_space_is_said_at_the_start(tmp_path, shared, monkeypatch, capsys):
    from types import SimpleNamespace

    from muletrain.launch import run_folder

    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert _quiet(shared, tmp_path, "train.steps=1", "parallel.workers=1") == EXIT_DONE
    assert "warning: checkpoints need" in capsys.readouterr().err


def test_C02_a_disk_with_no_room_for_the_plan_is_a_users_error(tmp_path, shared, monkeypatch):
    from muletrain.launch import run_folder

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_atomically", full)
    with pytest.raises(InputError, match=r"run_dir: .* cannot be written \(No space left on device\); choose a folder"):
        _quiet(shared, tmp_path)


def test_a_tokenizer_with_more_words_than_the_model_is_refused_before_training(tmp_path, shared):
    with pytest.raises(InputError, match=r"gives ids up to \d+, and .* has 64 words; use the model's own .*vocab_size=380"):
        _quiet(shared, tmp_path, "model.overrides.vocab_size=64")
    assert not (tmp_path / "events.jsonl").exists()


def test_O16_a_broken_driver_stops_no_run_on_the_cpu(tmp_path, shared, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan, _ = _decide(load_recipe(shared, ["parallel.device=cpu"]), None)
    assert plan.parallel.device == "cpu"
    with pytest.raises(
        InputError, match=r"the NVIDIA driver is not working: .*; to train on the CPU, set parallel.device: cpu"
    ):
        _decide(load_recipe(shared, ["parallel.device=auto"]), None)


def test_O16_a_gpu_and_a_wheel_without_cuda_is_told_before_anything_else(tmp_path, shared, monkeypatch):
    import torch

    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0, GPU-aa, NVIDIA GeForce RTX 4090, 24564, 8.9, 580.65.06\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(InputError, match=r"RTX 4090 is here, but the installed PyTorch .* is a build without CUDA"):
        _quiet(shared, tmp_path / "run", "parallel.device=auto", "parallel.workers=1")
    assert not (tmp_path / "run").exists()


def test_torchrun_decides_the_number_of_workers(shared):
    place = WorkerPlace(rank=1, workers=4, local_rank=1, local_workers=4, rendezvous="env://")
    with pytest.raises(InputError, match=r"parallel.workers: 2, but torchrun started 4"):
        _decide(load_recipe(shared), place)
    plan, _ = _decide(load_recipe(shared, ["parallel.workers=auto"]), place)
    assert plan.parallel.workers == 4


def test_torchrun_workers_run_in_its_processes(tmp_path, shared):
    """Streamed, so that they share host memory too."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", *command()]
    run = subprocess.run(
        [*line, "train", str(shared), f"run_dir={tmp_path}", "train.steps=2", "memory.strategy=streamed"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == EXIT_DONE, run.stderr
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").open()]
    assert kinds == ["start", "step", "step", "evaluation", "checkpoint", "end"], "written once, by worker 0"
