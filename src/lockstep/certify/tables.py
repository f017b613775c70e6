"""What each hypothesis expects of an endpoint. Needs torch and transformers.

In: a checkpoint, and golden's reference of it. Out: questions, prompts of golden's kind that a token shall follow, and
the log-probabilities of candidates for it under each hypothesis. Questions are golden's prompts and answers, and
answers drawn from the model, cut mostly where it is undecided, which tells most; long texts of these, cut where a
repetition penalty changes the answer, or where it depends on the text's beginning; and chats, where the tokenizer has a
template.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.artifacts.certificate import CHAT, COMPLETION, Hypotheses, Question
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.dtypes import ROW
from lockstep.artifacts.files import sha256_file, write_bytes
from lockstep.artifacts.places import FileEntry
from lockstep.artifacts.reference import ReferenceManifest
from lockstep.certify.likelihood import PENALTY, PUBLISHED, penalised, rms_difference
from lockstep.errors import InputError
from lockstep.manifests.own_files import replacing
from lockstep.progress import steps
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.verify.golden.model import load_checkpoint
from lockstep.verify.golden.reference import load_tokenizer
from lockstep.verify.golden.teacher_forced import logits_after, run_after
from lockstep.verify.rounded import Rounded, round_kv_cache, rounded_rows
from lockstep.weights import e4m3, groups

_NUM_CANDIDATES = 64  # of the published model, and
_NUM_OTHERS = 20  # of each hypothesis
_TEMPERATURES = (1.0, 2.0)  # that an answer to each prompt is drawn at
_DRAWN_TOKENS = 48
_UNDECIDED = 0.75  # of the questions
_NUM_FAR = 32  # long ones whose answer depends on tokens that are far back
_NUM_REPEATING = 32  # long ones of which a repetition penalty changes the answer: of short ones 1 in 100
_NUM_LONG_TEXTS = 16
_MIN_LONG_TOKENS = 64  # tokens
_LONG_TOKENS = 256
_END = 8  # a part of a long text: an eighth
_LENGTHS = (32, 64, 128)  # tokens of a truncated context
_NUM_CHATS = 32
_MIN_TOKENS = 4  # tokens of a question
_GROUP_SIZES = (32, 16)
_LEVELS = np.float32(127)
_REPETITION_PENALTY = 1.1  # as generation_config.json of many models has it


@dataclass(frozen=True)
class _Cut:
    """A question before its candidates are known. sequence: the ids that it is a beginning of. count: of its tokens."""

    kind: str
    text: str
    sequence: tuple[int, ...]
    count: int

    @property
    def ids(self) -> tuple[int, ...]:
        return self.sequence[: self.count]


@dataclass(frozen=True)
class _Place:
    """The first `count` ids of a sequence. repeats: whether a repetition penalty changes the next token."""

    sequence: tuple[int, ...]
    count: int
    repeats: bool


def make_hypotheses(checkpoint_json: Path, reference_json: Path, out: Path, completions: int = 240) -> Path:
    """Write the hypotheses on an endpoint of a checkpoint to `out`; return it.

    reference_json: golden's, of the same checkpoint and layers. completions: how many questions are not chats. Raises
    InputError where no text of the reference leads to its tokens.
    """
    reference = ReferenceManifest.load(reference_json)
    folder = CheckpointManifest.load(checkpoint_json).folder_of(Path(checkpoint_json))
    model = load_checkpoint(checkpoint_json, reference.layers)
    tokenizer = load_tokenizer(folder)
    cuts = _cuts(model, tokenizer, reference, completions)
    if not cuts:
        raise InputError(f"{reference_json}: expected prompts whose text leads to their tokens, found none")
    logits = dict(_hypotheses(model, tokenizer, cuts))
    published = logits[PUBLISHED]
    candidates = [_candidates(rows) for rows in zip(*logits.values())]
    logits[PENALTY] = np.stack([penalised(row, cut.ids, _REPETITION_PENALTY) for row, cut in zip(published, cuts)])
    tables = {name: _table(rows, candidates) for name, rows in logits.items()}
    arrays = {f"values.{name}": table for name, table in tables.items() if name not in ("fp16", "bf16")}
    for precision in ("fp16", "bf16"):
        rows = rms_difference(*(tables[name].astype(np.float64) for name in (precision, PUBLISHED)))
        # One draw of roundings says little of a row: the usual row's counts as much.
        arrays[f"noise.{precision}"] = np.sqrt((rows**2 + np.mean(rows**2)) / 2).astype(np.float32)
    texts = Tokenizer(folder / "tokenizer.json")
    questions = []
    for cut, tokens in zip(cuts, candidates):
        pieces = tuple(texts.token_bytes(token).decode(errors="replace") for token in tokens)
        questions.append(Question(cut.kind, cut.text, cut.ids, tuple(tokens), pieces))
    file = out.with_suffix(".safetensors")
    with replacing(out, (file.name,)):
        write_bytes(file, save(arrays))
        entry = FileEntry(file.name, sha256_file(file))
        Hypotheses(reference.layers, sha256_file(reference_json), tuple(questions), entry).save(out)
    return out


def _cuts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, reference: ReferenceManifest, count: int
) -> list[_Cut]:
    """Return the questions, in an order that mixes all kinds."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for prompt in reference.prompts:
        sequences.append((*prompt.prompt_ids, *prompt.tokens[:-1]))
        for temperature in _TEMPERATURES:
            sequences.append((*prompt.prompt_ids, *_drawn(model, prompt.prompt_ids, temperature, generator)))
    places = _undecided_first(model, sequences)
    undecided = _readable(tokenizer, places, int(_UNDECIDED * count))
    mixed_places = [places[number] for number in torch.randperm(len(places), generator=generator).tolist()]
    completions = [*dict.fromkeys(undecided + _readable(tokenizer, mixed_places, 2 * count))][:count]
    completions = [completions[number] for number in torch.randperm(len(completions), generator=generator).tolist()]
    long_texts = _long_texts(model, tokenizer, sequences)
    long_places = _undecided_first(model, long_texts, _MIN_LONG_TOKENS)
    repeating = [place for place in long_places if place.repeats]
    longs = _readable(tokenizer, repeating, _NUM_REPEATING) + _readable(
        tokenizer, _far_first(model, long_texts), _NUM_FAR
    )
    chats = []
    if tokenizer.chat_template:
        chats = [_chat(tokenizer, cut.text) for cut in completions[:_NUM_CHATS]]
    # All long texts and chats stand among the first, for an endpoint is not always asked all questions.
    mixed = itertools.chain.from_iterable(itertools.zip_longest(dict.fromkeys(longs), completions, chats))
    return [cut for cut in mixed if cut is not None]


def _long_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sequences: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return the ids of texts of all sequences, each with another one first, and at its end its beginning once more."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4 * _LONG_TOKENS
    length = min(_LONG_TOKENS, context // 4)
    texts = [_text(tokenizer, sequence) for sequence in sequences]
    long_texts = []
    for first in range(min(len(texts), _NUM_LONG_TEXTS)):
        ids = tokenizer("\n".join(texts[first:] + texts[:first]))["input_ids"]
        text = _text(tokenizer, ids[: length - length // _END])
        beginning = _text(tokenizer, ids[: length // _END])
        long_texts.append(tuple(tokenizer(f"{text}\n{beginning}")["input_ids"][:length]))
    return long_texts


def _far_first(model: PreTrainedModel, long_texts: Sequence[tuple[int, ...]]) -> list[_Place]:
    """Return the places in the ends of long texts, first the one whose next token depends most on the beginning."""
    dependence = {}
    for sequence in steps(long_texts, "hypotheses: long questions", "texts"):
        end = len(sequence) // _END
        left_out = 3 * end
        counts = range(len(sequence) - end + 1, len(sequence) + 1)
        logits, _ = logits_after(model, sequence, counts)
        truncated, _ = logits_after(model, sequence[left_out:], [count - left_out for count in counts])
        for count in counts:
            difference = _probabilities(logits[count]) - _probabilities(truncated[count - left_out])
            dependence[_Place(sequence, count, False)] = float(np.abs(difference).sum())
    return sorted(dependence, key=lambda place: -dependence[place])


def _undecided_first(
    model: PreTrainedModel, sequences: Sequence[tuple[int, ...]], shortest: int = _MIN_TOKENS
) -> list[_Place]:
    """Return the places in sequences after at least `shortest` tokens, the one with the least certain token first."""
    certainty = {}
    for sequence in steps(sequences, "hypotheses: questions", "texts"):
        logits, _ = logits_after(model, sequence, range(shortest, len(sequence) + 1))
        for count, row in logits.items():
            repeats = penalised(row, sequence[:count], _REPETITION_PENALTY).argmax() != row.argmax()
            place = _Place(sequence, count, bool(repeats))
            certainty[place] = float(np.square(_probabilities(row)).sum())
    return sorted(certainty, key=lambda place: certainty[place])


def _probabilities(row: np.ndarray) -> np.ndarray:
    probabilities = np.exp(row.astype(np.float64) - row.max())
    return np.asarray(probabilities / probabilities.sum())


def _readable(tokenizer: PreTrainedTokenizerBase, places: Sequence[_Place], limit: int) -> list[_Cut]:
    """Return questions at the first `limit` places whose text leads to their tokens."""
    cuts: list[_Cut] = []
    for place in places:
        ids = place.sequence[: place.count]
        text = _text(tokenizer, ids)
        if len(cuts) < limit and tuple(tokenizer(text)["input_ids"]) == ids:
            cuts.append(_Cut(COMPLETION, text, place.sequence, place.count))
    return cuts


def _chat(tokenizer: PreTrainedTokenizerBase, text: str, system: str = "", opens: bool = True) -> _Cut:
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=opens, return_dict=False)
    return _Cut(CHAT, text, tuple(ids), len(ids))


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text that the tokenizer makes these ids of: without the token that it puts first."""
    first = int(bool(ids) and ids[0] == tokenizer.bos_token_id and tokenizer("")["input_ids"][:1] == [ids[0]])
    return str(tokenizer.decode(list(ids[first:]), clean_up_tokenization_spaces=False))


def _drawn(model: PreTrainedModel, ids: Sequence[int], temperature: float, generator: torch.Generator) -> list[int]:
    tokens: list[int] = []
    with torch.no_grad():
        rows, cache = run_after(model, ids)
        for _ in range(_DRAWN_TOKENS):
            probabilities = torch.softmax(rows[-1].float() / temperature, -1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
            rows, cache = run_after(model, tokens[-1:], cache)
    return tokens


def _hypotheses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cuts: Sequence[_Cut]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of each hypothesis and its logits, [questions, vocab_size]; "as published" is the first."""
    published = _logits(model, cuts)
    yield PUBLISHED, published
    changes: dict[str, contextlib.AbstractContextManager[Any]] = {
        "fp16": Rounded(torch.float16),
        "bf16": Rounded(torch.bfloat16),
        "int8": _weights(model, lambda weight, is_head: _integers(weight, 8)),
        "int8 / rows": _weights(model, lambda weight, is_head: _symmetric_int8(weight, weight.shape[-1])),
        "int8 / groups": _weights(model, lambda weight, is_head: _symmetric_int8(weight, _group_size(weight))),
        "int4": _weights(model, lambda weight, is_head: _integers(weight, 8 if is_head else 4)),
        "fp8": _weights(model, _e4m3, rounds_activations=True),
        "fp8 / weights": _weights(model, _e4m3),
        "fp8 / KV cache": _kv_cache(model),
        "wrong RoPE scaling": _rope(model, lambda frequencies, exponents: frequencies / 2),
        "wrong RoPE scaling / base 10,000": _rope(model, lambda frequencies, exponents: 10_000.0**-exponents),
        "wrong RoPE scaling / base 500,000": _rope(model, lambda frequencies, exponents: 500_000.0**-exponents),
    }
    for name, change in changes.items():
        with change:
            logits = _logits(model, cuts)
        yield name, logits
    rewritten_cuts = {}
    for length in _LENGTHS:
        rewritten_cuts[f"truncated context / {length} tokens"] = [_cut_to(cut, length) for cut in cuts]
    for name in ("none", "with a system message", "without its end"):
        rewritten_cuts[f"another template / {name}"] = [_with_template(tokenizer, cut, name) for cut in cuts]
    for name, rewritten in rewritten_cuts.items():
        changed = [number for number, cut in enumerate(cuts) if rewritten[number] != cut]
        if changed:
            logits = published.copy()
            logits[changed] = _logits(model, [rewritten[number] for number in changed])
            yield name, logits


def _cut_to(cut: _Cut, length: int) -> _Cut:
    if cut.count <= length:
        return cut
    return replace(cut, sequence=cut.ids[-length:], count=length)


def _with_template(tokenizer: PreTrainedTokenizerBase, cut: _Cut, name: str) -> _Cut:
    if cut.kind != CHAT:
        return cut
    if name == "none":
        ids = tuple(tokenizer(cut.text)["input_ids"])
        return _Cut(CHAT, cut.text, ids, len(ids))
    if name == "without its end":
        return _chat(tokenizer, cut.text, opens=False)
    try:
        return _chat(tokenizer, cut.text, "You are a helpful assistant.")
    except Exception:  # templates raise their own for a role that they do not know
        return cut


def _logits(model: PreTrainedModel, cuts: Sequence[_Cut]) -> np.ndarray:
    """Return the logits after each question's tokens, [questions, vocab_size] float32."""
    by_sequence: dict[tuple[int, ...], set[int]] = {}
    for cut in cuts:
        by_sequence.setdefault(cut.sequence, set()).add(cut.count)
    rows = {}
    for sequence in steps(list(by_sequence), "hypotheses: a model", "texts"):
        counts = by_sequence[sequence]
        logits, _ = logits_after(model, sequence[: max(counts)], counts)
        rows.update({(sequence, count): row for count, row in logits.items()})
    return np.stack([rows[cut.sequence, cut.count] for cut in cuts])


@contextlib.contextmanager
def _weights(
    model: PreTrainedModel, rounded: Callable[[np.ndarray, bool], np.ndarray], rounds_activations: bool = False
) -> Iterator[None]:
    """Run a model with other weights of its linear layers. rounded: of a weight, and whether it is the head's."""
    head = model.get_output_embeddings()
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    originals = [module.weight for module in linear]
    hooks = []
    for module in linear:
        if rounds_activations and module is not head:
            hooks.append(module.register_forward_pre_hook(lambda _, inputs: (rounded_rows(inputs[0], ROW),)))
        weight = torch.from_numpy(rounded(module.weight.detach().numpy(), module is head))
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
    yield
    for module, parameter in zip(linear, originals):
        module.weight = parameter
    for hook in hooks:
        hook.remove()


def _integers(weight: np.ndarray, bits: int) -> np.ndarray:
    """Round as our weights of 8 and 4 bits, and llama.cpp's Q4_0."""
    rows = np.ascontiguousarray(weight).reshape(-1, _group_size(weight))
    scales = groups.scales_of(rows, bits)
    integers = groups.integers_of(rows, scales, bits).astype(np.float32) - np.float32(1 << bits - 1)
    return (integers * scales[:, None]).reshape(weight.shape)


def _symmetric_int8(weight: np.ndarray, size: int) -> np.ndarray:
    """Round to -127 to 127 steps in groups of `size`: rows as W8A8 engines, 32 numbers as llama.cpp's Q8_0."""
    rows = np.ascontiguousarray(weight).reshape(-1, size)
    steps = np.abs(rows).max(axis=1, keepdims=True) / _LEVELS
    return (np.rint(rows / np.where(steps > 0, steps, 1)) * steps).reshape(weight.shape)


def _group_size(weight: np.ndarray) -> int:
    return next((size for size in _GROUP_SIZES if weight.shape[-1] % size == 0), weight.shape[-1])


def _e4m3(weight: np.ndarray, is_head: bool) -> np.ndarray:
    if is_head:
        return weight
    scales = e4m3.row_scales(weight)
    numbers = e4m3.codes_of(weight, scales).view(e4m3.named_dtype("float8_e4m3fn"))
    return e4m3.dequantize(numbers, scales)


@contextlib.contextmanager
def _kv_cache(model: PreTrainedModel) -> Iterator[None]:
    hook = round_kv_cache(model)
    yield
    hook.remove()


@contextlib.contextmanager
def _rope(model: PreTrainedModel, changed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Run a model with other RoPE frequencies. changed: from the old ones and the exponents 0, 2 / d, 4 / d."""
    modules = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)]
    originals: list[Any] = [module.inv_freq for module in modules]
    for module, frequencies in zip(modules, originals):
        module.inv_freq = changed(frequencies, torch.arange(len(frequencies)) / len(frequencies))
    yield
    for module, frequencies in zip(modules, originals):
        module.inv_freq = frequencies


def _candidates(rows: Sequence[np.ndarray]) -> list[int]:
    """Return the likeliest tokens of any hypothesis, by their likelihood in the published model, which is first."""
    chosen = set(np.argsort(rows[0])[-_NUM_CANDIDATES:].tolist())
    for row in rows[1:]:
        chosen.update(np.argsort(row)[-_NUM_OTHERS:].tolist())
    return sorted(chosen, key=lambda token: (-rows[0][token], token))


def _table(rows: np.ndarray, candidates: Sequence[Sequence[int]]) -> np.ndarray:
    table = np.full((len(rows), max(map(len, candidates))), -np.inf, np.float32)
    for number, (row, tokens) in enumerate(zip(rows.astype(np.float64), candidates)):
        table[number, : len(tokens)] = row[tokens] - row.max() - np.log(np.exp(row - row.max()).sum())
    return table
