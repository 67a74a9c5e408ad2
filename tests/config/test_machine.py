"""machine.json comes back as it was written; anything else is told with the file, the field and the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muletrain.config.machine import load_machine
from muletrain.spec.errors import InputError
from tests.planner.boxes import H200, measured_box

MACHINE = measured_box(H200, device=H200.name)


def test_a_measured_machine_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(MACHINE.to_json(), encoding="utf-8")
    assert load_machine(file) == MACHINE


def test_a_missing_file_says_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json: cannot be read .No such file.*`mule probe --out .*none\.json`"):
        load_machine(tmp_path / "none.json")
    (tmp_path / "noise").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InputError, match=r"noise: cannot be read \(not text\)"):
        load_machine(tmp_path / "noise")


def test_the_fields_at_fault_are_named(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    content = json.loads(MACHINE.to_json())
    content["measured"]["compute"][0]["matmuls"][1]["m"] = "many"
    content["measured"].pop("links")
    content["colour"] = 1
    file.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        load_machine(file)
    text = str(caught.value)
    assert "measured.compute.0.matmuls.1.m: Input should be a valid integer" in text
    assert "measured.links: Field required" in text and "run `mule probe --out" in text


def test_what_is_no_json_is_told_and_many_faults_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text("{")
    with pytest.raises(InputError, match=r"not what `mule probe` of this version writes \(the file: Invalid JSON"):
        load_machine(file)
    file.write_text('{"a": 1, "b": 1}')
    with pytest.raises(InputError, match="and 3 more"):
        load_machine(file)
