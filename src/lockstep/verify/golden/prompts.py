"""The prompts of a reference, and the first token of an answer that differs. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.artifacts.dtypes import numpy_dtype
from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.places import FileEntry
from lockstep.artifacts.reference import LongPrompt, ReferenceManifest
from lockstep.artifacts.reports import GoldenReport, TokenDifference
from lockstep.checkpoint.safetensors_header import read_header
from lockstep.errors import InputError
from lockstep.targets import Target
from lockstep.tolerances import Tolerances
from lockstep.verify.golden.forced import Forced
from lockstep.verify.golden.text import new_text
from lockstep.verify.metrics import finite
from lockstep.verify.noise import LogitBounds, LogitNoise


@dataclass
class Decoded:
    """The answer of one request: the logits [vocab_size] of each step and the token chosen from them.

    expected: the right logits of each step, where they follow the engines' choices and are not the reference's.
    """

    logits: list[np.ndarray] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    expected: Sequence[np.ndarray] | None = None


@dataclass(frozen=True)
class Prompt:
    """One prompt of the reference.

    logits: [len(tokens), vocab_size] float32. bounds: of errors of its logits. expected: the text that must follow.
    adapter: "" for none; None in a reference without adapters.
    """

    text: str
    prompt_ids: Sequence[int]
    tokens: Sequence[int]
    new_text: str
    logits: np.ndarray
    bounds: LogitBounds
    expected: str | None
    adapter: str | None = None

    def __str__(self) -> str:
        with_adapter = {None: "", "": "no adapter, "}.get(self.adapter, f"adapter {self.adapter!r}, ")
        return f"{with_adapter}prompt {short(self.text)!r}"

    def count(self, step: int) -> int:
        return len(self.prompt_ids) + step

    @property
    def counts(self) -> range:
        return range(self.count(0), self.count(len(self.logits)))

    @property
    def total(self) -> int:
        """Return after how many tokens the last of `logits` are."""
        return len(self.prompt_ids) + len(self.tokens) - 1

    def forced(self, ends: Sequence[int], earlier: Mapping[int, np.ndarray] | None = None) -> Forced:
        """Return this prompt and its answer, in chunks that end at `ends`. earlier: logits within the prompt."""
        tokens = np.array([*self.prompt_ids, *self.tokens[:-1]], np.int64)
        expected = {**(earlier or {}), **dict(zip(self.counts, self.logits))}
        return Forced(tokens, expected, self.bounds, tuple(ends))


@dataclass(frozen=True)
class Long:
    """The long prompt.

    prompt: as the others, with a name for its text. edges: numbers of tokens where chunks end, the last is all of it.
    logits: {number of tokens: logits [vocab_size] float32 after them}.
    """

    prompt: Prompt
    edges: tuple[int, ...]
    logits: Mapping[int, np.ndarray]


def read_reference(
    path: Path, expected: Sequence[str | None], tolerances: Tolerances, follows: bool = False
) -> tuple[list[Prompt], Long | None, ReferenceManifest]:
    """Read a reference and its logits.

    expected: the text that must follow each prompt. follows: whether logits are judged along the engines' choices: then
    the noise is that of fixed choices.
    """
    manifest = ReferenceManifest.load(path)
    arrays = _read_logits(path, manifest.logits)
    # The first two columns are the noise of all, the last two that of fixed choices; see `artifacts.reference`.
    columns = slice(-2, None) if follows else slice(2)
    for name in [name for name in arrays if "noise" in name]:
        arrays[name] = arrays[name][:, columns]
    texts = list(expected) or [None] * len(manifest.prompts)
    if len(texts) != len(manifest.prompts):
        raise InputError(
            f"{path}: prompts: expected {len(texts)} as in the config, found {len(manifest.prompts)}; make the "
            "reference again"
        )
    prompts = []
    for i, (entry, text) in enumerate(zip(manifest.prompts, texts)):
        logits = arrays[f"logits.{i}"]
        counts = range(len(entry.prompt_ids), len(entry.prompt_ids) + len(logits))
        bounds = _bounds(counts, arrays[f"noise.{i}"], tolerances)
        answer = entry.text, entry.prompt_ids, entry.tokens, entry.new_text
        prompts.append(Prompt(*answer, logits, bounds, text, entry.adapter))
    return prompts, _read_long(manifest.long, arrays, tolerances), manifest


def read_golden(path: Path, target: Target, num_prompts: int) -> GoldenReport:
    """Return the golden check of a target. Raises InputError for another one, and where it was not run."""
    golden = GoldenReport.load(path)
    if golden.target != target or len(golden.prompts) != num_prompts:
        raise InputError(f"{path}: expected the golden check of {target}, found another; run it again")
    return golden


def _read_logits(reference: Path, logits: FileEntry) -> dict[str, np.ndarray]:
    path = reference.parent / logits.file
    if not path.is_file() or sha256_file(path) != logits.sha256:
        actual = "other bytes" if path.is_file() else "no file"
        raise InputError(f"{path}: expected the logits of the reference, found {actual}; make the reference again")
    data = np.fromfile(path, np.uint8)
    return {
        name: data[record.offset : record.offset + record.length].view(numpy_dtype(record.dtype)).reshape(record.shape)
        for name, record in read_header(path).items()
    }


def _bounds(counts: Iterable[int], noise: np.ndarray, tolerances: Tolerances) -> LogitBounds:
    """Return the bounds of logits after `counts` tokens. noise: a row for each, from the reference."""
    return LogitBounds(LogitNoise(dict(zip(counts, noise.tolist(), strict=True))), tolerances)


def _read_long(entry: LongPrompt | None, logits: Mapping[str, np.ndarray], tolerances: Tolerances) -> Long | None:
    if entry is None:
        return None
    counts = (*entry.counts, *range(entry.counts[-1], entry.counts[-1] + len(entry.tokens)))
    bounds = _bounds(counts, logits["long.noise"], tolerances)
    prompt = Prompt("the long prompt", entry.prompt_ids, entry.tokens, "", logits["long.logits"], bounds, None)
    return Long(prompt, entry.edges, dict(zip(entry.counts, logits["long.prompt"], strict=True)))


def first_difference(
    prompt: Prompt,
    expected: Sequence[int],
    actual: Sequence[int],
    logits: Sequence[np.ndarray] | np.ndarray,
    decode: Callable[[Sequence[int]], str],
) -> tuple[TokenDifference | None, tuple[int, str] | None]:
    """Return the first differing token, and (step, message) where it is not accepted; both may be None.

    After it the histories differ, and nothing can be compared. It is accepted where both tokens are equally likely: its
    logit is below the largest by less than the tolerance of a logit there. logits: of each step, which chose
    `expected`.
    """
    step = next((i for i, (a, b) in enumerate(zip(expected, actual)) if a != b), None)
    if step is None and len(expected) != len(actual):
        step = min(len(expected), len(actual))
        wrong = f"expected {len(expected)} tokens, found {len(actual)}"
        return TokenDifference(step, None, None, None, False), (step, wrong)
    if step is None:
        return None, None
    row = logits[step]
    tolerance = prompt.bounds.at(prompt.count(step))
    two = np.sort(row)[-2:]
    gap = float(two[1] - two[0])
    accepted = float(two[1] - row[actual[step]]) < tolerance
    wrong = (
        f"expected token {expected[step]}, found {actual[step]}; another one is accepted where the gap is below "
        f"{tolerance:.3g}, here it is {gap:.3g}"
    )
    texts = _token_texts(prompt, expected, actual, step, decode)
    difference = TokenDifference(step, expected[step], actual[step], finite(gap), accepted, *texts)
    if accepted:
        return difference, None
    return difference, (step, wrong)


def _token_texts(
    prompt: Prompt, expected: Sequence[int], actual: Sequence[int], step: int, decode: Callable[[Sequence[int]], str]
) -> tuple[str, str, str]:
    """Return the text before the first differing token, and what the expected and the found one add."""
    before, expected_text, actual_text = (
        new_text(decode, prompt.prompt_ids, tokens)
        for tokens in (expected[:step], expected[: step + 1], actual[: step + 1])
    )
    return before, expected_text[len(before) :], actual_text[len(before) :]


def short(text: str) -> str:
    if len(text) <= 40:
        return text
    return f"{text[:37]}..."
