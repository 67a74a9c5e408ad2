"""What each console mode shows of the same run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console as RichConsole

from muletrain.train.console import Console
from tests.train.tiny import make_plan, run


@pytest.mark.parametrize(("mode", "every", "lines"), [("plain", 1, [1, 2, 3, 4, 5, 6]), ("plain", 3, [3, 6]), ("quiet", 1, [])])
def test_lines_by_mode(materials, tmp_path, capfd, mode, every, lines):
    plan = make_plan(materials, tmp_path, console=mode)
    run(materials, plan.model_copy(update={"log": plan.log.model_copy(update={"every": every})}))
    shown = capfd.readouterr().out.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in shown if line.startswith("step ") and "tokens/s" in line] == lines
    assert all("\x1b" not in line for line in shown)
    if mode == "quiet":
        assert shown == []
    else:
        assert any("held-out loss" in line for line in shown) and shown[-1].startswith("finished at update 6 of 6")


def test_the_bar_shows_progress_speed_and_time_left(materials, tmp_path, monkeypatch, capfd):
    """The bar draws on a terminal; here rich is told that it has one."""
    monkeypatch.setattr(
        "muletrain.train.console.RichConsole", lambda **options: RichConsole(force_terminal=True, width=160, **options)
    )
    run(materials, make_plan(materials, tmp_path, console="bar"))
    shown = capfd.readouterr().out
    assert "6/6" in shown and "tokens/s" in shown and "ETA" in shown and "loss" in shown
    assert "held-out loss" in shown, "lines stand above the bar"
    assert "finished at update 6 of 6" in shown
    assert shown.rstrip().endswith("\x1b[?25h"), "the cursor is back"


def test_warnings_are_shown_in_every_mode(capsys):
    Console("quiet").warn("the disk is nearly full")
    assert capsys.readouterr().err == "warning: the disk is nearly full\n"


def test_a_console_without_a_terminal_takes_any_text():
    console = Console("plain")
    console._rich = RichConsole(file=io.StringIO())
    console.say("[bold]骡子[/bold]")
    assert console._rich.file.getvalue() == "[bold]骡子[/bold]\n"  # type: ignore[attr-defined]
