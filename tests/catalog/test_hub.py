"""Hub names: only what is used is fetched, and what cannot be is one line with the fix. The hub is a folder here."""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from muletrain.catalog import hub
from muletrain.spec.errors import InputError


class FakeHub:
    """Repositories in a folder, served into a cache laid out as huggingface_hub's."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.served: list[str] = []
        self.offline = False
        self.refusal: Exception | None = None

    def add(self, name: str, **files: str) -> None:
        for file, text in files.items():
            path = self.folder / name / file.replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def snapshot(self, name: str) -> Path:
        return self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / "c0ffee"

    def snapshot_download(self, name: str, *, revision: str | None = None, allow_patterns: list[str]) -> str:
        if self.refusal:
            raise self.refusal
        if self.offline:
            if self.snapshot(name).is_dir():
                return str(self.snapshot(name))  # as the library does: what is there, whole or not
            raise errors.LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder. More words.\nAnd lines.")
        if not (self.folder / name).is_dir():
            raise _refused(errors.RepositoryNotFoundError)
        assert revision in (None, "c0ffee")
        for path in sorted((self.folder / name).rglob("*")):
            file = path.relative_to(self.folder / name).as_posix()
            if path.is_file() and any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                self._serve(name, file)
        return str(self.snapshot(name))

    def hf_hub_download(self, name: str, file: str, *, revision: str) -> str:
        if self.offline:
            raise errors.LocalEntryNotFoundError("No network here.")
        raise _refused(errors.RemoteEntryNotFoundError)

    def _serve(self, name: str, file: str) -> None:
        target = self.snapshot(name) / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.folder / name / file, target)
        refs = self.snapshot(name).parent.parent / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text("c0ffee", encoding="utf-8")
        self.served.append(file)


def _refused(kind: type[Exception]) -> Exception:
    """An answer of the hub; its constructor wants an HTTP response, which nothing here reads."""
    return kind.__new__(kind)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(tmp_path / "hub", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(made.cache))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", made.hf_hub_download)
    return made


def test_only_what_is_used_is_fetched_and_only_once(fake: FakeHub) -> None:
    junk = {
        "pytorch_model__bin": "pickle",
        "modeling_evil__py": "code",
        "original/model__safetensors": "twice",
        "README__md": "words",
    }
    fake.add("team/model", config__json="{}", tokenizer__json="{}", model__safetensors="w", **junk)
    folder = hub.fetch_model("team/model", weights=True)
    assert folder == fake.snapshot("team/model") == hub.cached("team/model", "model.source")
    assert sorted(fake.served) == ["config.json", "model.safetensors", "tokenizer.json"]
    fake.offline = True
    assert hub.fetch_model("team/model", weights=True) == folder == hub.fetch_tokenizer("team/model"), "no network needed again"


def test_shards_are_those_of_the_index_and_what_is_there_is_kept(fake: FakeHub) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    fake.add("team/big", config__json="{}", **{"model__safetensors__index__json": index})
    fake.add("team/big", **{"model-1__safetensors": "1", "model-2__safetensors": "2", "consolidated__safetensors": "12"})
    assert hub.fetch_model("team/big", weights=False) and fake.served == ["config.json"], "random weights need none"
    folder = hub.fetch_model("team/big", weights=True)
    assert fake.served.count("model-1.safetensors") == fake.served.count("model-2.safetensors") == 1
    assert "consolidated.safetensors" not in fake.served
    (folder / "model-2.safetensors").unlink()  # a download that was cut off
    hub.fetch_model("team/big", weights=True)
    assert fake.served.count("model-1.safetensors") == 1 and fake.served.count("model-2.safetensors") == 2


def test_a_pickle_is_never_fetched(fake: FakeHub) -> None:
    fake.add("team/old", config__json="{}", pytorch_model__bin="pickle")
    with pytest.raises(
        InputError, match=r"model.source: team/old has no model.safetensors on the hub; .*a pickle can run code"
    ):
        hub.fetch_model("team/old", weights=True)
    assert fake.served == ["config.json"]


def test_what_the_hub_does_not_have_is_named_with_the_fix(fake: FakeHub) -> None:
    fake.add("team/empty", README__md="words")
    with pytest.raises(InputError, match=r"team/empty has no config.json on the hub; give a Hugging Face decoder"):
        hub.fetch_model("team/empty", weights=True)
    with pytest.raises(
        InputError, match=r"data.tokenizer: team/empty has no tokenizer.json on the hub; open it with transformers"
    ):
        hub.fetch_tokenizer("team/empty")
    with pytest.raises(
        InputError, match=r"model.source: the hub has no team/typo; check the name, or if it is private run: hf auth"
    ):
        hub.fetch_model("team/typo", weights=True)
    fake.refusal = _refused(errors.GatedRepoError)
    with pytest.raises(
        InputError, match=r"team/closed is gated; accept its terms at https://huggingface.co/team/closed, then run"
    ):
        hub.fetch_model("team/closed", weights=True)


def test_without_a_network_one_line_says_how_to_fetch(fake: FakeHub) -> None:
    fake.offline = True
    with pytest.raises(InputError) as caught:
        hub.fetch_model("team/model", weights=True)
    assert "team/model is not whole on this machine and could not be fetched: Cannot find" in str(caught.value)
    assert "run: hf download team/model; or give a folder" in str(caught.value)
    assert "\n" not in str(caught.value)
    fake.refusal = errors.LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known\nMore words.")
    with pytest.raises(InputError, match=r"could not be fetched: \[Errno -2\] Name or service not known\. Where there"):
        hub.fetch_model("team/model", weights=True)
    fake.offline, fake.refusal = False, None
    fake.add("team/model", config__json="{}", model__safetensors="w")
    hub.fetch_model("team/model", weights=False)
    fake.offline = True
    with pytest.raises(InputError, match=r"could not be fetched: No network here. Where there is a network"):
        hub.fetch_model("team/model", weights=True)


def test_a_damaged_index_is_named(fake: FakeHub) -> None:
    fake.add("team/big", config__json="{}", **{"model__safetensors__index__json": "{"})
    with pytest.raises(
        InputError, match=r"model.safetensors.index.json: cannot be read .*; remove it, and it is fetched again"
    ):
        hub.fetch_model("team/big", weights=True)


@pytest.mark.parametrize("name", ["bad name/..", "a--b/c..d"])
def test_what_cannot_be_a_name_is_said(fake: FakeHub, name: str) -> None:
    with pytest.raises(InputError, match=r"model.source: .* is neither a catalogue name, a folder nor a hub name"):
        hub.fetch_model(name, weights=True)
    assert hub.is_name("team/model")
    assert not any(map(hub.is_name, ("model", "./a", "/a", "~/a", "a/b/c", "a/", "/b", "a/tokenizer.json", "")))
