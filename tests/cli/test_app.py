"""The command itself: quick, plain, honest about errors."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from muletrain.cli import app as cli
from muletrain.spec.errors import DoesNotFitError, InputError, StoppedError, WorkerFailedError

VERBS = ("train", "generate", "data", "config", "bench")
RECIPE = "run_dir: r\nmodel: {source: smollm2-135m}\ndata: {source: d}\ntrain: {steps: 10}\nprecision: {compute: fp32}\n"
HELP = [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)]
DESK = [
    *HELP,
    ["config", "show", "recipe.yaml"],
    ["config", "show", "recipe.yaml", "--plan"],
    ["config", "show", "recipe.yaml", "train.lr=1"],
    ["config", "validate", "recipe.yaml"],
    ["config", "schema"],
]
PROBE = """
import atexit, sys
def check():
    heavy = [name for name in ("torch", "transformers", "numpy", "tokenizers") if name in sys.modules]
    if heavy: print("imported:", heavy, file=sys.stderr); sys.stderr.flush(); import os; os._exit(77)
atexit.register(check)
from muletrain.cli.app import main
main()
"""


def mule(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "from muletrain.cli.app import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, cwd=cwd, env=os.environ | environment, check=False)


@pytest.mark.parametrize("arguments", DESK, ids=" ".join)
def test_desk_verbs_are_quick_and_import_no_torch(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == (2 if "train.lr=1" in arguments else 0), done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0  # CPU time: the machine may be busy


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_O20_help_is_plain_on_any_console(arguments: list[str]) -> None:
    for encoding in ("cp1252", "ascii", "gbk"):
        done = mule(*arguments, PYTHONIOENCODING=encoding, PYTHONUTF8="0", LC_ALL="C")
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode(encoding).isascii() or encoding != "ascii"
        assert b"\x1b" not in done.stdout and b"Traceback" not in done.stderr


def test_O20_what_a_console_cannot_show_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("run_dir: r", "run_dir: 深度/é"), encoding="utf-8")
    shown = mule("config", "show", "recipe.yaml", cwd=tmp_path, PYTHONIOENCODING="cp1252", PYTHONUTF8="0")
    assert shown.returncode == 0, shown.stderr
    assert "run_dir: \\u6df1\\u5ea6/é" in shown.stdout.decode("cp1252")


def test_every_verb_is_there() -> None:
    listed = mule("--help").stdout.decode()
    assert all(f"\n  {verb} " in listed for verb in VERBS)
    alone = mule()
    assert (alone.stdout + alone.stderr).decode().startswith("Usage: mule")


def test_wrong_usage_is_input() -> None:
    for arguments in (["trian"], ["config", "show"], ["config", "show", "r.yaml", "--jsno"]):
        done = mule(*arguments)
        assert done.returncode == 2
        assert b"Usage: mule" in done.stderr and b"Traceback" not in done.stderr


def test_a_user_error_is_a_message_on_stderr(tmp_path: Path) -> None:
    done = mule("config", "show", "none.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.decode()) == (2, b"", "mule: none.yaml: there is no such recipe\n")
    with_traceback = mule("config", "show", "none.yaml", cwd=tmp_path, MULETRAIN_TRACEBACK="1")
    assert with_traceback.returncode == 2 and b"Traceback" in with_traceback.stderr
    off = mule("config", "show", "none.yaml", cwd=tmp_path, MULETRAIN_TRACEBACK="0")
    assert off.stderr == done.stderr


def raised_by_a_verb(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("muletrain.config.schema.recipe_schema", fail)
    monkeypatch.setattr(sys, "argv", ["mule", "config", "schema"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("wrong"), 2),
        (DoesNotFitError("big"), 3),
        (WorkerFailedError("worker 1 died"), 4),
        (StoppedError("saved"), 75),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    assert raised_by_a_verb(monkeypatch, error) == code
    assert capsys.readouterr().err == f"mule: {error}\n"


def test_several_problems_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert raised_by_a_verb(monkeypatch, InputError("one", "two")) == 2
    assert capsys.readouterr().err == "mule: 2 problems\n  one\n  two\n"


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert raised_by_a_verb(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_a_bug_of_ours_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        raised_by_a_verb(monkeypatch, ZeroDivisionError())
