"""What the kernel that chooses tokens (next_token.cu) reads and writes of each slot: records, and tables by token.

The kernel itself counts the tokens that it is given, so that a step may be launched before the host knows them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.step.logits_pipeline import Masks, Sampler
from lockstep.step.sampling import MAX_LOGPROBS, SMALLEST, Logprobs, scaled_temperature
from lockstep_gpu import cuda
from lockstep_gpu.staging import Staging

# A slot's parameters: `Sampling` in next_token.cu. temperature: 0 is greedy; top_k: 0 is all; changes: bits of MASKED,
# BIASED and PENALIZED; num_logprobs: one more than the likeliest tokens to return, 0: no log-probabilities.
PARAMETERS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_k", "i4"),
        ("min_p", "f4"),
        ("repetition_penalty", "f4"),
        ("top_p", "f8"),
        ("presence_penalty", "f8"),
        ("frequency_penalty", "f8"),
        ("seed", "u8"),
        ("choice", "u8"),
        ("num_prompt_tokens", "i8"),
        ("changes", "i4"),
        ("num_logprobs", "i4"),
    ]
)
MASKED = 1
BIASED = 2
PENALIZED = 4
# A slot's log-probabilities: `Logprobs` in next_token.cu. One is a logit minus `total`.
LOGPROBS = np.dtype(
    [
        ("total", "f8"),
        ("chosen", "f4"),
        ("unused", "i4"),
        ("tokens", "i4", MAX_LOGPROBS),
        ("logits", "f4", MAX_LOGPROBS),
    ]
)


def parameters(sampler: Sampler) -> np.ndarray:
    """Return a choice's PARAMETERS, without masks."""
    sampling = sampler.sampling
    changes = BIASED * bool(sampling.logit_bias) + PENALIZED * sampling.has_penalties
    if not (sampling.temperature or changes or sampling.logprobs is not None):
        return np.zeros((), PARAMETERS)
    temperature = 0.0
    if sampling.temperature:
        temperature = float(scaled_temperature(sampling))
    num_logprobs = 0
    if sampling.logprobs is not None:
        num_logprobs = sampling.logprobs + 1
    fields = (
        temperature,
        min(sampling.top_k, np.iinfo(np.int32).max),
        sampling.min_p,
        max(sampling.repetition_penalty, SMALLEST),
        sampling.top_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.seed,
        sampler.choice,
        sampler.num_prompt_tokens,
        changes,
        num_logprobs,
    )
    return np.array(fields, PARAMETERS)


def count_tokens(sampler: Sampler, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a choice's `LogitsTables.counts`, [vocab_size] int32, and its `counted`, [2] int32."""
    counts = np.zeros(vocab_size, np.int32)
    counts[list(sampler.counts)] = list(sampler.counts.values())
    counts[sampler.prompt_ids] |= np.int32(-(1 << 31))
    last_token = sampler.answer[-1] if sampler.answer else -1
    return counts, np.array([sampler.num_prompt_tokens + len(sampler.answer) - 1, last_token], np.int32)


def bits_of(masks: Masks) -> np.ndarray:
    """Return the bits of `LogitsTables.masks`, [2, words] uint32, the lowest bit first."""
    vocab_size = len(masks.allowed)
    bits = np.zeros((2, -(-vocab_size // 32) * 32), bool)
    bits[:, :vocab_size] = masks
    return np.packbits(bits, axis=1, bitorder="little").view("<u4")


def read_logprobs(record: np.ndarray, count: int) -> Logprobs:
    """Return the log-probabilities in a record of LOGPROBS, with the `count` likeliest tokens."""
    total = float(record["total"])
    top = zip(record["tokens"][:count].tolist(), record["logits"][:count].tolist())
    return Logprobs(float(record["chosen"]) - total, tuple((token, logit - total) for token, logit in top))


class LogitsTables:
    """Device arrays by slot, which change with a slot's request, and masks, which change at any step.

    Attributes:
        counts: [slots, vocab_size] int32: how often a token is in the answer; the sign bit: it is in the prompt.
        counted: [slots, 2] int32: position and token that `counts` got last.
        biases: [slots, vocab_size] float32.
        masks: [slots, 2, words] uint32: bits of the tokens that the grammar allows, and of those that nothing forbids.
        processed: [rows, vocab_size] float32: the logits that a token was chosen from.
        logprobs: [slots] LOGPROBS.
    """

    def __init__(self, slots: int, vocab_size: int):
        self._vocab_size = vocab_size
        what = "sampling"
        self.counts = cuda.zeros((slots, vocab_size), "i4", what)
        self.counted = cuda.zeros((slots, 2), "i4", what)
        self.biases = cuda.zeros((slots, vocab_size), "f4", what)
        self.masks = cuda.zeros((slots, 2, -(-vocab_size // 32)), "u4", what)
        self.processed = cuda.empty((slots, vocab_size), "f4", what)
        self.logprobs = cuda.zeros((slots,), LOGPROBS, what)
        self._staging = Staging(self.counts[:1].nbytes + self.counted[:1].nbytes, 2)
        self._bias_staging = Staging(self.biases[:1].nbytes, 1)
        self._mask_staging = Staging(self.masks.nbytes, slots)
        self._samplers: dict[int, Sampler] = {}  # whose tables are to be sent
        self._masks: dict[int, Masks] = {}  # which are to be sent

    @property
    def arrays(self) -> tuple[cuda.Array, ...]:
        """Return the arrays in the order in which the kernel takes them."""
        return self.counts, self.counted, self.biases, self.masks, self.processed, self.logprobs

    def set_sampling(self, slot: int, sampler: Sampler) -> None:
        """Send a slot's tables with the next step."""
        self._samplers[slot] = sampler
        self._masks.pop(slot, None)

    def set_masks(self, slot: int, masks: Masks) -> None:
        """Send a slot's masks with the next step."""
        self._masks[slot] = masks

    def send(self, stream: cuda.Stream) -> None:
        """Enqueue the values set since the last call."""
        for slot, sampler in self._samplers.items():
            sampling = sampler.sampling
            if sampling.has_penalties:
                counts, counted = count_tokens(sampler, self._vocab_size)
                pairs = [(self.counts[slot : slot + 1], counts), (self.counted[slot : slot + 1], counted)]
                self._staging.send(stream, pairs)
            if sampling.logit_bias:
                biases = np.zeros(self._vocab_size, np.float32)
                biases[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
                self._bias_staging.send(stream, [(self.biases[slot : slot + 1], biases)])
        self._samplers.clear()
        if self._masks:
            pairs = [(self.masks[slot : slot + 1], bits_of(masks)) for slot, masks in self._masks.items()]
            self._mask_staging.send(stream, pairs)
            self._masks.clear()

    def read_logprobs(self, records: np.ndarray, parameters: np.ndarray, slots: Sequence[int]) -> dict[int, Logprobs]:
        """Return by slot the log-probabilities that its parameters ask for; records: the host's copy of `logprobs`."""
        counts = {slot: min(int(parameters["num_logprobs"][slot]) - 1, self._vocab_size) for slot in slots}
        return {slot: read_logprobs(records[slot], count) for slot, count in counts.items() if count >= 0}
