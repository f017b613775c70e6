"""The check `served`: a server returns the golden check's tokens under load, and samples as its API says.

In: an engine set that golden passed, its reference and golden's report. Out: a report. The server is the one of
`lockstep serve`, on a Unix socket. Its answers to golden's prompts are compared alone; under a seeded load of requests
at random times, some of which are cancelled; with a cached prefix; with the engine killed in the middle; and with
drafts, if it verifies any. A model with a format of tool calls must make one. Requests with each parameter of the API
are compared with a second sampler (`served.sampling`). In the end, no request and no page may be in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from lockstep.artifacts.reports import PASS, ServedPhase, ServedReport, TokenDifference
from lockstep.runtime.model import CHUNK_SIZE, Model, ModelOptions, fitting_chunk_size
from lockstep.runtime.speculative import Speculative
from lockstep.runtime.tokenizer import tokenizer_path
from lockstep.step.pages import PAGE_SIZE
from lockstep.targets import Limits, Target
from lockstep.tolerances import Tolerances
from lockstep.verify.golden.prompts import Prompt, first_difference, read_golden, read_reference, short
from lockstep.verify.metrics import finish
from lockstep.verify.sampled.answer import Answer
from lockstep.verify.sampled.forced import History, read_logits, write_logits
from lockstep.verify.sampled.texts import Texts
from lockstep.verify.served.client import complete, gather, get
from lockstep.verify.served.sampling import SamplingCheck
from lockstep.verify.served.server import EngineFiles, OpenServer, Server
from lockstep.verify.served.tools import calls_tools, tool_call

_NUM_RANDOM = 24  # requests among the golden prompts
_NUM_CANCELLED = 8  # of them
_MAX_INTERVAL_S = 0.02  # between two arrivals
_DRAFT_TOKENS = 3
_RESTART_S = 300.0


def check(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    reference_json: Path,
    golden_json: Path,
    target: Target,
    tolerance: Tolerances,
    limits: Limits,
    out: Path,
    threads: int | None = None,
    *,
    open_server: OpenServer,
) -> Path:
    """Check a server on an engine set, and write the report to `out`.

    tolerance: of logits. limits: the config's. open_server: makes the server. Raises CheckError for the first failure,
    with the report in `<out>.failed.json`; InputError for inputs that do not belong together.
    """
    prompts, long, reference = read_reference(Path(reference_json), (), tolerance)
    golden = read_golden(golden_json, target, len(prompts))
    expected = [list(entry.tokens) for entry in golden.prompts]
    long_prompt = None
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    if long is not None:
        long_prompt = long.prompt
        longest = max(longest, len(long_prompt.prompt_ids))
    # A prefix is reused in whole chunks: they must be shorter than the prompt that shows it.
    chunk_size = None
    if longest <= fitting_chunk_size(CHUNK_SIZE, limits.max_batch_size, limits.max_num_tokens):
        chunk_size = PAGE_SIZE
    files = EngineFiles(
        str(engines_json),
        str(assembly_json),
        str(weights_json),
        target.layers,
        # The long prompt is as long as a request can be.
        {**asdict(limits), "max_input_len": limits.max_seq_len},
        threads,
        chunk_size,
    )
    server = open_server(files, target.model)
    # The target drafts for itself: that takes no more weights, and most of its drafts are right.
    drafts = Speculative(_DRAFT_TOKENS, str(target), files.engines, files.assembly, files.weights, target.layers)
    sampling = SamplingCheck(server, prompts, expected, Texts(tokenizer_path(assembly_json)))

    checked = _Check(server, prompts, expected, long_prompt, reference.max_new_tokens, drafts, sampling)
    report = asyncio.run(checked.run(target))
    model = open_model(files)  # the server has ended: an accelerator has memory for the engines again
    checked.judge(model)
    phases = {name: phase.entry() for name, phase in checked.phases.items()}
    report = replace(report, phases=phases, sampling=sampling.judge(model))
    failures = [*checked.failures, *sampling.failures]
    return finish(out, report, next(iter(failures), None))


def open_model(files: EngineFiles) -> Model:
    limits = files.limits
    return Model.open(
        files.engines,
        files.assembly,
        files.weights,
        files.layers,
        ModelOptions(
            max_batch_size=limits["max_batch_size"],
            max_seq_len=limits["max_seq_len"],
            max_num_tokens=limits["max_num_tokens"],
            threads=files.threads,
            chunk_size=files.chunk_size,
        ),
    )


@dataclass
class _Phase:
    """The requests of one phase, and how their answers differ."""

    num_golden: int = 0
    num_random: int = 0
    num_cancelled: int = 0
    differences: list[TokenDifference] = field(default_factory=list)

    def entry(self) -> ServedPhase:
        return ServedPhase(self.num_golden, self.num_random, self.num_cancelled, tuple(self.differences))


@dataclass(frozen=True)
class _Received:
    """An answer to a golden prompt. expected: golden's. how: it was requested. exact: near-ties are no excuse."""

    prompt: Prompt
    expected: Sequence[int]
    answer: Answer
    how: str
    phase: _Phase
    exact: bool

    @property
    def history(self) -> History:
        return tuple(self.prompt.prompt_ids), tuple(self.expected)


@dataclass
class _Check:
    """One run of the check.

    expected: golden's tokens of each prompt. failures: lines, in order of detection.
    """

    server: Server
    prompts: Sequence[Prompt]
    expected: Sequence[Sequence[int]]
    long: Prompt | None
    max_new_tokens: int
    drafts: Speculative
    sampling: SamplingCheck
    socket: Path = Path()
    failures: list[str] = field(default_factory=list)
    phases: dict[str, _Phase] = field(default_factory=dict)
    received: list[_Received] = field(default_factory=list)
    draw: Random = field(default_factory=lambda: Random(0))

    async def run(self, target: Target) -> ServedReport:
        """Run all phases, and return the report."""
        with tempfile.TemporaryDirectory(prefix="lockstep-served-") as folder:
            self.socket = Path(folder, "socket")
            async with self.server.listening(self.socket):
                self.phases["alone"] = await self._alone("alone")
                self.phases["under load"] = await self._under_load()
                self.phases["on a prefix"] = await self._on_a_prefix()
                if calls_tools(self.server):
                    self.phases["tool call"] = await self._tool_call()
                self.phases["sampled"] = await self._sampled(stream=False)
                self.phases["engine killed"] = await self._engine_killed()
                self.phases["with drafts"] = await self._with_drafts()
                self.phases["sampled, streamed"] = await self._sampled(stream=True)
                await self._check_idle()
                ready = self.server.ready
                hits = self.server.total("prefix_hits")
        return ServedReport(
            result=PASS,
            target=target,
            engine_digest=ready.engine_digest,
            identity=ready.identity,
            batch_invariant=ready.batch_invariant,
            phases={},
            prefix_hit_tokens=hits,
            restarts=self.server.restarts,
            num_pages=ready.num_pages,
            sampling={},
        )

    def judge(self, model: Model) -> None:
        """Judge the answers to golden prompts. model: the server's, opened here."""
        decode = self.server.default.tokenizer.decode
        model_logits = self._logits_after_golden(model)
        faults = []
        for received in self.received:
            logits = model_logits.get(received.history, received.prompt.logits)
            difference, fault = first_difference(
                received.prompt, received.expected, received.answer.token_ids, logits, decode
            )
            if difference is not None:
                received.phase.differences.append(difference)
                if received.exact and fault is None:
                    fault = difference.step, f"expected token {difference.reference}, found {difference.found}"
            if fault is not None:
                faults.append(f"prompt {short(received.prompt.text)!r}, {received.how}: step {fault[0]}: {fault[1]}")
        self.failures[:0] = faults

    def _logits_after_golden(self, model: Model) -> dict[History, np.ndarray]:
        """Return the model's logits after golden's tokens where these are not the reference's, and an answer differs.

        The reference has no logits there: at a near-tie, golden took another token and went on from it.
        """
        unique_histories = set()
        for received in self.received:
            expected = list(received.expected)
            if expected != list(received.answer.token_ids) and expected != list(received.prompt.tokens):
                unique_histories.add(received.history)
        histories = sorted(unique_histories)
        if not histories:
            return {}
        with tempfile.TemporaryDirectory(prefix="lockstep-logits-") as folder:
            path = Path(folder, "logits.npy")
            write_logits(model, histories, path)
            return read_logits(path, histories)

    async def _alone(self, how: str) -> _Phase:
        phase = _Phase()
        for number in range(len(self.prompts)):
            await self._golden(number, how, phase)
        return phase

    async def _with_drafts(self) -> _Phase:
        if not self.server.ready.verifies_drafts:
            return _Phase()
        phase = await self._alone("with drafts")
        if not self.server.drafts():
            self.failures.append("drafts: expected the engine that was started again to make some, found none")
        return phase

    async def _under_load(self) -> _Phase:
        """Send each golden prompt twice, among random requests."""
        phase = _Phase(num_random=_NUM_RANDOM, num_cancelled=_NUM_CANCELLED)
        draw = self.draw
        numbers = 2 * list(range(len(self.prompts)))
        tasks = [self._golden(number, "under load", phase) for number in numbers]
        tasks += [self._random_request(number < _NUM_CANCELLED) for number in range(_NUM_RANDOM)]
        draw.shuffle(tasks)

        async def later(seconds: float, task: Any) -> None:
            await asyncio.sleep(seconds)
            await task

        await gather([later(draw.uniform(0, _MAX_INTERVAL_S * len(tasks) / 4), task) for task in tasks], self.failures)
        return phase

    async def _on_a_prefix(self) -> _Phase:
        """Send the long prompt twice: the second request finds the prefix of the first."""
        phase = _Phase()
        ready = self.server.ready
        if self.long is None or not ready.prefix_caching or len(self.long.prompt_ids) <= ready.chunk_size:
            return phase
        answers = []
        before = self.server.total("prefix_hits")
        for how in ("leaving a prefix", "on the prefix that was left"):
            answer = await self._answer(self.long.prompt_ids, len(self.long.tokens), logprobs=1, ignore_eos=True)
            self._receive(_Received(self.long, self.long.tokens, answer, how, phase, exact=False))
            answers.append(answer)
        miss, hit = answers
        if self.server.total("prefix_hits") == before:
            self.failures.append("prefix: expected tokens of the long prompt to be found again, found none")
        if self.server.ready.batch_invariant and (hit.token_ids, hit.logprobs) != (miss.token_ids, miss.logprobs):
            self.failures.append("prefix: expected the same log-probabilities with and without it, found others")
        return phase

    async def _tool_call(self) -> _Phase:
        num_answers, fault = await tool_call(self.server, self.socket)
        if fault is not None:
            self.failures.append(fault)
        return _Phase(num_answers)

    async def _sampled(self, stream: bool) -> _Phase:
        """Send the requests of `served.sampling`. Streamed ones come last, when the engine drafts."""
        return _Phase(await self.sampling.send(self.socket, stream))

    async def _engine_killed(self) -> _Phase:
        """Send all golden prompts at once, and kill the engine at the first token. The next engine drafts."""
        phase = _Phase()
        restarts = self.server.restarts
        first = asyncio.Event()
        if self.server.ready.verifies_drafts:
            self.server.speculate(asdict(self.drafts))
        tasks = [
            asyncio.create_task(self._golden(number, "with the engine killed", phase, first))
            for number in range(len(self.prompts))
        ]
        await asyncio.wait([asyncio.create_task(first.wait()), *tasks], return_when=asyncio.FIRST_COMPLETED)
        if self.server.engine_pid is not None:
            os.kill(self.server.engine_pid, signal.SIGKILL)
        await gather(tasks, self.failures)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._restarted(restarts), _RESTART_S)
        if self.server.restarts != restarts + 1:
            self.failures.append(f"engine: expected it started again once, found {self.server.restarts - restarts}")
        return phase

    async def _restarted(self, before: int) -> None:
        while self.server.restarts == before or not self.server.is_ready:
            await asyncio.sleep(0.01)

    async def _check_idle(self) -> None:
        status: Any = None
        for _ in range(500):
            status = await get(self.socket, "/status")
            if not (status["running"] or status["waiting"] or status["streams"] or status["pages"]["used"]):
                return
            await asyncio.sleep(0.01)
        self.failures.append(
            f"afterwards: expected no request and no page in use, found {status['running']} running, "
            f"{status['waiting']} waiting, {status['streams']} streams, {status['pages']['used']} pages"
        )

    async def _golden(self, number: int, how: str, phase: _Phase, first: asyncio.Event | None = None) -> None:
        """Send a golden prompt. first: set when its first token has come."""
        prompt = self.prompts[number]
        answer = await self._answer(prompt.text, self.max_new_tokens, first)
        exact = self.server.ready.batch_invariant
        self._receive(_Received(prompt, self.expected[number], answer, how, phase, exact))

    def _receive(self, received: _Received) -> None:
        received.phase.num_golden += 1
        self.received.append(received)

    async def _answer(
        self, prompt: str | Sequence[int], max_tokens: int, first: asyncio.Event | None = None, **body: Any
    ) -> Answer:
        request = {"model": self.server.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **body}
        answer = Answer()
        async for answer in complete(self.socket, request):
            if first is not None and answer.token_ids:
                first.set()
        return answer

    async def _random_request(self, is_cancelled: bool) -> None:
        """Send a request whose answer is not compared."""
        draw = self.draw
        ready = self.server.ready
        longest = min(64, ready.max_seq_len // 2)
        body = {
            "model": self.server.name,
            "prompt": [draw.randrange(ready.vocab_size) for _ in range(draw.randint(1, longest))],
            "max_tokens": draw.randint(1, longest),
            "temperature": draw.choice([0, 1]),
            "top_p": 0.9,
            "seed": draw.randrange(1 << 32),
            "ignore_eos": True,
        }
        leave_after = draw.randint(0, 6) if is_cancelled else None
        async for _ in complete(self.socket, body, leave_after):
            pass
