"""`mule`: the verbs, what every verb does with errors, and text that any console can show.

A user's error is its message on stderr and its exit code, never a traceback (MULETRAIN_TRACEBACK=1 shows one). Help is plain
text: boxes drawn by rich cannot be encoded on every console, and a pipe is not a terminal. Verb modules import heavy things
inside their functions, so that `mule --help` answers at once.
"""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from muletrain.cli import bench, config, data, export, generate, plan, probe, train
from muletrain.spec.errors import InputError, MuleError

EXIT_INTERRUPTED = 130
"""Ctrl-C, by the shell's convention 128 + SIGINT."""


class _Group(TyperGroup):
    """Turns what a verb raises into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb. Anything but a MuleError or Ctrl-C is a bug of ours and keeps its traceback."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except MuleError as error:
            _show(error)
            raise typer.Exit(error.exit_code) from None


def _show(error: MuleError) -> None:
    from muletrain.config.environment import traceback_wanted

    if traceback_wanted():
        traceback.print_exception(error)
    problems = error.problems if isinstance(error, InputError) else (str(error),)
    if len(problems) > 1:
        print(f"mule: {len(problems)} problems", file=sys.stderr)
    for problem in problems:
        print(f"{'  ' if len(problems) > 1 else 'mule: '}{problem}", file=sys.stderr)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"muletrain {version('muletrain')}")
        raise typer.Exit()


app = typer.Typer(
    name="mule",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


@app.callback()
def mule(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train large language models on the GPUs that people can actually get."""


app.command("plan")(plan.command)
app.command("train")(train.command)
app.command("generate")(generate.command)
app.command("export")(export.command)
app.command("probe")(probe.command)
app.add_typer(data.app, name="data")
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the command. Characters that the console cannot show are escaped instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="mule")
