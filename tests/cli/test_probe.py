"""`mule probe` on a box without cards: the table, the file, the JSON, and a folder that is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muletrain.cli.app import app
from muletrain.cli.probe import _table
from muletrain.config.machine import load_machine
from muletrain.probe import measure as room
from muletrain.probe.timing import Effort
from muletrain.spec.machine import PeerRates, Sample
from tests.planner.boxes import H200, measured_box


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "QUICK", Effort(sample_s=0.001, samples=2, warm_s=0.001))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_table_and_the_file(tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    result = CliRunner().invoke(app, ["probe", "--quick", "--out", str(out), "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    machine = load_machine(out)
    assert machine.measured is not None
    for words in ("cpu fp32 512 x 512 x 512", "TFLOP/s", "host copy, 1 threads", f"disk of {tmp_path}, write", "n = 2"):
        assert words in result.output
    assert "not measured" in result.output and f"saved: {out}" in result.output


def test_json_is_the_machine(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["probe", "--quick", "--json", "--folder", str(tmp_path)])
    content = json.loads(result.stdout)
    assert content["schema_version"] == 1 and content["measured"]["compute"][0]["device"] == "cpu"


def test_a_file_without_a_folder_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["probe", "--out", str(tmp_path / "no" / "machine.json")])
    assert result.exit_code == 2
    assert "--out: the folder of" in result.output and "does not exist; make it first" in result.output


def test_links_and_wrong_bytes_are_shown() -> None:

    machine = measured_box(H200, H200, device=H200.name)
    assert machine.measured is not None
    rate = Sample(median=2e9, low=1e9, high=3e9, n=3)
    peer = PeerRates(source=0, target=1, route="peer", bytes_s=rate, equal=False)
    text = _table(machine.model_copy(update={"measured": machine.measured.model_copy(update={"peers": (peer,)})}))
    assert "card 1 link, both" in text
    line = next(line for line in text.splitlines() if line.startswith("card 0 to 1, peer"))
    assert "2 GB/s" in line and line.endswith("BYTES DIFFER: do not use this route")
