"""The part of the check `served` on sampling, log-probabilities and text.

Each request of `served.cases` is sent twice, whole and streamed. Then the engines run teacher-forced on the answers'
tokens, and a second sampler (`verify.sampled`) computes from their logits which tokens, text and log-probabilities are
right.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.reports import SampledCase
from lockstep.errors import CheckError
from lockstep.runtime.model import Model
from lockstep.verify.golden.prompts import Prompt
from lockstep.verify.metrics import largest
from lockstep.verify.sampled.answer import Answer
from lockstep.verify.sampled.forced import History, read_logits, write_logits
from lockstep.verify.sampled.judge import Bounds, ChoiceRequest, Verdict, judge, judge_tokens, without
from lockstep.verify.sampled.rules import Rules
from lockstep.verify.sampled.texts import Texts
from lockstep.verify.served.cases import Case, Cases
from lockstep.verify.served.client import answers, gather, post
from lockstep.verify.served.server import Server
from lockstep.verify.served.tools import NO_GRAMMARS

_COMPLETIONS = "/v1/completions"
_CHATS = "/v1/chat/completions"
_MESSAGE = "Tell me of the city."


@dataclass(frozen=True)
class Received:
    """An answer. how: it was sent. bounds: of its logits' errors."""

    case: str
    how: str
    request: ChoiceRequest
    answer: Answer
    bounds: Bounds

    @property
    def histories(self) -> list[History]:
        prompt = self.request.prompt
        histories: list[History] = []
        if self.request.echo is not None and self.request.logprobs is not None:
            histories = [(prompt[:end], prompt[end : end + 1]) for end in range(1, len(prompt))]
        return [*histories, (prompt, self.answer.token_ids)]


@dataclass
class SamplingCheck:
    """One run. expected: golden's greedy tokens of each prompt. failures: lines."""

    server: Server
    prompts: Sequence[Prompt]
    expected: Sequence[Sequence[int]]
    texts: Texts
    received: list[Received] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def send(self, socket: Path, stream: bool) -> int:
        """Send all requests at once; return how many. stream: as events."""
        *cases, chat = self._cases
        sent = [self._ask(socket, case, stream) for case in cases]
        sent.append(self._chat(socket, chat, self.server.ready.max_seq_len, stream))
        await gather(sent, self.failures)
        return len(sent)

    @functools.cached_property
    def _cases(self) -> list[Case]:
        """The requests, once the server is ready; the last is a chat."""
        ready = self.server.ready
        limits = ready.max_batch_size, ready.max_seq_len
        cases = Cases(self.prompts, self.expected, self.texts, *limits, ready.eos_token_ids)
        return [*cases.all(ready.prompt_logprobs), cases.chat()]

    async def _ask(self, socket: Path, case: Case, stream: bool) -> None:
        prompts = [list(prompt.prompt_ids) for prompt in case.prompts]
        body = {**case.body, "model": self.server.name, "prompt": prompts}
        how = "streamed" if stream else "whole"
        with _name_case(case.name, how):
            replies = await self._answers(socket, _COMPLETIONS, body, stream, prompts)
        for number, answer in enumerate(replies):
            prompt_number, choice = divmod(number, body.get("n", 1))
            request = self._request(case, prompts[prompt_number], prompt_number, choice)
            self.received.append(Received(case.name, how, request, answer, self._bounds(case)))

    async def _answers(
        self, socket: Path, url: str, body: Mapping[str, Any], stream: bool, prompts: Sequence[Sequence[int]]
    ) -> list[Answer]:
        """Return the answers, after a check of their number and usage. Raises CheckError."""
        if stream:
            body = {**body, "stream_options": {"include_usage": True}}
        try:
            replies, counts = await answers(socket, url, body, stream)
        except CheckError as error:
            if NO_GRAMMARS in str(error):
                return []
            raise
        count = len(prompts) * body.get("n", 1)
        if len(replies) != count:
            raise CheckError(f"expected {count} answers, found {len(replies)}")
        if url == _COMPLETIONS:
            expected = sum(map(len, prompts)), sum(len(answer.token_ids) for answer in replies)
            if (counts["prompt_tokens"], counts["completion_tokens"]) != expected:
                raise CheckError(f"usage: expected {expected[0]} and {expected[1]} tokens, found {counts}")
        return replies

    async def _chat(self, socket: Path, case: Case, room: int, stream: bool) -> None:
        """Request a completion and a chat of the same prompt: their answers must be the same."""
        server = self.server
        if server.default.chat.fault is not None:
            return
        how = "streamed" if stream else "whole"
        common = {**case.body, "model": server.name}
        messages = [{"role": "user", "content": _MESSAGE}]
        with _name_case(case.name, how):
            chat_body = {"model": server.name, "messages": messages}
            prompt = (await post(socket, "/tokenize", chat_body, "served"))["tokens"]
            if len(prompt) + case.body["max_tokens"] > room:
                return
            (text,) = await self._answers(socket, _COMPLETIONS, {**common, "prompt": prompt}, stream, [prompt])
            count = common.pop("logprobs")
            body = {**common, "messages": messages, "logprobs": True, "top_logprobs": count}
            (chat,) = await self._answers(socket, _CHATS, body, stream, [prompt])
        request = self._request(case, prompt, 0, 0)
        bounds = self._bounds(case)
        self.received.append(Received(case.name, how, request, text, bounds))
        if bounds.largest and chat.text != text.text:  # the chat's tokens are not known
            return
        chat = replace(chat, token_ids=text.token_ids)
        if server.default.reasoning_format is not None:  # its content is only a part of the text
            chat = replace(chat, text=text.text)
        self.received.append(Received(case.name, f"{how} chat", replace(request, is_chat=True), chat, bounds))

    def _request(self, case: Case, prompt: Sequence[int], prompt_number: int, choice: int) -> ChoiceRequest:
        body = case.body
        rules = Rules.from_body({**body, "seed": body.get("seed", 0) + prompt_number}, self.server.ready.eos_token_ids)
        fields = {"logit_bias": "bias"}
        shown = [fields.get(name, name) for name in case.shows]
        plain = without(rules, *(name for name in shown if hasattr(rules, name)))
        echo = self.texts.decode(prompt) if body.get("echo") else None
        return ChoiceRequest(
            prompt,
            rules,
            plain,
            body["max_tokens"],
            choice,
            body.get("stop", ()),
            body.get("bad_words", ()),
            case.form,
            body.get("logprobs"),
            echo,
        )

    def _bounds(self, case: Case) -> Bounds:
        # The server prefills a repeated prompt in chunks, the judge's run goes token by token: last bits may differ.
        if self.server.ready.batch_invariant and not case.body.get("echo"):
            return Bounds()
        rms = max(prompt.bounds.rms(prompt.counts) for prompt in case.prompts)
        return Bounds(max(prompt.bounds.largest for prompt in case.prompts), rms)

    def judge(self, model: Model) -> dict[str, SampledCase]:
        """Judge the answers; return the results by case. model: the server's, opened here."""
        entries = []
        unique_histories: dict[History, None] = {}
        for received in self.received:
            if not received.answer.token_ids:
                self.failures.append(f"{received.case}, {received.how}: expected tokens, found none")
                continue
            entries.append(received)
            unique_histories |= dict.fromkeys(map(_hashable, received.histories))
        histories = list(unique_histories)
        verdicts: dict[str, dict[tuple[History, int], Verdict]] = {}
        with tempfile.TemporaryDirectory(prefix="lockstep-logits-") as folder:
            path = Path(folder, "logits.npy")
            rows: Mapping[History, np.ndarray] = {}
            if histories:
                write_logits(model, histories, path)
                rows = read_logits(path, histories)
            for received in entries:
                logits = [rows[_hashable(history)] for history in received.histories]
                by_answer = verdicts.setdefault(received.case, {})
                same = _hashable(received.histories[-1]), received.request.choice  # whole, streamed, in a chat
                if same not in by_answer:
                    tokens = received.answer.token_ids
                    by_answer[same] = judge_tokens(received.request, tokens, logits[-1], self.texts, received.bounds)
                    self.failures += [f"{received.case}, {received.how}: {line}" for line in by_answer[same].wrong]
                verdict = judge(received.request, received.answer, np.concatenate(logits), self.texts, received.bounds)
                self.failures += [f"{received.case}, {received.how}: {line}" for line in verdict.wrong]
                by_answer[same] |= verdict
        return {name: _summed([*by_request.values()]) for name, by_request in verdicts.items()}


def _hashable(history: History) -> History:
    prompt, answer = history
    return tuple(prompt), tuple(answer)


def _summed(verdicts: Sequence[Verdict]) -> SampledCase:
    errors = [verdict.logprob_error for verdict in verdicts if verdict.logprob_error is not None]
    max_logprob_error = largest([*errors]) if errors else None
    return SampledCase(
        answers=sum(verdict.answers for verdict in verdicts),
        tokens=sum(verdict.tokens for verdict in verdicts),
        decided=sum(verdict.decided for verdict in verdicts),
        near=sum(verdict.near for verdict in verdicts),
        max_logprob_error=max_logprob_error,
    )


@contextlib.contextmanager
def _name_case(case: str, how: str) -> Iterator[None]:
    try:
        yield
    except CheckError as error:
        raise CheckError(f"{case}, {how}: {error}") from None
