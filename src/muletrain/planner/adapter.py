"""model.adapter -> AdapterPlan: which linear layers of a block get trained matrices beside them, and how many numbers that is.

A target names a layer by the end of its path, whole words only, as peft does: q_proj, or mlp.c_proj where two layers of a block
end alike. One that names nothing is an error, because a run without it would look like a run with it.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from muletrain.spec.errors import InputError
from muletrain.spec.model_shape import Linear, ModelShape
from muletrain.spec.plan import AdapterPlan, ModelPlan
from muletrain.spec.recipe import AdapterSection


def plan_adapter(section: AdapterSection, model: ModelPlan, reasons: list[str]) -> AdapterPlan:
    """Decides what the recipe left open, and says so in `reasons`. Raises InputError for targets that a block does not have
    and for a rank that no matrix of them can have."""
    if section.kind == "none":
        return AdapterPlan()
    shape = model.shape
    if not shape.linears:
        raise InputError(
            f"model.adapter.kind: {section.kind}, but the linear layers of {shape.family} are not known in this version; "
            "set model.adapter.kind: none, or choose another model.source"
        )
    targets = section.targets
    if targets == ("auto",):
        targets = tuple(dict.fromkeys(linear.name.rpartition(".")[2] for linear in shape.linears))
        which = (
            "all linear layers that every block has; experts are frozen" if shape.experts else "all linear layers of a block"
        )
        reasons.append(f"model.adapter.targets = {', '.join(targets)}: {which}")
    problems = _target_problems(targets, shape)
    adapted = shape.adapted(targets)
    problems += _rank_problems(section.rank, adapted)
    if problems:
        raise InputError(*problems)
    alpha = section.alpha
    if alpha == "auto":
        alpha = 2.0 * section.rank
        reasons.append(f"model.adapter.alpha = {alpha:g}: twice the rank")
    parameters = shape.layers * section.rank * sum(linear.inputs + linear.outputs for linear in adapted)
    reasons.append(
        f"{parameters:,} parameters are trained, {parameters / shape.parameters:.2%} of the model's {shape.parameters:,}, "
        "which are frozen"
    )
    if model.weights == "random":
        reasons.append("model.weights = random under an adapter: the base is not saved, so this is for measuring only")
    return AdapterPlan(
        kind=section.kind,
        rank=section.rank,
        alpha=alpha,
        dropout=section.dropout,
        targets=targets,
        rslora=section.rslora,
        parameters=parameters,
        base=str(Path(shape.name).resolve()) if Path(shape.name).is_dir() else shape.name,
    )


def _target_problems(targets: tuple[str, ...], shape: ModelShape) -> list[str]:
    problems = []
    there = [linear.name for linear in shape.linears]
    for target in targets:
        if not shape.adapted((target,)):
            endings = {name.rpartition(".")[2]: name for name in there}
            nearest = difflib.get_close_matches(target.rpartition(".")[2], endings, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            problems.append(
                f"model.adapter.targets: {target} is no linear layer of a block of {shape.name}{hint}; there are "
                f"{', '.join(there)}"
            )
    return problems


def _rank_problems(rank: int, adapted: list[Linear]) -> list[str]:
    if not adapted:
        return []
    smallest = min(adapted, key=lambda linear: min(linear.inputs, linear.outputs))
    most = min(smallest.inputs, smallest.outputs)
    if rank <= most:
        return []
    return [
        f"model.adapter.rank: {rank}, but {smallest.name} is a matrix of {smallest.outputs} x {smallest.inputs}, whose rank is "
        f"{most} at most; use {most} or less, or leave it out of model.adapter.targets"
    ]
