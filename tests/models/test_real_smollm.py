"""Real weights (SmolLM2-135M-Instruct) through our model: the same logits as Transformers, saved and read back. Opt-in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from muletrain.models.export import save_model_folder, verify_model_folder
from muletrain.models.weights import open_weights
from muletrain.serve.generate import Generator, Request
from tests.families.smollm import FOLDER_VARIABLE, smollm_folder
from tests.families.tiny import model_plan
from tests.models.loading import load, packed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get(FOLDER_VARIABLE), reason=f"{FOLDER_VARIABLE} does not say where to keep SmolLM2"),
]
TEXT = (
    "The capital of France is Paris. A mule is the offspring of a donkey and a horse, and can carry a heavy load.",
    "def mean(values):\n    return sum(values) / len(values)\n",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm_folder(Path(os.environ[FOLDER_VARIABLE]))


@torch.no_grad()
def test_packed_logits_and_loss_equal_transformers(folder: Path) -> None:
    ours, theirs = load(model_plan(folder)), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert ours.tied and ours.config.num_hidden_layers == 30
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXT]
    first, second = map(len, documents)
    ids, labels, positions, bounds = packed(documents, length=64)
    hidden = ours.hidden_states(ids, positions, bounds, max(first, second))
    logits = hidden @ ours.head.weight.t()
    expected = [theirs(document[None]) for document in documents]
    torch.testing.assert_close(logits[0, :first], expected[0].logits[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[0, first : first + second], expected[1].logits[0], rtol=0, atol=1e-4)
    losses = [theirs(d[None], labels=d[None]).loss.item() * (len(d) - 1) for d in documents]
    loss = ours.head_loss(hidden, labels).item()
    assert loss == pytest.approx(sum(losses), rel=1e-5)
    assert loss / (first + second - 2) < 3.0  # real weights know English and Python


def test_C09_saved_model_still_answers(folder: Path, tmp_path: Path) -> None:
    plan = model_plan(folder)
    model = load(plan)
    source = open_weights(plan, model, 0)
    tensors = ((name, source.tensor(name)) for name in source.names)
    save_model_folder(
        tmp_path, model.config, tensors, dtype=torch.float32, tokenizer_folder=folder, generation_from=folder, shard_bytes=2**28
    )
    verify_model_folder(tmp_path)
    done = Generator(tmp_path).complete(Request("The capital of France is", max_tokens=3))
    assert done.text.startswith(" Paris")
