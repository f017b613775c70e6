"""Every family through all stages, against transformers: the same tokens, the same logits, however a prompt is cut or
mixed.

One family runs always; the rest are `long` and run with `make test-all`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from built_family import NAME, built_family
from families import FAMILIES, WINDOW, Family, some_families
from pipeline import open_model

from lockstep.export.torch_model import cut_config, load_folder
from lockstep.runtime import Advance, Decoding, Engine, Model, Request
from lockstep.targets import Results

NEW_TOKENS = 20
PROMPTS = [np.random.default_rng(seed).integers(3, 256, length) for seed, length in enumerate((5, 19, 11))]


@dataclass
class Built:
    """A family's random checkpoint, taken through all stages, and what transformers makes of it."""

    family: Family
    results: Results
    folder: object
    assembly: dict
    reference: torch.nn.Module

    def open(self, layers="all", **limits) -> Model:
        return open_model(self.results, NAME, "fp32", layers, **{"max_batch_size": 3, "max_seq_len": 64} | limits)

    def logits(self, ids) -> np.ndarray:
        return forward(self.reference, ids)


def forward(model, ids) -> np.ndarray:
    """[len(ids), vocab_size]"""
    with torch.no_grad():
        return model(torch.as_tensor(ids)[None], use_cache=False).logits[0].numpy()


@pytest.fixture(scope="module", params=some_families("qwen3_5_text", states=True))
def built(request, shared) -> Built:
    family = FAMILIES[request.param]

    root = built_family(shared, request.param)
    folder = root / "checkpoint"
    results = Results(root / "results")
    reference = load_folder(folder, cut_config(family.config, "all"))
    return Built(family, results, folder, json.loads(results.assembly(NAME, "fp32").read_text()), reference)


def test_the_graphs_show_what_the_family_is_known_for(built):
    family = built.family
    assembly = built.assembly
    kinds = assembly["kinds"].values()
    assert tuple(kind["window"] for kind in kinds) == family.windows
    assert {kind["softcap"] for kind in kinds} == {family.softcap}
    assert len(assembly["classes"]) == family.classes
    slots = [slot["name"] for entry in assembly["classes"].values() for slot in entry["slots"]]
    for suffix in family.slots:
        assert any(slot.endswith(suffix) for slot in slots), suffix


def test_twenty_tokens_of_three_requests_are_those_of_generate(built):
    expected = [generate(built.reference, prompt) for prompt in PROMPTS]
    for budget in (None, 7):  # 7 tokens a step: prompts in pieces together with requests that decode already
        decoding = Decoding(
            built.open(), [Request(prompt, NEW_TOKENS, argmax) for prompt in PROMPTS], max_num_tokens=budget
        )
        actual = [[], [], []]
        for output in decoding:
            tokens, logits = expected[output.request]
            at = len(actual[output.request])
            actual[output.request].append(output.token)
            assert abs(output.logits - logits[at]).max() < built.family.tolerance, (budget, output.request, at)
        assert actual == [tokens for tokens, _ in expected], budget


def argmax(logits) -> int:
    return int(logits.argmax())


def generate(model, prompt) -> tuple[list[int], list[np.ndarray]]:
    """Greedy tokens of transformers' own loop, with the logits that each was chosen from."""
    model.generation_config.eos_token_id = None  # random models say it at any time
    out = model.generate(
        torch.as_tensor(prompt)[None], attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0,
    )  # fmt: skip
    return out.sequences[0, len(prompt) :].tolist(), [row[0].numpy() for row in out.logits]


def test_a_prompt_in_three_pieces_gives_what_the_whole_gives(built):
    prompt = PROMPTS[1]
    model = built.open()
    expected = built.logits(prompt)[-1]
    (logits,) = model.step([Advance(0, prompt, 0)])
    assert abs(logits - expected).max() < built.family.tolerance
    for cuts in ((0, WINDOW + 1, WINDOW + 3, 19), (0, 1, 18, 19)):
        for start, end in zip(cuts, cuts[1:]):
            (actual,) = model.step([Advance(1, prompt[start:end], start)])
        assert abs(actual - expected).max() < built.family.tolerance, cuts


def test_a_step_that_mixes_prefill_and_decode_gives_what_each_gives_alone(built):
    first, two, three = PROMPTS
    model = built.open()
    model.step([Advance(2, two[:17], 0), Advance(0, three[:8], 0)])
    actual = model.step([Advance(0, three[8:9], 8), Advance(1, first, 0), Advance(2, two[17:18], 17)])
    expected = [built.logits(three)[8], built.logits(first)[4], built.logits(two)[17]]
    assert abs(actual - expected).max() < built.family.tolerance
    actual = model.step([Advance(2, two[18:], 18), Advance(0, three[9:], 9)])
    assert abs(actual - [built.logits(two)[18], built.logits(three)[10]]).max() < built.family.tolerance


def test_each_request_gives_the_same_bits_in_any_company(built):
    """Chunks end at multiples of 8 tokens; requests of all lengths come and go together."""
    model = built.open(chunk_size=8)
    prompts = [
        np.random.default_rng(seed).integers(3, 256, length) for seed, length in enumerate((5, 19, 9, 33, 16, 1))
    ]

    def run(order, steps):
        engine = Engine(model, max_num_tokens=10, prefix_caching=False)
        waiting = list(order)
        results = {i: [] for i in order}
        while waiting or engine.has_work:
            for _ in range(steps.integers(0, 3)):
                if waiting:
                    engine.add(Request(prompts[waiting.pop(0)], 8, argmax))
            for output in engine.step() if engine.has_work else ():
                results[order[output.request]].append(output.logits)
        return results

    alone = {i: run([i], np.random.default_rng(0))[i] for i in range(len(prompts))}
    for seed in range(2):
        random = np.random.default_rng(seed)
        for i, logits in run(random.permutation(len(prompts)).tolist(), random).items():
            np.testing.assert_array_equal(logits, alone[i], err_msg=f"schedule {seed}, prompt of {len(prompts[i])}")


@pytest.mark.parametrize("layers", [1, 2])
def test_the_first_layers_alone_are_those_of_the_cut_model(built, layers):
    cut = load_folder(built.folder, cut_config(built.family.config, layers))
    (actual,) = built.open(layers).step([Advance(0, PROMPTS[1], 0)])
    assert abs(actual - forward(cut, PROMPTS[1])[-1]).max() < built.family.tolerance
