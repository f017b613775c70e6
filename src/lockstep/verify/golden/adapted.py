"""The check of adapters: several in one batch, against transformers with each.

Needs no torch.

In: an engine set with its assembly, weights and adapters, and the reference with each adapter. Out: a report. All
prompts with all adapters, and with none, are decoded in one batch along the reference's tokens, then freely, then in
the opposite order, so that adapters lie in other slots, and as `lockstep generate` decodes; then each is decoded
alone. Where there are more adapters than slots, they take turns. Last all slots are filled, with an adapter of the
reference or another, so that each slot has it at some time and any two slots differ at some time (`_in_every_slot`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep.artifacts.adapted import AdaptedPrompt, AdaptedReference, AdaptedReport
from lockstep.artifacts.reports import PASS, TokenDifference
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools.metrics import difference
from lockstep.runtime import Decoding, Model, Request
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.targets import Limits, Target, Tolerances
from lockstep.verify.golden.forced import Errors
from lockstep.verify.golden.opened import check_layers, open_model
from lockstep.verify.golden.prompts import Decoded, Prompt, first_difference, read_logits, read_prompt, short
from lockstep.verify.golden.text import new_text
from lockstep.verify.metrics import finish, largest

_FEW = 3  # tokens with an adapter in every slot: one behind the prompt, and decoding


@dataclass(frozen=True)
class Adapted:
    """A prompt of the reference, and the adapter that it is for; "" for none."""

    adapter: str
    prompt: Prompt

    @property
    def name(self) -> str | None:
        return self.adapter or None

    def __str__(self) -> str:
        with_ = f"adapter {self.adapter!r}" if self.adapter else "no adapter"
        return f"{with_}, prompt {short(self.prompt.text)!r}"


def check(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    adapters_json: Path,
    reference_json: Path,
    target: Target,
    tolerance: Tolerances,
    limits: Limits,
    out: Path,
    expected: Sequence[str | None] = (),
    threads: int | None = None,
) -> Path:
    """Check an engine set with its adapters.

    Writes the report to `out`, which is returned. Arguments as of `golden.check_engines`; expected: for each prompt of
    the reference.

    Raises CheckError, one line, for the first thing wrong, with the whole report in `<out>.failed.json`; InputError for
    inputs that do not fit together.
    """
    reference, prompts = _read(Path(reference_json), expected, tolerance)
    check_layers(reference_json, reference.layers, target)
    model = open_model(assembly_json, weights_json, engines_json, target, limits, threads, adapters_json)
    assert model.adapters is not None  # `open` refuses a model without
    for answer in reference.answers:
        model.check_adapter(answer.adapter or None)
        if answer.adapter and model.adapters.digest(answer.adapter) != answer.sha256:
            raise InputError(
                f"{reference_json}: adapter {answer.adapter!r}: expected {model.adapters.digest(answer.adapter)} as in "
                f"{adapters_json}, found {answer.sha256}; make the reference again"
            )
    checked = _Check(model, Tokenizer.open(assembly_json), prompts, reference)
    report = checked.run(target)
    finish(out, report, checked.failures[0] if checked.failures else None)
    return Path(out)


def _read(path: Path, expected: Sequence[str | None], tolerance: Tolerances) -> tuple[AdaptedReference, list[Adapted]]:
    manifest = AdaptedReference.load(path)
    logits = read_logits(path.parent / manifest.logits.file, manifest.logits.sha256)
    texts = list(expected) or [None] * len(manifest.answers)
    if len(texts) != len(manifest.answers):
        raise InputError(
            f"{path}: prompts: expected {len(texts)} as in the config, found {len(manifest.answers)}; make the "
            "reference again"
        )
    found = []
    for i, (answer, text) in enumerate(zip(manifest.answers, texts)):
        prompt = read_prompt(answer.prompt, logits[f"logits.{i}"], logits[f"noise.{i}"], tolerance, text)
        found.append(Adapted(answer.adapter, prompt))
    return manifest, found


class _Check:
    """One run of the check.

    `failures` are lines, in the order in which they were found.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, prompts: Sequence[Adapted], reference: AdaptedReference):
        self.model, self.tokenizer, self.prompts = model, tokenizer, prompts
        self.max_new_tokens, self.stop_ids = reference.max_new_tokens, frozenset(reference.eos_token_ids)
        self.failures: list[str] = []

    def run(self, target: Target) -> AdaptedReport:
        assert self.model.adapters is not None
        forced = self._decode([self._along(one) for one in self.prompts])
        free = self._decode([self._freely(one) for one in self.prompts])
        backwards = self._decode([self._freely(one) for one in reversed(self.prompts)])[::-1]
        generated = self._generate()
        for i, decoded in self._in_every_slot():
            self._same(self.prompts[i], "with an adapter in every slot", free[i], decoded, short=True)
        entries = []
        for i, one in enumerate(self.prompts):
            alone = self._decode([self._freely(one)])[0]
            others = (("alone", alone), ("with adapters in other slots", backwards[i]))
            same = [self._same(one, how, free[i], other) for how, other in others]
            entries.append(self._judge(one, free[i], forced[i], all(same)))
            self._first_difference(one, "as lockstep generate decodes", free[i].tokens, generated[i])
        names = sorted({one.adapter for one in self.prompts} - {""})
        return AdaptedReport(
            result=PASS,
            target=target,
            engine_digest=self.model.engines.digest(),
            tolerance=max(one.prompt.bounds.largest for one in self.prompts),
            logit_noise=max(one.prompt.bounds.cost for one in self.prompts),
            max_logit_error=largest([entry.max_logit_error for entry in entries]),
            adapters={name: self.model.adapters.known[name].sha256 for name in names},
            places=self.model.adapters.residency.max_adapters,
            loads=self.model.adapters.residency.loads,
            prompts=tuple(entries),
        )

    def _judge(self, one: Adapted, free: Decoded, forced: Decoded, alone_equal: bool) -> AdaptedPrompt:
        prompt = one.prompt
        errors = Errors(prompt.bounds)
        for count, row, found in zip(prompt.counts, prompt.logits, forced.logits, strict=True):
            errors.add(count, row, found)
        if wrong := errors.wrong():
            self._fail(one, f"step {wrong[0] - prompt.count(0)}: {wrong[1]}")
        differences = self._first_difference(one, "decoding freely", prompt.tokens, free.tokens)
        text = new_text(self.tokenizer.decode, prompt.prompt_ids, free.tokens)
        if prompt.expected is not None and text != prompt.expected:
            said = f"(the reference says {prompt.new_text!r})"
            self._fail(one, f"text: expected {prompt.expected!r} as in the config, found {text!r} {said}")
        return AdaptedPrompt(
            adapter=one.adapter,
            text=prompt.text,
            tokens=tuple(free.tokens),
            text_out=text,
            reference_text=prompt.new_text,
            expected=prompt.expected,
            logit_noise=prompt.bounds.cost,
            max_logit_error=errors.worst,
            differences=differences,
            alone_equal=alone_equal,
            from_base=self._from_base(one),
        )

    def _from_base(self, one: Adapted) -> float | None:
        """Return how far the adapter moves the logits behind the prompt.

        None where it was not computed without.
        """
        bases = [other.prompt for other in self.prompts if not other.adapter and other.prompt.text == one.prompt.text]
        if not one.adapter or not bases:
            return None
        return difference(bases[0].logits[0], one.prompt.logits[0]).max_abs_error

    def _in_every_slot(self) -> Iterator[tuple[int, Decoded]]:
        """Yield (number of a prompt, the first tokens of its answer) with an adapter in every slot.

        An adapter of the reference lies in the slots whose number has a bit set, then in those where it is not, and in
        all others one that computes something else; bit by bit. Beside each request comes one without an adapter.
        """
        adapters = self.model.adapters
        assert adapters is not None  # `open` refuses a model without
        names = sorted({one.adapter for one in self.prompts} - {""})
        without = [self._shortest("")] if any(not one.adapter for one in self.prompts) else []
        places = range(adapters.residency.max_adapters)
        rounds = [(bit, value) for bit in range(max(1, (len(places) - 1).bit_length())) for value in (1, 0)]
        for number, (bit, value) in enumerate(rounds):
            name = names[number % len(names)]
            adapter = adapters.known[name]
            other = replace(adapter, scale=-adapter.scale)
            own = [place for place in places if place >> bit & 1 == value]
            loaded = [replace(adapter if place in own else other, name=f"{name} in slot {place}") for place in places]
            for resident in adapters.residency.resident:
                adapters.residency.drop(resident)
            for each in loaded:
                adapters.add(each)
                adapters.residency.claim(0, each.name)
            adapters.residency.release(0)
            adapters.load()
            chosen = [(self._shortest(name), loaded[place].name) for place in own]
            mixed = [pair for one in chosen for pair in (*((i, None) for i in without), one)]
            yield from zip(
                [i for i, _ in mixed],
                self._decode([replace(self._freely(self.prompts[i], _FEW), adapter=with_) for i, with_ in mixed]),
            )
            for each in loaded:
                adapters.remove(each.name)

    def _shortest(self, adapter: str) -> int:
        """Return the number of the shortest prompt with an adapter; "" is none."""
        numbers = (i for i, one in enumerate(self.prompts) if one.adapter == adapter)
        return min(numbers, key=lambda i: len(self.prompts[i].prompt.prompt_ids))

    def _same(self, one: Adapted, how: str, batch: Decoded, other: Decoded, short: bool = False) -> bool:
        """Return whether a request gave in other company what it gave in the batch.

        short: of the batch's answer only as much as the other has.
        """
        if short:
            count = len(other.tokens)
            batch = Decoded(batch.logits[:count], batch.tokens[:count])
        if self.model.engines.backend.batch_invariant:
            same = len(batch.logits) == len(other.logits) and all(map(np.array_equal, batch.logits, other.logits))
            if not same:
                self._fail(one, f"{how}: expected the bits of all logits as in the batch, found others")
            return same
        return not self._first_difference(one, how, batch.tokens, other.tokens)

    def _along(self, one: Adapted) -> Request:
        tokens = iter(one.prompt.tokens)
        return Request(one.prompt.prompt_ids, len(one.prompt.tokens), lambda logits: next(tokens), adapter=one.name)

    def _freely(self, one: Adapted, most: int | None = None) -> Request:
        count, ids = min(self.max_new_tokens, most or self.max_new_tokens), one.prompt.prompt_ids
        return Request(ids, count, lambda logits: int(logits.argmax()), self.stop_ids, adapter=one.name)

    def _decode(self, requests: Sequence[Request]) -> list[Decoded]:
        found = [Decoded() for _ in requests]
        for made in Decoding(self.model, requests):
            assert made.logits is not None  # each request chooses by itself
            found[made.request].tokens.append(made.token)
            found[made.request].logits.append(made.logits)
        return found

    def _generate(self) -> list[list[int]]:
        """Decode as `lockstep generate` does: the model chooses the tokens."""
        requests = [
            Request(one.prompt.prompt_ids, self.max_new_tokens, stop_ids=self.stop_ids, adapter=one.name)
            for one in self.prompts
        ]
        found: list[list[int]] = [[] for _ in self.prompts]
        try:
            for made in Decoding(self.model, requests):
                found[made.request].append(made.token)
        except CheckError as error:
            self.failures.append(f"generating: {error}")
        return found

    def _first_difference(
        self, one: Adapted, how: str, expected: Sequence[int], found: Sequence[int]
    ) -> tuple[TokenDifference, ...]:
        found_, wrong = first_difference(one.prompt, expected, found, self.tokenizer.decode)
        if wrong is not None:
            step, what = wrong
            self._fail(one, f"step {step}, {how}: {what}")
        return () if found_ is None else (found_,)

    def _fail(self, one: Adapted, what: str) -> None:
        self.failures.append(f"{one}, {what}")
