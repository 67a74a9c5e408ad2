"""Generation from folders and runs: the same with and without a cache, clear limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from muletrain.checkpoint.layout import Manifest, files_below, measure, step_folder
from muletrain.cli.generate import command
from muletrain.serve.generate import Generator, Request, find_model_folder
from muletrain.spec.errors import InputError
from tests.families.tiny import byte_tokenizer, tiny_gpt2, tiny_llama, tiny_qwen3

PROMPT = "def carry(load, road):"


def _checkpoint(run: Path, step: int) -> Path:
    folder = step_folder(run / "checkpoints", step)
    tiny_llama(folder / "model")
    (folder / "state").mkdir()
    for name in ("progress.json", "state/.metadata"):
        (folder / name).touch()
    files = {name: measure(folder / name) for name in files_below(folder)}
    (folder / "manifest.json").write_text(Manifest(step=step, files=files).to_json(), encoding="utf-8")
    return folder


@pytest.mark.parametrize("family", [tiny_llama, tiny_qwen3, tiny_gpt2])
def test_G02_greedy_equals_a_loop_without_a_cache(family: Callable[..., Path], tmp_path: Path) -> None:
    folder = family(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT)["input_ids"]
    expected = list(ids)
    for _ in range(50):
        expected.append(int(model(torch.tensor([expected]), use_cache=False).logits[0, -1].argmax()))
        if expected[-1] == 1:
            break
    done = Generator(folder).complete(Request(PROMPT, max_tokens=50))
    assert done.text == tokenizer.decode(expected[len(ids) :], skip_special_tokens=True)
    assert (done.prompt_tokens, done.tokens) == (len(ids), len(expected) - len(ids))


def test_G02_beyond_the_positions_is_a_clear_error(tmp_path: Path) -> None:
    generator = Generator(tiny_gpt2(tmp_path))
    tokens = generator.complete(Request(PROMPT, max_tokens=1)).prompt_tokens
    assert generator.complete(Request(PROMPT, max_tokens=256 - tokens)).tokens <= 256 - tokens
    with pytest.raises(InputError, match=rf"exceed the model's 256 positions; ask for at most {256 - tokens}"):
        generator.complete(Request(PROMPT, max_tokens=257 - tokens))


def test_streamed_pieces_are_the_text(tmp_path: Path) -> None:
    pieces: list[str] = []
    request = Request(PROMPT, max_tokens=60, temperature=1.0, seed=1)
    done = Generator(tiny_llama(tmp_path)).complete(request, on_text=pieces.append)
    assert len(pieces) > 1 and "".join(pieces) == done.text


def test_a_seed_repeats_a_sample(tmp_path: Path) -> None:
    generator = Generator(tiny_llama(tmp_path))
    samples = [generator.complete(Request(PROMPT, 30, temperature=1.0, seed=seed)).text for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    narrow = [generator.complete(Request(PROMPT, 30, temperature=1.0, top_p=1e-9, seed=seed)).text for seed in (0, 1)]
    assert narrow == [generator.complete(Request(PROMPT, 30)).text] * 2


def test_the_end_token_stops(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    generator = Generator(folder)
    first = generator.complete(Request(PROMPT, 5))
    assert (first.tokens, first.finish) == (5, "length")
    token = generator._model.generate(torch.tensor([generator._encode(PROMPT)]), max_new_tokens=1, do_sample=False)[
        0, -1
    ].item()
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [1, token]}))
    done = Generator(folder).complete(Request(PROMPT, 5))
    assert (done.tokens, done.finish) == (1, "stop")


def test_an_empty_prompt_starts_a_text(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    assert Generator(folder).complete(Request("", 3)).prompt_tokens == 1
    byte_tokenizer(bos=None, eos=None).save_pretrained(folder)
    with pytest.raises(InputError, match="prompt: it is empty, and the tokenizer has no token that starts a text"):
        Generator(folder).complete(Request("", 3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, r"max-tokens: 0 must be at least 1"),
        ({"temperature": -1.0}, r"temperature: -1\.0 must be 0"),
        ({"top_p": 0.0}, r"top-p: 0\.0 must be more than 0"),
        ({"max_tokens": 0, "top_p": 1.5}, r"max-tokens: .*\n.*top-p: "),
    ],
)
def test_wrong_requests_are_named(fields: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Request("x", **fields)  # type: ignore[arg-type]


def test_the_newest_complete_checkpoint_of_a_run_is_used(tmp_path: Path) -> None:
    run, warnings = tmp_path / "run", []
    older, newer = _checkpoint(run, 9900), _checkpoint(run, 10_000)
    assert find_model_folder(run, warnings.append) == newer / "model"
    assert find_model_folder(older, warnings.append) == older / "model"
    assert find_model_folder(older / "model", warnings.append) == older / "model"
    (newer / "model" / "config.json").unlink()
    assert find_model_folder(run, warnings.append) == older / "model"
    assert len(warnings) == 1


def test_folders_without_a_model_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is neither a model folder"):
        find_model_folder(tmp_path, print)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match="has no checkpoint yet"):
        find_model_folder(tmp_path, print)
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "plan.json").touch()
    with pytest.raises(InputError, match="has no checkpoint yet"):
        find_model_folder(tmp_path, print)
    with pytest.raises(InputError, match="gone: there is no such folder; give a run folder"):
        find_model_folder(tmp_path / "gone", print)


def test_a_model_without_tokenizer_is_an_error(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(InputError, match="its tokenizer cannot be loaded"):
        Generator(folder)


def _run(*arguments: str) -> tuple[str, str]:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_command_streams_prompt_and_text(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    text = Generator(folder).complete(Request(PROMPT, 8)).text
    stdout, stderr = _run(str(folder), "--prompt", PROMPT, "--max-tokens", "8")
    assert stdout == PROMPT + text + "\n"
    assert "8 tokens in" in stderr and "ended by length" in stderr


def test_command_prints_one_json_object(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    arguments = ("--prompt", PROMPT, "--max-tokens", "8", "--temperature", "1.0", "--top-p", "0.9", "--seed", "4", "--json")
    result = json.loads(_run(str(folder), *arguments)[0])
    expected = Generator(folder).complete(Request(PROMPT, 8, 1.0, 0.9, 4))
    assert result["schema_version"] == 1
    assert (result["text"], result["tokens"], result["finish"]) == (expected.text, 8, "length")
