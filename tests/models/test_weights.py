"""First values: read from files under any spelling, or drawn by the family's rules, each alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from muletrain.models.build import build_on_meta
from muletrain.models.causal import canonical_name
from muletrain.models.weights import PretrainedWeights, WeightSource, open_weights
from muletrain.spec.errors import InputError
from tests.families.tiny import model_plan, tiny_deepseek, tiny_gpt2, tiny_llama, tiny_qwen3

FAMILIES = pytest.mark.parametrize("family", [tiny_llama, tiny_deepseek, tiny_qwen3, tiny_gpt2])


def _source(folder: Path, weights: str = "pretrained", seed: int = 0) -> WeightSource:
    plan = model_plan(folder, weights)  # type: ignore[arg-type]
    return open_weights(plan, build_on_meta(plan, dtype=torch.bfloat16, loss_chunk=8), seed)


@FAMILIES
def test_pretrained_values_are_the_files(family: Callable[..., Path], tmp_path: Path) -> None:
    folder = family(tmp_path)
    source = _source(folder)
    expected = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert source.names == tuple(expected)
    assert source.unexpected == ()
    for name in source.names:
        assert source.tensor(name).dtype == torch.float32
        assert torch.equal(source.tensor(name), expected[name].detach())


@FAMILIES
def test_names_are_those_of_the_built_model(family: Callable[..., Path], tmp_path: Path) -> None:
    plan = model_plan(family(tmp_path), "random")
    model = build_on_meta(plan, dtype=torch.float32, loss_chunk=8)
    assert open_weights(plan, model, 0).names == tuple(canonical_name(name) for name, _ in model.named_parameters())


def _rename(folder: Path, change: Callable[[str], str]) -> None:
    file = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(("family", "prefix"), [(tiny_gpt2, "transformer."), (tiny_llama, "model."), (tiny_qwen3, "model.")])
def test_names_without_the_base_models_prefix_are_found(family: Callable[..., Path], prefix: str, tmp_path: Path) -> None:
    folder = family(tmp_path)
    before = _source(folder)
    values = {name: before.tensor(name) for name in before.names}
    _rename(folder, lambda name: name.removeprefix(prefix))
    after = _source(folder)
    assert after.unexpected == ()
    assert all(torch.equal(after.tensor(name), values[name]) for name in values)


def test_C06_a_tied_weight_is_found_under_its_other_name(tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path)
    value = _source(folder).tensor("model.embed_tokens.weight")
    _rename(folder, lambda name: "lm_head.weight" if name == "model.embed_tokens.weight" else name)
    source = _source(folder)
    assert "lm_head.weight" not in source.names and source.unexpected == ()
    assert torch.equal(source.tensor("model.embed_tokens.weight"), value)


def test_C09_missing_tensors_are_an_error_that_lists_them(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    _rename(folder, lambda name: name.replace("layers.1.mlp.up_proj", "layers.1.mlp.other"))
    with pytest.raises(InputError, match=r"lacks 1 of the model's tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        _source(folder)


def test_untied_head_is_not_filled_from_the_embedding(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    _rename(folder, lambda name: name.replace("lm_head", "unknown"))
    with pytest.raises(InputError, match=r"tensors: lm_head\.weight"):
        _source(folder)


def test_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    file = folder / "model.safetensors"
    extra = {
        "model.layers.2.mlp.up_proj.weight": torch.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
    }
    save_file({**load_file(file), **extra}, file)
    assert _source(folder).unexpected == ("model.layers.2.mlp.up_proj.weight",)


def test_other_shape_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    file = folder / "model.safetensors"
    save_file({**load_file(file), "model.norm.weight": torch.zeros(63)}, file)
    source = _source(folder)
    with pytest.raises(
        InputError, match=r"model\.safetensors: model\.norm\.weight is \[63\] torch\.float32, the model needs \[64\]"
    ):
        source.tensor("model.norm.weight")


def test_pickle_files_are_not_read(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no model\.safetensors .*convert it first"):
        _source(folder)


@pytest.mark.parametrize("source", ["/no/such/folder", "no such name"])
def test_a_source_that_is_nowhere_is_named(source: str, tmp_path: Path) -> None:
    plan = model_plan(tiny_llama(tmp_path))
    model = build_on_meta(plan, dtype=torch.float32, loss_chunk=8)
    with pytest.raises(InputError, match=rf"model\.source: {source} is no folder here"):
        open_weights(plan.model_copy(update={"source": source}), model, 0)


@pytest.mark.parametrize("size", [0, 4, 5000])
def test_a_file_cut_short_is_named(size: int, tmp_path: Path) -> None:
    file = tiny_llama(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    plan = model_plan(tmp_path)
    model = build_on_meta(plan, dtype=torch.float32, loss_chunk=8)
    with pytest.raises(InputError, match=r"model.safetensors: not a whole safetensors file \(.*\); fetch or copy it again"):
        open_weights(plan, model, 0)


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_damaged_index_is_named(text: str, tmp_path: Path) -> None:
    plan = model_plan(tiny_llama(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(text)
    model = build_on_meta(plan, dtype=torch.float32, loss_chunk=8)
    with pytest.raises(InputError, match=r"index.json: not an index of shards .*; fetch or copy it again"):
        open_weights(plan, model, 0)


def test_lost_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(InputError, match=r"not there: model-00001-of-00002\.safetensors"):
        _source(folder)


@FAMILIES
def test_random_values_depend_on_seed_and_name_only(family: Callable[..., Path], tmp_path: Path) -> None:
    folder = family(tmp_path)
    one, other, seeded = _source(folder, "random"), _source(folder, "random"), _source(folder, "random", seed=1)
    values = {name: one.tensor(name) for name in one.names}
    torch.manual_seed(123)
    for name in reversed(other.names):  # alone and in another order
        assert torch.equal(other.tensor(name), values[name])
    drawn = [name for name in values if values[name].std() > 0]
    assert drawn and all(not torch.equal(seeded.tensor(name), values[name]) for name in drawn)
    first, second = drawn[0], drawn[-1]
    assert not torch.equal(values[first].flatten()[:16], values[second].flatten()[:16])


def test_drawing_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    source = _source(tiny_llama(tmp_path), "random")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    source.tensor("lm_head.weight")
    assert torch.equal(torch.rand(3), expected)


@FAMILIES
def test_random_values_have_the_familys_own_distribution(family: Callable[..., Path], tmp_path: Path) -> None:
    """GPT-2's residual projections are scaled by depth: 4 layers make the rule visible."""
    folder = family(tmp_path, **({"n_layer": 4} if family is tiny_gpt2 else {"num_hidden_layers": 4}), initializer_range=0.05)
    plan = model_plan(folder, "random")
    source = _source(folder, "random")
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(build_on_meta(plan, dtype=torch.float32, loss_chunk=8).config)
    deviations = set()
    for name, parameter in theirs.named_parameters():
        value, expected = source.tensor(name), parameter.detach()
        if expected.std() == 0:
            assert torch.equal(value, expected), name
        else:
            assert value.std().item() == pytest.approx(expected.std().item(), rel=6 / value.numel() ** 0.5), name
            assert abs(value.mean().item()) < 5 * value.std().item() / value.numel() ** 0.5, name
            deviations.add(round(expected.std().item(), 2))
    assert len(deviations) == (2 if family is tiny_gpt2 else 1)


def test_a_name_the_model_does_not_have_is_a_key_error(tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path)
    for source in (_source(folder), _source(folder, "random")):
        with pytest.raises(KeyError, match=r"lm_head"):
            source.tensor("lm_head.weight")


def test_quantized_files_are_refused(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    file = folder / "model.safetensors"
    save_file({**load_file(file), "model.norm.weight": torch.zeros(64, dtype=torch.int8)}, file)
    plan = model_plan(folder, "random")
    source = PretrainedWeights(str(folder), build_on_meta(plan, dtype=torch.float32, loss_chunk=8).hf)
    with pytest.raises(InputError, match=r"int8"):
        source.tensor("model.norm.weight")
