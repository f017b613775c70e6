"""KV cache that is moved: copied for further choices, swapped out, reused as a prefix, or in pages used before.

Needs no torch. In: an open model and the long prompt of a reference. Out: an entry of the report for each scenario.
Each request runs through the engine twice, alone and moved. Where engines are batch invariant, its logits must have the
same bits both times; else they must be within the tolerance of the precision. Where the reference has logits, both runs
are compared with these too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.artifacts.reports import MovedState
from lockstep.onnx_tools.judge import Bound, measure, wrong
from lockstep.runtime import Engine, Model, ModelOptions, Request, Sampling, Token
from lockstep.runtime.scheduler import Admission
from lockstep.step.pages import PAGE_SIZE
from lockstep.verify.golden.decoding import DecodingCheck
from lockstep.verify.golden.forced import Errors
from lockstep.verify.golden.prompts import Decoded, Long
from lockstep.verify.metrics import describe_error, largest

_NEW = 8  # tokens of an answer, one of which fills a page
_BEFORE = 6  # tokens before the end of a page where a prompt ends
_REQUESTS = 3  # that run together: one may have a neighbour on both sides
_STEPS = 4  # before requests are cancelled
# A temperature at which the noise decides most tokens, so that choices differ. With logprobs the logits are returned.
_DRAWN = Sampling(4.0, seed=1, logprobs=0)

Answers = dict[tuple[int, int], Decoded]  # {(index of a request, number of its choice): answer}


class _NotRunError(Exception):
    """The reason why this model, or its limits, cannot run a scenario."""


@dataclass(frozen=True)
class _ForcedRequest:
    """A teacher-forced request. prompt, new: tokens of its sequence. choice: it samples instead, as this choice."""

    sequence: int
    prompt: int
    new: int = _NEW
    choice: int | None = None


class MovedCheck:
    """The scenarios of one check, to whose failures errors are added."""

    def __init__(self, check: DecodingCheck, long: Long):
        self._check = check
        self._prompt = long.prompt
        self._model = _of_few_pages(check, len(long.prompt.prompt_ids))
        self._reference_rows = {**long.logits, **dict(zip(long.prompt.counts, long.prompt.logits))}
        self._tokens = np.array([*long.prompt.prompt_ids, *long.prompt.tokens], np.int64)
        self._whole = _ForcedRequest(0, len(long.prompt.prompt_ids), len(long.prompt.tokens))
        self._alone: dict[_ForcedRequest, Decoded] = {}

    def run(self) -> tuple[MovedState, ...]:
        scenarios: Mapping[str, Callable[[], list[float | None]]] = {
            "copies for n choices": self._copies,
            "swapped out and back": self._swapped,
            "a reused prefix": self._prefix,
            "slots of cancelled requests": self._cancelled,
            "the last pages of the cache": self._last_pages,
        }
        if len(self._tokens) < _NEW + 2:
            reason = f"the long prompt and its answer have fewer than {_NEW + 2} tokens"
            return tuple(MovedState(name, 0, None, reason) for name in scenarios)
        states = []
        for name, scenario in scenarios.items():
            try:
                errors = scenario()
                states.append(MovedState(name, len(errors), largest(errors)))
            except _NotRunError as reason:
                states.append(MovedState(name, 0, None, str(reason)))
        self._model.tables.pool.forget()  # the cached prefix
        return tuple(states)

    def _copies(self) -> list[float | None]:
        """Sample several choices of a prompt: of one within the first page, and of one that ends in a later one."""
        count = min(_REQUESTS, self._model.max_batch_size)
        self._expect(count > 1, "max_batch_size is 1")
        self._expect(self._model.tables.shares is not None, "this attention computes a prompt again for each choice")
        errors = []
        for length in dict.fromkeys((min(_BEFORE, self._before_page(1)), self._before_page(2))):
            choices = [_ForcedRequest(0, length, choice=number) for number in range(count)]
            decoded = _decode(self._engine(), [replace(self._request(choices[0]), n=count)])
            for number, request in enumerate(choices):
                errors.append(self._judge(request, f"choice {number} of {count} copies", decoded.get((0, number))))
        return errors

    def _swapped(self) -> list[float | None]:
        """Decode requests past the end of a page, with a free page for one of them: the youngest is swapped out."""
        count = min(_REQUESTS, self._model.max_batch_size)
        tables = self._model.tables
        self._expect(count > 1, "max_batch_size is 1: one request alone always has room")
        self._expect(tables.shares is not None, "this attention cannot be swapped out")
        full = PAGE_SIZE
        if len(self._tokens) >= 2 * PAGE_SIZE + _NEW:
            full = 2 * PAGE_SIZE  # a request is swapped with more than one page
        extra_pages = tables.pages_for(full + 1) - tables.pages_for(full)
        self._expect(len(self._tokens) >= full + _NEW and extra_pages > 0, "no request has a second page")
        requests = [_ForcedRequest(number, full - 2 - number) for number in range(count)]
        with self._pages_left(count * tables.pages_for(full) + extra_pages):
            engine = self._engine(admission="optimistic", lookahead=1)
            decoded = _decode(engine, map(self._request, requests))
        self._expect(engine.scheduler.num_swaps > 0, "steps of so few tokens end requests one after another")
        return self._judge_all(requests, "swapped out and back", decoded)

    def _prefix(self) -> list[float | None]:
        """Run the long prompt twice, the second time next to one that differs after the first chunk."""
        chunk_size = self._model.chunk_size
        engine = self._engine(prefix_caching=True)
        self._expect(engine.prefix_caching, "this attention, or a step of so few tokens, keeps no prefix")
        self._expect(self._whole.prompt > chunk_size, f"no prompt is longer than a chunk of {chunk_size} tokens")
        length = max(chunk_size + 1, min(chunk_size + _BEFORE, len(self._tokens) - _NEW))
        branch = _ForcedRequest(1, length, min(_NEW, len(self._tokens) - length))
        tokens = np.concatenate([self._tokens[:chunk_size], self._sequence(1)[chunk_size:]])
        (alone,) = _decode(engine, [self._request(self._whole)]).values()
        self._judge_reference(self._whole, "filling the prefix cache", alone)
        self._alone[self._whole] = alone
        hits = engine.prefix_hits
        decoded = _decode(engine, [self._request(self._whole), self._request(branch, tokens)])
        if engine.prefix_hits == hits:
            self._check.fail(self._prompt, "on a cached prefix: expected a hit, found none")
        (self._alone[branch],) = _decode(self._engine(), [self._request(branch, tokens)]).values()
        return self._judge_all([self._whole, branch], "on a cached prefix", decoded)

    def _cancelled(self) -> list[float | None]:
        """Cancel all but one of several sampling requests; run the config's prompts, and one more, in their slots.

        The device samples the tokens of the prompts.
        """
        check = self._check
        engine = self._engine()
        count = min(_REQUESTS, self._model.max_batch_size)
        stays = [_ForcedRequest(0, self._before_page(1))][: count - 1]  # none where there is one slot
        follows = _ForcedRequest(count, self._before_page(1))
        for request in stays:
            engine.add(self._request(request))
        for number in range(count - len(stays)):
            drawn = self._sequence(1 + number)[: self._before_page(2) - number]
            engine.add(Request(drawn, 2 * _NEW, sampling=Sampling(_DRAWN.temperature, seed=number)))
        tokens: list[Token] = []
        for _ in range(_STEPS):
            tokens += engine.step()
        for number in range(len(stays), count):
            engine.abort(number)
        new = min(_NEW, check.max_new_tokens)
        prompts = [Request(prompt.prompt_ids, new, stop_ids=check.stop_ids) for prompt in check.prompts]
        tokens += engine.run([self._request(follows), *prompts])
        decoded = _by_choice(tokens)
        for number, prompt in enumerate(check.prompts, count + 1):
            answer = decoded.get((number, 0), Decoded())
            if check.routes is None:
                how = "in the slot of a cancelled request"
                check.first_difference(prompt, how, replace(prompt, tokens=prompt.tokens[:new]), answer)
        judged = {count: follows, **dict(enumerate(stays))}
        how = "with cancelled requests"
        return [self._judge(request, how, decoded.get((number, 0))) for number, request in judged.items()]

    def _last_pages(self) -> list[float | None]:
        """Run the long prompt in the last slot, and in the last free pages of the cache."""
        tables = self._model.tables
        num_others = self._model.max_batch_size - 1
        ends = [*num_others * [1 + self._whole.new], self._whole.prompt + self._whole.new - 1]
        pages = sum(map(tables.pages_for, ends))
        self._expect(pages <= tables.pool.num_available, "the cache has no room for a request in each slot")
        requests = [Request(self._sequence(number)[:1], self._whole.new + 1) for number in range(1, num_others + 1)]
        with self._pages_left(pages):
            decoded = _decode(self._engine(), [*requests, self._request(self._whole)])
        return [self._judge(self._whole, "in the last pages of the cache", decoded.get((num_others, 0)))]

    def _before_page(self, number: int) -> int:
        """Return a length after which `_NEW` tokens cross the end of page `number`, or of the sequence."""
        return max(1, min(number * PAGE_SIZE - _BEFORE, len(self._tokens) - _NEW))

    def _expect(self, holds: bool, reason: str) -> None:
        if not holds:
            raise _NotRunError(reason)

    def _sequence(self, number: int) -> np.ndarray:
        """Return one of several token sequences; 0 is the long prompt with its answer."""
        return np.roll(self._tokens, -number * (len(self._tokens) // 7 + 1))

    def _request(self, request: _ForcedRequest, tokens: np.ndarray | None = None) -> Request:
        if tokens is None:
            tokens = self._sequence(request.sequence)
        prompt = tokens[: request.prompt]
        following = iter(tokens[request.prompt : request.prompt + request.new].tolist())
        if request.choice is not None:
            return Request(prompt, request.new, sampling=_DRAWN, choice=request.choice)
        return Request(prompt, request.new, lambda logits: next(following))

    def _engine(
        self, prefix_caching: bool = False, admission: Admission = "guaranteed", lookahead: int | None = None
    ) -> Engine:
        num_tokens = self._check.max_num_tokens
        return Engine(
            self._model, None, num_tokens, prefix_caching, admission, lookahead=lookahead, samples_on_host=True
        )

    @contextlib.contextmanager
    def _pages_left(self, count: int) -> Iterator[None]:
        """Allocate all pages of the cache but the last `count`."""
        pool = self._model.tables.pool
        pool.forget()
        pages = sorted(pool.allocate(pool.num_available))
        occupied = pages[: len(pages) - count]
        pool.release(pages[len(occupied) :])
        try:
            yield
        finally:
            pool.release(occupied)

    def _judge_all(self, requests: Sequence[_ForcedRequest], how: str, decoded: Answers) -> list[float | None]:
        return [self._judge(request, how, decoded.get((number, 0))) for number, request in enumerate(requests)]

    def _judge(self, request: _ForcedRequest, how: str, moved: Decoded | None) -> float | None:
        """Return the largest difference from the logits of the request alone, up to the first differing token."""
        if request not in self._alone:
            self._alone[request] = _decode(self._engine(), [self._request(request)])[0, request.choice or 0]
        alone = self._alone[request]
        moved = moved or Decoded()
        self._judge_reference(request, how, moved)
        where = f"prompt of {request.prompt} tokens, {how}, compared with alone"
        if len(moved.logits) != len(alone.logits):
            self._check.fail(self._prompt, f"{where}: expected {len(alone.logits)} tokens, found {len(moved.logits)}")
            return None
        # A near-tie of a router may be decided otherwise in another batch, and the logits jump.
        if self._check.routes is not None and not self._check.model.engines.batch_invariant:
            raise _NotRunError("a router's choices may depend on the batch")
        errors = list[float | None]()
        bound = self._prompt.bounds.largest
        for step, (expected, actual) in enumerate(zip(alone.logits, moved.logits)):
            error = measure(expected[None], actual[None], Bound(bound), 1.0)
            errors.append(error.max_abs_error)
            if wrong("logits", error):
                self._check.fail(self._prompt, f"step {step}, {where}: {describe_error(error.max_abs_error, bound)}")
                break
            if alone.tokens[: step + 1] != moved.tokens[: step + 1]:
                break
        self._check.same_bits(self._prompt, where, alone.logits, moved.logits)
        return largest(errors)

    def _judge_reference(self, request: _ForcedRequest, how: str, decoded: Decoded) -> None:
        """Compare logits with the reference's, where it has them and routers choose the same experts."""
        errors = Errors(self._prompt.bounds)
        if request.sequence == 0 and request.choice is None and self._check.routes is None:
            for count, logits in enumerate(decoded.logits, request.prompt):
                if count in self._reference_rows:
                    errors.add(count, self._reference_rows[count], logits)
        if wrong := errors.wrong():
            self._check.fail(self._prompt, f"after {wrong[0]} tokens, {how}: {wrong[1]}")


def _of_few_pages(check: DecodingCheck, longest: int) -> Model:
    """Return the model of a check; on a host another one with few pages and the same weights, so that pages run out.

    Its chunks are a page long where the prompt would else be one chunk.
    """
    model = check.model
    pool = check.model.tables.pool
    if not model.engines.backend.on_host:
        return model
    pages = 2 * model.max_batch_size * model.tables.pages_for(model.max_seq_len)  # for requests, and for a prefix
    chunk_size = model.chunk_size
    if longest <= chunk_size:
        chunk_size = PAGE_SIZE
    return Model.open(
        model.engines.path,
        model.assembly_json,
        check.weights_json,
        check.target.layers,
        ModelOptions(
            max_batch_size=model.max_batch_size,
            max_seq_len=model.max_seq_len,
            max_num_tokens=model.max_num_tokens,
            threads=check.threads,
            kv_bytes=min(pages, pool.num_pages) * pool.page_nbytes,
            chunk_size=chunk_size,
            cut_of=model,
        ),
    )


def _decode(engine: Engine, requests: Iterable[Request]) -> Answers:
    for number, request in enumerate(requests):
        engine.add(request, number)
    return _by_choice(engine.run())


def _by_choice(tokens: Iterable[Token]) -> Answers:
    answers: Answers = {}
    for token in tokens:
        answer = answers.setdefault((token.request, token.choice), Decoded())
        if token.token >= 0:  # else its logits are NaN or infinite
            answer.tokens.append(token.token)
        if token.logits is not None:
            answer.logits.append(token.logits)
    return answers
