"""`mule config`: what a recipe asks for, whether it is sound, and which keys there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from muletrain.spec.ledger import Ledger
    from muletrain.spec.plan import Plan
    from muletrain.spec.recipe import RunConfig

SCHEMA_VERSION = 1
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show, check and document recipes.")

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, e.g. recipes/demo.yaml.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes, e.g. train.optimizer.learning_rate=1e-5.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def show(
    recipe: Recipe,
    overrides: Overrides = None,
    as_json: AsJson = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Decide it for this box: print the plan, its memory and its reasons.")
    ] = False,
) -> None:
    """Print a recipe with all defaults filled in, as a recipe again."""
    from muletrain.config.load import load_recipe
    from muletrain.config.render import dump_recipe

    request = load_recipe(recipe, overrides or ())
    if plan:
        decided = _plan(request)
        print(decided.to_json() if as_json else plan_text(decided), end="")
    elif as_json:
        content = {"schema_version": SCHEMA_VERSION, "recipe": request.model_dump(mode="json")}
        print(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        print(dump_recipe(request), end="")


@app.command()
def validate(recipe: Recipe, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe; every problem is named at once, with its key and line."""
    from muletrain.config.load import load_recipe
    from muletrain.spec.errors import InputError

    problems: tuple[str, ...] = ()
    try:
        load_recipe(recipe, overrides or ())
    except InputError as error:
        if not as_json:
            raise
        problems = error.problems
    if as_json:
        print(
            json.dumps(
                {"schema_version": SCHEMA_VERSION, "valid": not problems, "problems": problems}, indent=2, ensure_ascii=False
            )
        )
        raise typer.Exit(InputError.exit_code if problems else 0)
    print(f"{recipe}: sound")


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, every key with its meaning."""
    from muletrain.config.schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))


def _plan(request: RunConfig) -> Plan:
    import sys

    from muletrain.cli.box import box_for
    from muletrain.planner.resolve import resolve

    return resolve(request, box_for(request), interactive=sys.stdout.isatty())


def plan_text(plan: Plan) -> str:
    import yaml

    content = plan.model_dump(mode="json")
    reasons, memory = content.pop("reasons"), content["memory"]
    memory.pop("ledger")
    if plan.memory.strategy != "streamed":
        memory.pop("streaming")  # what is in it decides nothing
    lines = [yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)]
    lines.append("# memory\n" + _ledger_text(plan.memory.ledger))
    lines.append("# decided, as the recipe left it open\n" + "".join(f"#   {reason}\n" for reason in reasons))
    return "".join(lines)


def _ledger_text(ledger: Ledger) -> str:
    from muletrain.spec.units import format_bytes

    rows = [(item.place, item.part, format_bytes(item.size_bytes), item.formula) for item in ledger.items]
    for place in ("card", "host"):
        if ledger.total(place):
            note = "on each card" if place == "card" else "of the whole box"
            rows.append((place, "total", format_bytes(ledger.total(place)), note))
    return "".join(f"#   {place}  {part:12} {size:>10}  {formula}\n" for place, part, size, formula in rows)
