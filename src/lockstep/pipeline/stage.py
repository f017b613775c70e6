"""One stage of the workflow, as an entry of the table of stages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.build_record import BuildKey
from lockstep.pipeline import pinned
from lockstep.pipeline.resources import Resources
from lockstep.targets import Results, Target, is_quantized

if TYPE_CHECKING:
    from lockstep.config.schema import Config

Options = Callable[..., dict[str, Any]]  # (config, and the stage's wildcards by name) -> plain JSON


@dataclass(frozen=True)
class Finished:
    """What was made of a model, on which the rest of its lock depends.

    precisions: of its weights. runs: some of its engines run here. is_served: the config has the server checked.
    """

    precisions: frozenset[str]
    has_adapters: bool
    runs: bool
    is_served: bool


@dataclass(frozen=True)
class Stage:
    """One kind of job.

    Artefacts are methods of `Results`: their parameters are the stage's wildcards. makes: the artefact, whose manifest
    is the result. reads: artefacts. code: the module of this package that the stage enters by; a change of what it
    imports makes the stage run again. job: `module:function` that is given the `Job`.
    """

    name: str
    makes: str
    code: str
    job: str
    reads: tuple[str, ...] = ()
    # Where weights are quantised, {name: artefact}: read besides or, under a name of `reads`, in its place.
    reads_quantized: Mapping[str, str] = field(default_factory=dict)
    # {artefact: condition on (config, model)}: waited for where a job brings what else lies in a folder of the config.
    waits_for: Mapping[str, Callable[[Config, str], bool]] = field(default_factory=dict)
    # Made beside the manifest, by name of the rule's output. Speeds are no part of a record.
    beside: tuple[str, ...] = ()
    options: Options = lambda config, **names: {}
    needed: Callable[[Config, Target], bool] = lambda config, target: True
    # What a lock pins of it, from its manifest and its record. None: nothing.
    pinned: Callable[[Path, BuildKey], pinned.Pinned] | None = None
    # Whether a lock of such a model must have it; besides, a model has what its precisions and adapters ask for.
    required: Callable[[Finished], bool] = lambda model: True
    # What a job asks of a cluster. None: it runs where Snakemake runs.
    resources: Resources | None = None
    is_check: bool = False  # the lock pins what the config says to it; a failure leaves a report
    is_judged: bool = False  # a failure leaves its report or its reason as `<name>.failed.json`
    is_cached: bool = False  # in the shared cache of artefacts
    is_reproduced: bool = False  # made again by `lockstep reproduce`
    is_named: bool = False  # its results speak of the model by its name in the config
    is_summarised: bool = False  # the summary shows its results
    only_quantized: bool = False  # other precisions than those of quantised weights do without
    only_adapters: bool = False  # models without adapters do without
    continues: bool = False  # begins with what an earlier run made
    runs_here_too: bool = False  # beside the interpreter that runs the backend's engines
    owns_folder: bool = False  # clears its folder of what an earlier artefact left
    help: str = field(default="", compare=False)

    @property
    def wildcards(self) -> tuple[str, ...]:
        """Return which of model, precision, layers and backend the stage has."""
        return wildcards_of(self.makes)

    def is_of(self, precision: str) -> bool:
        """Return whether targets of this precision have the stage."""
        return is_quantized(precision) or not self.only_quantized

    def is_required(self, model: Finished) -> bool:
        """Return whether the lock of a finished model must have this stage."""
        is_in_lock = self.pinned is not None or self.is_check
        has_precision = not self.only_quantized or any(map(is_quantized, model.precisions))
        has_adapters = not self.only_adapters or model.has_adapters
        return is_in_lock and has_precision and has_adapters and self.required(model)

    def inputs(self, precision: str | None) -> dict[str, str]:
        """Return {name: artefact} that a job of this precision reads.

        precision: None for a stage without one.
        """
        quantized = precision is not None and is_quantized(precision)
        return {name: name for name in self.reads} | (dict(self.reads_quantized) if quantized else {})


@functools.cache
def wildcards_of(artefact: str) -> tuple[str, ...]:
    """Return the parameters of `Results.<artefact>`."""
    return tuple(inspect.signature(getattr(Results, artefact)).parameters)[1:]


def path_of(artefact: str, results: Results, names: Mapping[str, Any]) -> Path:
    """Return the path of an artefact. names: values of at least its wildcards."""
    return getattr(results, artefact)(*(names[name] for name in wildcards_of(artefact)))
