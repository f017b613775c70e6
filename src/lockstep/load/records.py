"""The requests of a run, and what the client saw of each; times from its start."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

COMPLETED = "completed"
CANCELLED = "cancelled"
REFUSED = "refused"
FAILED = "failed"


@dataclass(frozen=True)
class Prompt:
    """A prompt: text, token ids or messages, tokens to ask for, and its arrival in seconds, of a trace."""

    content: str | list[int] | list[dict[str, Any]]
    max_tokens: int
    arrival: float | None = None


@dataclass(frozen=True)
class Planned:
    """A request before it is sent; cancel_after: seconds from its sending, None: never. stream: in events."""

    number: int
    scheduled: float
    body: bytes
    path: str
    cancel_after: float | None = None
    stream: bool = True


@dataclass(slots=True)
class Record:
    """One request, as the client saw it.

    scheduled: when it was due; sent: when its bytes were handed to the socket, connected; chunks: when each piece of
    text came; end: when the answer was whole, or the request was over otherwise.
    input_tokens, output_tokens: what the server's `usage` says; of Triton's answers, what they hold.
    """

    number: int
    scheduled: float
    sent: float | None = None
    chunks: list[float] = field(default_factory=list)
    end: float | None = None
    status: str = FAILED
    http_status: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    text: str = ""

    @property
    def latency(self) -> float | None:
        """Return the seconds from the scheduled send to the end of the answer."""
        return None if self.end is None else self.end - self.scheduled

    @property
    def ttft(self) -> float | None:
        """Return the seconds from the scheduled send to the first piece of text."""
        return self.chunks[0] - self.scheduled if self.chunks else None

    @property
    def tpot(self) -> float | None:
        """Return the seconds per output token, from the first piece of text to the last."""
        if not self.chunks or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Return the seconds between the pieces of text."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:])]

    def to_json(self) -> dict[str, Any]:
        """Return all but the text, which may be a user's."""
        return {key: value for key, value in asdict(self).items() if key != "text"}
