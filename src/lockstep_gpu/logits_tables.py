"""What the kernel that chooses tokens knows of each slot: the logits pipeline's parameters and tables on the device.

The kernel itself counts the tokens that it is given, so that a step may be launched before the host knows them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.step.logits_pipeline import Masks, Sampler
from lockstep.step.sampling import Logprobs
from lockstep_gpu import cuda
from lockstep_gpu.sampling_records import LOGPROBS, bits_of, count_tokens, read_logprobs
from lockstep_gpu.staging import Staging


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
