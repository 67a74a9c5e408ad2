"""Saved folders are ordinary Hugging Face folders, equal bit for bit, and prove it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from muletrain.models.export import copy_tokenizer, save_model_folder, verify_model_folder
from muletrain.models.weights import open_weights
from muletrain.spec.errors import InputError
from tests.dist.workers import run_workers
from tests.families.tiny import model_plan, tiny_deepseek, tiny_gpt2, tiny_llama, tiny_qwen3
from tests.models.loading import load

FAMILIES = pytest.mark.parametrize("family", [tiny_llama, tiny_deepseek, tiny_qwen3, tiny_gpt2])


def _save(source: Path, folder: Path, dtype: torch.dtype = torch.float32, **kwargs: object) -> None:
    plan = model_plan(source)
    model = load(plan)
    weights = open_weights(plan, model, 0)
    tensors = ((name, weights.tensor(name)) for name in weights.names)
    options = {"dtype": dtype, "tokenizer_folder": source, **kwargs}
    save_model_folder(folder, model.config, tensors, **options)  # type: ignore[arg-type]


@FAMILIES
@pytest.mark.parametrize("shard_bytes", [2**30, 60_000])
def test_C09_reload_in_plain_transformers_is_bit_equal(family: Callable[..., Path], shard_bytes: int, tmp_path: Path) -> None:
    source, saved = family(tmp_path / "source"), tmp_path / "out put" / "模型"
    _save(source, saved, shard_bytes=shard_bytes)
    verify_model_folder(saved)
    theirs = AutoModelForCausalLM.from_pretrained(source)
    reloaded, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(report.values())
    expected = dict(theirs.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in reloaded.named_parameters())
    ids = torch.arange(3, 60)[None]
    assert torch.equal(reloaded(ids).logits, theirs(ids).logits)
    again, original = AutoTokenizer.from_pretrained(saved), AutoTokenizer.from_pretrained(source)
    text = "def carry(load):\n    return 'é 模型'"
    assert again(text)["input_ids"] == original(text)["input_ids"]
    assert again.chat_template == original.chat_template is not None
    assert again.eos_token == original.eos_token == "</s>"


@FAMILIES
def test_C06_keys_are_those_of_the_source(family: Callable[..., Path], tmp_path: Path) -> None:
    source, saved = family(tmp_path / "source"), tmp_path / "saved"
    _save(source, saved)
    assert set(load_file(saved / "model.safetensors")) == set(load_file(source / "model.safetensors"))


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")]
)
def test_C10_dtype_metadata_and_config_agree(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    source, saved = tiny_llama(tmp_path / "source"), tmp_path / "saved"
    _save(source, saved, dtype)
    config = json.loads((saved / "config.json").read_text())
    assert config["dtype"] == name
    assert config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(saved / "model.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    values, expected = load_file(saved / "model.safetensors"), load_file(source / "model.safetensors")
    assert all(torch.equal(values[key], expected[key].to(dtype)) for key in expected)
    assert AutoModelForCausalLM.from_pretrained(saved).dtype == dtype


def test_C10_index_names_every_tensor_and_the_size(tmp_path: Path) -> None:
    source, saved = tiny_gpt2(tmp_path / "source"), tmp_path / "saved"
    _save(source, saved, shard_bytes=100_000)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    total = len(files)
    assert total > 2
    assert files == [f"model-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
    assert sorted(p.name for p in saved.glob("*.safetensors")) == files
    stored = {name: tensor for file in files for name, tensor in load_file(saved / file).items()}
    assert set(stored) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert index["metadata"]["total_parameters"] == model_plan(source).shape.parameters
    assert not list(saved.glob("*.part"))
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1  # whoever may read the config may read the weights


def test_only_one_shard_is_held_and_buffers_may_be_used_again(tmp_path: Path) -> None:
    """The giver fills one buffer again and again, as a strategy's gather does."""
    source = tiny_llama(tmp_path / "source")
    plan = model_plan(source)
    config = load(plan).config
    values = load_file(source / "model.safetensors")
    buffer = torch.empty(max(t.numel() for t in values.values()))
    shards_seen = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, value in values.items():
            view = buffer[: value.numel()].view(value.shape)
            yield name, view.copy_(value)
            shards_seen.append(len(list((tmp_path / "saved").glob("*.part"))))

    save_model_folder(tmp_path / "saved", config, tensors(), dtype=torch.float32, tokenizer_folder=source, shard_bytes=150_000)
    assert shards_seen[-1] >= 2  # earlier shards were on the disk before the last tensor was asked for
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(reloaded[name], value) for name, value in values.items())


def test_saving_again_leaves_no_older_shards(tmp_path: Path) -> None:
    source, saved = tiny_llama(tmp_path / "source"), tmp_path / "saved"
    _save(source, saved, shard_bytes=60_000)
    _save(source, saved)
    assert [p.name for p in saved.glob("model*")] == ["model.safetensors"]
    verify_model_folder(saved)


def test_generation_settings_are_kept(tmp_path: Path) -> None:
    source, saved = tiny_llama(tmp_path / "source"), tmp_path / "saved"
    GenerationConfig(eos_token_id=[1, 7], do_sample=True, temperature=0.6).save_pretrained(source)
    _save(source, saved, generation_from=source)
    assert GenerationConfig.from_pretrained(saved).eos_token_id == [1, 7]
    _save(source, saved)
    assert GenerationConfig.from_pretrained(saved).eos_token_id == 1


def _collective(rank: int, workers: int, folder: str, source: str) -> list[str]:
    import torch.distributed as dist

    values = load_file(Path(source) / "model.safetensors")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, value in values.items():
            share = value / workers
            dist.all_reduce(share)  # would hang, were it not drawn on every worker
            yield name, share

    config = AutoConfig.from_pretrained(source)
    save_model_folder(Path(folder), config, tensors(), dtype=torch.float32, tokenizer_folder=Path(source), write=rank == 0)
    return sorted(path.name for path in Path(folder).iterdir()) if rank == 0 else []


def test_workers_that_do_not_write_still_take_part(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    names, nothing = run_workers(2, _collective, str(tmp_path / "saved"), str(source))
    assert "model.safetensors" in names and nothing == []
    verify_model_folder(tmp_path / "saved")


def _damage(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    values = load_file(folder / "model.safetensors")
    change(values)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda v: v.update({"model.norm.weight": torch.zeros(0)}), r"model\.norm\.weight is F32 \[0\], not F32 \[64\]"),
        (lambda v: v.update({"model.norm.weight": torch.zeros(64).half()}), r"model\.norm\.weight is F16 \[64\], not F32"),
        (lambda v: v.update({"hf.extra": torch.zeros(1)}), r"hf\.extra belongs to no parameter"),
    ],
)
def test_C09_verification_finds_what_is_wrong(
    change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    source, saved = tiny_llama(tmp_path / "source"), tmp_path / "saved"
    _save(source, saved)
    _damage(saved, change)
    with pytest.raises(InputError, match=message):
        verify_model_folder(saved)


def test_a_lone_tokenizer_file_is_enough(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    target = tmp_path / "target"
    target.mkdir()
    copy_tokenizer(source / "tokenizer.json", target)
    (target / "config.json").write_text((source / "config.json").read_text())
    text = "The mule walked, 模型"
    assert AutoTokenizer.from_pretrained(target)(text)["input_ids"] == AutoTokenizer.from_pretrained(source)(text)["input_ids"]


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no tokenizer file \(tokenizer\.json"):
        copy_tokenizer(tmp_path, tmp_path)
