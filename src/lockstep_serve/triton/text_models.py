"""The models preprocessing and postprocessing: text to tokens and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.checks import expect_tokens
from lockstep_serve.bodies import BadRequest, bad_request
from lockstep_serve.prompts import encode_texts
from lockstep_serve.served_model import ServedModel
from lockstep_serve.triton.inputs import Batch, word_biases
from lockstep_serve.triton.tensors import Tensor, new_tensor
from lockstep_serve.triton.words import spellings


async def preprocess(batch: Batch, model: ServedModel) -> list[Tensor]:
    """Return a batch's texts and words as tokens. Raises BadRequest."""
    tokenizer = model.tokenizer
    count = range(batch.size)
    ends = model.ready.eos_token_ids
    end = _batch_values(batch, "END_ID", next(iter(ends), -1))
    pad = _batch_values(batch, "PAD_ID", next(iter(ends), 0))
    texts = [next(iter(batch.texts("QUERY", number)), "") for number in count]
    ids = await encode_texts(texts, tokenizer, "QUERY", model.ready.max_seq_len)
    longest = max(map(len, ids))
    # The texts of a batch are one tensor; REQUEST_INPUT_LEN says where each one ends.
    padded = [[*tokens.tolist(), *[fill] * (longest - len(tokens))] for tokens, fill in zip(ids, pad)]
    bad = [spellings("BAD_WORDS_DICT", batch.texts("BAD_WORDS_DICT", number), tokenizer) for number in count]
    stop = [spellings("STOP_WORDS_DICT", batch.texts("STOP_WORDS_DICT", number), tokenizer) for number in count]
    biases = [
        word_biases(batch, "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS", number, tokenizer) for number in count
    ]
    bias_length = model.ready.vocab_size if any(biases) else 0  # no biases: an empty row, not one of the vocabulary
    bias = np.zeros((batch.size, bias_length), np.float32)
    for row, weights in zip(bias, biases):
        try:
            expect_tokens("EMBEDDING_BIAS_WORDS", weights, model.ready.vocab_size)
        except InputError as error:
            raise bad_request(error) from None
        for token, weight in weights.items():
            row[token] = weight

    def column(name: str, values: Sequence[int]) -> Tensor:
        return new_tensor(name, "INT32", values, batch.size, 1)

    return [
        new_tensor("INPUT_ID", "INT32", padded, batch.size, longest),
        column("REQUEST_INPUT_LEN", list(map(len, ids))),
        column("DECODER_INPUT_ID", pad),
        column("REQUEST_DECODER_INPUT_LEN", [1] * batch.size),
        _word_lists("BAD_WORDS_IDS", bad),
        _word_lists("STOP_WORDS_IDS", stop),
        new_tensor("EMBEDDING_BIAS", "FP32", bias, *bias.shape),
        column("REQUEST_OUTPUT_LEN", _batch_values(batch, "REQUEST_OUTPUT_LEN", 0)),
        column("OUT_END_ID", end),
        column("OUT_PAD_ID", pad),
    ]


def _batch_values(batch: Batch, name: str, default: int) -> list[int]:
    return [batch.value(name, number, default) for number in range(batch.size)]


def _word_lists(name: str, lists: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Return words in the format of `word_ids`: [batch, 2, length], length 0 for none."""
    length = max(sum(map(len, words)) for words in lists)
    rows = np.zeros((len(lists), 2, length), np.int32)
    rows[:, 1] = -1
    for row, words in zip(rows, lists):
        flat = list(itertools.chain.from_iterable(words))
        row[0, : len(flat)] = flat
        row[1, : len(words)] = np.cumsum([len(tokens) for tokens in words])
    return new_tensor(name, "INT32", rows, *rows.shape)


def postprocess(batch: Batch, model: ServedModel) -> list[Tensor]:
    """Return the texts of tokens [batch, beams, length].

    SEQUENCE_LENGTH [batch, beams]: number of valid tokens. CONTEXT_IDS [batch, beams, any length], padded with -1: the
    tokens before them, if they are a piece of a stream: its leading spaces are kept, and an incomplete character at its
    end is left to the next piece, unless IS_LAST. Raises BadRequest.
    """
    texts = []
    for number in range(batch.size):
        beams = batch.values("TOKENS_BATCH", number)
        lengths = batch.values("SEQUENCE_LENGTH", number).tolist()
        if len(lengths) != len(beams):
            raise BadRequest(f"SEQUENCE_LENGTH: expected {len(beams)} lengths, found {len(lengths)}", "SEQUENCE_LENGTH")
        contexts: Any = [None] * len(beams)
        if "CONTEXT_IDS" in batch:
            contexts = batch.values("CONTEXT_IDS", number)
        if len(contexts) != len(beams):
            raise BadRequest(f"CONTEXT_IDS: expected {len(beams)} rows, found {len(contexts)}", "CONTEXT_IDS")
        for tokens, length, context in zip(beams, lengths, contexts):
            if not 0 <= length <= len(tokens):
                raise BadRequest(f"SEQUENCE_LENGTH: expected 0 to {len(tokens)}, found {length}", "SEQUENCE_LENGTH")
            if (tokens[:length] < 0).any():
                raise BadRequest("TOKENS_BATCH: expected tokens from 0 on, found a negative one", "TOKENS_BATCH")
            context_ids = () if context is None else context[context >= 0]
            try:
                stream = model.tokenizer.stream(context_ids, owed=True)
                text = "".join(map(stream.push, tokens[:length].tolist()))
                if context is None or batch.value("IS_LAST", number, True):
                    text += stream.finish()
                texts.append(text.encode())
            except InputError as error:
                raise BadRequest(str(error), "TOKENS_BATCH") from None
    return [new_tensor("OUTPUT", "BYTES", texts, len(texts))]
