"""Small kernels of a step: cache writes, adapter masks, and sampling."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import CheckError
from lockstep_gpu.cuda import Array, Kernel, Stream, compile_kernels
from lockstep_gpu.kernels.library import KINDS, including

_MAX_VOCAB_SIZE = 1 << 20  # ID_BITS in next_token.cu
_THREADS = 1024  # THREADS in next_token.cu


class Kernels:
    """The kernels, compiled for this GPU; wide: token ids and positions are int64."""

    def __init__(self, wide: bool):
        module = compile_kernels(including("step.cu", "next_token.cu"))
        self.wide = int(wide)
        self._write: dict[int, Kernel] = {2: module["write_cache_2"], 16: module["write_cache_16"]}
        self._advance = module["advance"]
        self._largest = module["largest"]
        self._choose = module["choose"]
        self._adapter_mask = module["adapter_mask"]

    def adapter_mask(self, stream: Stream, ids: Array, mask: Array, rank: int) -> None:
        """Write a mask [num_tokens, max_adapters * rank]: 1 in the columns of a token's adapter (ids), else 0."""
        tokens, columns = mask.shape
        self._adapter_mask.launch(
            stream, tokens, min(128, columns), ids, self.wide, mask, KINDS[mask.dtype.name], columns, rank
        )

    def write_cache(
        self, stream: Stream, key: Array, value: Array, keys: Array, values: Array, rows: Array, positions: Array
    ) -> None:
        """Write the keys and values of tokens to the cache, at row rows[token] and position positions[token].

        Args:
            key, value: [num_tokens, num_kv_heads, head_dim].
            keys, values: The cache, [rows, num_kv_heads, capacity, head_dim].
            rows: [num_tokens] int32; -1: the token is not written.
        """
        tokens, heads, key_dim = key.shape
        key_nbytes = key_dim * key.dtype.itemsize
        value_nbytes = value.shape[2] * key.dtype.itemsize
        unit = 2  # bytes that a thread copies at once
        if key_nbytes % 16 == 0 and value_nbytes % 16 == 0:
            unit = 16
        key_size = key_nbytes // unit
        value_size = value_nbytes // unit
        sizes = keys.shape[2], heads, key_size, value_size
        threads = min(128, max(32, key_size, value_size))
        arrays = key, value, keys, values, rows, positions
        self._write[unit].launch(stream, (tokens, heads, 1), threads, *arrays, self.wide, *sizes)

    def advance(
        self, stream: Stream, logits: Array, slots: Array, positions: Array, limit: int, token_ids: Array,
        logit_rows: Array, samplings: Array, tables: Sequence[Array], *out: Array
    ) -> None:  # fmt: skip
        """Choose the next token of each row of logits, greedily or as `logits_pipeline.choose` does.

        The weights and the noise of a draw are fp32 and within the last bits of NumPy's: the ratio of the two is within
        2^-19 of NumPy's. For the same reason the set that top-p keeps may have a token more or less.

        Args:
            logits: [num_requests, vocab_size].
            slots: [num_requests] int32, the slot of each row; -1: none.
            positions: [num_requests], of the tokens that the logits follow; may be the same array as in `out`.
            limit: A new position of `limit` is written as 0: no token may have it.
            token_ids, logit_rows: The step's tokens, and for each row of logits the index of its token.
            samplings, tables: [slots] of `logits_tables.PARAMETERS`, and `LogitsTables.arrays`.
            out: By slot: next_tokens int32 (-1 if the largest logit is NaN or infinite), token_ids (0 in that case) and
                positions (the row's plus 1).

        Raises CheckError for more than 2^20 tokens.
        """
        count, size = logits.shape
        if size > _MAX_VOCAB_SIZE:
            raise CheckError(
                f"vocab_size: expected at most {_MAX_VOCAB_SIZE} for the kernel that samples, found {size}; use the "
                "backend onnxruntime"
            )
        arguments = logits, KINDS[logits.dtype.name], size, slots, positions, limit, token_ids, logit_rows, samplings
        self._advance.launch(stream, count, _THREADS, *arguments, *tables, *out, self.wide)

    def largest(self, stream: Stream, shard: Array, first: int, slots: Array, rank_argmax: Array) -> None:
        """Find the largest logit of each row in a rank's shard of the logits; the first of equal ones.

        Args:
            shard: [num_requests, columns], the logits of tokens `first` on.
            slots: [num_requests] int32; rows of slot -1 are skipped.
            rank_argmax: [num_requests, 2]: the logit float32 (infinity for NaN), and the token's id int32 as bits.
        """
        count, columns = shard.shape
        dtype = KINDS[shard.dtype.name]
        self._largest.launch(stream, count, _THREADS, shard, dtype, columns, first, slots, rank_argmax)

    def choose(
        self, stream: Stream, gathered_argmax: Array, slots: Array, positions: Array, limit: int, *out: Array
    ) -> None:
        """Choose greedy tokens from all ranks' `largest`, [num_requests, 2 * ranks]; the rest as in `advance`."""
        count, columns = gathered_argmax.shape
        arguments = gathered_argmax, columns // 2, slots, positions, limit
        self._choose.launch(stream, count, 32, *arguments, *out, self.wide)
