"""The option `--speculative`, `ngram:4` or `draft=TARGET:4`, and the speculation that it opens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts.assembly import TextFiles
from lockstep.errors import InputError
from lockstep.runtime.checks import expect
from lockstep.runtime.draft_model import ModelDrafter
from lockstep.runtime.drafts import MAX_DRAFT_TOKENS, NgramDrafter, Speculation
from lockstep.runtime.model import Model, ModelOptions
from lockstep.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Speculative:
    """Plain JSON: num_tokens of a draft at most, and the target that drafts, with its files; none: n-grams."""

    num_tokens: int
    target: str | None = None
    engines: str = ""
    assembly: str = ""
    weights: str = ""
    layers: int | str = "all"


def parse(text: str) -> Speculative:
    """Parse `ngram:N` or `draft=TARGET:N`. Raises InputError for anything else."""
    how, _, count = text.rpartition(":")
    name, _, target = how.partition("=")
    if not (count.isdecimal() and (how == "ngram" or name == "draft" and target)):
        raise InputError(f"speculative: expected ngram:4, or draft=TARGET:4, of 4 tokens, found {text[:60]!r}")
    expect("speculative", int(count), 1, MAX_DRAFT_TOKENS, "tokens of a draft")
    return Speculative(int(count), target or None)


def open_speculation(model: Model, settings: Speculative, threads: int | None = None) -> Speculation:
    """Open the drafter of `model`.

    Raises InputError for a model that verifies no drafts, a draft of another tokenizer, or one without room for drafts,
    and what `Model.open` raises of the draft target.
    """
    model.check_verifies_drafts()
    expect(
        "speculative", settings.num_tokens, 1, model.max_seq_len - 1, "tokens of a draft, which fit into max_seq_len"
    )
    if settings.target is None:
        return Speculation(NgramDrafter(), settings.num_tokens)
    _check_tokens(model, settings)
    draft = Model.open(
        settings.engines,
        settings.assembly,
        settings.weights,
        settings.layers,
        ModelOptions(max_batch_size=model.max_batch_size, max_seq_len=model.max_seq_len, threads=threads, cut_of=model),
    )
    if not draft.can_forget:
        raise InputError(
            f"speculative: expected a draft target whose layers all keep keys and values, found {settings.target}"
        )
    return Speculation(ModelDrafter(draft), settings.num_tokens)


def _check_tokens(model: Model, settings: Speculative) -> None:
    """Raise InputError for a draft target of another tokenizer."""
    files = [Path(model.assembly_json), Path(settings.assembly)]
    entries = [TextFiles.load(path).tokenizer for path in files]
    if None not in entries and len({entry.sha256 for entry in entries if entry}) == 1:
        return
    if None in entries or Tokenizer.open(files[0]).vocabulary != Tokenizer.open(files[1]).vocabulary:
        raise InputError(
            f"speculative: expected a draft target of the same tokenizer, found {settings.target} with another "
            f"({settings.assembly}); give a cut of the target, or ngram:{settings.num_tokens}"
        )
