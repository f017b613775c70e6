"""How the tokens of a request are to be chosen: the body of a completion in, the token that follows logits out.

In order: bias, banned tokens, penalties, temperature, min-p, top-k, top-p, draw (docs/scheduling.md). Computed in
float64, where servers take float32: `Chosen.may_be` says which tokens are too near to the chosen one to be told from
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from lockstep.tolerances import SAMPLER
from lockstep.verify.sampled.noise import exponential_noise


@dataclass(frozen=True)
class Rules:
    """What a body says of choosing tokens; values that it leaves out are those of docs/serving.md.

    top_k: 0 for all tokens. bias: by token. stop_ids: tokens that end the answer.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    @classmethod
    def from_body(cls, body: Mapping[str, Any], eos_token_ids: Collection[int]) -> Rules:
        """Read the body of a completion, or of a chat."""
        plain = {item.name: body[item.name] for item in fields(cls) if item.name in body}
        bias = {int(token): float(value) for token, value in body.get("logit_bias", {}).items()}
        ends = frozenset(body.get("stop_token_ids", ()))
        if not body.get("ignore_eos"):
            ends |= frozenset(eos_token_ids)
        return cls(**plain, bias=bias, stop_ids=ends)


@dataclass(frozen=True)
class Chosen:
    """The token that rules choose.

    near: scores of all tokens, of which the largest wins; -inf for those that are left out whatever the logits' errors.
    best: the largest score of the tokens that are kept whatever these errors; -inf where there is none. error: of a
    score.
    """

    token: int
    best: float
    near: np.ndarray
    error: float

    def may_be(self, token: int) -> bool:
        """Return whether another token is as good, within the error."""
        if not np.isfinite(self.near[token]):
            return False
        rounding = SAMPLER * max(1.0, abs(float(self.near[token])))
        return bool(self.near[token] >= self.best - self.error - rounding)


def choose(
    rules: Rules,
    logits: np.ndarray,
    prompt: Sequence[int],
    answer: Sequence[int],
    noise: np.ndarray | None = None,
    banned: Collection[int] = (),
    allowed: Collection[int] | None = None,
    error: float = 0.0,
) -> Chosen:
    """Choose the token that follows prompt and answer.

    logits: [vocab_size] after them. noise: of the tokens there, above a temperature of 0. banned: tokens that would
    complete a bad word. allowed: those of a grammar; None: all. error: how far two runs of the same logits may be
    apart.
    """
    changed = _changed(rules, logits.astype(np.float64), prompt, answer, banned, allowed)
    factor = max(rules.repetition_penalty, 1 / rules.repetition_penalty)
    if noise is None:
        return Chosen(int(np.argmax(changed)), float(changed.max()), changed, 2 * factor * error)
    weights = (changed - changed.max()) / rules.temperature  # logarithms
    slack = 2 * factor * error / rules.temperature
    rounding = SAMPLER * max(1.0, float(np.abs(changed[np.isfinite(changed)]).max()) / rules.temperature)
    scores = weights - np.log(noise)  # logarithms of weights divided by exponential noise
    ordered = np.sort(weights[weights > -np.inf])[::-1]

    def truncated(slack: float) -> np.ndarray:
        return np.where(weights >= _least_weight(rules, ordered, slack), scores, -np.inf)

    error = slack + rounding
    return Chosen(int(np.argmax(truncated(0.0))), float(truncated(-error).max()), truncated(error), error)


def noises(rules: Rules, prompt: Sequence[int], count: int, vocab_size: int, choice: int) -> list[np.ndarray | None]:
    """Return the noise after the prompt and after each of an answer's `count` tokens but the last, in order."""
    if not rules.temperature:
        return [None] * count
    return [*exponential_noise(rules.seed, choice, range(len(prompt), len(prompt) + count), vocab_size)]


def _changed(
    rules: Rules,
    logits: np.ndarray,
    prompt: Sequence[int],
    answer: Sequence[int],
    banned: Collection[int],
    allowed: Collection[int] | None,
) -> np.ndarray:
    """Return logits with bias, bans and penalties: without them where they leave no token."""
    in_grammar = np.full(len(logits), allowed is None)
    in_grammar[list(allowed or ())] = True
    changed = np.where(in_grammar, logits, -np.inf)
    for token, value in rules.bias.items():
        changed[token] += value
    changed[list(banned)] = -np.inf
    if len(answer) < rules.min_tokens:
        changed[[token for token in rules.stop_ids if 0 <= token < len(logits)]] = -np.inf
    for token in {*prompt, *answer}:
        # A penalty always lowers a logit: dividing would raise one below 0.
        if changed[token] > 0:
            changed[token] *= 1 / rules.repetition_penalty
        else:
            changed[token] *= rules.repetition_penalty
    for token in set(answer):
        changed[token] -= rules.presence_penalty + rules.frequency_penalty * list(answer).count(token)
    if np.all(changed == -np.inf):
        return np.where(in_grammar, logits, -np.inf)
    return changed


def _least_weight(rules: Rules, ordered: np.ndarray, slack: float) -> float:
    """Return the least weight that min-p, top-k and top-p keep.

    ordered: weights, logarithms, the largest first, which is 0. slack: how far below the edge a token may be to be kept
    nevertheless; below 0: how far above it a token must be.
    """
    edge = -np.inf
    if rules.min_p:
        edge = float(np.log(rules.min_p) - slack)
    largest = ordered[ordered >= edge]
    if 0 < rules.top_k < len(largest):
        last = rules.top_k  # the first token that is left out
        if slack >= 0:
            last = rules.top_k - 1
        edge = max(edge, largest[last] - slack)
        largest = largest[: rules.top_k]
    if rules.top_p < 1:
        parts = np.exp(largest)
        tail = np.cumsum(parts[::-1])[::-1]
        before = np.cumsum(parts) - parts
        # At the edge all before it may be smaller by the slack, and all others larger.
        shares = before * np.exp(-2 * slack) * (1 - rules.top_p)
        count = int(np.sum(shares < rules.top_p * tail))
        if slack >= 0:
            edge = max(edge, largest[count - 1] - slack)
        elif count < len(largest):
            edge = max(edge, largest[count] - slack)
    return edge
