"""Choose which tokens to follow: a target's results in, a request out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.artifacts.reference import ReferenceManifest, ReferencePrompt
from lockstep.artifacts.reports import GoldenReport
from lockstep.errors import InputError
from lockstep.manifests.manifest_files import failed_path
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.targets import Results, Target
from lockstep.verify.walk import Tokens


@dataclass(frozen=True)
class Request:
    """A text to follow, with the reference's answer.

    tokens: prompt and the reference's answer. number: of the prompt in the reference; None for a text that is not in
    it. why: the reason of this choice.
    """

    text: str
    tokens: Tokens
    number: int | None
    why: str


def choose(results: Results, target: Target, prompt: str | None, vocab_size: int) -> Request:
    """Choose `prompt`, else the first prompt that failed, else the longest.

    Raises InputError without results, and for a prompt that has no tokens or is no longer in the reference.
    """
    path = results.reference_of(target.model, target.precision, target.layers)
    entries: Sequence[ReferencePrompt] = ()
    if path.is_file():
        entries = ReferenceManifest.load(path).prompts
    texts = [entry.text for entry in entries]
    if prompt is not None and prompt in texts:
        return _of(entries, texts.index(prompt), "given")
    if prompt is not None:
        return _new(results, target, prompt, vocab_size)
    if not path.is_file():
        raise InputError(
            f"{path}: expected the reference of {target}, found none; run `lockstep run` first, or give --prompt"
        )
    failed = failed_path(results.golden(target.model, target.precision, target.layers, target.backend))
    if failed.is_file() and (request := failing(path, failed)):
        return request
    longest = max(range(len(entries)), key=lambda number: len(entries[number].prompt_ids) + len(entries[number].tokens))
    return _of(entries, longest, "the longest of the reference; none is known to fail")


def failing(reference: Path, failed: Path) -> Request | None:
    """Choose the first prompt that is wrong in the failed golden report, the long one last; None where none is.

    Raises InputError for a prompt that the reference does not have.
    """
    manifest = ReferenceManifest.load(reference)
    report = GoldenReport.load(failed)
    entries = manifest.prompts
    why = f"the first that fails in {failed}"
    texts = [entry.text for entry in entries]
    text = next((entry.text for entry in report.prompts if not entry.passed), None)
    if text is not None and text not in texts:
        raise InputError(
            f"{failed}: expected a prompt of {reference}, found {text[:40]!r}; "
            "run the golden check again, or give --prompt"
        )
    if text is not None:
        return _of(entries, texts.index(text), why)
    long = manifest.long
    if report.long_prompt and long and not report.long_prompt.passed:
        ids = [*long.prompt_ids, *long.tokens]
        return Request("the long prompt", Tokens(np.array(ids, np.int64), len(long.prompt_ids)), None, why)
    return None


def _of(entries: Sequence[ReferencePrompt], number: int, why: str) -> Request:
    entry = entries[number]
    ids = [*entry.prompt_ids, *entry.tokens]
    return Request(entry.text, Tokens(np.array(ids, np.int64), len(entry.prompt_ids)), number, why)


def _new(results: Results, target: Target, prompt: str, vocab_size: int) -> Request:
    ids = Tokenizer.open(results.assembly(target.model, target.precision)).encode(prompt)
    if not len(ids):
        raise InputError(f"--prompt {prompt[:40]!r}: expected at least one token, found none; give a longer prompt")
    if int(np.max(ids)) >= vocab_size:
        raise InputError(
            f"--prompt {prompt[:40]!r}: expected token ids below {vocab_size}, found {int(np.max(ids))}; "
            "give another prompt"
        )
    return Request(prompt, Tokens(np.asarray(ids, np.int64), len(ids)), None, "given")
