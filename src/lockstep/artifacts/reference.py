"""The manifest of a reference: transformers' answers to the golden prompts.

`reference/<layers>.json` in and out. Logits are in a safetensors file next to it: `logits.<number of the prompt>`
[len(tokens), vocab_size], and those of the long prompt, `long.prompt` [len(counts), vocab_size] and `long.logits`
[len(tokens), vocab_size]; all float32. With them comes their noise in fp16, the largest and the rms error of each
row: `noise.<number of the prompt>` [len(tokens), 2], `long.noise` [len(counts) + len(tokens), 2], float32. A model with
a router has 4 numbers a row: then the same two errors of a run whose experts are those that fp32 chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.document import Document
from lockstep.artifacts.places import FileEntry


@dataclass(frozen=True)
class ReferencePrompt:
    """A prompt and what follows it. new_text: the tokens as text. adapter: "" for none, among others with one."""

    text: str
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    new_text: str
    adapter: str | None = None


@dataclass(frozen=True)
class LongPrompt:
    """The long prompt and its answer.

    counts: numbers of tokens after which logits are kept. edges: of pages, windows and chunks, where errors would show.
    """

    prompt_ids: tuple[int, ...]
    edges: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class ReferenceManifest(Document):
    """The answers of a model's first `layers` layers (or "all").

    long: None where there is no long prompt. quantization_error: of rounded weights or a rounded KV cache
    (`artifacts.quantization_error`). adapters: {name: `Adapter.sha256`} of the adapters that prompts name.
    """

    FORMAT: ClassVar[str] = formats.REFERENCE
    layers: int | str
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    logits: FileEntry
    prompts: tuple[ReferencePrompt, ...]
    long: LongPrompt | None
    quantization_error: FileEntry | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
