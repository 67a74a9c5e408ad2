"""A tokenizer as preparing needs it: text to ids, and which ids begin and end a document. No torch, no transformers.

Any Hugging Face folder with a tokenizer.json works. Whether a document begins with bos follows the tokenizer's own rule:
`add_bos_token` in tokenizer_config.json where it is written (as Transformers reads it), else the post-processor. Every document
ends with eos exactly once. Special tokens inside a text are ordinary text, so that no text can forge the end of a document.
Rejected: transformers.AutoTokenizer (seconds of imports in every tokenizing process for the same ids).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from muletrain.spec.errors import InputError

_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json")
_BATCH_DOCUMENTS = 64


@dataclass(frozen=True)
class TextTokenizer:
    """Encodes documents. `prefix` is [bos] or nothing; ids are below `vocabulary`."""

    source: str
    backend: Tokenizer
    prefix: tuple[int, ...]
    eos: int
    pad: int
    vocabulary: int
    reserved: dict[int, str]
    """Special tokens (unknown excepted), which no text may yield."""
    fingerprint: str
    """Of everything that decides the ids: tokenizer.json, prefix and eos."""
    batch_call: bool = False
    """Encode by the library's batch call: 1.4 times as fast, but it starts a thread pool, which must not be forked later."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """How ids are stored: 2 bytes where they fit, little-endian."""
        return np.dtype("<u2" if self.vocabulary <= 1 << 16 else "<u4")

    def encode(self, text: str) -> np.ndarray[Any, np.dtype[Any]]:
        """A whole document: prefix, the text's ids, eos. One-dimensional, `dtype`."""
        ids = self._ids(text)
        if not self.reserved.keys().isdisjoint(ids):
            ids = self._ids_apart(text)
        return np.array([*self.prefix, *ids, self.eos], dtype=self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens shown."""
        return str(self.backend.decode([int(number) for number in ids], skip_special_tokens=False))

    def _ids(self, text: str) -> list[int]:
        if self.batch_call:  # with one text it works on one thread: processes give the parallelism
            ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def _ids_apart(self, text: str) -> list[int]:
        """For vocabularies that yield a reserved token as such: breaks those strings behind their first character.

        A reserved token of one character cannot be broken and is left out.
        """
        parts = [text]
        for token in self.reserved.values():
            inside = re.compile(f"(?<={re.escape(token[:1])})(?={re.escape(token[1:])})")
            parts = [piece for part in parts for piece in inside.split(part)] if len(token) > 1 else parts
        return [number for part in parts if part for number in self._ids(part) if number not in self.reserved]


def load_tokenizer(source: str) -> TextTokenizer:
    """From a folder, a tokenizer.json or a hub name. Raises InputError naming what is missing and the fix."""
    path = _tokenizer_json(source)
    raw = path.read_bytes()
    try:
        backend = Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise InputError(f"{path}: not a tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    sides = {name: _read_json(path.with_name(name)) for name in _SIDE_FILES}
    bos, eos, pad = (_token_id(backend, sides, name) for name in ("bos", "eos", "pad"))
    if eos is None:
        raise InputError(f"{path}: no end-of-sequence token is known; name it as eos_token in tokenizer_config.json beside it")
    prefix = _prefix(backend, sides["tokenizer_config.json"].get("add_bos_token"), bos, path)
    backend.encode_special_tokens = True
    unknown = {getattr(backend.model, "unk_token", None), _content(sides["tokenizer_config.json"].get("unk_token"))}
    added = backend.get_added_tokens_decoder()
    reserved = {number: token.content for number, token in added.items() if token.special and token.content not in unknown}
    reserved |= {number: str(backend.id_to_token(number)) for number in (*prefix, eos)}
    vocabulary = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    digest = hashlib.blake2b(raw, digest_size=20)
    digest.update(json.dumps([prefix, eos]).encode())
    pad = eos if pad is None else pad
    return TextTokenizer(source, backend, prefix, eos, pad, vocabulary, reserved, digest.hexdigest())


def _tokenizer_json(source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return path / "tokenizer.json"
        raise InputError(
            f"{source}: the folder has no tokenizer.json; open it with transformers.AutoTokenizer.from_pretrained and save it "
            "with save_pretrained, which writes one, or name another tokenizer with data.tokenizer"
        )
    if source.count("/") > 1 or source.startswith((".", "/", "~")):
        raise InputError(f"data.tokenizer: {source!r} does not exist; give a folder, a tokenizer.json or a hub name")
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (a quarter of a second, for hub names only)

    try:
        folder = snapshot_download(source, allow_patterns=["tokenizer.json", *_SIDE_FILES])
    except Exception as error:  # any network or hub fault: the user's turn in every case
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"data.tokenizer: {source!r} is no folder here, and the hub did not give it: {reason}") from None
    return _tokenizer_json(folder)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _token_id(backend: Tokenizer, sides: dict[str, dict[str, Any]], name: str) -> int | None:
    """The id of bos, eos or pad by the tokenizer's files, else by the model's (the first of several)."""
    for side in _SIDE_FILES[:2]:
        content = _content(sides[side].get(f"{name}_token"))
        if content is not None and (number := backend.token_to_id(content)) is not None:
            return int(number)
    for side in _SIDE_FILES[2:]:
        number = sides[side].get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and backend.id_to_token(number) is not None:
            return number
    return None


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _prefix(backend: Tokenizer, add_bos: Any, bos: int | None, path: Path) -> tuple[int, ...]:
    if isinstance(add_bos, bool):
        if add_bos and bos is None:
            raise InputError(f"{path.with_name('tokenizer_config.json')}: add_bos_token is true but no bos_token is named")
        return (bos,) if add_bos and bos is not None else ()
    plain = backend.encode("a", add_special_tokens=False).ids
    processed = backend.encode("a", add_special_tokens=True).ids
    start = next((at for at in range(len(processed)) if processed[at : at + len(plain)] == plain), 0)
    return tuple(processed[:start])


def train_tokenizer(texts: Iterator[str], vocabulary: int, folder: Path) -> TextTokenizer:
    """Trains a byte-level BPE on texts and writes it as a Hugging Face tokenizer folder. The same texts give the same files.

    Every byte is a token of its own, so any text can be represented; digits stand alone; `<s>` begins a document, as in
    DeepSeek-LLM, and `</s>` ends it. Raises InputError if `vocabulary` has no room for the bytes and the two.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary < len(alphabet) + 2:
        raise InputError(f"--vocab-size {vocabulary}: at least {len(alphabet) + 2} are needed (256 bytes, <s> and </s>)")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_batches(texts), trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    _write_json(folder / "special_tokens_map.json", special)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "add_eos_token": False}
    _write_json(folder / "tokenizer_config.json", config | {"clean_up_tokenization_spaces": False} | special)
    return load_tokenizer(str(folder))


def publish_tokenizer(texts: Iterator[str], vocabulary: int, folder: Path) -> TextTokenizer:
    """train_tokenizer into a folder that appears whole. The same tokenizer there already is fine; another is an InputError."""
    folder = folder.expanduser()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=folder.parent) as temporary:
        work = Path(temporary) / "tokenizer"
        made = train_tokenizer(texts, vocabulary, work)
        if (folder / "tokenizer.json").is_file():
            if load_tokenizer(str(folder)).fingerprint != made.fingerprint:
                raise InputError(f"{folder}: holds another tokenizer; choose another folder, or remove it")
        elif folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder}: is not empty; choose another folder")
        else:
            os.rename(work, folder)
    return load_tokenizer(str(folder))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch = []
    yield batch


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
