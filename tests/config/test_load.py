"""Recipes: typed by key, everything wrong named at once with key and place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muletrain.config.keys import RESERVED, dotted, table
from muletrain.config.load import load_recipe
from muletrain.config.render import dump_recipe
from muletrain.spec.errors import InputError
from muletrain.spec.recipe import RunConfig

HEAD = "run_dir: r\nmodel: {source: m}\ndata: {source: d}\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        load_recipe(path, overrides)
    return [problem.replace(str(path), "recipe.yaml") for problem in caught.value.problems]


def train(write: Any, line: str, *overrides: str) -> Any:
    return load_recipe(write(HEAD + "train:\n  steps: 100\n" + line), overrides).train


@pytest.mark.parametrize("text", ["1e-5", '"1e-5"', "'1e-5'", "0.00001", "1.0e-5", "1E-5", ".00001"])
def test_O01_learning_rate_is_a_number(write: Any, text: str) -> None:
    assert train(write, f"  optimizer: {{learning_rate: {text}}}\n").optimizer.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("  optimizer: {learning_rate: 5e-4}\n", "optimizer.learning_rate", 5e-4),
        ("  tokens_per_step: 2_048_000\n", "tokens_per_step", 2_048_000),
        ("  tokens_per_step: 64Ki\n", "tokens_per_step", 65_536),
        ("  tokens_per_step: 2e6\n", "tokens_per_step", 2_000_000),
        ("  seed: 010\n", "seed", 10),
        ("  seed: 0o10\n", None, "'0o10' is not a count"),
        ("  seed: 12:30\n", None, "'12:30' is not a count; write it like 4096 or 64k"),
        ("  seed: 2026-01-01\n", None, "'2026-01-01' is not a count"),
        ("  seed: on\n", None, "'on' is not a count"),
        ("  seed: true\n", None, "'true' is not a count"),
        ("  clip_norm: no\n", None, "'no' is not a number"),
        ("  clip_norm: 12:30\n", None, "'12:30' is not a number"),
        ("  compile: on\n", "compile", True),
        ("  compile: no\n", "compile", False),
        ("  compile: 'off'\n", "compile", False),
        ("  compile: Auto\n", "compile", "auto"),
        ("  compile: 1\n", "compile", True),
        ("  compile: 12:30\n", None, "'12:30' is neither auto, on nor off"),
        ("  compile: sometimes\n", None, "'sometimes' is neither auto, on nor off; write auto, true or false"),
    ],
)
def test_O01_scalars_mean_what_a_person_expects(write: Any, line: str, key: str | None, value: Any) -> None:
    if key is None:
        (problem,) = problems(write(HEAD + "train:\n  steps: 100\n" + line))
        assert problem.startswith(f"recipe.yaml:6: train.{line.partition(':')[0].strip()}: {value}")
        return
    found: Any = train(write, line)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value and type(found) is type(value)


def test_O01_sizes_lengths_and_words(write: Any) -> None:
    text = "run_dir: on\nmodel: {source: no}\ndata: {source: 010, sequence_length: 4k, text_key: 1e-5}\n"
    config = load_recipe(write(text + "memory: {gpu_limit: 24GiB}\ntrain: {steps: 1}\n"))
    assert (config.run_dir, config.model.source, config.data.source, config.data.text_key) == ("on", "no", ("010",), "1e-5")
    assert (config.data.sequence_length, config.memory.gpu_limit) == (4096, 24 * 2**30)


@pytest.mark.parametrize("null", ["null", "~", "", "Null"])
def test_O01_null_is_absent(write: Any, null: str) -> None:
    text = HEAD + f"train:\n  steps: 5\n  epochs: {null}\n  seed: {null}\n  optimizer: {null}\nmemory: {null}\n"
    assert load_recipe(write(text)).train == load_recipe(write(HEAD + "train: {steps: 5}")).train


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train: {optimizer: {learnig_rate: 1}}", "there is no such key; did you mean train.optimizer.learning_rate?"),
        ("train: {learning_rate: 1}", "train.learning_rate: there is no such key; did you mean train.optimizer.learning_rate?"),
        ("learning_rate: 1", "learning_rate: there is no such key; did you mean train.optimizer.learning_rate?"),
        ("train: {learnig_rate: 1}", "train.learnig_rate: there is no such key; did you mean train.optimizer.learning_rate?"),
        ("train: {micro-batch: 1}", "train.micro-batch: there is no such key; did you mean train.micro_batch?"),
        ("train: {optimizer: {Learning-Rate: 1}}", "did you mean train.optimizer.learning_rate?"),
        ("optimizer: {learning_rate: 1}", "optimizer: there is no such key; did you mean train.optimizer?"),
        ("mdel: {source: x}", "mdel: there is no such key; did you mean model?"),
        ("train: {lr: 1}", "train.lr: there is no such key; did you mean train.optimizer.learning_rate?"),
        ("checkpoint: {every: {n: 1}}", "checkpoint.every: a mapping, where one value is wanted"),
        ("train.optimizer.beta1: 0.9", "train.optimizer.beta1: in a recipe, write beta1 indented below train.optimizer:"),
        ("bf16: true", "bf16: there is no such key; did you mean precision.compute?"),
        ("<<: {a: 1}", "<<: there is no such key; a recipe has run_dir, model"),
        ("log: {zzz: 1}", "log.zzz: there is no such key; log has every, console"),
    ],
)  # fmt: skip
def test_O02_unknown_key_is_refused_with_a_suggestion(write: Any, line: str, message: str) -> None:
    found = problems(write(HEAD + line), "train.steps=1")
    assert any(problem.startswith("recipe.yaml:4: ") and message in problem for problem in found), found


def test_O02_duplicate_keys_are_refused_with_both_lines(write: Any) -> None:
    text = HEAD + "train:\n  steps: 1\n  seed: 2\n  steps: 3\ntrain:\n  seed: 4\nmodel: {source: x}\n"
    assert problems(write(text)) == [
        "recipe.yaml:8: train is given twice, first at recipe.yaml:4; keep one",
        "recipe.yaml:10: model is given twice, first at recipe.yaml:2; keep one",
        "recipe.yaml:7: train.steps is given twice, first at recipe.yaml:5; keep one",
    ]
    duplicate = write(HEAD + "train: {steps: 1}\nmemory: {strategy: zero3, strategy: zero2}\n")
    assert problems(duplicate) == ["recipe.yaml:5: memory.strategy is given twice, first at recipe.yaml:5; keep one"]


def test_O02_duplicates_inside_overrides(write: Any) -> None:
    text = "run_dir: r\nmodel:\n  source: m\n  overrides: {a: 1, a: 2, b: {c: 1, c: 2}}\ndata: {source: d}\ntrain: {steps: 1}\n"
    found = problems(write(text))
    assert [problem.partition(" is given")[0] for problem in found] == [
        "recipe.yaml:4: model.overrides.a",
        "recipe.yaml:4: model.overrides.b.c",
    ]


@pytest.mark.parametrize("key", RESERVED)
def test_O02_reserved_key_is_told_apart(write: Any, key: str) -> None:
    assert tuple(key.split(".")) not in table()[1]
    (problem,) = problems(write(HEAD + "train: {steps: 1}"), f"{key}=1")
    assert f"{key} is part of the design but not in this version" in problem


def test_reserved_below(write: Any) -> None:
    (problem,) = problems(write(HEAD + "train: {steps: 1}"), "parallel.tensor.size=8")
    assert "parallel.tensor.size: parallel.tensor is part of the design but not in this version" in problem


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("model.lora", "model.adapter"),
        ("lora_r", "model.adapter.rank"),
        ("lora_target_modules", "model.adapter.targets"),
        ("model.lora.alpha", "model.adapter.alpha"),
        ("model.adapter.target", "model.adapter.targets"),
    ],
)
def test_what_others_call_an_adapters_keys(write: Any, key: str, meant: str) -> None:
    (problem,) = problems(write(HEAD + "train: {steps: 1}"), f"{key}=8")
    assert f"did you mean {meant}?" in problem


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model.adapter=lora", "model.adapter is a section; set one of its keys, e.g. model.adapter.kind=…"),
        ("model.adapter.kind=qlora", "'qlora' is not one of none, lora; did you mean lora?"),
        ("model.adapter.rank=0", "0 is out of range; it must be at least 1"),
        ("model.adapter.alpha=0", "'0' is too small; it must be more than 0, or auto"),
        ("model.adapter.alpha=much", "'much' is neither auto nor a number"),
        ("model.adapter.dropout=1", "1.0 is out of range; it must be less than 1"),
        ("model.adapter.targets=[]", "an empty list; give at least one"),
    ],
)
def test_wrong_adapter_values(write: Any, argument: str, message: str) -> None:
    assert any(message in problem for problem in problems(write(HEAD + "train: {steps: 1}"), argument))


def test_all_problems_at_once_by_key_and_place(write: Any) -> None:
    text = """run_dir: ''
model:
  sorce: m
data:
  source: []
  sequence_length: [1, 2]
  packing: bestfit
  validation_fraction: 0
train:
  steps: ten
  micro_batch: 0
  clip_norm: -1
  evaluate_every: 10
  optimizer: {beta1: 1}
memory: zero3
parallel: {workers: 0, device: gpu}
"""
    found = problems(write(text), "train.seed=x", "log=3", "nonsense", "train.compile=[", "data.tokenizer={a: 1}")
    assert sorted(found) == sorted(
        [
            "recipe.yaml:3: model.sorce: there is no such key; did you mean model.source?",
            "recipe.yaml:15: memory is a section: write its keys below it, indented",
            "argument 'log=3': log is a section; set one of its keys, e.g. log.every=…",
            "argument 'nonsense': write key=value, e.g. train.optimizer.learning_rate=1e-5",
            "argument 'train.compile=[': the value is not valid YAML: expected the node content, but found '<stream end>'",
            "recipe.yaml:1: run_dir: is empty",
            "recipe.yaml: model.source is missing: A catalogue name (deepseek-llm-7b), a Hugging Face folder, or a hub name.",
            "recipe.yaml:5: data.source: an empty list; give at least one",
            "argument 'data.tokenizer={a: 1}': data.tokenizer: a mapping, where one value is wanted",
            "recipe.yaml:6: data.sequence_length: a list, where one value is wanted",
            "recipe.yaml:7: data.packing: 'bestfit' is not one of best_fit, concat, none; did you mean best_fit?",
            "recipe.yaml:10: train.steps: 'ten' is not a count; write it like 4096 or 64k",
            "recipe.yaml:11: train.micro_batch: 0 is out of range; it must be at least 1",
            "recipe.yaml:12: train.clip_norm: -1.0 is out of range; it must be at least 0.0",
            "argument 'train.seed=x': train.seed: 'x' is not a count; write it like 4096 or 64k",
            "recipe.yaml:14: train.optimizer.beta1: 1.0 is out of range; it must be less than 1.0",
            "recipe.yaml:16: parallel.workers: 0 is too few; write at least 1, or auto",
            "recipe.yaml:16: parallel.device: 'gpu' is not one of auto, cpu, cuda; did you mean cuda?",
            "recipe.yaml:13: train.evaluate_every: 10, but data.validation_fraction is 0, so there is nothing to evaluate on; "
            "raise it (0.01) or set evaluate_every: 0",
        ]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "recipe.yaml: the recipe is empty"),
        (b"# nothing\n", "recipe.yaml: the recipe is empty"),
        (b"- a\n- b\n", "recipe.yaml:1: a recipe is a mapping of keys"),
        (b"just words\n", "recipe.yaml:1: a recipe is a mapping of keys"),
        (b"run_dir: a\nmodel: {source: \xff}\n", "recipe.yaml:2: not UTF-8 text (byte 0xff); save it as UTF-8"),
        (b"a: 1\n  b: 2\n", "recipe.yaml:2: not valid YAML: mapping values are not allowed here"),
        (b"run_dir: r\ndata: {source: *.txt}\n", "recipe.yaml:2: not valid YAML: "),
        (b"a: 1\n---\nb: 2\n", "recipe.yaml:2: not valid YAML: but found another document"),
        (b"run_dir: \x01\n", "recipe.yaml: not valid YAML: unacceptable character"),
        (b"a: " + b"[" * 5000, "recipe.yaml: nested too deeply to be a recipe"),
        (b"{[a]: 1}\n", "recipe.yaml:1: a key must be a word"),
    ],
)
def test_unreadable_recipes(write: Any, content: bytes, message: str) -> None:
    found = problems(write(content))
    assert len(found) == 1 and found[0].startswith(message)


def test_a_star_is_explained(write: Any) -> None:
    assert problems(write("data: {source: *.txt}\n"))[0].endswith("quote a text that starts with * & % @ or `")


def test_missing_recipe_and_folder(tmp_path: Path) -> None:
    assert problems(tmp_path / "no")[0].endswith(": there is no such recipe")
    assert problems(tmp_path)[0].endswith(": cannot read the recipe: Is a directory")


def test_tags_and_self_reference_are_refused(write: Any) -> None:
    assert "YAML tags (tag:yaml.org,2002:int) are not used" in problems(write(HEAD + "train: {steps: !!int 3}"))[0]
    text = "run_dir: r\nmodel: {source: m, overrides: {a: &x {b: *x}}}\ndata: {source: d}\ntrain: {steps: 1}\n"
    assert any("nested too deeply, or contains itself" in problem for problem in problems(write(text)))


def test_byte_order_mark_and_anchors_are_fine(write: Any) -> None:
    config = load_recipe(write(b"\xef\xbb\xbf" + (HEAD + "train: {steps: &n 7, seed: *n}").encode()))
    assert (config.train.steps, config.train.seed) == (7, 7)


def test_arguments_win_and_the_last_one_does(write: Any) -> None:
    path = write(HEAD + "train: {steps: 7, seed: 1}\n")
    config = load_recipe(
        path,
        [
            "train.steps=8",
            "train.steps=9",
            "train.seed=null",
            "data.source=[a, 'b c']",
            "train.optimizer={beta1: 0.5, beta2: 0.6}",
            "model.overrides.vocab_size=64",
            "model.overrides.rope={a: 1e-5}",
            "data.text_key=*x=y",
            "run_dir='null'",
        ],
    )
    assert (config.train.steps, config.train.seed, config.data.source, config.run_dir) == (9, 0, ("a", "b c"), "null")
    assert (config.train.optimizer.beta1, config.train.optimizer.beta2, config.data.text_key) == (0.5, 0.6, "*x=y")
    assert config.model.overrides == {"vocab_size": 64, "rope": {"a": 1e-5}}


def test_arguments_can_give_what_the_file_lacks(write: Any) -> None:
    config = load_recipe(write("train: {steps: 1}"), ["run_dir=r", "model.source=m", "data.source=d"])
    assert (config.run_dir, config.model.source, config.data.source) == ("r", "m", ("d",))


def test_words_in_free_mappings_are_read_as_json_would(write: Any) -> None:
    text = (
        "run_dir: r\nmodel:\n  source: m\n  overrides: {a: 4, b: 1e-6, c: true, d: null, e: on, f: '4', g: [1, x], h: -2.5}\n"
        "data: {source: d}\ntrain: {steps: 1}"
    )
    overrides = load_recipe(write(text)).model.overrides
    assert overrides == {"a": 4, "b": 1e-6, "c": True, "d": None, "e": "on", "f": "4", "g": [1, "x"], "h": -2.5}
    assert [type(overrides[name]) for name in "abch"] == [int, float, bool, float]


WORDS = st.text(min_size=1, max_size=12).filter(lambda text: text.isprintable()) | st.sampled_from(
    [
        "null",
        "~",
        "1e-5",
        "no",
        "on",
        "12:30",
        "010",
        "[a]",
        "{",
        "*x",
        "&y",
        "- z",
        "#",
        "true",
        " a",
        "a: b",
        "'",
        '"',
        "深度",
    ]
)
VALUES = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | WORDS


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    word=WORDS,
    sources=st.lists(WORDS, min_size=1, max_size=3),
    overrides=st.dictionaries(st.sampled_from("abcd"), VALUES | st.lists(VALUES)),
)
def test_dump_and_load_round_trip(write: Any, word: str, sources: list[str], overrides: dict[str, Any]) -> None:
    config = RunConfig.model_validate(
        {
            "run_dir": word,
            "model": {"source": word, "overrides": overrides},
            "data": {"source": sources},
            "train": {"epochs": 3, "optimizer": {"learning_rate": 1.7e-5}},
            "memory": {"gpu_limit": 24 * 2**30},
        }
    )
    assert load_recipe(write(dump_recipe(config))) == config


def test_keys_are_unambiguous() -> None:
    names = [dotted(path) for path in table()[1]]
    assert len(set(names)) == len(names) > 40
