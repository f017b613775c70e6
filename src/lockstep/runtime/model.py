"""A model that runs: engines bound to weights, a KV cache, and `step`.

`step` is the one operation that everything else is made of.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from lockstep.backends import EngineSet
from lockstep.errors import InputError
from lockstep.manifests.manifest_files import content
from lockstep.runtime.adapters import Adapters, unknown_adapter
from lockstep.runtime.bad_words import Vocabulary
from lockstep.runtime.binding import open_network
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step import host_memory
from lockstep.step.advance import Advance, Executor, check, then_decode
from lockstep.step.host import HostExecutor
from lockstep.step.host_step import Observer
from lockstep.step.network import layer_count
from lockstep.step.pages import PAGE_SIZE, PageTables
from lockstep.step.sampling import Sampling
from lockstep.targets import Limits

_GREEDY = Sampling()
_Taken = TypeVar("_Taken")
# Tokens of a prompt that are computed together, unless a step has less room. Where the cuts do not make the bits, small
# ones fill steps better, and more of a prefix is found again.
CHUNK_SIZE = 256
SMALL_CHUNK_SIZE = PAGE_SIZE


class Model:
    """A model that runs requests in slots 0 to max_batch_size-1.

    Not for several threads at once: the backend itself uses all that it is given.
    """

    def __init__(
        self,
        executor: Executor,
        max_num_tokens: int | None,
        engines: EngineSet,
        layers: int,
        chunk_size: int,
        weights_sha256: str,
        assembly_json: str | os.PathLike,
        adapters: Adapters | None = None,
    ):
        self.engines = engines
        self.chunk_size = chunk_size
        self.weights_sha256 = weights_sha256
        self.layers = layers
        self.vocab_size = engines.assembly.vocab_size
        self.max_batch_size = executor.num_slots
        self.max_seq_len = executor.max_seq_len
        self.max_num_tokens = max_num_tokens
        self.eos_token_ids = engines.assembly.eos_token_ids
        self._executor = executor
        self.adapters = adapters
        self.assembly_json = assembly_json

    @classmethod
    def open(
        cls,
        engines_json: str | os.PathLike,
        assembly_json: str | os.PathLike,
        weights_json: str | os.PathLike,
        layers: int | str = "all",
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        max_num_tokens: int | None = None,
        threads: int | None = None,
        low_memory: bool = False,
        kv_bytes: float | None = None,
        chunk_size: int | None = None,
        adapters_json: str | os.PathLike | None = None,
        cut_of: Model | None = None,
    ) -> Model:
        """Open engines, weights and cache for the first `layers` layers.

        Limits that are not given are those that the engines were built for; engines that are built for any take 4
        requests, 256 tokens of each, and any number of tokens in a step. `low_memory` reads the weights from the mapped
        files at each step instead of a repacked copy: slower, no copy. `kv_bytes`: memory for keys and values of all
        requests, or below 1 the share of what is free; on a CPU a quarter of the container's or machine's.
        `chunk_size`: long prompts are computed in pieces that end at multiples of it; by default 256 on a CPU,
        else 64. `adapters_json`: the manifest of the model's adapters. `cut_of`: an open model; if it is of these
        engines and weights, its first layers are these layers, bound once.
        Raises InputError for limits or a layer count that the model does not allow, CheckError for engines that do not
        fit here.
        """
        engines = EngineSet.open(engines_json, assembly_json)
        rows, length, tokens = _limits(
            engines,
            assembly_json,
            {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len, "max_num_tokens": max_num_tokens},
        )
        weights = content(Path(weights_json))  # not where they lie
        shared = None
        if cut_of is not None and (cut_of.engines.digest(), cut_of.weights_sha256) == (engines.digest(), weights):
            shared = cut_of._executor.network if isinstance(cut_of._executor, HostExecutor) else None
        network = open_network(engines, weights_json, layers, threads, low_memory, shared)
        if chunk_size is None:
            wanted = CHUNK_SIZE if engines.backend.on_host else SMALL_CHUNK_SIZE
            chunk_size = fitting_chunk_size(wanted, rows, tokens)
        if chunk_size < 1:
            raise InputError(f"chunk_size: expected at least 1, found {chunk_size}")
        if kv_bytes is not None and kv_bytes <= 0:
            raise InputError(f"kv_bytes: expected at least 1, found {kv_bytes}")
        executor = engines.backend.executor(network, rows, length, tokens, kv_bytes) or HostExecutor(
            network, rows, length, chunk_size, _host_bytes(kv_bytes), engines.backend.decode_layers(network)
        )
        adapters = Adapters.open(adapters_json, engines.assembly, network, executor)
        count = layer_count(engines.assembly, layers)
        return cls(executor, tokens, engines, count, chunk_size, weights, assembly_json, adapters)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """Return the texts of all tokens, read from the assembly's tokenizer when they are first asked for.

        Raises InputError where there is none or it cannot be opened here, CheckError for another than was exported.
        """
        return Vocabulary(Tokenizer.open(self.assembly_json).pieces, self.vocab_size)

    @functools.cached_property
    def libraries(self) -> dict[str, str]:
        """Return the version of each library that computes beside the backend's own."""
        return self.engines.libraries()

    def step(self, advances: Sequence[Advance]) -> np.ndarray:
        """Advance any mix of requests by one or several tokens each.

        Gives the logits that follow each request's last token, [len(advances), vocab_size] float32, in the order of the
        list; those that follow each of its tokens where it `verifies`.
        Raises InputError, and changes nothing, for a slot out of range or named twice, a start other than 0 or the
        slot's length, a token outside the vocabulary, no token, or more than max_seq_len or max_num_tokens.
        """
        return self._take(advances, self._executor.logits)

    def step_tokens(self, advances: Sequence[Advance], following: bool | Sequence[Advance] = False) -> np.ndarray:
        """Take a step and return each request's next token, [len(advances)] int64.

        The token is the most likely one or what `set_sampling` says: on a GPU nothing else comes back. -1 where the
        largest logit is NaN or infinite.

        following: the next step, as far as it is known: prompts, and slots of this step that go on with the token which
        it finds (`FOUND`); True: the latter for all slots. A GPU begins it at once, before the tokens are back
        (`async_scheduling`); a step of some of it is then there, and any other step may follow all the same.
        """
        behind = then_decode(advances) if following is True else following or ()
        return self._take(advances, lambda advances: self._executor.tokens(advances, behind))

    def step_with_logits(self, advances: Sequence[Advance], wanted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Take a step and return each request's next token, and some logits.

        The logits [len(wanted), vocab_size] float32 stand behind `advances[i]` for i of `wanted` (where some verify:
        row i of all): on a GPU no others come back. The tokens are as of `step_tokens`.
        """
        return self._take(advances, lambda advances: self._executor.tokens_and_logits(advances, wanted))

    @property
    def gives_all_logits(self) -> bool:
        """Return whether `logits_behind` can be called.

        Not where only those behind the last tokens are computed.
        """
        return isinstance(self._executor, HostExecutor)

    @property
    def verifies_drafts(self) -> bool:
        """Return whether steps take drafts (`Advance.verifies`), to the bits of plain decoding.

        So where a row's bits do not depend on the number of rows, and no layer has a state that wrong ones are in.
        """
        return self.can_forget and self.engines.batch_invariant

    @property
    def can_forget(self) -> bool:
        """Return whether `keep` can be called: a state cannot be taken back."""
        return self._executor.most_verified > 0 and not self.has_state

    @property
    def most_verified(self) -> int:
        """Return the tokens of a step with drafts: more cost as much as steps of their own."""
        return self._executor.most_verified

    def check_verifies_drafts(self) -> None:
        """Check that steps take drafts. Raises InputError."""
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
        """Return how many tokens can follow `length` tokens before a slot's memory is laid out anew."""
        return self._executor.room(length)

    def keep(self, slot: int, length: int) -> None:
        """Forget the tokens of a slot behind its first `length`: drafts that were not what follows."""
        if length < self._executor.lengths[slot]:
            self._executor.keep(slot, length)

    def check_gives_all_logits(self) -> None:
        """Check that `logits_behind` can be called. Raises InputError."""
        if not self.gives_all_logits:
            raise InputError(
                "prompt_logprobs: expected a backend that computes the logits behind all tokens of a prompt, such as "
                f"onnxruntime, found {self.engines.manifest.backend}; leave them out"
            )

    def logits_behind(self, number: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the logits behind all tokens of `advances[number]`, a few at a time.

        Of the step that was taken last: see `HostExecutor.logits_behind`.
        """
        return cast(HostExecutor, self._executor).logits_behind(number)

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Show the blocks of all steps to an observer meanwhile, where `gives_all_logits`."""
        executor = cast(HostExecutor, self._executor)
        executor.observe(observer)
        try:
            yield
        finally:
            executor.observe(None)

    def set_sampling(self, slot: int, sampling: Sampling, choice: int = 0) -> None:
        """Have steps that give tokens draw a slot's as `sampling` says.

        choice: number of the request's choice. It holds until the slot is released. Raises InputError for what needs
        logits (`Sampling.needs_logits`).
        """
        if sampling.needs_logits:
            raise InputError(
                "sampling: expected temperature, top_k, top_p, min_p and seed alone, found what needs logits; take "
                "steps that give logits, and sample with `Sampler`"
            )
        self._executor.set_sampling(slot, sampling, choice)

    def set_adapter(self, slot: int, adapter: str | None) -> None:
        """Compute a slot's tokens with an adapter, or with none.

        It holds until the slot is released. Raises InputError for a name that is no adapter's, and where other slots
        hold as many as can be resident.
        """
        self.check_adapter(adapter)
        if self.adapters is not None and not self.adapters.residency.claim(slot, adapter):
            most = self.adapters.residency.max_adapters
            raise InputError(f"adapter {adapter!r}: expected at most {most} at a time (max_adapters), found one more")

    def check_adapter(self, adapter: str | None) -> None:
        """Check the name of an adapter. Raises InputError for an unknown one."""
        if adapter is not None and self.adapters is None:
            raise unknown_adapter(adapter, ())
        if self.adapters is not None:
            self.adapters.check(adapter)

    def warm_up(self) -> None:
        """Prepare all that steps are made of, so that no request waits for it.

        Caches stay as they are.
        """
        self._executor.warm_up()

    @property
    def async_scheduling(self) -> bool:
        """Return whether `step_tokens` begins the step that follows early.

        That is before the tokens of this one are back.
        """
        return self._executor.async_scheduling

    @property
    def in_flight(self) -> bool:
        """Return whether a step was begun before it was asked for.

        See `step_tokens`.
        """
        return self._executor.in_flight

    @property
    def tables(self) -> PageTables:
        """Return the page tables of the slots, and the pool that pages are from."""
        return self._executor.tables

    def _take(self, advances: Sequence[Advance], run: Callable[[Sequence[Advance]], _Taken]) -> _Taken:
        check(advances, self._executor, self.vocab_size, self.max_num_tokens)
        if self.adapters is not None:
            self.adapters.load()
        lengths = self._executor.lengths
        for advance in advances:
            if not advance.start and lengths[advance.slot]:
                self._executor.reset(advance.slot)
        try:
            taken = run(advances)
        except BaseException:
            for advance in advances:  # what a step that failed wrote there is nobody's
                if not advance.start:
                    self._executor.reset(advance.slot)
            raise
        for advance in advances:
            lengths[advance.slot] = advance.start + len(advance.tokens)
        return taken

    @property
    def has_state(self) -> bool:
        """Return whether some layer keeps a state of all tokens instead of their keys and values."""
        assembly = self.engines.assembly
        return any(layer.variant in assembly.state_mixers for layer in assembly.first_layers(self.layers))

    def length(self, slot: int) -> int:
        """Return how many tokens the slot holds."""
        return int(self._executor.lengths[slot])

    def release(self, slot: int) -> None:
        """Forget what a slot holds, how it samples, and its adapter.

        Its memory may be used again. A new request at start 0 does the first.
        """
        self._executor.reset(slot)
        self._executor.set_sampling(slot, _GREEDY, 0)
        if self.adapters is not None:
            self.adapters.residency.release(slot)

    def share(self, slot: int, pages: Sequence[int], length: int) -> None:
        """Begin a slot that holds nothing with the pages of a prefix of `length` tokens.

        See `Executor.share`.
        """
        self._executor.share(slot, pages)
        self._executor.lengths[slot] = length

    def store(self, slot: int, start: int, pages: Sequence[int]) -> None:
        """Copy the slot's tokens from `start` on into pages: see `Executor.store`."""
        self._executor.store(slot, start, pages)

    def fork(self, slot: int, other: int) -> None:
        """Make another slot, which has pages and holds nothing, hold what a slot holds."""
        self._executor.fork(slot, other)
        self._executor.lengths[other] = self._executor.lengths[slot]

    def move(self, slot: int, other: int) -> None:
        """Make another slot, which has the slot's pages now and holds nothing, hold what the slot holds.

        The other samples nothing yet.
        """
        self._executor.move(slot, other)
        self._executor.set_sampling(slot, _GREEDY, 0)

    def swap_out(self, slot: int) -> tuple[Any, int]:
        """Bring what a slot holds to the host's memory, and reset the slot.

        Returns what `swap_in` takes.
        """
        length = self.length(slot)
        if not length:
            self.release(slot)
            return None, 0
        swapped = self._executor.swap_out(slot)
        self._executor.set_sampling(slot, _GREEDY, 0)
        if self.adapters is not None:
            self.adapters.residency.release(slot)
        return swapped, length

    def swap_in(self, slot: int, swapped: tuple[Any, int]) -> None:
        """Make a slot, which has pages and holds nothing, hold what was swapped out."""
        if swapped[1]:
            self._executor.swap_in(slot, swapped[0])
        self._executor.lengths[slot] = swapped[1]


def fitting_chunk_size(wanted: int, num_slots: int, max_num_tokens: int | None) -> int:
    """Return the chunk size that fits: `wanted` tokens, or what there is room for.

    A step has room for it beside a token of each other request; in whole pages where that is at least one.
    """
    room = wanted if max_num_tokens is None else max(1, max_num_tokens - num_slots + 1)
    return wanted if wanted <= room else room // PAGE_SIZE * PAGE_SIZE or room


def _host_bytes(kv_bytes: float | None) -> int:
    """Return the bytes for the KV cache on a CPU.

    kv_bytes: None for a quarter of the machine's or the container's memory; below 1 a part of what of it is free.
    """
    if kv_bytes is None:
        return host_memory.total_bytes() // 4
    return int(host_memory.free_bytes() * kv_bytes) if kv_bytes < 1 else int(kv_bytes)


def _limits(
    engines: EngineSet, assembly_json: str | os.PathLike, given: Mapping[str, int | None]
) -> tuple[int, int, int | None]:
    """Return max_batch_size, max_seq_len and max_num_tokens to open engines with.

    Raises InputError for those that engines or model do not allow.
    """
    built = {name: engines.manifest.options.get(name) for name in given}
    defaults = {**asdict(Limits()), "max_num_tokens": None}
    limits: dict[str, Any] = {  # only max_num_tokens may be None: any number
        name: next((limit for limit in (value, built[name], defaults[name]) if limit is not None), None)
        for name, value in given.items()
    }
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
