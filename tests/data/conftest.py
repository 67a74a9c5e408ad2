"""A small tokenizer, a plan and a data set to prepare, for every test of the data room."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muletrain.data.dataset import Prepared
from muletrain.data.prepare import prepare
from muletrain.data.tokenizer import TextTokenizer, train_tokenizer
from muletrain.spec.plan import DataPlan

WORDS = ("the", "mule", "carries", "a", "heavy", "load", "over", "mountains", "and", "down", "before", "rain", "山", "é", "123")


def text_of(number: int, words: int) -> str:
    """A text with its number in it, so that it can be known again."""
    return f"{number}: " + " ".join(WORDS[(number * 7 + i) % len(WORDS)] for i in range(words))


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    return train_tokenizer((text_of(i, 30) for i in range(100)), 400, folder)


@pytest.fixture
def plan(tmp_path: Path, tokenizer: TextTokenizer) -> Callable[..., DataPlan]:
    def make(*source: Path | str, **changes: Any) -> DataPlan:
        values: dict[str, Any] = {
            "source": tuple(str(one) for one in source),
            "tokenizer": tokenizer.source,
            "text_key": "text",
            "sequence_length": 64,
            "packing": "best_fit",
            "validation_fraction": 0.0,
            "bad_rows": "skip",
            "cache_dir": str(tmp_path / "cache"),
            "processes": 1,
        }
        return DataPlan(**(values | changes))

    return make


@pytest.fixture
def rows_of(tmp_path: Path, plan: Callable[..., DataPlan]) -> Callable[..., Prepared]:
    """Prepares `count` documents of unlike lengths."""

    def make(count: int, **changes: Any) -> Prepared:
        rows = [{"text": text_of(i, 1 + i * 5 % 37)} for i in range(count)]
        return prepare(plan(write_rows(tmp_path / f"rows{count}.jsonl", rows), **changes))

    return make
