"""The rules of the workflow as `workflow/rules/*.smk` writes them, for those who ask without Snakemake.

Text in; of each rule its inputs, outputs and the names of its parameters, out. A path is a text that opens with
`<results>/`, or a `branch` between two such; what a function gives is left out, for only Snakemake calls it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
_MARKS = ("update", "ancient", "report", "directory")  # around a path

Names = Mapping[str, Any]  # model, precision, layers and backend, those that a rule has


@dataclass(frozen=True)
class Branch:
    """A path that depends on a condition: `branch(is_quantized, then=..., otherwise=...)`; "" for none."""

    condition: str
    then: str = ""
    otherwise: str = ""

    def path(self, config: Config | None, names: Names) -> str:
        is_then = not self.condition or _CONDITIONS[self.condition](config, names)
        return self.then if is_then else self.otherwise


@dataclass(frozen=True)
class Rule:
    """A rule.

    inputs: manifests of a model by name, below the results folder. files: other inputs and parameters that
    `files_of("...")` gives, by name. outputs: the manifest first. updates: a job begins with what an earlier one made.
    params: their names. kinds: of sources, where it is a rule for models of some kinds alone.
    """

    name: str
    inputs: Mapping[str, Branch] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    updates: bool = False
    params: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        return self.outputs[0]

    @property
    def wildcards(self) -> tuple[str, ...]:
        """Return which of model, precision, layers and backend the rule has."""
        return wildcards_of(self.output)

    def reads(self, config: Config | None, names: Names) -> dict[str, str]:
        """Return the patterns of the manifests that a job reads, by name. config: None of a check of engines."""
        chosen = {name: branch.path(config, names) for name, branch in self.inputs.items()}
        return {name: pattern for name, pattern in chosen.items() if pattern}

    def is_for(self, config: Config, names: Names) -> bool:
        return not self.kinds or kind_of(config.models[names["model"]].source) in self.kinds


def _is_brought(config: Config, names: Names) -> bool:
    return kind_of(config.models[names["model"]].source) != "folder"


# What a `branch` asks; workflow/rules/common.smk has functions of these names.
_CONDITIONS: Mapping[str, Any] = {
    "is_quantized": lambda config, names: is_quantized(names["precision"]),
    "is_brought": _is_brought,
    "is_any_adapter_on_the_hub": lambda config, names: bool(params.hub_adapters(config, names["model"])),
}
# The targets that have an artefact, as `collected` names them.
_COLLECTED: Mapping[str, Any] = {
    "all": lambda config, target: True,
    "built": lambda config, target: config.is_built(target),
    "run": lambda config, target: config.is_run(target),
    "served": lambda config, target: config.check_server and config.is_run(target),
    "adapted": lambda config, target: bool(config.models[target.model].adapters) and config.is_run(target),
}


def collected_targets(config: Config) -> dict[str, list[Target]]:
    """Return the targets by the words that `collected` takes."""
    targets = config.targets()
    collected = {}
    for word, is_collected in _COLLECTED.items():
        collected[word] = [target for target in targets if is_collected(config, target)]
    return collected


@functools.cache
def rules() -> Mapping[str, Rule]:
    """Return all rules by name. Raises InputError for one that cannot be read."""
    bodies: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.smk")):
        bodies.update(_RULE.findall(path.read_text(encoding="utf-8")))
    if not bodies:
        raise InputError(f"{FOLDER}: expected the rules of the workflow, found none; install the wheel again")
    return {name: _rule(name, dict(_DIRECTIVE.findall(body))) for name, body in bodies.items()}


@functools.cache
def ends() -> tuple[tuple[str, str], ...]:
    """Return what the summary collects: the pattern of a manifest, and the word for the targets that have it."""
    text = (FOLDER / "report.smk").read_text(encoding="utf-8")
    entries = re.findall(r'=collected\("<results>/([^"]+)", "(\w+)"\)', text)
    return tuple(
        (pattern, word) for pattern, word in entries if makers(pattern) and makers(pattern)[0].output == pattern
    )


def makers(pattern: str) -> list[Rule]:
    """Return the rules that make a file."""
    return [rule for rule in rules().values() if pattern in rule.outputs]


def _rule(name: str, directives: Mapping[str, str]) -> Rule:
    inputs = _entries(name, directives.get("input", ""))
    params = _entries(name, directives.get("params", ""))
    branches = {key: _branch(value) for key, value in inputs}
    files = {key: _files(value) for key, value in [*inputs, *params]}
    outputs = [_branch(value) for _, value in _entries(name, directives.get("output", ""))]
    kinds = re.findall(r'"(\w+)"', "".join(re.findall(r"of_kind\((.*)\)", directives.get("wildcard_constraints", ""))))
    return Rule(
        name,
        {key: value for key, value in branches.items() if value and _MANIFEST.fullmatch(value.then or value.otherwise)},
        {key: value for key, value in files.items() if value},
        tuple(branch.then for branch in outputs if branch),
        "update(" in directives.get("output", ""),
        tuple(key for key, _ in params),
        tuple(kinds),
    )


def _entries(rule: str, text: str) -> list[tuple[str, ast.expr]]:
    """Return names and values of a directive; those without a name have ""."""
    try:
        call = ast.parse(f"f({text}\n)", mode="eval").body
    except SyntaxError as error:
        raise InputError(f"{FOLDER}: rule {rule}: expected arguments as Snakemake takes them, found {error}") from None
    assert isinstance(call, ast.Call)
    named = [(keyword.arg or "", keyword.value) for keyword in call.keywords]
    return [*(("", value) for value in call.args), *named]


def _branch(value: ast.expr) -> Branch | None:
    """Return the path of an entry; None where it is none of a manifest below the results folder."""
    if isinstance(value, ast.Call) and _called(value) in _MARKS:
        return _branch(value.args[0])
    if isinstance(value, ast.Call) and _called(value) == "branch":
        paths = {keyword.arg: _path(keyword.value) for keyword in value.keywords}
        return Branch(ast.unparse(value.args[0]), paths.get("then", ""), paths.get("otherwise", ""))
    path = _path(value)
    return Branch("", path) if path else None


def _path(value: ast.expr) -> str:
    text = str(_constant(value) or "")
    return text.removeprefix(_ROOT) if text.startswith(_ROOT) else ""


def _files(value: ast.expr) -> str:
    """Return the argument of `files_of`; "" for another entry."""
    return str(_constant(value.args[0])) if isinstance(value, ast.Call) and _called(value) == "files_of" else ""


def _constant(value: ast.expr) -> Any:
    return value.value if isinstance(value, ast.Constant) else None


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""
