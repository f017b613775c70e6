"""The requests by which the check `served` sees how tokens are chosen: one for each parameter of the API.

In: the prompts of a reference with their logits. Out: bodies. What would show nothing on a model is fitted to it:
temperatures, biases and words come from the reference's logits and tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.verify.golden.prompts import Prompt
from lockstep.verify.sampled.rules import Rules, choose, noises
from lockstep.verify.sampled.texts import UNDECODED, Texts

_TOKENS = 16  # of an answer
_SEEDS = 64  # that are tried
_LETTERS = 10  # of an answer that is held to a form
# tokens between which a draw decides, as perplexity
_FEW = 4.0
_MANY = 12.0
_BANNED = -100.0  # a bias that no logit comes up to
_LIKELIEST = 1024  # tokens by which a temperature is fitted


@dataclass(frozen=True)
class Case:
    """A request. body: of a completion, without its prompt. shows: fields that it is to show, which decide tokens.

    form: as of `judge.Asked`.
    """

    name: str
    prompts: tuple[Prompt, ...]
    body: dict[str, Any] = field(default_factory=dict)
    shows: tuple[str, ...] = ()
    form: tuple[str, int] | None = None


class Cases:
    """The requests for a model.

    expected: the tokens that golden's prompts have, greedy. most: choices of a request. room: tokens of a request.
    """

    def __init__(
        self, prompts: Sequence[Prompt], expected: Sequence[Sequence[int]], texts: Texts, most: int, room: int
    ):
        self._prompts = prompts  # golden has seen that each and its answer fit
        self._expected = {id(prompt): list(tokens) for prompt, tokens in zip(prompts, expected)}
        self._texts = texts
        self._most = most
        self._room = room
        self._count = 0

    def all(self, repeats_prompts: bool) -> list[Case]:
        """Return all of them. repeats_prompts: whether the server has log-probabilities of prompts."""
        cases = [
            self._drawn("temperature", _MANY, [{"temperature": 1.0}]),
            self._drawn("top_k", _MANY, [{"top_k": 0}, {"top_k": 2}, {"top_k": 4}], top_k=3),
            self._drawn("top_p", _MANY, [{"top_p": 1.0}, {"top_p": 0.3}], top_p=0.6),
            self._drawn("min_p", _MANY, [{"min_p": 0.0}, {"min_p": 0.6}], min_p=0.3),
            self._drawn("top_k and top_p", _MANY, [{"top_k": 0}, {"top_p": 1.0}], top_k=6, top_p=0.7),
            self._drawn("min_p and top_p", _MANY, [{"min_p": 0.0}, {"top_p": 1.0}], min_p=0.2, top_p=0.7),
            self._penalized("repetition_penalty", 16),
            self._penalized("presence_penalty", 16),
            self._penalized("frequency_penalty", 4),  # which come several times
            self._biased(),
            self._late_end(),
            self._stopped(),
            self._bad_words(),
            self._choices(),
            self._drawn("logprobs", _FEW, logprobs=20),
            self._case("top_logprobs", temperature=0, logprobs=5),
            self._case("echo", temperature=0, echo=True, logprobs=3 if repeats_prompts else None),
            self._formed(),
        ]
        return [case for case in cases if case is not None]

    def chat(self) -> Case:
        """Return what a chat is asked with, beside its messages."""
        return self._drawn("chat", _FEW, logprobs=2)

    def _next(self) -> Prompt:
        """Return the prompts in turn."""
        self._count += 1
        return self._prompts[self._count % len(self._prompts)]

    def _case(self, name: str, prompt: Prompt | None = None, shows: Sequence[str] = (), **body: Any) -> Case:
        prompt = prompt or self._next()
        body = {"max_tokens": min(_TOKENS, self._room - len(prompt.prompt_ids)), "ignore_eos": True, **body}
        body = {name: value for name, value in body.items() if value is not None}
        return Case(name, (prompt,), body, tuple(shows))

    def _drawn(self, name: str, perplexity: float, mistakes: Sequence[Mapping[str, Any]] = (), **body: Any) -> Case:
        """Return a request that draws. mistakes: what of its body a wrong server would take for something else."""
        prompt = self._next()
        shows = [key for key in body if key not in ("logprobs", "n")] or ["temperature"]
        body = {"temperature": _temperature(prompt.logits, perplexity), **body}
        return self._case(name, prompt, shows, **body, seed=self._seed(prompt, body, mistakes))

    def _seed(self, prompt: Prompt, body: Mapping[str, Any], mistakes: Sequence[Mapping[str, Any]]) -> int:
        """Return a seed with which most mistakes would draw another first token."""
        best = most = -1
        first = _SEEDS * self._count
        for seed in range(first, first + _SEEDS):
            tokens = []
            for changed in ({}, *mistakes):
                rules = Rules.of({**body, **changed, "seed": seed}, ())
                (noise,) = noises(rules, prompt.prompt_ids, 1, prompt.logits.shape[1], 0)
                tokens.append(choose(rules, prompt.logits[0], prompt.prompt_ids, (), noise).token)
            number = sum(token != tokens[0] for token in tokens)
            if number > most:
                best = seed
                most = number
            if most == len(mistakes):
                break
        return best

    def _greedy(self) -> tuple[Prompt, list[int]]:
        """Return a prompt with what follows it, as long as can be had."""
        return max(
            ((prompt, self._expected[id(prompt)]) for prompt in self._prompts),
            key=lambda pair: len(self._texts.added(pair[0].prompt_ids, pair[1])),
        )

    def _penalized(self, penalty: str, count: int) -> Case:
        """Return a request whose answer has few tokens, some of them of the prompt. count: how many there are."""
        prompt = self._next()
        rows = prompt.logits.astype(np.float64)
        tokens = _companions(prompt, count)
        level = float(max(rows.max(), 0.0) + np.ptp(rows))  # above all others, wherever they are
        bias = np.round(level - rows[:, tokens].mean(axis=0), 3)
        temperature = _temperature(rows[:, tokens] + bias, 0.7 * len(tokens))
        # What comes again loses more than the temperature spreads logits by.
        loss = 1.5 * temperature
        value = 1 / (1 - min(0.4, loss / level)) if penalty == "repetition_penalty" else min(2.0, loss)
        by_token = {str(token): float(value) for token, value in zip(tokens, bias)}
        body = {"temperature": temperature, penalty: round(value, 3), "logit_bias": by_token}
        mistakes = [{penalty: 1.0}, {penalty: value**2}] if penalty == "repetition_penalty" else []
        n = min(2, self._most)
        return self._case(penalty, prompt, [penalty], **body, n=n, seed=self._seed(prompt, body, mistakes))

    def _biased(self) -> Case:
        """Return a request whose first token is the fifth likeliest, and the likeliest is banned."""
        prompt = self._next()
        row = prompt.logits[0]
        order = np.argsort(-row, kind="stable")
        best = int(order[0])
        other = int(order[min(4, len(order) - 1)])
        rise = round(float(row[best] - row[other]) + max(1.0, float(row.std())), 3)
        bias = {str(best): _BANNED, str(other): rise}
        return self._case("logit_bias", prompt, ["logit_bias"], temperature=0, logit_bias=bias)

    def _late_end(self) -> Case:
        """Return a request that a token would end at once, which `min_tokens` holds back."""
        prompt = self._next()
        token = self._expected[id(prompt)][0]
        bias = {str(token): round(2 * float(np.ptp(prompt.logits[0])) + 10, 3)}
        body = {"temperature": 0, "logit_bias": bias, "stop_token_ids": [token], "min_tokens": 5}
        case = self._case("min_tokens", prompt, ["min_tokens"], **body)
        case.body["min_tokens"] = min(5, case.body["max_tokens"])
        return case

    def _stopped(self) -> Case | None:
        """Return a request that a string ends: of a known text, over two of its tokens where it is long enough."""
        prompt, tokens = self._greedy()
        text = self._texts.added(prompt.prompt_ids, tokens)
        middle = len(self._texts.added(prompt.prompt_ids, tokens[: len(tokens) // 2]))
        word = text[max(0, middle - 1) : middle + 2]
        if not word or UNDECODED in word:
            return None
        return self._case("stop", prompt, temperature=0, stop=["never said", word])

    def _bad_words(self) -> Case | None:
        prompt, tokens = self._greedy()
        half = len(tokens) // 2
        before, text = (self._texts.added(prompt.prompt_ids, tokens[:count]) for count in (half, half + 2))
        word = text[len(before) :].strip()
        if not word or UNDECODED in word:
            return None
        return self._case("bad_words", prompt, ["bad_words"], temperature=0, bad_words=[word])

    def _formed(self) -> Case:
        case = self._drawn("structured output", _FEW, structured_outputs={"regex": f"[a-z]{{{_LETTERS}}}"})
        return replace(case, form=("a-z", _LETTERS))

    def _choices(self) -> Case:
        """Return a request of two prompts with as many choices as can be, up to 3."""
        case = self._drawn("n", _MANY, n=min(3, self._most))
        other = self._next()
        room = self._room - len(other.prompt_ids)
        body = {**case.body, "max_tokens": min(case.body["max_tokens"], room)}
        return replace(case, prompts=(*case.prompts, other), body=body)


def _companions(prompt: Prompt, count: int) -> list[int]:
    """Return tokens whose logits rise and fall together, so that a penalty decides; a quarter of the prompt's."""
    rows = prompt.logits.astype(np.float32)
    anchor = int(prompt.prompt_ids[-1])
    order = np.argsort(np.std(rows - rows[:, anchor : anchor + 1], axis=0), kind="stable")
    said = np.isin(order, prompt.prompt_ids)
    return [*order[said][: count // 4].tolist(), *order[~said][: count - count // 4].tolist()]


def _temperature(logits: np.ndarray, perplexity: float) -> float:
    """Return a temperature at which the first and the median row have a perplexity, and whose square is another."""
    count = min(_LIKELIEST, logits.shape[1])
    rows = np.partition(logits, -count, axis=1)[:, -count:].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    low = 1e-3
    high = 1e3
    for _ in range(30):
        middle = float(np.sqrt(low * high))
        parts = np.exp(rows / middle)
        parts /= parts.sum(axis=1, keepdims=True)
        entropy = -np.sum(parts * np.log(np.maximum(parts, 1e-300)), axis=1)
        if np.exp(min(entropy[0], np.median(entropy))) < perplexity:
            low = middle
        else:
            high = middle
    temperature = float(np.sqrt(low * high))
    if 0.7 < temperature < 1.4:
        temperature = 0.7 if temperature < 1 else 1.4
    return round(temperature, 4)
