"""A server's answer, of one choice: the input of `judge`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Answer:
    """Token ids, text, finish reason (None: not finished), and the log-probabilities if requested.

    logprobs, tokens, offsets, top: an entry for each token (of the prompt's too, where that is echoed): its
    log-probability, its text, the offset of that in the answer's, and {text: log-probability} of the likeliest. None:
    for the first of a prompt. Chats have no offsets.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    top: list[Mapping[str, float] | None] = field(default_factory=list)
