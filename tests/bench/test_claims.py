"""The page of claims: every row has a verdict, and those that physics rules out are called false."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from muletrain.bench import claims as module
from muletrain.bench.claims import TABLE_A, TABLE_B, Claim, claims_page
from muletrain.cli.app import app


@pytest.fixture(scope="module")
def page() -> str:
    return claims_page()


def test_every_claim_has_its_row(page: str) -> None:
    assert (len(TABLE_A), len(TABLE_B)) == (5, 9)
    for claim in (*TABLE_A, *TABLE_B):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {claim.text} |")]
        assert all(cell.strip() for cell in row.strip("|").split("|"))


def test_what_cannot_be_true_is_called_so(page: str) -> None:
    rows = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if line.startswith("| ")}
    assert "false with ZeRO-2: 16-bit weights alone are 26 GB" in rows[TABLE_B[1].text]
    assert "| false |" in rows[TABLE_B[2].text] and "1.32 PFLOP/s" in rows[TABLE_B[2].text]
    assert "Adam's takes 111 GB; 52 TFLOP/s, 32% of the card" in rows[TABLE_A[1].text]
    assert "GiB short on each card" in rows[TABLE_A[0].text]


def test_what_is_promised_is_planned(page: str) -> None:
    found = module.planned("deepseek-llm-7b", "3x RTX 4090", "128GiB")
    three, one = module._best(found, 3), module._best(found, 1)
    assert three.tokens_per_s / one.tokens_per_s > 2.85
    assert three.communication < 0.05
    assert three.card_bytes < 18 * module.GIB
    assert one.card_bytes < 22 * module.GIB
    big = module.planned("llama-2-13b", "RTX 4090", "128GiB", step=131_072).choice
    assert big is not None and big.card_bytes < 22 * module.GIB


def test_the_verb_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_A", (Claim("a", lambda: ("true", "x")),))
    monkeypatch.setattr(module, "TABLE_B", ())
    done = CliRunner().invoke(app, ["bench", "claims", "--output", str(tmp_path / "claims.md")])
    assert done.exit_code == 0, done.output
    assert "| a | true | x |" in (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert "| a | true | x |" in CliRunner().invoke(app, ["bench", "claims"]).stdout
