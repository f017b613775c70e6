"""The rules of the workflow (`workflow/rules/*.smk`) for code that runs without Snakemake.

Text in; of each rule of a stage its inputs, outputs and the names of its parameters, out. The lines below `input:` are
the arguments of a Python call, and are evaluated as such, with functions of the names that the rules call. A path
begins with `<results>/`, or is a `branch` between two such; results of other functions are ignored.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.config.sources import REPOSITORY, kind_of
from lockstep.errors import InputError
from lockstep.stages import params
from lockstep.targets import Target, is_quantized, wildcards_of

if TYPE_CHECKING:
    from lockstep.config.schema import Config

FOLDER = REPOSITORY / "workflow" / "rules"
_RULE = re.compile(r"^rule (\w+):\n((?:[ \t]+.*\n|\n)+)", re.MULTILINE)
_DIRECTIVE = re.compile(r"^    (\w+):[ \t]*((?:.*\n)(?:        .*\n|[ \t]*\n)*)", re.MULTILINE)
_ROOT = "<results>/"
_MANIFEST = re.compile(r"\{model\}/.*\.json")

Names = Mapping[str, Any]  # model, precision, layers and backend, those that a rule has
Condition = Callable[[Any, Names], bool]  # of a config and names


@dataclass(frozen=True)
class Branch:
    """A path that depends on a condition; "" for none."""

    condition: Condition
    then: str = ""
    otherwise: str = ""

    def path(self, config: Config | None, names: Names) -> str:
        if self.condition(config, names):
            return self.then
        return self.otherwise


class FilesOf(str):
    """The word in `files_of("...")`."""


@dataclass(frozen=True)
class Rule:
    """A rule.

    inputs: {name: manifest of a model, below the results folder}. files: {name of another input or parameter: the word
    in its `files_of("...")`}. outputs: the manifest first. updates: a job reads its own earlier output. params: their
    names. kinds: of sources, where it is a rule for models of some kinds alone.
    """

    name: str
    inputs: Mapping[str, Branch]
    files: Mapping[str, str]
    outputs: tuple[str, ...]
    updates: bool
    params: tuple[str, ...]
    kinds: tuple[str, ...]

    @property
    def output(self) -> str:
        return self.outputs[0]

    @property
    def wildcards(self) -> tuple[str, ...]:
        """Return which of model, precision, layers and backend the rule has."""
        return wildcards_of(self.output)

    def reads(self, config: Config | None, names: Names) -> dict[str, str]:
        """Return {name: pattern} of the manifests that a job reads. config: None for a check of engines."""
        chosen = {name: branch.path(config, names) for name, branch in self.inputs.items()}
        return {name: pattern for name, pattern in chosen.items() if pattern}

    def is_for(self, config: Config, names: Names) -> bool:
        return not self.kinds or kind_of(config.models[names["model"]].source) in self.kinds


def _branch(condition: Condition, then: str, otherwise: str = "") -> Branch:
    # Of other paths, such as a user's file, nothing is left after the root.
    return Branch(condition, then.partition(_ROOT)[2], otherwise.partition(_ROOT)[2])


def _always(config: Config | None, names: Names) -> bool:
    return True


def _arguments(*values: Any, **named: Any) -> list[tuple[str, Any]]:
    """Return names and values of a directive; "" for those without a name, a `Branch` for each path."""
    arguments: list[tuple[str, Any]] = [*(("", value) for value in values), *named.items()]
    for number, (name, value) in enumerate(arguments):
        if type(value) is str:  # not a `FilesOf`, which is a subclass
            arguments[number] = (name, _branch(_always, value))
    return arguments


# The functions that rules call; workflow/rules/common.smk has those for Snakemake.
_FUNCTIONS: Mapping[str, Any] = {
    "arguments": _arguments,
    "ancient": str,
    "update": str,
    "branch": _branch,
    "is_quantized": lambda config, names: is_quantized(names["precision"]),
    "is_rounded": lambda config, names: names["precision"] != "fp32",
    "is_brought": lambda config, names: kind_of(config.models[names["model"]].source) != "folder",
    "is_any_adapter_on_the_hub": lambda config, names: bool(params.hub_adapters(config, names["model"])),
    "files_of": FilesOf,
    "of_kind": lambda *kinds: kinds,
    "of_config": lambda name: None,
    "stage_of": lambda name: None,
}
# Which targets have an artefact, by the words of `collected`.
_COLLECTED: Mapping[str, Any] = {
    "all": lambda config, target: True,
    "built": lambda config, target: config.why_not_built(target) is None,
    "bounded": lambda config, target: (
        is_quantized(target.precision) and config.models[target.model].golden.max_perplexity_change is not None
    ),
    "run": lambda config, target: config.is_run(target),
    "served": lambda config, target: config.check_server and config.is_run(target),
    "adapted": lambda config, target: bool(config.models[target.model].adapters) and config.is_run(target),
}


def collected_targets(config: Config) -> dict[str, list[Target]]:
    targets = config.targets()
    collected = {}
    for word, is_collected in _COLLECTED.items():
        collected[word] = [target for target in targets if is_collected(config, target)]
    return collected


@functools.cache
def rules() -> Mapping[str, Rule]:
    """Return {name: rule of a stage}. Raises InputError for one that cannot be read."""
    bodies: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.smk")):
        bodies.update(_RULE.findall(path.read_text(encoding="utf-8")))
    if not bodies:
        raise InputError(f"{FOLDER}: expected the rules of the workflow, found none; install the wheel again")
    # It reads all targets, has its own script, and is no stage of this folder.
    bodies.pop("summary", None)
    stages = {name: body for name, body in bodies.items() if f'stage_of("{name}")' in body}
    return {name: _rule(name, dict(_DIRECTIVE.findall(body))) for name, body in stages.items()}


@functools.cache
def ends() -> tuple[tuple[str, str], ...]:
    """Return the inputs of the summary: the pattern of a manifest, and the word for the targets that have it."""
    text = (FOLDER / "report.smk").read_text(encoding="utf-8")
    entries = re.findall(r'=collected\("<results>/([^"]+)", "(\w+)"\)', text)
    manifests = {rule.output for rule in rules().values()}
    return tuple((pattern, word) for pattern, word in entries if pattern in manifests)


def makers(pattern: str) -> list[Rule]:
    return [rule for rule in rules().values() if pattern in rule.outputs]


def _rule(name: str, directives: Mapping[str, str]) -> Rule:
    def entries(directive: str) -> list[tuple[str, Any]]:
        try:
            # The text belongs to this installation and is as trusted as this module; it is never a user's.
            return eval(f"arguments({directives.get(directive, '')}\n)", dict(_FUNCTIONS))
        except (SyntaxError, NameError, TypeError) as error:
            raise InputError(
                f"{FOLDER}: rule {name}: {directive}: expected paths, branch(...) and the functions of "
                f"lockstep.stages.rules, found {error}"
            ) from None

    inputs = entries("input")
    # Files that a manifest names (logits of a reference) are inputs for Snakemake only: jobs find them by it.
    branches = {key: value for key, value in inputs if isinstance(value, Branch)}
    return Rule(
        name,
        {key: branch for key, branch in branches.items() if _MANIFEST.fullmatch(branch.then or branch.otherwise)},
        {key: str(value) for key, value in [*inputs, *entries("params")] if isinstance(value, FilesOf)},
        tuple(branch.then for _, branch in entries("output")),
        "update(" in directives["output"],
        tuple(key for key, _ in entries("params")),
        dict(entries("wildcard_constraints")).get("model", ()),
    )
