"""A model that runs: engines bound to weights, a KV cache, and `step`, on which everything else is built."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from lockstep.backends.engine_set import EngineSet
from lockstep.errors import InputError
from lockstep.runtime.adapters import Adapters, unknown_adapter
from lockstep.runtime.binding import Binder
from lockstep.runtime.checkpoints import Checkpoint, Checkpoints, check_shares
from lockstep.runtime.request import CheckpointFiles
from lockstep.step import host_memory
from lockstep.step.advance import Advance, Executor, Observer, check, then_decode
from lockstep.step.host import HostExecutor
from lockstep.step.logits_pipeline import Sampler
from lockstep.step.pages import PAGE_SIZE
from lockstep.step.sampling import Logprobs
from lockstep.targets import Limits

_GREEDY = Sampler()
_Result = TypeVar("_Result")
# Prompt tokens of one prefill chunk, unless a step has less room. Where the bits do not depend on the chunks (on GPUs),
# small chunks fill steps better, and more of a prefix can be reused.
CHUNK_SIZE = 256
SMALL_CHUNK_SIZE = PAGE_SIZE


@dataclass(frozen=True)
class ModelOptions:
    """How a model is opened.

    max_batch_size, max_seq_len, max_num_tokens: default to the limits that the engines were built for; engines without
    limits take 4 requests of 256 tokens, and any number of tokens in a step. threads: of the CPU. low_memory: read the
    weights from memory-mapped files in each step instead of repacking a copy: slower. kv_bytes: memory for the KV
    cache, or below 1 the fraction of free memory; by default, on a CPU, a quarter of the container's or machine's
    memory. chunk_size: long prompts are computed in chunks that end at its multiples; by default 256 on a CPU, else 64.
    adapters_json: the manifest of its adapters. cut_of: an open model; if it has the same engines and weights,
    its bound layers are reused. others: further checkpoints that the engines run with. max_bound: checkpoints that are
    in memory at a time; None: all. restarted: an earlier process served the same; what it had need not be there.
    """

    max_batch_size: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    threads: int | None = None
    low_memory: bool = False
    kv_bytes: float | None = None
    chunk_size: int | None = None
    adapters_json: str | os.PathLike | None = None
    cut_of: Model | None = None
    others: Sequence[CheckpointFiles] = ()
    max_bound: int | None = None
    restarted: bool = False


class Model:
    """A model that runs requests in slots 0 to max_batch_size-1. Not thread-safe: the backend has its own threads."""

    def __init__(
        self,
        executor: Executor,
        max_num_tokens: int | None,
        engines: EngineSet,
        layers: int,
        chunk_size: int,
        checkpoints: Checkpoints,
        adapters: Adapters | None = None,
    ):
        self.engines = engines
        self.chunk_size = chunk_size
        self.checkpoints = checkpoints
        self.layers = layers
        self.vocab_size = engines.assembly.vocab_size
        self.max_batch_size = executor.num_slots
        self.max_seq_len = executor.max_seq_len
        self.max_num_tokens = max_num_tokens
        self.executor = executor
        self.tables = executor.tables
        self.async_scheduling = executor.async_scheduling
        self.processes_logits = executor.processes_logits  # `set_sampling` takes all parameters, and masks are used
        self.adapters = adapters

    @classmethod
    def open(
        cls,
        engines_json: str | os.PathLike,
        assembly_json: str | os.PathLike,
        weights_json: str | os.PathLike,
        layers: int | str = "all",
        options: ModelOptions = ModelOptions(),
    ) -> Model:
        """Open engines, weights and KV cache for the first `layers` layers.

        Raises InputError for limits or a layer count that the model does not allow, or a checkpoint of another shape,
        and CheckError for engines that do not fit this machine.
        """
        engines = EngineSet.open(engines_json, assembly_json)
        num_slots, max_seq_len, max_num_tokens = _limits(engines, assembly_json, options)
        first = Checkpoint("", Path(assembly_json), Path(weights_json), engines.assembly)
        checkpoints = [first]
        for files in options.others:
            assembly = check_shares(first.assembly_json, engines.assembly, Path(files.assembly))
            paths = Path(files.assembly), Path(files.weights)
            checkpoints.append(Checkpoint(files.name, *paths, assembly, files.weights_sha256))
        bound = checkpoints[: options.max_bound]
        if options.restarted:  # the files of others may be damaged
            bound = [first] * len(bound)
        shared = None  # a draft that is a cut of the model: its layers are in memory already
        cut_of = options.cut_of
        if cut_of is not None:
            is_same = cut_of.engines.digest() == engines.digest() and cut_of.weights_sha256 == first.weights_sha256
            if is_same and isinstance(cut_of.executor, HostExecutor):
                shared = cut_of.executor.networks[0]
        # On a device, weights are replaced in place.
        shares_blocks = len(checkpoints) > 1 and engines.backend.on_host
        binder = Binder(engines, layers, options.threads, options.low_memory, shares_blocks)
        networks = [binder.bind(checkpoint.weights_json, shared) for checkpoint in bound]
        chunk_size = options.chunk_size
        kv_bytes = options.kv_bytes
        if chunk_size is None:
            preferred = CHUNK_SIZE if engines.backend.on_host else SMALL_CHUNK_SIZE
            chunk_size = fitting_chunk_size(preferred, num_slots, max_num_tokens)
        if chunk_size < 1:
            raise InputError(f"chunk_size: expected at least 1, found {chunk_size}")
        if kv_bytes is not None and kv_bytes <= 0:
            raise InputError(f"kv_bytes: expected at least 1, found {kv_bytes}")
        executor = engines.backend.executor(networks, num_slots, max_seq_len, max_num_tokens, kv_bytes)
        if executor is None:
            executor = HostExecutor(networks, num_slots, max_seq_len, chunk_size, host_bytes(kv_bytes))
        manifests = {"": options.adapters_json, **{files.name: files.adapters for files in options.others}}
        adapters = Adapters.open(manifests, engines.assembly, networks, executor, options.restarted)
        pool = Checkpoints(checkpoints, executor, binder.bind, bound)
        return cls(executor, max_num_tokens, engines, binder.num_layers, chunk_size, pool, adapters)

    @property
    def assembly_json(self) -> Path:
        return self.checkpoints[""].assembly_json

    @property
    def eos_token_ids(self) -> Sequence[int]:
        return self.checkpoints[""].eos_token_ids

    @property
    def weights_sha256(self) -> str:
        return self.checkpoints[""].weights_sha256

    @functools.cached_property
    def libraries(self) -> dict[str, str]:
        """Return the versions of the libraries that compute besides the backend's own."""
        return self.engines.libraries()

    def step(self, advances: Sequence[Advance]) -> np.ndarray:
        """Advance any mix of requests by one or several tokens each.

        Returns the logits after each request's last token, [len(advances), vocab_size] float32, in the order of
        `advances`; one row after each of its tokens for an advance that `verifies`.

        Raises InputError, and changes nothing, for a slot out of range or named twice, a start other than 0 or the
        slot's length, a token outside the vocabulary, no token, or more than max_seq_len or max_num_tokens.
        """
        return self._run(advances, self.executor.logits)

    def step_tokens(self, advances: Sequence[Advance], following: bool | Sequence[Advance] = False) -> np.ndarray:
        """Run a step and return each request's next token, [len(advances)] int64.

        The token is the most likely one, or sampled as `set_sampling` says; on a GPU nothing else is copied back. -1
        where the largest logit is NaN or infinite.

        following: the next step as far as it is known: prompts, and slots of this step that continue with the token
        that it chooses (`PREVIOUS_TOKEN`); True for the latter in all slots. A GPU launches it before the tokens of
        this step are back (`async_scheduling`). The step that then follows may be a part of it, or any other.
        """
        next_advances = then_decode(advances) if following is True else following or ()
        return self._run(advances, lambda advances: self.executor.tokens(advances, next_advances))

    def step_with_logits(self, advances: Sequence[Advance], rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Run a step and return each request's next token, as `step_tokens` does, and the logits of some rows.

        rows: indices into the rows of all advances (one each, more where one `verifies`). Returns tokens, and logits
        [len(rows), vocab_size] float32; on a GPU no other logits are copied back.
        """
        return self._run(advances, lambda advances: self.executor.tokens_and_logits(advances, rows))

    @property
    def gives_all_logits(self) -> bool:
        """Return whether `logits_after` can be called: other executors compute logits after last tokens alone."""
        return isinstance(self.executor, HostExecutor)

    @property
    def verifies_drafts(self) -> bool:
        """Return whether steps verify drafts (`Advance.verifies`) with the bits of plain decoding.

        A row's bits must not depend on the number of rows, and no layer may have a state, since rejected tokens could
        not be removed from it.
        """
        return self.can_forget and self.engines.batch_invariant

    @property
    def can_forget(self) -> bool:
        """Return whether `keep` can be called: a state cannot be rolled back."""
        return self.executor.max_verify_tokens > 0 and not self.has_state

    @property
    def max_verify_tokens(self) -> int:
        """Return the limit of tokens of a step with drafts: more would cost as much as separate steps."""
        return self.executor.max_verify_tokens

    def check_verifies_drafts(self) -> None:
        if self.has_state:
            raise InputError(
                "speculative: expected a model whose layers keep keys and values, found one with a state, from which "
                "wrong drafts cannot be taken back; leave it out"
            )
        if not self.verifies_drafts:
            raise InputError(
                "speculative: expected a backend whose rows have the same bits in any number, such as onnxruntime, "
                f"found {self.engines.manifest.backend} on this machine; leave it out"
            )

    def room(self, length: int) -> int:
        """Return how many tokens can follow `length` tokens before a slot's memory is reallocated."""
        return self.executor.room(length)

    def keep(self, slot: int, length: int) -> None:
        """Forget the tokens of a slot after its first `length`: rejected drafts."""
        if length < self.executor.lengths[slot]:
            self.executor.keep(slot, length)

    def check_gives_all_logits(self) -> None:
        if not self.gives_all_logits:
            raise InputError(
                "prompt_logprobs: expected a backend that computes the logits after all tokens of a prompt, such as "
                f"onnxruntime, found {self.engines.manifest.backend}; leave them out"
            )

    def logits_after(self, number: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the logits after all tokens of `advances[number]` of the last step, some rows at a time.

        See `HostExecutor.logits_after`.
        """
        return cast(HostExecutor, self.executor).logits_after(number)

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        self.executor.observe(observer)
        try:
            yield
        finally:
            self.executor.observe(None)

    def set_sampling(self, slot: int, sampler: Sampler) -> None:
        """Set how `step_tokens` chooses a slot's tokens, until the slot is released.

        Raises InputError for a sampling that needs logits (`Sampling.needs_logits`) on a backend that only draws.
        """
        if sampler.sampling.needs_logits and not self.processes_logits:
            raise InputError(
                "sampling: expected temperature, top_k, top_p, min_p and seed alone, found what needs logits; take "
                "steps that give logits, and sample with `Sampler`"
            )
        self.executor.set_sampling(slot, sampler)

    def set_adapter(self, slot: int, adapter: str | None) -> None:
        """Compute a slot's tokens with an adapter, or None, until the slot is released.

        Raises InputError for an unknown name, and while other slots use as many adapters as can be resident.
        """
        self.check_adapter(adapter)
        if self.adapters is not None and not self.adapters.residency.claim(slot, adapter):
            limit = self.adapters.residency.num_places
            raise InputError(f"adapter {adapter!r}: expected at most {limit} at a time (max_adapters), found one more")

    def check_adapter(self, adapter: str | None) -> None:
        if adapter is not None and self.adapters is None:
            raise unknown_adapter(adapter, ())
        if self.adapters is not None:
            self.adapters.check(adapter)

    def warm_up(self) -> None:
        """Prepare what steps need, so that no request waits for it. KV caches are unchanged."""
        for _ in self.warm_up_parts():
            pass

    def warm_up_parts(self) -> Iterator[None]:
        """`warm_up` in parts of some ten milliseconds, between which requests may run; the first is the most useful."""
        yield from self.executor.warm_up()
        yield from self.checkpoints.preload()

    @property
    def logprobs(self) -> Mapping[int, Logprobs]:
        """Return by slot the log-probabilities of the last step's tokens: see `Executor.logprobs`."""
        return self.executor.logprobs

    @property
    def in_flight(self) -> bool:
        return self.executor.in_flight

    def _run(self, advances: Sequence[Advance], run: Callable[[Sequence[Advance]], _Result]) -> _Result:
        check(advances, self.executor, self.vocab_size, self.max_num_tokens)
        if self.adapters is not None:
            self.adapters.load()
        lengths = self.executor.lengths
        for advance in advances:
            if not advance.start and lengths[advance.slot]:  # a new request in a slot that was not released
                self.executor.reset(advance.slot)
        try:
            result = run(advances)
        except BaseException:
            # A failed step may have written rows into slots that hold no request yet.
            for advance in advances:
                if not advance.start:
                    self.executor.reset(advance.slot)
            raise
        for advance in advances:
            lengths[advance.slot] = advance.start + len(advance.tokens)
        return result

    @property
    def has_state(self) -> bool:
        """Return whether a layer has a recurrent state instead of keys and values."""
        assembly = self.engines.assembly
        return any(layer.variant in assembly.state_mixers for layer in assembly.first_layers(self.layers))

    def length(self, slot: int) -> int:
        return int(self.executor.lengths[slot])

    def release(self, slot: int) -> None:
        """Clear a slot: its cache, sampling parameters and adapter. (A step at start 0 clears the cache too.)"""
        self.executor.reset(slot)
        self.executor.set_sampling(slot, _GREEDY)
        if self.adapters is not None:
            self.adapters.residency.release(slot)

    def share(self, slot: int, pages: Sequence[int], length: int) -> None:
        """Start an empty slot with the pages of a prefix of `length` tokens: see `Executor.share`."""
        self.executor.share(slot, pages)
        self.executor.lengths[slot] = length

    def store(self, slot: int, start: int, pages: Sequence[int]) -> None:
        """Copy a slot's cache from token `start` on into pages: see `Executor.store`."""
        self.executor.store(slot, start, pages)

    def fork(self, slot: int, other: int) -> None:
        """Copy a slot's cache to another slot, which is empty and has pages."""
        self.executor.fork(slot, other)
        self.executor.lengths[other] = self.executor.lengths[slot]

    def move(self, slot: int, other: int) -> None:
        """Move a slot's cache to another slot, which is empty and has the pages by now.

        The caller sets the sampling parameters of the other slot.
        """
        self.executor.move(slot, other)
        self.executor.set_sampling(slot, _GREEDY)

    def swap_out(self, slot: int) -> tuple[Any, int]:
        """Copy a slot's cache to host memory, clear the slot, and return what `swap_in` takes."""
        length = self.length(slot)
        if not length:
            self.release(slot)
            return None, 0
        swapped = self.executor.swap_out(slot)
        self.executor.set_sampling(slot, _GREEDY)
        if self.adapters is not None:
            self.adapters.residency.release(slot)
        return swapped, length

    def swap_in(self, slot: int, swapped: tuple[Any, int]) -> None:
        """Copy a swapped-out cache to a slot, which is empty and has pages."""
        if swapped[1]:
            self.executor.swap_in(slot, swapped[0])
        self.executor.lengths[slot] = swapped[1]


def fitting_chunk_size(preferred: int, num_slots: int, max_num_tokens: int | None) -> int:
    """Return the preferred chunk size, or the largest that fits in a step with a token of each other request.

    A smaller one is a multiple of the page size, if at least one page fits.
    """
    if max_num_tokens is None:
        return preferred
    room = max(1, max_num_tokens - num_slots + 1)
    if preferred <= room:
        return preferred
    return room // PAGE_SIZE * PAGE_SIZE or room


def host_bytes(kv_bytes: float | None) -> int:
    """Return the bytes for the KV cache on a CPU.

    kv_bytes: None for a quarter of the machine's or container's memory; below 1 a fraction of its free memory.
    """
    if kv_bytes is None:
        return host_memory.total_bytes() // 4
    if kv_bytes < 1:
        kv_bytes *= host_memory.free_bytes()
    return int(kv_bytes)


def _limits(engines: EngineSet, assembly_json: str | os.PathLike, options: ModelOptions) -> tuple[int, int, int | None]:
    """Return max_batch_size, max_seq_len and max_num_tokens (None: any number) to open engines with.

    Raises InputError for limits that the engines or the model do not allow.
    """
    defaults = {**asdict(Limits()), "max_num_tokens": None}
    limits: dict[str, Any] = {}
    built: dict[str, Any] = {}
    for name in ("max_batch_size", "max_seq_len", "max_num_tokens"):
        built[name] = engines.manifest.options.get(name)
        candidates = (getattr(options, name), built[name], defaults[name])
        limits[name] = next((limit for limit in candidates if limit is not None), None)
    allowed = engines.assembly.max_position_embeddings
    if allowed is not None and limits["max_seq_len"] > allowed:
        reason = engines.assembly.positions_limited_by or "max_position_embeddings"
        raise InputError(
            f"max_seq_len: expected at most {allowed} ({reason} of {assembly_json}), found {limits['max_seq_len']}"
        )
    for name, value in limits.items():
        if value is not None and value < 1:
            raise InputError(f"{name}: expected at least 1, found {value}")
        if built[name] is not None and value > built[name]:
            raise InputError(
                f"{name}: expected at most {built[name]}, which {engines.path} was built for, "
                f"found {value}; raise limits.{name} and build again"
            )
    return limits["max_batch_size"], limits["max_seq_len"], limits["max_num_tokens"]
