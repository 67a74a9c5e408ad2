"""SmolLM2-135M-Instruct, real weights on real text: our 20 steps are those of a plain Transformers loop."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from muletrain.data.batch import MicroBatch
from muletrain.models.export import save_model_folder
from muletrain.strategy.contract import StepContext
from tests.families.smollm import FOLDER_VARIABLE, smollm_folder
from tests.families.tiny import model_plan
from tests.strategy.runs import Run, start

STEPS, LENGTH, RATE = 20, 96, 2e-5


def text_rows(tokenizer: object, first: int, count: int) -> torch.Tensor:
    """[count, LENGTH + 1] token ids of the standard library's sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[first::40][:count]
    rows = [tokenizer(file.read_text("utf-8")[:4000])["input_ids"][: LENGTH + 1] for file in files]  # type: ignore[operator]
    return torch.tensor([row for row in rows if len(row) == LENGTH + 1])


def batch_of(row: torch.Tensor) -> MicroBatch:
    """One row as a micro-batch of one segment."""
    positions, bounds = torch.arange(LENGTH)[None], torch.empty(0, dtype=torch.int32)
    return MicroBatch(0, row[None, :-1], row[None, 1:], positions, bounds, LENGTH, LENGTH, 0)


def plain_losses(folder: Path, rows: torch.Tensor) -> list[float]:
    """The same steps in plain Transformers and PyTorch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for row in rows[:STEPS]:
        loss = model(input_ids=row[None], labels=row[None]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not os.environ.get(FOLDER_VARIABLE), reason=f"set {FOLDER_VARIABLE} to a folder to test real weights")
def test_smollm2_trains_like_plain_transformers_saves_and_still_answers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(os.cpu_count() or 1)
    folder = smollm_folder(Path(os.environ[FOLDER_VARIABLE]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows, held_out = text_rows(tokenizer, 0, STEPS), text_rows(tokenizer, 7, 6)
    rows = rows.repeat(-(-STEPS // len(rows)), 1)[:STEPS]
    run = Run(model_plan(folder), compute="fp32", rate=RATE, steps=STEPS)
    strategy = start(run)
    before = strategy.evaluate([batch_of(row) for row in held_out])
    results = [strategy.step([batch_of(row)], StepContext(n, n, RATE)) for n, row in enumerate(rows)]
    after = strategy.evaluate([batch_of(row) for row in held_out])
    assert after[0] / after[1] < before[0] / before[1] - 0.01
    ours = [r.loss_sum / r.tokens for r in results]
    assert max(abs(a - b) for a, b in zip(ours, plain_losses(folder, rows), strict=True)) < 1e-4

    saved = tmp_path / "model"
    config = AutoConfig.from_pretrained(folder)
    save_model_folder(saved, config, strategy.full_parameters(), dtype=torch.float32, tokenizer_folder=folder)
    reloaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    with torch.no_grad():
        loss = reloaded(input_ids=held_out, labels=held_out).loss.item()
    assert loss == pytest.approx(after[0] / after[1], abs=1e-4)
    question = AutoTokenizer.from_pretrained(saved).apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = question["input_ids"] if hasattr(question, "keys") else question
    answer = reloaded.generate(ids, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])
