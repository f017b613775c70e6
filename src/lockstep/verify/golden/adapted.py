"""The check of adapters: several in one batch, against transformers with each. Needs no torch.

In: an engine set with its assembly, weights and adapters, and the reference with each adapter. Out: a report. All
prompts with all adapters, and with none, go through the golden check; instead of random chunks they are decoded in the
opposite order, so that adapters get other slots. Where there are more adapters than slots, they take turns. Last all
slots are filled, with an adapter of the reference or another, so that each slot has it at some time and any two slots
differ at some time (`_in_every_slot`), and each adapter is loaded under a name that another had before (`_renamed`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.artifacts.adapted import AdaptedPrompt, AdaptedReport
from lockstep.errors import InputError
from lockstep.onnx_tools.judge import max_abs_error
from lockstep.targets import Limits, Target
from lockstep.tolerances import Tolerances
from lockstep.verify.golden.check import GoldenCheck
from lockstep.verify.golden.prompts import Decoded, Prompt
from lockstep.weights.adapters import LoadedAdapter

_NUM_TOKENS = 3  # with an adapter in every slot: one after the prompt, and decoding


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
    files = assembly_json, weights_json, engines_json, adapted_reference_json
    checked = _Check(*files, target, tolerance, limits, expected, threads, adapters_json)
    adapters = checked.model.adapters
    assert adapters is not None  # `open` refuses a model without
    for name, sha256 in checked.reference.adapters.items():
        checked.model.check_adapter(name)
        if adapters.digest(name) != sha256:
            raise InputError(
                f"{adapted_reference_json}: adapter {name!r}: expected {adapters.digest(name)} as in {adapters_json}, "
                f"found {sha256}; make the reference again"
            )
    report, _ = checked.run()
    prompts = tuple(
        AdaptedPrompt(**vars(entry), adapter=prompt.adapter or "", from_base=checked.from_base(prompt))
        for entry, prompt in zip(report.prompts, checked.prompts)
    )
    adapted = AdaptedReport(
        **{**vars(report), "prompts": prompts},
        adapters={name: adapters.loaded[name].sha256 for name in checked.names()},
        places=adapters.residency.num_places,
        loads=adapters.residency.loads,
    )
    return checked.finish(out, adapted)


class _Check(GoldenCheck):
    def mixed(self, free: Sequence[Decoded]) -> list[float | None]:
        """Run all prompts with adapters in other slots, and then in every slot; return the largest error of each."""
        backwards = self.decode([self.free_running(prompt) for prompt in reversed(self.prompts)])[0][::-1]
        errors = [
            self.compare_runs(prompt, "with adapters in other slots", *pair)[1]
            for prompt, *pair in zip(self.prompts, free, backwards)
        ]
        answers = [(i, "with an adapter in every slot", answer) for i, answer in self._in_every_slot()]
        for name in self.names():
            i = self._shortest(name)
            answers.append((i, "loaded under the name of another", self._renamed(name, i)))
        for i, how, answer in answers:
            count = len(answer.tokens)
            batch = Decoded(free[i].logits[:count], free[i].tokens[:count])
            self.compare_runs(self.prompts[i], how, batch, answer)
        return errors

    def names(self) -> list[str]:
        return sorted({prompt.adapter for prompt in self.prompts if prompt.adapter})

    def from_base(self, prompt: Prompt) -> float | None:
        """Return how far the adapter moves the logits after the prompt; None where that is not known."""
        bases = [base for base in self.prompts if not base.adapter and base.text == prompt.text]
        if not prompt.adapter or not bases:
            return None
        return max_abs_error(bases[0].logits[0], prompt.logits[0])

    def _in_every_slot(self) -> Iterator[tuple[int, Decoded]]:
        """Yield (number of a prompt, the first tokens of its answer) with an adapter in every slot.

        An adapter of the reference is in the slots whose number has a bit set, then in those where it is not, and in
        all others one that computes something else; bit by bit. Each batch also has a request without an adapter.
        """
        adapters = self.model.adapters
        assert adapters is not None  # `open` refuses a model without
        names = self.names()
        plain: list[tuple[int, str | None]] = []
        if any(not prompt.adapter for prompt in self.prompts):
            plain = [(self._shortest(""), None)]
        slots = range(adapters.residency.num_places)
        # Any two slots differ in a bit of their numbers, so they hold different adapters in the rounds of that bit.
        bits = range(max(1, (len(slots) - 1).bit_length()))
        for number, (bit, value) in enumerate(itertools.product(bits, (1, 0))):
            name = names[number % len(names)]
            adapter = adapters.loaded[name]
            negated = _negated(adapter)
            right_slots = [slot for slot in slots if slot >> bit & 1 == value]
            loaded = [replace(negated, name=f"{name} in slot {slot}") for slot in slots]
            for slot in right_slots:
                loaded[slot] = replace(adapter, name=loaded[slot].name)
            # While none is resident, `claim` fills the slots in ascending order.
            for resident in adapters.residency.resident:
                adapters.residency.drop(resident)
            for adapted in loaded:
                adapters.add(adapted)
                adapters.residency.claim(0, adapted.name)
            adapters.residency.release(0)
            adapters.load()
            mixed: list[tuple[int, str | None]] = []
            for slot in right_slots:
                mixed += [*plain, (self._shortest(name), loaded[slot].name)]
            requests = []
            for i, loaded_name in mixed:
                requests.append(replace(self.free_running(self.prompts[i], _NUM_TOKENS), adapter=loaded_name))
            yield from zip([i for i, _ in mixed], self.decode(requests)[0])
            for adapted in loaded:
                adapters.remove(adapted.name)

    def _renamed(self, name: str, i: int) -> Decoded:
        """Return the first tokens of prompt `i` with an adapter whose name another one had before."""
        adapters = self.model.adapters
        assert adapters is not None  # `open` refuses a model without
        adapter = adapters.loaded[name]
        for loaded in (_negated(adapter), adapter):
            adapters.add(replace(loaded, name=f"{name} renamed"))
            request = replace(self.free_running(self.prompts[i], _NUM_TOKENS), adapter=f"{name} renamed")
            (decoded,), _ = self.decode([request])
            adapters.remove(f"{name} renamed")
        return decoded

    def _shortest(self, adapter: str) -> int:
        """Return the number of the shortest prompt with an adapter; "" is none."""
        numbers = (i for i, prompt in enumerate(self.prompts) if prompt.adapter == adapter)
        return min(numbers, key=lambda i: len(self.prompts[i].prompt_ids))


def _negated(adapter: LoadedAdapter) -> LoadedAdapter:
    """Return an adapter that computes something else, with the same numbers."""
    scales = {module: -scale for module, scale in adapter.scales.items()}
    return replace(adapter, scale=-adapter.scale, scales=scales)
