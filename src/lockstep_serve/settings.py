"""The settings of a server. Standard library only: the engine's Python may have nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lockstep.artifacts.chat_template import ChatTemplate
    from lockstep.runtime.request import CheckpointFiles
    from lockstep.runtime.tokenizer import Tokenizer
    from lockstep.targets import Limits
    from lockstep_serve.frames import Load


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine process, which the frame "open" carries.

    engines, assembly, weights, adapters, checkpoint: paths of manifests; adapters: None without any, checkpoint: None
    where no adapter can be loaded later. layers: a layer count, or "all". limits: max_batch_size, max_seq_len,
    max_num_tokens, max_input_len. loaded: each adapter that an earlier engine process had loaded, and its SHA-256.
    threads: of the CPU. kv_bytes: of the KV cache, or a fraction below 1 of the free memory. chunk_size,
    long_prefill_token_threshold: in tokens. grammar_seconds: of CPU time that a grammar may take to compile.
    speculative: the fields of `Speculative`, None for no drafts. log_level: see `start_log`. others: further
    checkpoints, by the names of their models. max_bound: checkpoints that are in memory at a time. restarted: an
    earlier engine process died. None elsewhere: the default.
    """

    engines: str
    assembly: str
    weights: str
    layers: int | str
    limits: Mapping[str, int]
    threads: int | None = None
    kv_bytes: float | None = None
    chunk_size: int | None = None
    long_prefill_token_threshold: int | None = None
    prefix_caching: bool = True
    admission: Literal["guaranteed", "optimistic"] = "guaranteed"
    grammar_seconds: float = 5.0
    adapters: str | None = None
    checkpoint: str | None = None
    loaded: Sequence[tuple[Load, str]] = ()
    speculative: Mapping[str, Any] | None = None
    log_level: str = "info"
    others: Sequence[CheckpointFiles] = ()
    max_bound: int | None = None
    restarted: bool = False


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of the queue, of an engine process and of slow readers.

    max_queue: requests that may wait for a slot; max_queue_tokens: tokens of their prompts. queue_timeout: seconds that
    one may wait. stall: seconds without a sign of life after which an engine is started again. start: seconds that a
    start may take. slow_reader: seconds that tokens may wait for their reader.
    """

    max_queue: int = 128
    max_queue_tokens: int = 1 << 20
    queue_timeout: float = 60.0
    stall: float = 60.0
    start: float = 600.0
    slow_reader: float = 60.0


@dataclass(frozen=True)
class ServedModelOptions:
    """A model that a service serves, by its name in requests.

    chat_template: None where chats are refused. tool_call_parser, reasoning_parser: names of formats; None: recognise
    them from the chat template. limits: to which it was checked, where they are less than the engine's.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    limits: Limits | None = None


@dataclass(frozen=True)
class ServiceOptions:
    """What a service serves, and how.

    models: the first one is that of requests that name none; further ones are `engine.others`, in their order.
    adapter_root: see `Adapters`. weights_root: see `WeightUpdates`.
    """

    models: Sequence[ServedModelOptions]
    engine: EngineOptions
    limits: ServiceLimits = ServiceLimits()
    metrics_prefix: str = "lockstep"
    adapter_root: Path | None = None
    weights_root: Path | None = None
