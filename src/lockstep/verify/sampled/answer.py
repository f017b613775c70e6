"""An answer as a server gave it, of one choice: what `judge` looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Answer:
    """Token ids, text, why it ended (None: it has not), and the log-probabilities if requested.

    logprobs, tokens, offsets, top: an entry for each token (of the prompt's too, where that is repeated): its
    log-probability, its text, where that begins in the answer's, and those of the likeliest by text. None: for the
    first of a prompt. Chats have no offsets.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    top: list[Mapping[str, float] | None] = field(default_factory=list)
