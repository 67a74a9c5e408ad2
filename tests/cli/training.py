"""A recipe for a real, tiny run in a folder of its own, and `mule` in a process of its own, as a user has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.families.tiny import tiny_llama

_RECIPE = """
run_dir: {run_dir}
model: {{source: {model}, weights: random}}
data: {{source: {text}, sequence_length: 32, packing: concat, validation_fraction: 0.1, cache_dir: {cache}, processes: 1}}
train:
  steps: 6
  tokens_per_step: 128
  optimizer: {{learning_rate: 1e-3}}
precision: {{compute: fp32}}
memory: {{strategy: zero3}}
parallel: {{workers: 2, device: cpu}}
"""


def write_recipe(folder: Path) -> Path:
    """Text, model and recipe; the recipe's path. The run folder is folder/run."""
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"row {row} " + "the mules walk on " * (row % 5)}) + "\n" for row in range(40)))
    model = tiny_llama(folder / "model", hidden_size=32, intermediate_size=48)
    recipe = folder / "recipe.yaml"
    names = {"run_dir": folder / "run", "model": model, "text": text, "cache": folder / "cache"}
    recipe.write_text(_RECIPE.format(**{key: json.dumps(str(path)) for key, path in names.items()}))
    return recipe


def command(*arguments: object) -> list[str]:
    """The command line of `mule`."""
    return [sys.executable, "-c", "from muletrain.cli.app import main; main()", *map(str, arguments)]


def mule(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs `mule` to its end."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout, check=False)
