"""The prompts of a workload: from a file, a trace, or drawn by length.

Drawn prompts are token ids, so that they have the lengths that were drawn whatever the tokenizer: ids from 16 to 255,
which every vocabulary has (bytes in most). They make no text that a model was trained on, so they measure speed only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import InputError
from lockstep.load.records import Prompt

_IDS = (16, 256)
_HASH_BLOCK = 512  # tokens for each id in a trace's `hash_ids`
_TOKENS_PER_WORD = 1.3  # of an answer that is given as text, as TensorRT-LLM's Triton backend counts


def normal(number: int, sizes: Sequence[float], seed: int) -> list[Prompt]:
    """Return prompts of normal lengths; sizes: mean and deviation, in tokens, of the prompt and of the answer."""
    if len(sizes) != 4 or not all(np.isfinite(sizes)) or min(sizes) < 0 or sizes[0] < 1 or sizes[2] < 1:
        raise InputError(
            "--token-norm-dist: expected IN_MEAN,IN_STDEV,OUT_MEAN,OUT_STDEV in tokens, means of at least 1, such as "
            f"512,128,128,32, found {','.join(f'{size:g}' for size in sizes)}"
        )
    draw = np.random.default_rng([seed, 3])
    inputs, outputs = (
        np.maximum(1, np.rint(draw.normal(sizes[at], sizes[at + 1], number))).astype(int).tolist() for at in (0, 2)
    )
    return _of_lengths(inputs, outputs, seed)


def histogram(number: int, path: Path, key: str | None, seed: int) -> list[Prompt]:
    """Return `number` prompts with lengths from a file of histograms.

    The file: `{"input": {"buckets": [tokens, ...], "freqs": [weight, ...]}, "output": ...}`, one weight a bucket; with
    a key, `KEY_ip` and `KEY_op` in the place of `input` and `output`.
    """
    value = _json(path)
    draw = np.random.default_rng([seed, 4])

    def lengths(name: str) -> list[int]:
        found: Any = value.get(name) if isinstance(value, dict) else None
        buckets: Any = found.get("buckets") if isinstance(found, dict) else None
        freqs: Any = found.get("freqs") if isinstance(found, dict) else None
        good = _are(buckets, int, 1) and _are(freqs, (int, float), 0)
        if not good or len(buckets) != len(freqs) or not sum(freqs):
            raise InputError(
                f'{path}: {name}: expected {{"buckets": [tokens, ...], "freqs": [weight, ...]}} of one length, tokens '
                f"of at least 1 and weights of at least 0, not all 0; found {_short(found)}"
            )
        return draw.choice(buckets, number, p=np.array(freqs) / sum(freqs)).tolist()

    inputs, outputs = map(lengths, ("input", "output") if key is None else (f"{key}_ip", f"{key}_op"))
    return _of_lengths(inputs, outputs, seed)


def dataset(path: Path, number: int | None, max_tokens: int) -> list[Prompt]:
    """Return the prompts of a file, the first `number`: a JSON list, or JSON lines.

    A record: `prompt` (text or token ids), or `messages` (a chat), and `max_tokens`, where there is another than
    `max_tokens`; or `input`, `instruction` and `output` (texts), as TensorRT-LLM's Triton backend has them: the answer
    gets 1.3 tokens for each word of `output`.
    """
    return [_prompt(record, f"{path}: record {at}", max_tokens) for at, record in enumerate(_records(path)[:number], 1)]


def trace(path: Path, number: int | None, max_tokens: int, seed: int) -> list[Prompt]:
    """Return the requests of a trace, the first `number`, each with its arrival.

    A record (JSON lines): `timestamp` in milliseconds, and either `input_length` and `output_length` in tokens, with or
    without `hash_ids` (equal ids are equal blocks of 512 tokens at the front: shared prefixes), or what a dataset has.
    """
    found = []
    for at, record in enumerate(_records(path)[:number], 1):
        where = f"{path}: record {at}"
        when = record.get("timestamp")
        if not isinstance(when, int | float) or isinstance(when, bool) or not np.isfinite(when):
            raise InputError(f"{where}: timestamp: expected milliseconds, found {_short(when)}")
        content: Any
        if "input_length" in record:
            content = _trace_ids(record, where, seed, at)
            size = _count(record, "output_length", where)
        else:
            prompt = _prompt(record, where, max_tokens)
            content = prompt.content
            size = prompt.max_tokens
        found.append(Prompt(content, size, when / 1000))
    first = min((prompt.arrival or 0.0 for prompt in found), default=0.0)
    found = [Prompt(prompt.content, prompt.max_tokens, (prompt.arrival or 0.0) - first) for prompt in found]
    return sorted(found, key=lambda prompt: prompt.arrival or 0.0)


def _trace_ids(record: Mapping[str, Any], where: str, seed: int, at: int) -> list[int]:
    length = _count(record, "input_length", where)
    blocks = record.get("hash_ids", [])
    if blocks and not _are(blocks, int, 0):
        raise InputError(f"{where}: hash_ids: expected a list of whole numbers, found {_short(blocks)}")
    ids: list[int] = []
    for block in blocks:
        ids += np.random.default_rng([seed, 5, block]).integers(*_IDS, _HASH_BLOCK).tolist()
    return (ids + np.random.default_rng([seed, 6, at]).integers(*_IDS, max(length - len(ids), 0)).tolist())[:length]


def _prompt(record: Mapping[str, Any], where: str, max_tokens: int) -> Prompt:
    if "max_tokens" in record:
        max_tokens = _count(record, "max_tokens", where)
    content: Any = record.get("prompt", record.get("messages"))
    if content is None and isinstance(record.get("input"), str):
        content = " ".join(filter(None, (record["input"], record.get("instruction"))))
        if "max_tokens" not in record and isinstance(record.get("output"), str):
            max_tokens = max(1, int(len(record["output"].split()) * _TOKENS_PER_WORD))
    is_text = isinstance(content, str) and bool(content)
    is_list = ("prompt" in record and _are(content, int, 0)) or ("messages" in record and _are(content, dict))
    if not (is_text or is_list):
        raise InputError(
            f"{where}: expected `prompt` (text or token ids), `messages` (a list of objects) or `input` (text), "
            f"found {_short(content) if content is not None else _short(sorted(record))}"
        )
    return Prompt(content, max_tokens)


def _of_lengths(inputs: Sequence[int], outputs: Sequence[int], seed: int) -> list[Prompt]:
    draw = np.random.default_rng([seed, 7])
    return [Prompt(draw.integers(*_IDS, size).tolist(), int(tokens)) for size, tokens in zip(inputs, outputs)]


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, or of JSON lines."""
    text = _text(path)
    if text.lstrip().startswith("["):
        values = [("record", at, value) for at, value in enumerate(_json(path), 1)]
    else:
        lines = ((at, line) for at, line in enumerate(text.splitlines(), 1) if line.strip())
        values = [("line", at, _loads(line, f"{path}: line {at}")) for at, line in lines]
    for what, at, value in values:
        if not isinstance(value, dict):
            raise InputError(f"{path}: {what} {at}: expected an object, found {_short(value)}")
    if not values:
        raise InputError(f"{path}: expected a list of records, or one a line, found none")
    return [value for _, _, value in values]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: expected a file of JSON, found none that can be read: {said}") from None


def _json(path: Path) -> Any:
    return _loads(_text(path), str(path))


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected JSON, found {' '.join(str(error).split())}") from None


def _count(record: Mapping[str, Any], key: str, where: str) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{where}: {key}: expected a whole number of at least 1, found {_short(value)}")
    return value


def _are(value: Any, kind: Any, least: float | None = None) -> bool:
    """Return whether `value` is a list of one type, not empty, and none below `least`."""
    if not isinstance(value, list) or not value:
        return False
    fit = all(isinstance(each, kind) and not isinstance(each, bool) for each in value)
    return fit and (least is None or min(value) >= least)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
