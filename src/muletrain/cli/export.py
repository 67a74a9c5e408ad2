"""`mule export RUN FOLDER`: a run's model as an ordinary Hugging Face folder, an adapter merged into its base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    run_or_model: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_MODEL", help="A run folder (its newest checkpoint), a checkpoint or a model folder."),
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write; must not exist yet.")],
) -> None:
    """Write a run's model as a Hugging Face folder, an adapter merged into its base."""
    from muletrain.config.environment import limit_spinning

    limit_spinning()
    from muletrain.serve.export import export
    from muletrain.serve.generate import find_model_folder

    source = find_model_folder(run_or_model, warn=lambda message: typer.echo(message, err=True))
    typer.echo(export(source, folder))
