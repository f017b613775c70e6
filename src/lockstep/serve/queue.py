"""What the requests of a service hold of its queue and slots, as running totals.

Whether a request finds room is then known without a walk over all that wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.serve.stream import Active


@dataclass
class QueueTotals:
    """The totals of all prompts that have not ended.

    waiting: prompts that the engine has not admitted. prompt_tokens: of them. backlog_tokens: of them, and those that
    their answers may have. running: answers of admitted prompts that have not ended.
    """

    waiting: int = 0
    prompt_tokens: int = 0
    backlog_tokens: int = 0
    running: int = 0

    def add(self, active: Active) -> None:
        """Count a prompt that waits from now on."""
        self._count_waiting(active, 1)

    def admit(self, active: Active) -> None:
        """Count a prompt that waited as running. It still has all its choices."""
        self._count_waiting(active, -1)
        self.running += len(active.choices)

    def end_choice(self, active: Active) -> None:
        """Take off an answer that has ended; a prompt that waits keeps its place."""
        self.running -= active.admitted is not None

    def remove(self, active: Active) -> None:
        """Take off a prompt that is gone. All its choices have ended."""
        if active.admitted is None:
            self._count_waiting(active, -1)

    def _count_waiting(self, active: Active, sign: int) -> None:
        request = active.prompt.request
        tokens = len(request.prompt_ids)
        self.waiting += sign
        self.prompt_tokens += sign * tokens
        self.backlog_tokens += sign * (tokens + request.n * request.max_new_tokens)
