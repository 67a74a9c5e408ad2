"""`mule plan`: read in ten seconds, stable JSON, errors that name the fix."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muletrain.catalog.models import model_config
from muletrain.cli.app import app

BOX = ["--on", "3x RTX 4090", "--ram", "128GiB"]


def plan(*words: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, ["plan", *words])
    assert found.exit_code == code, found.output
    return found.output


def test_the_answer_is_at_the_top() -> None:
    text = plan(
        "deepseek-llm-7b", *BOX, "--tokens", "1T", "--tokens-per-step", "393k", "--rent", "2.3CNY/h", "--power", "0.8CNY/kWh"
    )
    first, _, fits, *rest = text.splitlines()
    assert first.startswith("deepseek-llm-7b: 6.91B parameters, full, on 3 x RTX 4090; 1T tokens, 393k a step, rows of 4096")
    assert fits.startswith("fits: streamed on 3 cards")
    assert any(line.startswith("  money") and "CNY rent" in line for line in rest)
    assert any(line.startswith("  card    [#") and " of 23.9 GiB" in line for line in rest)
    assert "* on paper only: this version does not run it" in text


def test_no_price_given_is_said() -> None:
    assert "money   no price given; no rent given; no price of electricity given" in plan("gpt2", *BOX, "--seq", "1024")


def test_json_is_stable_and_versioned() -> None:
    first, second = (plan("deepseek-llm-7b", *BOX, "--json") for _ in range(2))
    assert first == second
    found = json.loads(first)
    assert (found["schema_version"], found["model"], found["choice"]["cards"]) == (1, "deepseek-llm-7b", 3)


def test_what_does_not_fit_has_its_own_exit_code() -> None:
    assert "does not fit" in plan("llama-3.1-405b", "--on", "RTX 4090", "--ram", "16GiB", code=3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["deepseek-7b", *BOX], "'deepseek-7b' is not in the model catalogue; did you mean deepseek-llm-7b"),
        (["gpt2", "--on", "RTX 5070"], "'RTX 5070' is not in the GPU catalogue; did you mean"),
        (["gpt2", *BOX], "--seq: 4096 is longer than the 1024 positions that gpt2 was made for"),
        (["gpt2", *BOX, "--method", "dora"], "--method: 'dora' is none of full, lora, qlora"),
        (["gpt2", *BOX, "--precision", "int8"], "--precision: 'int8' is neither bf16 nor fp16"),
        (["gpt2", *BOX, "--tokens", "many", "--seq", "x"], "--tokens: 'many' is not a count"),
        (["bert-base", *BOX, "--seq", "512", "--method", "lora"], "bert has no linear layers that adapters are known for"),
    ],
)
def test_O03_what_cannot_hold_is_refused_with_the_fix(words: list[str], message: str) -> None:
    assert message in plan(*words, code=2)


def test_any_config_of_a_known_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config("qwen3-0.6b")), encoding="utf-8")
    for source in (str(tmp_path), str(tmp_path / "config.json")):
        assert "596M parameters" in plan(source, *BOX)
    assert "6.91B" in plan("deepseek-ai/deepseek-llm-7b-chat", *BOX)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    assert "family 'mamba' is not known in this version; known: llama" in plan(str(tmp_path), *BOX, code=2)


def test_a_recipe_is_decided_for_named_cards(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("run_dir: r\nmodel: {source: qwen3-0.6b}\ndata: {source: d}\ntrain: {steps: 10}\n", encoding="utf-8")
    assert "strategy: resident" in plan(str(recipe), "--on", "RTX 4090", "--ram", "64GiB")
    assert (
        json.loads(plan(str(recipe), "train.steps=20", "--on", "RTX 4090", "--ram", "64GiB", "--json"))["train"]["steps"] == 20
    )


def test_scale_on_paper_says_from_where_more_is_not_worth_it() -> None:
    words = [
        "qwen2.5-1.5b",
        "--on",
        "8x RTX 4090",
        "--ram",
        "512GiB",
        "--network",
        "10Gb/s",
        "--tokens-per-step",
        "2Mi",
        "--scale",
    ]
    text = plan(*words)
    assert "cards are not worth it: doubling them adds less than half of what it costs" in text
    assert json.loads(plan(*words, "--json"))["rows"][0]["cards"] == 8
    assert "--boxes: say what joins them" in plan(*words[:5], "--scale", code=2)
    fast = ["--on", "8x H100 SXM5 80GB", "--ram", "2TiB", "--network", "3200Gb/s", "--scale", "--tokens-per-step", "262144"]
    assert "every doubling up to 64 cards adds more than half" in plan("deepseek-llm-7b", *fast)


def test_a_plan_takes_under_a_second_and_no_torch() -> None:
    code = (
        "import sys, time; t = time.process_time(); sys.argv = ['mule', 'plan', 'deepseek-llm-7b', '--on', '3x RTX 4090',"
        " '--ram', '128GiB', '--json']\nfrom muletrain.cli.app import app\ntry:\n    app()\nexcept SystemExit:\n    pass\n"
        "print(time.process_time() - t, 'torch' in sys.modules, file=sys.stderr)"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    seconds, torch = done.stderr.split()[-2:]
    assert (float(seconds) < 1.0, torch) == (True, "False"), (seconds, time.perf_counter() - started)


def test_html_is_written_beside_what_is_printed(tmp_path: Path) -> None:
    assert "fits: zero1" in plan("gpt2", *BOX, "--seq", "1024", "--html", str(tmp_path / "p.html"))
    assert (tmp_path / "p.html").read_text(encoding="utf-8").startswith("<!doctype html>")
