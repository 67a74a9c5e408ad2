"""`mule generate RUN_OR_MODEL --prompt ...`: a sample from a run's newest checkpoint or from a model folder."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer


def command(
    run_or_model: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_MODEL", help="A run folder (its newest checkpoint), a checkpoint or a model folder."),
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to add.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token; more is more varied.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same sample.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Continue a prompt with a trained model."""
    from muletrain.config.environment import expand_segments, limit_spinning

    limit_spinning()
    expand_segments()
    from muletrain.serve.generate import Generator, Request, find_model_folder

    request = Request(prompt, max_tokens, temperature, top_p, seed)
    folder = find_model_folder(run_or_model, warn=lambda message: typer.echo(message, err=True))
    generator = Generator(folder)
    if json:
        done = generator.complete(request)
        result = {
            "schema_version": 1,
            "model": str(folder),
            "prompt": prompt,
            "text": done.text,
            "finish": done.finish,
            "prompt_tokens": done.prompt_tokens,
            "tokens": done.tokens,
            "seconds": round(done.seconds, 3),
        }
        typer.echo(json_format.dumps(result, ensure_ascii=False))
        return
    typer.echo(prompt, nl=False)
    done = generator.complete(request, on_text=lambda piece: typer.echo(piece, nl=False))
    typer.echo("")
    rate = done.tokens / done.seconds if done.seconds > 0 else 0.0
    typer.echo(f"{done.tokens} tokens in {done.seconds:.1f} s ({rate:.1f} tokens/s), ended by {done.finish}", err=True)
