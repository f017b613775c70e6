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
from dataclasses import replace
from pathlib import Path

from lockstep.artifacts.adapted import AdaptedPrompt, AdaptedReport
from lockstep.artifacts.reports import PASS
from lockstep.errors import InputError
from lockstep.onnx_tools.metrics import difference
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.targets import Limits, Target, Tolerances
from lockstep.verify.golden.decoding import DecodingCheck, open_model
from lockstep.verify.golden.prompts import Decoded, Prompt, read_reference
from lockstep.verify.metrics import finish, largest

_FEW = 3  # tokens with an adapter in every slot: one behind the prompt, and decoding


def check(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    adapters_json: Path,
    adapted_reference_json: Path,
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
    path = Path(adapted_reference_json)
    prompts, _, reference = read_reference(path, expected, tolerance)
    files = assembly_json, weights_json, engines_json, path
    model = open_model(*files, reference.layers, target, limits, threads, adapters_json)
    assert model.adapters is not None  # `open` refuses a model without
    for name, sha256 in reference.adapters.items():
        model.check_adapter(name)
        if model.adapters.digest(name) != sha256:
            raise InputError(
                f"{path}: adapter {name!r}: expected {model.adapters.digest(name)} as in {adapters_json}, found "
                f"{sha256}; make the reference again"
            )
    tokenizer, stop_ids = Tokenizer.open(assembly_json), reference.eos_token_ids
    checked = _Check(model, tokenizer, prompts, reference.max_new_tokens, stop_ids, limits.max_num_tokens)
    report = checked.run(target)
    return finish(out, report, checked.failures[0] if checked.failures else None)


class _Check(DecodingCheck):
    def run(self, target: Target) -> AdaptedReport:
        assert self.model.adapters is not None
        forced, _ = self.decode([self.along(prompt) for prompt in self.prompts])
        free, _ = self.decode([self.freely(prompt) for prompt in self.prompts])
        backwards = self.decode([self.freely(prompt) for prompt in reversed(self.prompts)])[0][::-1]
        self.generate(self.prompts, [decoded.tokens for decoded in free], self.stop_ids)
        for i, decoded in self._in_every_slot():
            self._same(self.prompts[i], "with an adapter in every slot", free[i], decoded, short=True)
        entries = []
        for i, prompt in enumerate(self.prompts):
            (alone,), _ = self.decode([self.freely(prompt)])
            others = (("alone", alone), ("with adapters in other slots", backwards[i]))
            same = [self._same(prompt, how, free[i], other) for how, other in others]
            entries.append(self._judge(prompt, free[i], forced[i], all(same)))
        return AdaptedReport(
            result=PASS,
            target=target,
            engine_digest=self.model.engines.digest(),
            tolerance=max(prompt.bounds.largest for prompt in self.prompts),
            logit_noise=max(prompt.bounds.cost for prompt in self.prompts),
            max_logit_error=largest([entry.max_logit_error for entry in entries]),
            adapters={name: self.model.adapters.known[name].sha256 for name in self._names()},
            places=self.model.adapters.residency.max_adapters,
            loads=self.model.adapters.residency.loads,
            prompts=tuple(entries),
        )

    def _names(self) -> list[str]:
        return sorted({prompt.adapter for prompt in self.prompts if prompt.adapter})

    def _judge(self, prompt: Prompt, free: Decoded, forced: Decoded, alone_equal: bool) -> AdaptedPrompt:
        """Return a prompt's entry in the report; what is wrong with it goes to `failures`."""
        return AdaptedPrompt(
            adapter=prompt.adapter or "",
            text=prompt.text,
            tokens=tuple(free.tokens),
            text_out=self.text(prompt, free.tokens),
            reference_text=prompt.new_text,
            expected=prompt.expected,
            logit_noise=prompt.bounds.cost,
            max_logit_error=self.logit_error(prompt, "along the reference's tokens", forced.logits),
            differences=self.first_difference(prompt, "decoding freely", prompt.tokens, free.tokens),
            alone_equal=alone_equal,
            from_base=self._from_base(prompt),
        )

    def _from_base(self, prompt: Prompt) -> float | None:
        """Return how far the adapter moves the logits behind the prompt; None where that is not known."""
        bases = [base for base in self.prompts if not base.adapter and base.text == prompt.text]
        if not prompt.adapter or not bases:
            return None
        return difference(bases[0].logits[0], prompt.logits[0]).max_abs_error

    def _in_every_slot(self) -> Iterator[tuple[int, Decoded]]:
        """Yield (number of a prompt, the first tokens of its answer) with an adapter in every slot.

        An adapter of the reference lies in the slots whose number has a bit set, then in those where it is not, and in
        all others one that computes something else; bit by bit. Beside each request comes one without an adapter.
        """
        adapters = self.model.adapters
        assert adapters is not None  # `open` refuses a model without
        names = self._names()
        without = [self._shortest("")] if any(not prompt.adapter for prompt in self.prompts) else []
        places = range(adapters.residency.max_adapters)
        rounds = [(bit, value) for bit in range(max(1, (len(places) - 1).bit_length())) for value in (1, 0)]
        for number, (bit, value) in enumerate(rounds):
            name = names[number % len(names)]
            adapter = adapters.known[name]
            scales = {module: -scale for module, scale in adapter.scales.items()}
            other = replace(adapter, scale=-adapter.scale, scales=scales)
            chosen = [place for place in places if place >> bit & 1 == value]
            loaded = [
                replace(adapter if place in chosen else other, name=f"{name} in slot {place}") for place in places
            ]
            for resident in adapters.residency.resident:
                adapters.residency.drop(resident)
            for adapted in loaded:
                adapters.add(adapted)
                adapters.residency.claim(0, adapted.name)
            adapters.residency.release(0)
            adapters.load()
            pairs = [(self._shortest(name), loaded[place].name) for place in chosen]
            mixed = [pair for with_adapter in pairs for pair in (*((i, None) for i in without), with_adapter)]
            requests = [replace(self.freely(self.prompts[i], _FEW), adapter=loaded_name) for i, loaded_name in mixed]
            yield from zip([i for i, _ in mixed], self.decode(requests)[0])
            for adapted in loaded:
                adapters.remove(adapted.name)

    def _shortest(self, adapter: str) -> int:
        """Return the number of the shortest prompt with an adapter; "" is none."""
        numbers = (i for i, prompt in enumerate(self.prompts) if prompt.adapter == adapter)
        return min(numbers, key=lambda i: len(self.prompts[i].prompt_ids))

    def _same(self, prompt: Prompt, how: str, batch: Decoded, other: Decoded, short: bool = False) -> bool:
        """Return whether a request gave beside others the same as in the batch. short: as far as it goes."""
        if short:
            count = len(other.tokens)
            batch = Decoded(batch.logits[:count], batch.tokens[:count])
        if self.model.engines.batch_invariant:
            return self.same_bits(prompt, f"{how} instead of in the batch", batch.logits, other.logits)
        return not self.first_difference(prompt, how, batch.tokens, other.tokens)
