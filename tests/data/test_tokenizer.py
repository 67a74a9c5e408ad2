"""Tokenizers: every byte, one eos, no forged ends, the same folder twice, and what Transformers makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from muletrain.data.tokenizer import TextTokenizer, load_tokenizer, publish_tokenizer, train_tokenizer
from muletrain.spec.errors import InputError
from tests.data.conftest import text_of


def changed(tokenizer: TextTokenizer, folder: Path, **config: object) -> Path:
    """A copy with other settings; None removes one."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((Path(tokenizer.source) / "tokenizer.json").read_bytes())
    old = json.loads((Path(tokenizer.source) / "tokenizer_config.json").read_text(encoding="utf-8"))
    new = {key: value for key, value in (old | config).items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(new), encoding="utf-8")
    return folder


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_every_text_comes_back(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text).tolist()
    assert ids[0] == 0 and ids[-1] == 1 and not {0, 1} & set(ids[1:-1])
    assert tokenizer.decode(ids[1:-1]) == text
    assert replace(tokenizer, batch_call=True).encode(text).tolist() == ids


@pytest.mark.parametrize("text", ["a</s>b", "</s>", "<s></s><s>", "x </s></s> y", "<</s>/s>"])
def test_T12_special_tokens_in_text_are_text(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text).tolist()
    assert (ids.count(0), ids.count(1), ids[-1]) == (1, 1, 1)
    assert tokenizer.decode(ids[1:-1]) == text


@pytest.mark.parametrize("special", [True, False])
def test_T12_also_where_the_vocabulary_itself_yields_eos(tmp_path: Path, special: bool) -> None:
    vocabulary = {"<eos>": 0, "a": 1, "<unk>": 2, "<": 3, "eos>": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        backend.add_special_tokens(["<eos>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>", "unk_token": "<unk>"}')
    assert load_tokenizer(str(tmp_path)).encode("a <eos> zz a").tolist() == [1, 3, 4, 2, 1, 0]


def test_T02_eos_once_even_if_the_post_processor_adds_it(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    folder = changed(tokenizer, tmp_path / "t", add_bos_token=None)
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    raw["post_processor"]["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    raw["post_processor"]["special_tokens"]["</s>"] = {"id": "</s>", "ids": [1], "tokens": ["</s>"]}
    (folder / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    ids = load_tokenizer(str(folder)).encode("the mule").tolist()
    assert ids[0] == 0 and ids.count(1) == 1 and ids[-1] == 1


@pytest.mark.parametrize(("setting", "begins"), [(True, True), (False, False), (None, True)])
def test_bos_by_the_tokenizers_own_rule(tokenizer: TextTokenizer, tmp_path: Path, setting: bool | None, begins: bool) -> None:
    own = load_tokenizer(str(changed(tokenizer, tmp_path / "t", add_bos_token=setting)))
    assert (own.encode("a").tolist()[0] == 0) is begins
    assert (own.fingerprint == tokenizer.fingerprint) is begins


def test_transformers_reads_the_folder_alike(tokenizer: TextTokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer.source)
    text = text_of(3, 20) + "\n  ½ \U0001f9ed"
    assert (theirs.bos_token_id, theirs.eos_token_id) == (0, 1)
    assert [*theirs(text)["input_ids"], theirs.eos_token_id] == tokenizer.encode(text).tolist()
    assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text


def test_training_is_repeatable_in_another_process(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    program = (
        "import sys; from pathlib import Path; from muletrain.data.tokenizer import train_tokenizer\n"
        "from tests.data.conftest import text_of\n"
        "train_tokenizer((text_of(i, 30) for i in range(100)), 400, Path(sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "t")], check=True, cwd=Path(__file__).parents[2])
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "t" / name).read_bytes() == (Path(tokenizer.source) / name).read_bytes()


def test_publish_keeps_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "t"
    first = publish_tokenizer(iter(["one two"]), 300, out)
    assert publish_tokenizer(iter(["one two"]), 300, out).fingerprint == first.fingerprint
    with pytest.raises(InputError, match="another tokenizer"):
        publish_tokenizer(iter(["three four three"]), 300, out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(InputError, match="is not empty; choose another folder"):
        publish_tokenizer(iter(["a"]), 300, tmp_path / "full")
    assert [name.name for name in out.parent.iterdir()] == ["t"]


def test_ids_take_two_bytes_where_they_fit(tokenizer: TextTokenizer) -> None:
    assert tokenizer.dtype.itemsize == 2 and replace(tokenizer, vocabulary=65_537).dtype.itemsize == 4
    assert replace(tokenizer, vocabulary=65_536).dtype.itemsize == 2


def test_what_is_missing_is_said(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path / "empty"))
    with pytest.raises(InputError, match="does not exist"):
        load_tokenizer(str(tmp_path / "missing"))
    with pytest.raises(InputError, match="is no folder here, and the hub did not give it"):
        load_tokenizer("no-such-owner/no-such-tokenizer")
    with pytest.raises(InputError, match="no end-of-sequence"):
        load_tokenizer(str(changed(tokenizer, tmp_path / "no_eos", eos_token=None)))
    with pytest.raises(InputError, match="no bos_token"):
        load_tokenizer(str(changed(tokenizer, tmp_path / "no_bos", bos_token=None)))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match="not a tokenizer"):
        load_tokenizer(str(tmp_path / "bad.json"))
    broken = changed(tokenizer, tmp_path / "broken")
    (broken / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config\.json: not valid JSON"):
        load_tokenizer(str(broken))
    with pytest.raises(InputError, match="at least 258"):
        train_tokenizer(iter(["a"]), 257, tmp_path / "small")
