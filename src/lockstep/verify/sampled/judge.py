"""A server's answer compared with the second sampler: its tokens, why it ended, its text, its log-probabilities.

In: the request, the answer, and the logits after the prompt and each token. Out: a line for each fault, and how many
tokens would differ without the request's parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.tolerances import ENOUGH, SAMPLER
from lockstep.verify.sampled.answer import Answer
from lockstep.verify.sampled.rules import Chosen, Rules, choose, noises
from lockstep.verify.sampled.texts import Texts, agree


@dataclass(frozen=True)
class ChoiceRequest:
    """One choice of a request.

    rules: what its body says. plain: the rules without what the request is to show. choice: its number. max_tokens,
    stop, bad_words, logprobs: of the body. form: (letters, number): what the answer's text must be. echo: the repeated
    prompt's text.
    """

    prompt: Sequence[int]
    rules: Rules
    plain: Rules
    max_tokens: int
    choice: int = 0
    stop: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    form: tuple[str, int] | None = None
    logprobs: int | None = None
    echo: str | None = None
    is_chat: bool = False


@dataclass(frozen=True)
class Bounds:
    """How far the server's logits may be from these: the largest, and the rms of all. 0: the same bits."""

    largest: float = 0.0
    rms: float = 0.0


@dataclass
class Verdict:
    """Statistics of answers of the same tokens.

    decided: tokens that would be others without what the request is to show. near: tokens that are not the chosen ones,
    but as good. logprob_error: the largest.
    """

    answers: int = 0
    tokens: int = 0
    decided: int = 0
    near: int = 0
    logprob_error: float | None = None
    wrong: list[str] = field(default_factory=list)

    def __or__(self, other: Verdict) -> Verdict:
        errors = [error for error in (self.logprob_error, other.logprob_error) if error is not None]
        return replace(self, answers=self.answers + other.answers, logprob_error=max(errors, default=None))


def judge_tokens(
    request: ChoiceRequest, tokens: Sequence[int], logits: np.ndarray, texts: Texts, bounds: Bounds
) -> Verdict:
    """Judge the tokens of an answer. logits: [len(tokens), vocab_size] after the prompt and all tokens but the last.

    Stops at the first wrong one.
    """
    verdict = Verdict(tokens=len(tokens))
    noise = noises(request.rules, request.prompt, len(tokens), logits.shape[1], request.choice)
    plain_noise = noise
    if request.choice:
        plain_noise = noises(request.plain, request.prompt, len(tokens), logits.shape[1], 0)
    for step, (token, row) in enumerate(zip(tokens, logits)):
        before = tokens[:step]
        chosen = _choose(request, row, before, noise[step], texts, bounds.largest)
        plain = choose(request.plain, row, request.prompt, before, plain_noise[step])
        verdict.decided += plain.token != chosen.token
        if token == chosen.token:
            continue
        if not _is_allowed(request, [*before, token], texts):
            why = "which the request forbids"
        elif chosen.may_be(token) or (request.form and texts.decode([token]) == texts.decode([chosen.token])):
            verdict.near += 1
            continue
        else:
            gap = chosen.best - float(chosen.near[token])
            why = "which is left out"
            if np.isfinite(gap):
                why = f"whose score is {gap:.3g} lower"
        verdict.wrong.append(f"step {step}: expected token {chosen.token}, found {token}, {why}")
        break
    return verdict


def judge(request: ChoiceRequest, answer: Answer, logits: np.ndarray, texts: Texts, bounds: Bounds) -> Verdict:
    """Judge why an answer ended, its text and its log-probabilities. logits: as of `judge_tokens`.

    If the prompt is repeated with log-probabilities, `logits` begin with those after each of its tokens.
    """
    verdict = Verdict(answers=1)
    for line in (_wrong_end(request, answer, texts), _wrong_text(request, answer, texts)):
        if line:
            verdict.wrong.append(line)
    if request.logprobs is not None:
        tokens = list(answer.token_ids)
        if request.echo is not None:
            tokens = [*request.prompt, *tokens]
        verdict.wrong += _wrong_logprobs(request, tokens, answer, logits, bounds, verdict)
    return verdict


def _choose(
    request: ChoiceRequest, row: np.ndarray, before: Sequence[int], noise: np.ndarray | None, texts: Texts, error: float
) -> Chosen:
    """Choose a token that completes no bad word, and keeps to the form."""
    banned: set[int] = set()
    allowed = None
    if request.form is not None:
        letters, number = request.form
        allowed = texts.named(letters, number - len(texts.added(request.prompt, before)))
    while True:
        chosen = choose(request.rules, row, request.prompt, before, noise, banned, allowed, error)
        if chosen.token in banned or _is_allowed(request, [*before, chosen.token], texts):
            return chosen
        banned.add(chosen.token)


def _is_allowed(request: ChoiceRequest, tokens: Sequence[int], texts: Texts) -> bool:
    """Return whether an answer may begin with tokens: its text without bad words, and of the form."""
    if not request.bad_words and request.form is None:
        return True
    text = texts.added(request.prompt, tokens)
    if _contains(text, request.bad_words):
        return False
    if request.form is None:
        return True
    letters, number = request.form
    return text != texts.added(request.prompt, tokens[:-1]) and bool(re.fullmatch(f"[{letters}]{{1,{number}}}", text))


def _contains(text: str, words: Sequence[str]) -> bool:
    return any(word in text for word in words)


def _wrong_end(request: ChoiceRequest, answer: Answer, texts: Texts) -> str | None:
    """Return the fault of the number of tokens, or of the reason for the end."""
    tokens = answer.token_ids
    for step in range(len(tokens)):
        reason = _end(request, tokens[: step + 1], texts)
        if reason is None:
            continue
        if step + 1 < len(tokens):
            return f"expected the end at step {step} ({reason}), found {len(tokens) - step - 1} more tokens"
        if reason == answer.finish:
            return None
        return f"finish_reason: expected {reason}, found {answer.finish}"
    return f"expected more than {len(tokens)} tokens, found the end ({answer.finish})"


def _end(request: ChoiceRequest, tokens: Sequence[int], texts: Texts) -> str | None:
    """Return the finish_reason of an answer that these tokens end; None where more follow."""
    text = texts.added(request.prompt, tokens)
    is_whole = request.form is not None and len(text) == request.form[1]
    if tokens[-1] in request.rules.stop_ids or _contains(text, request.stop) or is_whole:
        return "stop"
    if len(tokens) == request.max_tokens:
        return "length"
    return None


def _text(request: ChoiceRequest, tokens: Sequence[int], texts: Texts) -> str:
    """Return the text of an answer: without the token that ended it, up to the first stop string."""
    if tokens and tokens[-1] in request.rules.stop_ids:
        tokens = tokens[:-1]
    text = texts.added(request.prompt, tokens)
    return min((text.partition(word)[0] for word in request.stop), key=len, default=text)


def _wrong_text(request: ChoiceRequest, answer: Answer, texts: Texts) -> str | None:
    expected = (request.echo or "") + _text(request, answer.token_ids, texts)
    if agree(expected, answer.text):
        return None
    return f"text: expected {expected!r}, found {answer.text!r}"


def _wrong_logprobs(
    request: ChoiceRequest, tokens: Sequence[int], answer: Answer, logits: np.ndarray, bounds: Bounds, verdict: Verdict
) -> Iterator[str]:
    """Yield the faults of the log-probabilities of tokens: the first of each kind."""
    entries: list[Sequence[Any]] = [answer.logprobs, answer.top, answer.tokens]
    if not request.is_chat:
        entries.append(answer.offsets)
    lengths = [len(entry) for entry in entries]
    if lengths != [len(tokens)] * len(lengths):
        yield f"logprobs: expected {len(tokens)} entries, found {lengths}"
        return
    if request.echo is not None and (answer.logprobs[0], answer.top[0]) != (None, None):
        yield f"logprobs: expected none of the prompt's first token, found {answer.logprobs[0]}"
    errors = []
    bound = 2 * bounds.largest + SAMPLER * max(1.0, float(np.abs(logits).max()))
    first = len(tokens) - len(logits)  # 1 where the prompt is repeated: its first token has no logits
    for number, row in enumerate(logits, first):
        token = tokens[number]
        logprob = answer.logprobs[number]
        expected = _log_probabilities(row)
        if logprob is None or answer.top[number] is None:
            yield f"logprobs: expected one of token {number}, found none"
            return
        errors.append(abs(logprob - float(expected[token])))
        if line := _wrong_top(request, answer, number, expected, token, bound):
            yield f"top_logprobs of token {number}: {line}"
            return
    verdict.logprob_error = max(errors, default=0.0)
    if verdict.logprob_error > bound:
        yield f"logprobs: expected an error of at most {bound:.3g}, found {verdict.logprob_error:.3g}"
    rms = float(np.sqrt(np.mean(np.square(errors))))
    bound_of_sum = 2 * bounds.rms + bound - 2 * bounds.largest
    if bounds.rms and len(errors) >= ENOUGH and rms > bound_of_sum:
        yield f"logprobs: expected an rms error of at most {bound_of_sum:.3g}, found {rms:.3g}"
    if not request.is_chat:
        yield from _wrong_pieces(request, answer)


def _log_probabilities(row: np.ndarray) -> np.ndarray:
    shifted = row.astype(np.float64) - float(row.max())
    return shifted - np.log(np.exp(shifted).sum())


def _wrong_top(
    request: ChoiceRequest, answer: Answer, number: int, expected: np.ndarray, token: int, bound: float
) -> str | None:
    """Return the fault of a list of the likeliest tokens. expected: log-probabilities of all tokens."""
    top = answer.top[number] or {}
    count = min(request.logprobs or 0, len(expected))
    largest = np.sort(expected)[len(expected) - count :][::-1]
    values = sorted(top.values(), reverse=True)
    counts = {count}
    if not request.is_chat:  # completions add the chosen token to the list if it is not among the likeliest
        if not count or expected[token] < largest[-1] - bound:
            counts = {count + 1}
        elif expected[token] <= largest[-1] + bound:
            counts.add(count + 1)  # as likely as the last: which of them is in the list is rounding
    if len(values) not in counts:
        return f"expected {min(counts)} entries, found {len(values)}"
    text = answer.tokens[number]
    logprob = answer.logprobs[number]
    if not request.is_chat and top.get(text) != logprob:
        return f"expected {logprob} of the chosen token {text!r}, found {top.get(text)}"
    off = np.abs(np.array(values[:count]) - largest)
    if count and off.max() > bound:
        place = int(off.argmax())
        return f"expected {largest[place]:.6g} in place {place}, found {values[place]:.6g}"
    return None


def _wrong_pieces(request: ChoiceRequest, answer: Answer) -> Iterator[str]:
    """Yield the faults of the texts of tokens and of their offsets."""
    joined = "".join(answer.tokens)
    is_cut = bool(request.stop or request.rules.stop_ids)  # the text ends before what ended it, the tokens do not
    if joined != answer.text and not (is_cut and joined.startswith(answer.text)):
        yield f"tokens: expected the text {answer.text!r}, found {joined!r}"
    starts = np.cumsum([0, *map(len, answer.tokens)])[:-1].tolist()
    if answer.offsets != starts:
        yield f"text_offset: expected {starts}, found {answer.offsets}"


def without(rules: Rules, *names: str) -> Rules:
    """Return rules with some fields as if the body had left them out."""
    default = Rules()
    values: dict[str, Any] = {name: getattr(default, name) for name in names}
    return replace(rules, **values)
