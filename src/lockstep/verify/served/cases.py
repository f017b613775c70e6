"""The requests by which the check `served` tests sampling: one for each parameter of the API.

In: the prompts of a reference with their logits. Out: bodies. A parameter must change the answer, or the check could
not see it: temperatures, biases and words are fitted to the model by the reference's logits and tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.verify.golden.prompts import Prompt
from lockstep.verify.sampled.rules import Rules, choose, noises
from lockstep.verify.sampled.texts import UNDECODED, Texts

_TOKENS = 16  # of an answer
_SEEDS = 64  # that are tried
_LETTERS = 10  # of the structured output
_FEW_LETTERS = "a-d"
# Perplexities of a draw.
_NARROW = 4.0
_WIDE = 12.0
_BANNED = -100.0  # a bias below the range of all logits
_LIKELIEST = 1024  # tokens by which a temperature is fitted


@dataclass(frozen=True)
class Case:
    """A request. body: of a completion, without its prompt. shows: fields under test, which must decide tokens.

    form: see `judge.ChoiceRequest`.
    """

    name: str
    prompts: tuple[Prompt, ...]
    body: dict[str, Any] = field(default_factory=dict)
    shows: tuple[str, ...] = ()
    form: tuple[str, int] | None = None


class Cases:
    """The requests for a model.

    expected: golden's greedy tokens of each prompt. max_choices, max_tokens: of a request, prompt included. end_tokens:
    of the model.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        expected: Sequence[Sequence[int]],
        texts: Texts,
        max_choices: int,
        max_tokens: int,
        end_tokens: Collection[int],
    ):
        self._prompts = prompts  # that fit with their answers, as golden has checked
        self._expected = {id(prompt): list(tokens) for prompt, tokens in zip(prompts, expected)}
        self._texts = texts
        self._max_choices = max_choices
        self._max_tokens = max_tokens
        self._end_tokens = sorted(end_tokens)
        self._count = 0

    def all(self, repeats_prompts: bool) -> list[Case]:
        """Return all of them. repeats_prompts: whether the server has log-probabilities of prompts."""
        echo_logprobs = 3 if repeats_prompts else None
        cases = [
            self._drawn("temperature", _WIDE, [{"temperature": 1.0}]),
            self._drawn("top_k", _WIDE, [{"top_k": 0}, {"top_k": 2}, {"top_k": 4}], top_k=3),
            self._drawn("top_p", _WIDE, [{"top_p": 1.0}, {"top_p": 0.3}], top_p=0.6),
            self._drawn("min_p", _WIDE, [{"min_p": 0.0}, {"min_p": 0.6}], min_p=0.3),
            self._drawn("top_k and top_p", _WIDE, [{"top_k": 0}, {"top_p": 1.0}], top_k=6, top_p=0.7),
            self._drawn("min_p and top_p", _WIDE, [{"min_p": 0.0}, {"top_p": 1.0}], min_p=0.2, top_p=0.7),
            self._penalized("repetition_penalty", 16),
            self._disliked(),
            self._penalized("presence_penalty", 8),  # some of which come several times
            self._penalized("frequency_penalty", 4),
            self._biased(),
            self._late_end(),
            self._end_token(ignored=False),
            self._end_token(ignored=True),
            self._stopped(),
            self._nearly_stopped(),
            self._bad_words(),
            self._choices(),
            self._drawn("logprobs", _NARROW, logprobs=20),
            self._case("top_logprobs", temperature=0, logprobs=5),
            self._case("echo", temperature=0, echo=True, logprobs=echo_logprobs),
            self._formed(),
        ]
        return [case for case in cases if case is not None]

    def chat(self) -> Case:
        return self._drawn("chat", _NARROW, logprobs=2)

    def _next(self) -> Prompt:
        self._count += 1
        return self._prompts[self._count % len(self._prompts)]

    def _case(self, name: str, prompt: Prompt | None = None, shows: Sequence[str] = (), **body: Any) -> Case:
        prompt = prompt or self._next()
        body = {"max_tokens": min(_TOKENS, self._max_tokens - len(prompt.prompt_ids)), "ignore_eos": True, **body}
        body = {name: value for name, value in body.items() if value is not None}
        return Case(name, (prompt,), body, tuple(shows))

    def _drawn(self, name: str, perplexity: float, mistakes: Sequence[Mapping[str, Any]] = (), **body: Any) -> Case:
        """Return a request that draws. mistakes: changes of its body by which a wrong server would sample."""
        prompt = self._next()
        shows = [key for key in body if key not in ("logprobs", "n")] or ["temperature"]
        body = {"temperature": _temperature(prompt.logits, perplexity), **body}
        return self._case(name, prompt, shows, **body, seed=self._seed(prompt, body, mistakes))

    def _seed(self, prompt: Prompt, body: Mapping[str, Any], mistakes: Sequence[Mapping[str, Any]]) -> int:
        """Return a seed with which most mistakes would draw another first token."""
        best_seed = -1
        most_changed = -1
        first = _SEEDS * self._count
        for seed in range(first, first + _SEEDS):
            (noise,) = noises(Rules(seed=seed), prompt.prompt_ids, 1, prompt.logits.shape[1], 0)
            tokens = []
            for changed in ({}, *mistakes):
                rules = Rules.from_body({**body, **changed}, ())
                tokens.append(choose(rules, prompt.logits[0], prompt.prompt_ids, (), noise).token)
            num_changed = sum(token != tokens[0] for token in tokens)
            if num_changed > most_changed:
                best_seed = seed
                most_changed = num_changed
            if most_changed == len(mistakes):
                break
        return best_seed

    def _greedy(self) -> tuple[Prompt, list[int]]:
        """Return the prompt whose expected text is longest, and the tokens of an answer."""
        return max(
            ((prompt, self._expected[id(prompt)][:_TOKENS]) for prompt in self._prompts),
            key=lambda pair: len(self._texts.added(pair[0].prompt_ids, pair[1])),
        )

    def _penalized(self, penalty: str, count: int) -> Case:
        """Return a request whose answer has only `count` different tokens, some of them of the prompt."""
        prompt = self._next()
        rows = prompt.logits.astype(np.float64)
        tokens = _companions(prompt, count)
        level = float(max(rows.max(), 0.0) + np.ptp(rows))  # above the logits of all other tokens
        bias = np.round(level - rows[:, tokens].mean(axis=0), 3)
        temperature = _temperature(rows[:, tokens] + bias, 0.7 * len(tokens))
        # A repeated token must lose more than the temperature spreads the logits.
        loss = 1.5 * temperature
        value = min(2.0, loss)
        mistakes: list[dict[str, float]] = []
        if penalty == "repetition_penalty":
            value = 1 / (1 - min(0.4, loss / level))
            mistakes = [{penalty: 1.0}, {penalty: value**2}]
        by_token = {str(token): float(value) for token, value in zip(tokens, bias)}
        body = {"temperature": temperature, penalty: round(value, 3), "logit_bias": by_token}
        n = min(2, self._max_choices)
        return self._case(penalty, prompt, [penalty], **body, n=n, seed=self._seed(prompt, body, mistakes))

    def _disliked(self) -> Case:
        """Return a request whose tokens all have negative logits, which the repetition penalty multiplies.

        A grammar leaves few tokens, so that biases can make all of them negative.
        """
        prompt = self._next()
        tokens = self._texts.named(_FEW_LETTERS, _LETTERS)
        rows = prompt.logits[:, tokens].astype(np.float64)
        level = float(np.ptp(prompt.logits))
        bias = np.round(-level - rows.mean(axis=0), 3)
        temperature = _temperature(rows + bias, 0.7 * len(tokens))
        body = {
            "temperature": temperature,
            "repetition_penalty": round(1 + 1.5 * temperature / level, 3),  # as in `_penalized`
            "logit_bias": {str(token): float(value) for token, value in zip(tokens, bias)},
            "structured_outputs": {"regex": f"[{_FEW_LETTERS}]{{{_LETTERS}}}"},
        }
        n = min(2, self._max_choices)
        case = self._case("repetition_penalty of negative logits", prompt, ["repetition_penalty"], **body, n=n, seed=0)
        return replace(case, form=(_FEW_LETTERS, _LETTERS))

    def _biased(self) -> Case:
        prompt = self._next()
        row = prompt.logits[0]
        order = np.argsort(-row, kind="stable")
        best = int(order[0])
        other = int(order[min(4, len(order) - 1)])
        rise = round(float(row[best] - row[other]) + max(1.0, float(row.std())), 3)
        bias = {str(best): _BANNED, str(other): rise}
        return self._case("logit_bias", prompt, ["logit_bias"], temperature=0, logit_bias=bias)

    def _late_end(self) -> Case:
        """Return a request that a token would end at once without `min_tokens`."""
        prompt = self._next()
        token = self._expected[id(prompt)][0]
        body = {"temperature": 0, "logit_bias": _forced(token, prompt), "stop_token_ids": [token], "min_tokens": 5}
        case = self._case("min_tokens", prompt, ["min_tokens"], **body)
        case.body["min_tokens"] = min(5, case.body["max_tokens"])
        return case

    def _end_token(self, ignored: bool) -> Case | None:
        """Return a request whose first token is the model's end token."""
        if not self._end_tokens:
            return None
        prompt = self._next()
        body = {"temperature": 0, "logit_bias": _forced(self._end_tokens[0], prompt), "ignore_eos": ignored}
        return self._case("ignore_eos" if ignored else "end token", prompt, ["logit_bias"], **body)

    def _stopped(self) -> Case | None:
        """Return a request that ends at a string from the middle of the expected text, if possible across tokens."""
        prompt, tokens = self._greedy()
        text = self._texts.added(prompt.prompt_ids, tokens)
        middle = len(self._texts.added(prompt.prompt_ids, tokens[: len(tokens) // 2]))
        word = text[max(0, middle - 1) : middle + 2]
        if not word or UNDECODED in word:
            return None
        return self._case("stop", prompt, temperature=0, stop=["never said", word])

    def _nearly_stopped(self) -> Case | None:
        """Return a request whose answer ends with the beginning of a stop string, which a server must not keep back."""
        prompt, tokens = self._greedy()
        text = self._texts.added(prompt.prompt_ids, tokens)
        if not text or UNDECODED in text:
            return None
        stop = [f"{text[-1]} never said"]
        return self._case("stop, not reached", prompt, temperature=0, stop=stop, max_tokens=len(tokens))

    def _bad_words(self) -> Case | None:
        prompt, tokens = self._greedy()
        half = len(tokens) // 2
        before = self._texts.added(prompt.prompt_ids, tokens[:half])
        text = self._texts.added(prompt.prompt_ids, tokens[: half + 2])
        word = text[len(before) :].strip()
        if not word or UNDECODED in word:
            return None
        return self._case("bad_words", prompt, ["bad_words"], temperature=0, bad_words=[word])

    def _formed(self) -> Case:
        case = self._drawn("structured output", _NARROW, structured_outputs={"regex": f"[a-z]{{{_LETTERS}}}"})
        return replace(case, form=("a-z", _LETTERS))

    def _choices(self) -> Case:
        """Return a request of two prompts with as many choices as can be, up to 3."""
        case = self._drawn("n", _WIDE, n=min(3, self._max_choices))
        other = self._next()
        room = self._max_tokens - len(other.prompt_ids)
        body = {**case.body, "max_tokens": min(case.body["max_tokens"], room)}
        return replace(case, prompts=(*case.prompts, other), body=body)


def _forced(token: int, prompt: Prompt) -> dict[str, float]:
    """Return the bias by which a token is always the likeliest."""
    return {str(token): round(2 * float(np.ptp(prompt.logits[0])) + 10, 3)}


def _companions(prompt: Prompt, count: int) -> list[int]:
    """Return tokens whose logits differ by about the same in all rows, so that a penalty decides between them.

    A quarter of them are the prompt's, if it is long enough.
    """
    rows = prompt.logits.astype(np.float32)
    anchor = int(prompt.prompt_ids[-1])
    order = np.argsort(np.std(rows - rows[:, anchor : anchor + 1], axis=0), kind="stable")
    in_prompt = np.isin(order, prompt.prompt_ids)
    return [*order[in_prompt][: count // 4].tolist(), *order[~in_prompt][: count - count // 4].tolist()]


def _temperature(logits: np.ndarray, perplexity: float) -> float:
    """Return a temperature at which the first and the median row have at least a perplexity.

    Not near 1: a server that squares it, for instance, must draw other tokens.
    """
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
    if 0.7 < temperature < 1:
        temperature = 0.7
    elif 1 <= temperature < 1.4:
        temperature = 1.4
    return round(temperature, 4)
