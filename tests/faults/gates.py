"""The gates that faults are sent through, called as the stages call them.

And how a fault ends in one. All that a change of the gates' calls touches is here.

validate and the reference need torch; compare and golden run where the engines run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lockstep
from lockstep import CheckError, InputError, Limits, Results, Target, Tolerances

# in the order in which the workflow comes to them; a build may refuse a graph
GATES = ("build", "validate", "compare", "golden", "adapted")


def said(gate: Callable[[], Any], *folders: Path) -> str | None:
    """Return what a gate says of what it was given; None where it passes.

    In one line without these folders.
    """
    try:
        gate()
    except (CheckError, InputError) as error:
        line = " ".join(str(error).split()).partition("; details in ")[0]
        for folder in folders:
            line = line.replace(f"{folder}/", "")
        return line
    return None


def _asked(prompts: tuple[str, ...], max_new_tokens: int, limits: Mapping[str, int]) -> lockstep.GoldenTerms:
    """Return the terms of the config's defaults."""
    return lockstep.GoldenTerms(max_new_tokens, prompts, limits["max_seq_len"] - max_new_tokens)


def make_quantized_reference(
    results: Results,
    model: str,
    precision: str,
    layers: int | str,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    limits: Mapping[str, int],
) -> None:
    lockstep.make_quantized_reference(
        results.checkpoint(model),
        results.weights(model, precision),
        results.reference(model, layers),
        layers,
        _asked(prompts, max_new_tokens, limits),
        "",
        results.quantized_reference(model, precision, layers),
        results.drift(model, precision, layers),
    )


def make_reference(
    results: Results,
    model: str,
    layers: int | str,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    limits: Mapping[str, int],
) -> None:
    asked = _asked(prompts, max_new_tokens, limits)
    lockstep.make_reference(results.checkpoint(model), layers, asked, results.reference(model, layers))


def make_adapters(
    results: Results,
    model: str,
    layers: int | str,
    folders: Mapping[str, Path],
    max_lora_rank: int,
    prompts: tuple[str, ...],
    max_new_tokens: int,
) -> None:
    """Make the manifest of adapters, and the reference with each and with none. Needs torch."""
    from lockstep.verify.golden.adapted_reference import make_adapted_reference
    from lockstep.verify.golden.terms import AdaptedTerms

    sources = {name: str(folder) for name, folder in folders.items()}
    out = results.adapters(model)
    lockstep.resolve_adapters(sources, folders, results.checkpoint(model), max_lora_rank, None, out)
    terms = AdaptedTerms(max_new_tokens, dict.fromkeys(("", *folders), prompts))
    make_adapted_reference(results.checkpoint(model), out, layers, terms, results.adapted_reference(model, layers))


def validate(
    results: Results,
    model: str,
    precision: str,
    layers: int | str,
    assembly: Path,
    tolerance: Mapping[str, float],
    limits: Mapping[str, int],
    out: Path,
) -> None:
    """Graphs of `assembly` against torch."""
    lockstep.validate_graphs(
        assembly,
        results.weights(model, precision),
        results.checkpoint(model),
        layers,
        Tolerances(noise=tolerance["noise"], rounding=tolerance["rounding"]),
        limits["max_seq_len"],
        out,
        model,
    )


def compare(
    results: Results,
    model: str,
    precision: str,
    assembly: Path,
    engines: Path,
    tolerance: Mapping[str, float],
    limits: Mapping[str, int],
    out: Path,
) -> None:
    """Compare each engine with its graph.

    tolerance["compare"]: the config's for the backend and the precision.
    """
    weights, sizes = results.weights(model, precision), Limits(**limits)
    lockstep.compare_engines(assembly, weights, engines, tolerance["compare"], sizes, out)


def golden(
    results: Results,
    target: Target,
    assembly: Path,
    engines: Path,
    tolerance: Mapping[str, float],
    limits: Mapping[str, int],
    out: Path,
) -> None:
    """Engines in the runtime against the reference."""
    lockstep.check_golden(
        assembly,
        results.weights(target.model, target.precision),
        engines,
        results.reference_of(target.model, target.precision, target.layers),
        target,
        Tolerances(noise=tolerance["noise"], rounding=tolerance["rounding"]),
        Limits(**limits),
        out,
        out.with_suffix(".speed.json"),
    )


def adapted(
    results: Results,
    target: Target,
    assembly: Path,
    engines: Path,
    tolerance: Mapping[str, float],
    limits: Mapping[str, int],
    out: Path,
) -> None:
    """Engines with adapters against the reference with each."""
    from lockstep.verify.golden.adapted import check

    check(
        assembly,
        results.weights(target.model, target.precision),
        engines,
        results.adapters(target.model),
        results.adapted_reference_of(target.model, target.precision, target.layers),
        target,
        Tolerances(noise=tolerance["noise"], rounding=tolerance["rounding"]),
        Limits(**limits),
        out,
    )
