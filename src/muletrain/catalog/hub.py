"""Models and tokenizers by hub name: where they lie in this machine's cache, and fetching them into it.

Only what is used is fetched: config, safetensors, tokenizer; never a pickle and never code. Planning only looks (`cached`);
`fetch` is called by verbs that train, before anything else is done. From then on the plan holds the snapshot's folder, so a run
works without a network, all workers read the same commit, and a saved model gets the tokenizer it was trained with.
Rejected: passing the name on to Transformers, which fetches while workers wait, and a pickle where it finds no better.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import huggingface_hub  # its parts load when they are used: errors and utils with the first download

from muletrain.spec.errors import InputError

_CONFIG, _SINGLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
"""The one file that a tokenizer cannot be without here."""
_TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    _CONFIG,  # both name the ids of bos and eos where the tokenizer does not
    "generation_config.json",
)


def is_name(source: str) -> bool:
    """Whether a source that is nothing on this disk can be a hub name, `owner/name`."""
    owner, _, name = source.partition("/")
    return bool(owner and name) and "/" not in name and not source.startswith((".", "/", "~")) and not name.endswith(".json")


def cached(name: str, key: str, file: str = _CONFIG) -> Path | None:
    """The folder of the cached snapshot that holds `file`, or None. Looks on this disk only.

    Raises InputError, naming the recipe's `key`, for what cannot be a hub name.
    """
    try:
        found = huggingface_hub.try_to_load_from_cache(name, file)
    except ValueError:
        raise InputError(_no_name(key, name)) from None
    return Path(found).parent if isinstance(found, str) else None


def fetch_model(name: str, *, weights: bool) -> Path:
    """The snapshot's folder with config, tokenizer and, if wanted, safetensors; only what is not cached is fetched.

    Raises InputError with the reason and the fix: no network, no such model, a gated one, one without safetensors.
    """
    key = "model.source"
    folder = cached(name, key)
    if folder is None or (weights and _absent_weights(folder)):
        folder = _fetch(name, key, [*_TOKENIZER_FILES, *([_INDEX] if weights else [])], need=_CONFIG)
    for file in _absent_weights(folder) if weights else ():
        _fetch(name, key, [file], need=file, revision=folder.name)
    return folder


def fetch_tokenizer(name: str) -> Path:
    """The snapshot's folder with the tokenizer, fetched unless it is cached. Raises InputError as fetch_model does."""
    key = "data.tokenizer"
    return cached(name, key, TOKENIZER) or _fetch(name, key, [*_TOKENIZER_FILES], need=TOKENIZER)


def _absent_weights(folder: Path) -> tuple[str, ...]:
    """Weight files that the snapshot should have and has not."""
    if (folder / _SINGLE).is_file():
        return ()
    if not (folder / _INDEX).is_file():
        return (_SINGLE,)
    try:
        names = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise InputError(f"{folder / _INDEX}: cannot be read ({error}); remove it, and it is fetched again") from None
    return tuple(sorted(name for name in names if not (folder / name).is_file()))


def _fetch(name: str, key: str, files: list[str], need: str, revision: str | None = None) -> Path:
    """Fetches those of `files` that the hub has; `need` must be there afterwards. The snapshot's folder."""
    download = huggingface_hub.snapshot_download
    sys.stderr.write(f"{key}: fetching {name} from the hub ({need if len(files) == 1 else 'config, tokenizer'})\n")
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    try:
        folder = Path(download(name, revision=revision, allow_patterns=files))
        if not (folder / need).is_file():  # the hub has none, or an older snapshot was found where there is no network
            huggingface_hub.hf_hub_download(name, need, revision=folder.name)
    except huggingface_hub.errors.HFValidationError:
        raise InputError(_no_name(key, name)) from None
    except huggingface_hub.errors.GatedRepoError:
        fix = f"accept its terms at https://huggingface.co/{name}, then run: hf auth login"
        raise InputError(f"{key}: {name} is gated; {fix}") from None
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise InputError(f"{key}: the hub has no {name}; check the name, or if it is private run: hf auth login") from None
    except huggingface_hub.errors.RemoteEntryNotFoundError:
        raise InputError(f"{key}: {name} has no {need} on the hub; {_INSTEAD[need if need in _INSTEAD else _SINGLE]}") from None
    except Exception as error:  # any fault of the network, the hub or the disk: one line and the way round it
        raise InputError(
            f"{key}: {name} is not whole on this machine and could not be fetched: {_reason(error)}. "
            f"Where there is a network run: hf download {name}; or give a folder"
        ) from None
    return folder


def _reason(error: Exception) -> str:
    """The first line, without the names of classes that the library puts before it ("Got: ConnectError: ...")."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return re.sub(r"^Got: (\w+: )?", "", said)


def _no_name(key: str, name: str) -> str:
    return f"{key}: {name!r} is neither a catalogue name, a folder nor a hub name"


_INSTEAD = {
    _CONFIG: "give a Hugging Face decoder",
    TOKENIZER: "open it with transformers.AutoTokenizer.from_pretrained, save it with save_pretrained and give that folder",
    _SINGLE: "other formats of weights are not read (a pickle can run code): convert it with Transformers' save_pretrained, "
    "or say model.weights=random",
}
