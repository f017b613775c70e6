"""The target or bundle that a command generates text from, or serves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from lockstep.errors import InputError, LockstepError
from lockstep.targets import Results, Target

if TYPE_CHECKING:
    from lockstep.bundle.opened import Opened
    from lockstep.config.schema import Config


BUNDLE_SUFFIX = ".tar"


def complete_target(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the targets of the last run in this folder that begin so, for a shell's completion."""
    try:
        targets = used_config(Results(Path(ctx.params.get("results") or "results"))).targets()
    except LockstepError:
        # Nothing has run here, and an error message would appear in the middle of the command line.
        return []
    return [CompletionItem(str(target)) for target in targets if str(target).startswith(incomplete)]


TARGET = click.argument("target", metavar="TARGET", shell_complete=complete_target)
TARGET_OR_BUNDLE = click.argument("target", metavar="TARGET|BUNDLE.tar", shell_complete=complete_target)


def check_was_run(results: Results) -> None:
    if not results.config().is_file():
        raise InputError(
            f"{results.root}: expected results of a run, found none in {os.getcwd()}; run `lockstep run` first, or go "
            "to the folder where it ran"
        )


def used_config(results: Results) -> Config:
    """Return the config that the results were made with.

    Raises InputError where its statement is of another one, or this version does not know its keys.
    """
    from lockstep.artifacts.files import OTHER_VERSION, read_json
    from lockstep.artifacts.statement import statement_path
    from lockstep.config.load import load
    from lockstep.provenance.statements import read_statement

    check_was_run(results)
    value = read_json(results.config())
    if statement_path(results.config()).is_file() and read_statement(results.config()) is None:
        raise InputError(
            f"{results.config()}: expected the config that its statement describes, found another; run `lockstep run` "
            "again"
        )
    try:
        return load(value, where=str(results.config()))
    # No user wrote this file, so an unknown key comes from another version.
    except InputError as error:
        raise InputError(f"{error}; {OTHER_VERSION}") from None


def of_last_run(tree: Results) -> str:
    return f"{tree.config()}, the config of the last run"


def made_target(config: Config, tree: Results, name: str) -> Target:
    """Return the target of this name, as `Config.parse_target`.

    Raises InputError where its engines are not built on this machine, and for a model of an earlier run.
    """
    model = name.partition("/")[0]
    if model not in config.models and tree.checkpoint(model).is_file():
        raise InputError(
            f"target: expected a target of the last run ({tree.config()}, models {', '.join(config.models)}), found "
            f"{name} of an earlier run; run its config again: `lockstep run`"
        )
    target = config.parse_target(name, of_last_run(tree))
    engines = tree.engines(target.model, target.precision, target.backend)
    if not engines.is_file() and (reason := config.why_not_built(target)):
        raise InputError(
            f"{engines}: expected the engines of {target}, found none: they are not built here, because it {reason}; "
            "choose another target, or a machine that has them"
        )
    return target


@contextlib.contextmanager
def runnable(name: str, weights: Path | None, results: Path) -> Iterator[Opened]:
    """Open a target or a bundle, whose files are there until the context ends.

    name: a target's name, or the path of a bundle, which ends in `.tar`. weights: for a bundle that holds none. Raises
    InputError where weights are given with a target, and what opening raises.
    """
    if name.endswith(BUNDLE_SUFFIX):
        from lockstep.bundle.opened import opened

        with opened(Path(name), weights) as place:
            yield place
        return
    if weights is not None:
        raise InputError(f"--weights: expected a bundle ({BUNDLE_SUFFIX}) to go with it, found {name}; leave it out")
    yield _of_target(name, Results(results))


def _of_target(name: str, tree: Results) -> Opened:
    from lockstep.bundle.opened import Opened

    config = used_config(tree)
    target = made_target(config, tree, name)
    place = Opened(
        target,
        config.limits.plain(),
        tree.engines(target.model, target.precision, target.backend),
        tree.assembly(target.model, target.precision),
        tree.weights(target.model, target.precision),
        tree.adapters(target.model) if config.models[target.model].adapters else None,
        tree.checkpoint(target.model),
    )
    _check_stated(tree, place)
    return place


SPECULATIVE = click.option(
    "--speculative",
    "drafts",
    metavar="DRAFTS",
    help="Verify drafts of N tokens, for the same answers in fewer steps: ngram:N, of earlier text, or draft=TARGET:N, "
    "of a target of the same tokenizer.  [default: none]",
)


def speculative(text: str | None, results: Path) -> dict[str, Any] | None:
    """Return `--speculative` as plain JSON of `Speculative`. Raises InputError for an invalid one."""
    from lockstep.runtime.speculative import parse

    if text is None:
        return None
    options = parse(text)
    tree = Results(results)
    if options.target is None:
        return asdict(options)
    # Any number of first layers may draft, also one that is no target and was never checked: the model verifies drafts.
    names = options.target.split("/")
    first_layers = None
    if len(names) > 2 and names[2].isdecimal():
        first_layers = int(names[2])
        names[2] = "all"
    place = _of_target("/".join(names), tree)
    layers = place.target.layers if first_layers is None else first_layers
    resolved = replace(
        options, engines=str(place.engines), assembly=str(place.assembly), weights=str(place.weights), layers=layers
    )
    return asdict(resolved)


def _check_stated(tree: Results, place: Opened) -> None:
    """Raise InputError where the statement of an artefact of the target is missing or is of another file."""
    from lockstep.artifacts.statement import statement_path
    from lockstep.provenance.statements import read_statement

    # The workflow writes the config's statement first; callers of the Python API have results without statements.
    if not statement_path(tree.config()).is_file():
        return
    for path in (place.assembly, place.weights, place.engines):
        if path.is_file() and read_statement(path) is None:
            raise InputError(
                f"{path}: expected its statement {statement_path(path).name} next to it, found none or one of another "
                "file; run `lockstep run` again"
            )
