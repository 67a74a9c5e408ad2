"""Text from a saved model, in plain Transformers: what a user of the exported folder will get is what is shown here.

Rejected for generation: the training model of the models room, whose attention knows no key cache.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer
from transformers.utils.logging import disable_progress_bar

from muletrain.checkpoint.layout import MODEL, latest_complete
from muletrain.models.adapter_folder import base_of, is_adapter
from muletrain.spec.errors import InputError


@dataclass(frozen=True)
class Request:
    """What to generate. `temperature` 0: always the likeliest token; then `top_p` and `seed` change nothing."""

    prompt: str
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.max_tokens < 1:
            problems.append(f"max-tokens: {self.max_tokens} must be at least 1")
        if self.temperature < 0:
            problems.append(f"temperature: {self.temperature} must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            problems.append(f"top-p: {self.top_p} must be more than 0 and at most 1")
        if problems:
            raise InputError(*problems)


@dataclass(frozen=True)
class Completion:
    """What was generated, without the prompt."""

    text: str
    prompt_tokens: int
    tokens: int
    finish: Literal["stop", "length"]
    """stop: the model ended its text; length: max_tokens was reached."""
    seconds: float


def find_model_folder(path: Path, warn: Callable[[str], None]) -> Path:
    """The model folder meant by a model folder, a checkpoint or a run (its newest complete checkpoint).

    Raises InputError where there is none.
    """
    for folder in (path, path / MODEL):
        if (folder / "config.json").is_file() or is_adapter(folder):
            return folder
    if (path / "checkpoints").is_dir():
        newest = latest_complete(path / "checkpoints", warn)
        if newest is not None:
            return newest / MODEL
    if not path.is_dir():
        raise InputError(f"{path}: there is no such folder; give a run folder, a checkpoint or a model folder")
    if (path / "checkpoints").is_dir() or (path / "plan.json").is_file():
        raise InputError(f"{path}: this run has no checkpoint yet; train until its first one")
    raise InputError(f"{path} is neither a model folder (no config.json) nor a run (no checkpoints)")


class Generator:
    """A loaded model and tokenizer. In fp32 on a CPU, where half precision is many times slower; as saved on a GPU."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError where the folder has no usable tokenizer."""
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype: Any = "auto" if self._device.type == "cuda" else torch.float32
        if not sys.stderr.isatty():
            disable_progress_bar()  # "Loading weights", a flood in a file
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise InputError(f"{folder}: its tokenizer cannot be loaded: {error}") from error
        self._model = _load(folder, dtype).to(self._device).eval()

    @torch.no_grad()
    def complete(self, request: Request, on_text: Callable[[str], None] | None = None) -> Completion:
        """Continues the prompt. `on_text` gets pieces of text as they come, never part of a character.

        Raises InputError where prompt and new tokens exceed the model's positions.
        """
        ids = self._encode(request.prompt)
        limit = self._model.config.max_position_embeddings
        if len(ids) + request.max_tokens > limit:
            raise InputError(
                f"max-tokens: the prompt's {len(ids)} tokens and {request.max_tokens} new ones exceed the model's {limit} "
                f"positions; ask for at most {max(0, limit - len(ids))}"
            )
        torch.manual_seed(request.seed)
        start = time.monotonic()
        inputs = torch.tensor([ids], device=self._device)
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=self._settings(request),
            streamer=None if on_text is None else _Pieces(self._tokenizer, on_text),
        )
        seconds = time.monotonic() - start
        new = output[0, len(ids) :].tolist()
        text = self._tokenizer.decode(new, skip_special_tokens=True)
        finish: Literal["stop", "length"] = "stop" if new and new[-1] in self._ends() else "length"
        return Completion(text, len(ids), len(new), finish, seconds)

    def _encode(self, prompt: str) -> list[int]:
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        if ids:
            return ids
        first = self._tokenizer.bos_token_id if self._tokenizer.bos_token_id is not None else self._tokenizer.eos_token_id
        if first is None:
            raise InputError("prompt: it is empty, and the tokenizer has no token that starts a text")
        return [first]

    def _ends(self) -> tuple[int, ...]:
        ends = self._model.generation_config.eos_token_id
        return () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)

    def _settings(self, request: Request) -> GenerationConfig:
        ends = list(self._ends())
        sampling: dict[str, Any] = {"do_sample": False}
        if request.temperature > 0:
            sampling = {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p, "top_k": 0}
        return GenerationConfig(
            max_new_tokens=request.max_tokens, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0, **sampling
        )


def _load(folder: Path, dtype: Any) -> Any:
    """The model; for an adapter its base, found by the name that the folder gives, with the adapter's matrices in it.

    Through peft itself: Transformers' own way asks for a peft newer than some package indexes have.
    """
    if not is_adapter(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    base = base_of(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: the adapter's base, {base}, cannot be loaded: {error}") from error
    return PeftModel.from_pretrained(model, str(folder)).get_base_model()


class _Pieces(TextStreamer):
    """Hands on text as soon as it is whole."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002 - Transformers passes it
        """Called by Transformers."""
        if text:
            self._on_text(text)
