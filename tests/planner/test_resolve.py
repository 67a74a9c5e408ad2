"""Request on a machine -> Plan: what is decided, why, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muletrain.catalog.models import model_config
from muletrain.planner.resolve import resolve
from muletrain.spec.errors import EXIT_DOES_NOT_FIT, DoesNotFitError, InputError
from muletrain.spec.machine import Machine
from muletrain.spec.plan import Plan

from .boxes import GIB, H200, RTX_4090, T4, box, request

CPU = box()


def reason(plan: Plan, key: str) -> str:
    (line,) = (line for line in plan.reasons if line.startswith(key))
    return line


def problems(changes: dict[str, Any], machine: Machine = CPU) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        resolve(request(changes), machine)
    return caught.value.problems


def test_on_a_cpu() -> None:
    plan = resolve(request(), CPU)
    assert (plan.parallel.device, plan.parallel.workers, plan.parallel.peak_flops) == ("cpu", 1, 0.0)
    assert (plan.memory.strategy, plan.memory.activations) == ("resident", "keep")
    assert (plan.train.micro_batches, plan.train.steps, plan.train.epochs, plan.train.compile) == (8, 100, 0, False)
    assert (plan.model.weights, plan.data.tokenizer) == ("random", "HuggingFaceTB/SmolLM2-135M")
    assert (plan.data.processes, plan.log.console, plan.checkpoint.model_dtype) == (8, "plain", "fp32")
    assert plan.tokens_per_step == 4096


def test_every_open_decision_has_its_reason_and_a_closed_one_none() -> None:
    opened = ("model.weights", "parallel.device", "parallel.workers", "train.compile", "memory.strategy", "memory.activations",
              "data.tokenizer", "data.cache_dir", "data.processes", "checkpoint.model_dtype", "log.console")  # fmt: skip
    plan = resolve(request(), CPU)
    assert [line.partition(" =")[0] for line in plan.reasons] == list(opened)
    closed = {
        "model.weights": "random", "parallel.device": "cpu", "parallel.workers": 2, "train.compile": False,
        "memory.strategy": "zero2", "memory.activations": "keep", "data.tokenizer": "t", "data.cache_dir": "c",
        "data.processes": 3, "checkpoint.model_dtype": "bf16", "log.console": "bar",
    }  # fmt: skip
    assert resolve(request(closed), CPU).reasons == ()


def test_on_gpus() -> None:
    plan = resolve(request({"precision.compute": "bf16"}), box(RTX_4090, RTX_4090, RTX_4090))
    assert (plan.parallel.device, plan.parallel.workers, plan.train.compile) == ("cuda", 3, True)
    assert (plan.memory.strategy, plan.memory.activations) == ("resident", "keep")
    assert plan.parallel.peak_flops == pytest.approx(165.2e12)
    assert "3 x NVIDIA GeForce RTX 4090" in reason(plan, "parallel.device")


def test_peak_is_the_slowest_cards_and_unknown_where_one_is() -> None:
    changes = {"precision.compute": "bf16"}
    assert resolve(request(changes), box(H200, RTX_4090)).parallel.peak_flops == pytest.approx(165.2e12)
    unknown = RTX_4090.model_copy(update={"name": "NVIDIA GeForce RTX 4090 Laptop GPU"})
    assert resolve(request(changes), box(RTX_4090, unknown)).parallel.peak_flops == 0.0


@pytest.mark.parametrize(
    ("model", "gpus", "strategy", "activations"),
    [
        ("smollm2-135m", 2, "resident", "keep"),
        ("qwen3-0.6b", 1, "resident", "keep"),
        ("llama-3.2-1b", 2, "zero1", "keep"),
        ("deepseek-llm-7b", 8, "zero3", "recompute"),
    ],
)
def test_auto_takes_the_least_communication_that_fits(model: str, gpus: int, strategy: str, activations: str) -> None:
    changes = {"model.source": model, "data.sequence_length": 2048, "train.tokens_per_step": 65536, "precision.compute": "bf16"}
    if model == "deepseek-llm-7b":
        changes["data.sequence_length"] = 1024
    plan = resolve(request(changes), box(*[RTX_4090] * gpus))
    assert (plan.memory.strategy, plan.memory.activations) == (strategy, activations)
    assert plan.memory.ledger.total("card") <= 0.97 * RTX_4090.memory_bytes


def test_auto_goes_through_the_stages_as_memory_shrinks() -> None:
    changes = {"model.source": "llama-3.2-1b", "precision.compute": "bf16", "train.tokens_per_step": 16384}
    chosen = []
    for limit in range(40, 5, -1):
        try:
            plan = resolve(request(changes | {"memory.gpu_limit": limit * GIB}), box(*[H200] * 8))
        except DoesNotFitError:
            chosen.append("none")
            continue
        chosen.append(plan.memory.strategy)
        assert plan.memory.ledger.total("card") <= limit * GIB
    assert list(dict.fromkeys(chosen)) == ["resident", "zero1", "zero2", "zero3", "none"]


def test_streamed_is_the_last_resort_on_a_cpu() -> None:
    # bf16 with a large vocabulary: resident holds the embedding's gradient beside the sums, streamed two small blocks.
    changes = {"model.source": "gpt2", "precision.compute": "bf16", "train.tokens_per_step": 512, "memory.loss_chunk": 16}
    resident = resolve(request(changes | {"memory.activations": "recompute"}), CPU).memory.ledger.total("host")
    plan = resolve(request(changes | {"memory.host_limit": resident - 1}), CPU)
    assert (plan.memory.strategy, plan.memory.activations) == ("streamed", "recompute")
    with pytest.raises(DoesNotFitError, match=r"does not fit: memory\.strategy streamed"):
        resolve(request(changes | {"memory.host_limit": plan.memory.ledger.total("host") - 1}), CPU)


def test_what_does_not_fit_is_told_with_shortfall_and_what_would() -> None:
    changes = {
        "model.source": "deepseek-llm-7b",
        "precision.compute": "bf16",
        "data.sequence_length": 4096,
        "train.tokens_per_step": 65536,
    }
    with pytest.raises(DoesNotFitError) as caught:
        resolve(request(changes), box(RTX_4090))
    message = str(caught.value)
    assert caught.value.exit_code == EXIT_DOES_NOT_FIT
    assert (
        "deepseek-llm-7b does not fit: memory.strategy streamed with activations recompute needs 95.7 GiB on the host"
        in message
    )
    assert "there are 64.0 GiB: 31.7 GiB short" in message
    assert "parts: state 56.5 GiB, inputs 14.5 GiB" in message
    assert "what would fit: train.optimizer.state: 8bit; " in message
    assert "memory.strategy: zero3 on 16 such cards" in message
    with pytest.raises(DoesNotFitError) as caught:
        resolve(request(changes | {"memory.strategy": "resident"}), box(RTX_4090, host_gib=128))
    message = str(caught.value)
    assert "memory.strategy resident with activations recompute needs 120.5 GiB on each card" in message
    assert "there are 23.3 GiB: 97.2 GiB short" in message
    assert "parts: moments 51.5 GiB, master 25.7 GiB" in message
    assert "what would fit: memory.strategy: streamed with memory.activations: recompute; " in message


@pytest.mark.parametrize(
    ("changes", "machine", "advice"),
    [
        (
            {"train.micro_batch": 8, "train.tokens_per_step": 32768, "memory.activations": "keep"},
            box(T4),
            "activations: recompute",
        ),
        (
            {"memory.strategy": "resident", "train.micro_batch": 64, "train.tokens_per_step": 524288},
            box(T4),
            "train.micro_batch: 1 with memory.activations: rec",
        ),
        ({"memory.strategy": "resident", "memory.gpu_limit": 3500 * 2**20}, box(T4), "memory.loss_chunk: 256 with"),
        ({"memory.strategy": "zero3", "memory.gpu_limit": "1GiB"}, box(T4), "nothing smaller in the same recipe fits"),
    ],
)
def test_advice_is_what_would_fit(changes: dict[str, Any], machine: Machine, advice: str) -> None:
    base = {"model.source": "smollm2-135m", "data.sequence_length": 4096, "precision.compute": "fp16"}
    with pytest.raises(DoesNotFitError, match=advice):
        resolve(request(base | changes), machine)


def test_host_limit_holds_workers_on_gpus_too() -> None:
    with pytest.raises(DoesNotFitError, match=r"needs 4\.0 GiB on the host and there are 3\.0 GiB: 1\.0 GiB short"):
        resolve(request({"memory.host_limit": 3 * GIB}), box(H200, H200))


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_O16_without_a_gpu_the_cpu_path_works(device: str) -> None:
    assert resolve(request({"parallel.device": device}), CPU).parallel.device == "cpu"


def test_O16_asking_for_a_gpu_without_one_is_refused() -> None:
    (problem,) = problems({"parallel.device": "cuda"})
    assert "parallel.device: cuda, but no NVIDIA GPU is visible on box; check nvidia-smi and CUDA_VISIBLE_DEVICES" in problem


def test_more_workers_than_gpus_is_refused() -> None:
    assert "parallel.workers: 3, but this box has 2 GPU(s)" in problems({"parallel.workers": 3}, box(H200, H200))[0]


def test_more_workers_than_cores_is_said() -> None:
    plan = resolve(request({"parallel.workers": 3}), box(cores=2))
    assert plan.parallel.workers == 3 and "share 2 CPU core(s)" in reason(plan, "parallel.workers")


def test_workers_without_work_are_said() -> None:
    plan = resolve(request({"parallel.workers": 5, "train.tokens_per_step": 1024}), CPU)
    assert (plan.train.micro_batches, plan.parallel.workers) == (2, 5)
    assert "3 of 5 workers have no micro-batch" in reason(plan, "3 of 5")


def test_rounded_tokens_are_said() -> None:
    plan = resolve(request({"train.tokens_per_step": 64_000}), CPU)
    assert plan.tokens_per_step == 64_000 and not any("rounded" in line for line in plan.reasons)
    plan = resolve(request({"train.tokens_per_step": 64_100}), CPU)
    assert "train.tokens_per_step = 64000: 64100 rounded to 125 whole micro-batches" in plan.reasons


@pytest.mark.parametrize(
    ("source", "length", "field"), [("smollm2-135m", 8193, "max_position_embeddings"), ("gpt2", 1025, "n_positions")]
)
def test_A07_longer_than_the_model_is_refused(source: str, length: int, field: str) -> None:
    (problem,) = problems({"model.source": source, "data.sequence_length": length, "train.tokens_per_step": length})
    assert problem.startswith(
        f"data.sequence_length: {length} is longer than the {length - 1} positions that {source} was made for"
    )
    assert field in problem


def test_A07_scaling_asked_for_is_allowed() -> None:
    asked = {
        "data.sequence_length": 16384,
        "train.tokens_per_step": 16384,
        "model.overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    }
    assert resolve(request(asked), CPU).data.sequence_length == 16384
    assert resolve(request({"data.sequence_length": 8192, "train.tokens_per_step": 8192}), CPU).data.sequence_length == 8192


def test_problems_are_reported_together() -> None:
    found = problems({"data.sequence_length": 9000, "train.tokens_per_step": 9000, "precision.compute": "fp16"})
    assert [problem.partition(":")[0] for problem in found] == ["data.sequence_length", "precision.compute"]
    assert "fp16 needs a GPU" in found[1]
    assert problems({"train.tokens_per_step": 700}) == ("train.tokens_per_step: not near a whole number of micro-batches",)


def test_a_card_limit_on_a_cpu_is_said_to_do_nothing() -> None:
    plan = resolve(request({"memory.gpu_limit": GIB}), CPU)
    assert reason(plan, "memory.gpu_limit") == "memory.gpu_limit has no effect: the run is on the CPU (memory.host_limit would)"


def test_bf16_needs_ampere() -> None:
    assert (
        "bf16 needs compute capability 8.0, and Tesla T4 has less; use fp16"
        in problems({"precision.compute": "bf16"}, box(T4))[0]
    )
    assert "slow on most CPUs" in reason(resolve(request({"precision.compute": "bf16"}), CPU), "precision.compute")


def test_streamed_runs_any_number_of_workers() -> None:
    for workers, slices in ((1, ()), (2, (1, 1))):
        plan = resolve(request({"memory.strategy": "streamed", "parallel.workers": workers}), box(H200, H200))
        assert (plan.parallel.workers, plan.memory.streaming.slices) == (workers, slices)
    plan = resolve(request({"memory.strategy": "streamed"}), CPU)
    assert (plan.memory.strategy, plan.memory.activations) == ("streamed", "recompute")
    assert "blocks pass through" in reason(plan, "memory.activations")


def test_shape_without_tokenizer_needs_one() -> None:
    tiny = {"model.source": "deepseek-llm-tiny"}
    assert "data.tokenizer: deepseek-llm-tiny is a shape without a tokenizer of its own" in problems(tiny)[0]
    assert resolve(request(tiny | {"data.tokenizer": "t"}), CPU).data.tokenizer == "t"


def test_console_and_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MULETRAIN_CACHE", str(tmp_path))
    plan = resolve(request(), CPU, interactive=True)
    assert (plan.log.console, plan.data.cache_dir) == ("bar", str(tmp_path))


def test_home_is_expanded() -> None:
    paths = {"run_dir": "~/r", "data.source": ["~/d", "e"], "data.tokenizer": "~/t", "data.cache_dir": "~/c"}
    plan, home = resolve(request(paths), CPU), str(Path.home())
    assert (plan.run_dir, plan.data.source, plan.data.tokenizer) == (f"{home}/r", (f"{home}/d", "e"), f"{home}/t")
    assert plan.data.cache_dir == f"{home}/c"


def test_a_model_already_read_is_taken() -> None:
    model = resolve(request(), CPU).model.model_copy(update={"source": "elsewhere"})
    assert resolve(request({"data.tokenizer": "t"}), CPU, model=model).model.source == "elsewhere"


def test_plan_survives_json() -> None:
    plan = resolve(request(), box(H200))
    assert Plan.from_json(plan.to_json()) == plan
    assert "auto" not in {value for value in json.loads(plan.to_json())["memory"].values() if isinstance(value, str)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(model_config("smollm2-135m")), encoding="utf-8")
    return tmp_path


def test_folder_with_and_without_weights(folder: Path) -> None:
    plan = resolve(request({"model.source": str(folder)}), CPU)
    assert (plan.model.weights, plan.model.source, plan.data.tokenizer) == ("random", str(folder), str(folder))
    assert plan.model.shape.parameters == 134_515_008
    (folder / "model.safetensors").touch()
    assert resolve(request({"model.source": str(folder / "config.json")}), CPU).model.weights == "pretrained"
    assert resolve(request({"model.source": str(folder), "model.weights": "random"}), CPU).model.weights == "random"


def test_pretrained_needs_weights(folder: Path) -> None:
    assert "smollm2-135m is a catalogue shape without weights" in problems({"model.weights": "pretrained"})[0]
    assert "a folder without weights" in problems({"model.source": str(folder), "model.weights": "pretrained"})[0]


def test_overrides_reach_the_plan(folder: Path) -> None:
    plan = resolve(request({"model.source": str(folder), "model.overrides": {"num_hidden_layers": 2}}), CPU)
    assert (plan.model.config["num_hidden_layers"], plan.model.shape.layers) == (2, 2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nowhere", "there is no folder ./nowhere"),
        ("deepseek-7b", "did you mean deepseek-llm-7b"),
        ("someone/something", "no hub model of that name has been downloaded; run: hf download someone/something"),
        ("bad name/..", "neither a catalogue name, a folder nor a hub name"),
    ],
)
def test_unknown_sources(source: str, message: str) -> None:
    assert message in problems({"model.source": source})[0]


def test_broken_folders(tmp_path: Path) -> None:
    assert "has no config.json" in problems({"model.source": str(tmp_path)})[0]
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert "cannot be read as JSON" in problems({"model.source": str(tmp_path)})[0]
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    assert "config.json: a model's config is a JSON object, and this is list" in problems({"model.source": str(tmp_path)})[0]


def test_hub_name_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--someone--something" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(model_config("gpt2")), encoding="utf-8")
    (tmp_path / "models--someone--something" / "refs").mkdir()
    (tmp_path / "models--someone--something" / "refs" / "main").write_text("abc", encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    plan = resolve(request({"model.source": "someone/something", "data.tokenizer": "tokenizers/elsewhere"}), CPU)
    assert (plan.model.source, plan.model.weights) == (str(snapshot), "pretrained"), (
        "workers need neither the name nor a network"
    )
    assert (plan.model.shape.name, plan.model.shape.family) == ("someone/something", "gpt2")
    assert plan.data.tokenizer == "tokenizers/elsewhere", "not cached: whoever prepares the data fetches it"
    (snapshot / "tokenizer.json").touch()
    assert resolve(request({"model.source": "someone/something", "data.tokenizer": "auto"}), CPU).data.tokenizer == str(
        snapshot
    )
    named = resolve(request({"data.tokenizer": "someone/something"}), CPU)
    assert named.data.tokenizer == str(snapshot), "a saved model gets its files"
