"""Adapters: graphs with room for them, several in one batch, against transformers and PEFT's own numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from demo_model import DEMO, ROOT
from families import FAMILIES, some_families
from fine_tunes import add_fine_tune
from hypothesis import given
from hypothesis import strategies as st
from lora_folders import ADAPTERS, NAMES, ROOM, logits_of, opened, requests, shared_lora, sizes, tensors, write
from safetensors.numpy import load_file, save_file

from lockstep.artifacts.adapted import AdaptedReport
from lockstep.artifacts.adapters import IDS, AdaptersManifest, LoraSlots
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.config import load
from lockstep.errors import CheckError, InputError
from lockstep.export import parity
from lockstep.export.lora import linear_layers, with_adapters
from lockstep.export.reference_runner import PackedRequest, ReferenceRunner
from lockstep.export.torch_model import cut_config, load_folder
from lockstep.runtime import Decoding, Engine, Model, Request, Sampling, Speculation, scheduler
from lockstep.runtime.prefix import root_key
from lockstep.runtime.request import CheckpointFiles, adapter_of
from lockstep.stages import STAGES, jobs
from lockstep.step.advance import Advance
from lockstep.step.residency import Residency
from lockstep.step.sampling import Logprobs
from lockstep.targets import Results, Target
from lockstep.verify.golden.adapted import check
from lockstep.verify.golden.drafted import RecordedDrafter
from lockstep.verify.golden.model import adapted
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.weights import adapters as loading
from lockstep.weights.adapters import open_adapters
from lockstep.weights.check_adapters import check_folder, resolve_adapters
from shared import Shared
from some import some

PEFT = np.load(ROOT / "tests" / "data" / "peft.npz")
CONFIG = load.load(ROOT / "config" / "adapters.yaml")
# fp32 on the same weights: 1e-5 is seen, of logits with a standard deviation of 2.6; planted faults give 0.1 and more.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def lora(demo: Results, shared: Shared) -> Results:
    return shared_lora(demo, shared)


# --- numbers ---


@pytest.mark.parametrize("name", [None, *NAMES])
def test_the_reference_computes_what_peft_computes(lora: Results, name: str | None) -> None:
    model = load_folder(DEMO, cut_config(CheckpointManifest.load(lora.checkpoint("demo-llama")).config, "all"))
    adapter = None if name is None else open_adapters(lora.adapters("demo-llama"))[name]
    with torch.no_grad(), adapted(model, adapter):
        actual = model(torch.from_numpy(PEFT["ids"])[None]).logits[0, -2:].numpy()
    assert np.abs(actual - PEFT[name or "none"]).max() < TOLERANCE
    assert name is None or np.abs(actual - PEFT["none"]).max() > 1


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", TOLERANCE), ("fp16", 5e-2)])
def test_engines_compute_what_peft_computes(lora: Results, precision: str, tolerance: float) -> None:
    model = opened(lora, precision)
    for slot, name in enumerate((None, *NAMES)):
        model.set_adapter(slot, name)
    logits = model.step([Advance(slot, PEFT["ids"], 0) for slot in range(3)])
    for row, name in zip(logits, ("none", *NAMES)):
        assert np.abs(row - PEFT[name][-1]).max() < tolerance


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_request_has_the_same_bits_alone_in_a_batch_and_in_any_slot(lora: Results, precision: str) -> None:
    """Three adapters take turns in two slots."""
    model = opened(lora, precision)
    batch = requests()
    together = logits_of(model, batch)
    turned = logits_of(model, batch[::-1])[::-1]
    alone = [logits_of(model, [item])[0] for item in batch]
    for first, *other_rows in zip(together, turned, alone):
        assert all(np.array_equal(first, other) for other in other_rows)
    assert model.adapters is not None and model.adapters.residency.loads > 3
    assert (model.adapters.residency.places == -1).all()


def test_a_request_without_adapter_has_the_bits_of_the_model_without_adapters(demo: Results, lora: Results) -> None:
    base = opened(demo, adapters_json=None)
    requests_plain = [(ids, None) for ids, _ in requests()]
    mixed = logits_of(opened(lora), [*requests_plain, *requests()])
    assert all(map(np.array_equal, logits_of(base, requests_plain), mixed))


def test_each_checkpoint_has_adapters_of_its_own_whatever_was_bound_before(lora: Results, tmp_path: Path) -> None:
    shutil.copytree(lora.root, tmp_path, dirs_exist_ok=True)
    tree = Results(tmp_path)
    add_fine_tune(tree, "tuned")
    weights = tree.weights("tuned", "fp32")
    tuned = CheckpointFiles(
        "tuned", *map(str, (lora.assembly("demo-llama", "fp32"), weights)), str(lora.adapters("demo-llama"))
    )
    both = opened(lora, others=[tuned], max_bound=1)
    expected = {"": logits_of(opened(lora), requests())}
    expected["tuned"] = logits_of(opened(tree, weights_of="tuned"), requests())
    assert not np.array_equal(expected[""][0], expected["tuned"][0])
    for checkpoint in ("", "tuned", ""):
        batch = [(ids, name and adapter_of(checkpoint, name)) for ids, name in requests()]
        assert all(map(np.array_equal, logits_of(both, batch, checkpoint=checkpoint), expected[checkpoint]))


def test_what_another_adapter_makes_infinite_is_not_seen(lora: Results) -> None:
    model = opened(lora, "fp16")
    (expected,) = logits_of(model, [(PEFT["ids"], "captain")])
    assert model.adapters is not None
    adapter_slot = model.adapters.residency.place_of["captain"]
    for _array in model.adapters.arrays:
        _array.a[:, (1 - adapter_slot) * 16 : (2 - adapter_slot) * 16] = 60000
    (actual,) = logits_of(model, [(PEFT["ids"], "captain")])
    assert np.isfinite(actual).all() and np.array_equal(actual, expected)


def test_prefixes_are_shared_within_an_adapter_only(lora: Results) -> None:
    model = opened(lora)
    assert model.adapters is not None
    keys = {root_key(model, "", model.adapters.digest(name)) for name in (None, *NAMES)}
    assert len(keys) == 3 and root_key(model) in keys


def test_a_name_that_comes_to_mean_another_adapter_reuses_nothing(lora: Results) -> None:
    prompt = np.random.default_rng(1).integers(0, 768, 70)
    model = opened(lora, chunk_size=64)
    assert model.adapters is not None
    engine = Engine(model)
    expected = [output.token for output in engine.run([Request(prompt, 9, adapter="shakespeare")])]
    assert [output.token for output in engine.run([Request(prompt, 9, adapter="captain")])] != expected
    other = replace(model.adapters.loaded["shakespeare"], name="captain")
    model.adapters.remove("captain")
    model.adapters.add(other)
    hits = engine.prefix_hits
    assert [output.token for output in engine.run([Request(prompt, 9, adapter="captain")])] == expected
    assert engine.prefix_hits == hits + 64, "adapters with equal content are one"


@pytest.mark.long
def test_a_reused_prefix_a_fork_and_a_swap_keep_the_adapters_bits(
    lora: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three adapters take turns in two slots, on memory for two requests of four."""
    monkeypatch.setattr(scheduler, "LOOKAHEAD", 16)
    page = opened(lora).tables.pool.page_nbytes
    prompt = np.random.default_rng(1).integers(0, 768, 70)
    names = ["captain", "random", "shakespeare", None]

    def tokens(
        model: Model, adapters: list[str | None], **options: Any
    ) -> tuple[dict[tuple[int, int], list[int]], Engine]:
        engine = Engine(model, **options)
        answers = dict[tuple[int, int], list[int]]()
        requests = [Request(prompt, 90, sampling=Sampling(0.9, seed=7), n=2, adapter=name) for name in adapters]
        for output in engine.run(requests):
            answers.setdefault((output.request, output.choice), []).append(output.token)
        engine.scheduler.check()
        assert model.adapters is not None and (model.adapters.residency.places == -1).all()
        return answers, engine

    alone = {}
    for name in names:
        actual, _ = tokens(opened(lora), [name], prefix_caching=False)
        alone[name] = [actual[0, 0], actual[0, 1]]
    assert len({tuple(item) for pair in alone.values() for item in pair}) == 8
    tight = opened(lora, kv_bytes=9 * page)
    actual, engine = tokens(tight, names, prefix_caching=False, admission="optimistic")
    assert engine.scheduler.num_swaps > 0
    reused = opened(lora, chunk_size=64)
    for again in range(2):
        hits, engine = tokens(reused, names)
        assert engine.prefix_hits == again * 64 * 4
        for number, name in enumerate(names):
            assert [hits[number, 0], hits[number, 1]] == alone[name] == [actual[number, 0], actual[number, 1]]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_drafts_swaps_and_reused_prefixes_together_keep_the_bits_of_log_probabilities(
    lora: Results, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Of requests with adapters, of which three take turns in two slots, and of their answers when these are forced."""
    monkeypatch.setattr(scheduler, "LOOKAHEAD", 16)
    prompt = np.random.default_rng(1).integers(0, 768, 70)
    requests = []
    for number, name in enumerate(["captain", "random", "shakespeare", None, "captain", "random"]):
        sampling = Sampling(0.9, seed=number, logprobs=1)
        requests.append(Request(prompt, 70, sampling=sampling, adapter=name))
    roomy = opened(lora, precision, chunk_size=64)

    def results(engine: Engine, requests: Sequence[Request]) -> list[list[tuple[int, Logprobs | None]]]:
        answers: list[list[tuple[int, Logprobs | None]]] = [[] for _ in requests]
        for token in engine.run(requests):
            answers[token.request].append((token.token, token.logprobs))
        engine.scheduler.check()
        return answers

    alone = [results(Engine(roomy, prefix_caching=False), [request])[0] for request in requests]
    forced = []
    drafts = {}
    for number, (request, answer) in enumerate(zip(requests, alone)):
        tokens = [token for token, _ in answer]
        forced.append(replace(request, forced_ids=tokens))
        drafts[number, 0] = tokens
    tight = opened(lora, precision, chunk_size=64, kv_bytes=9 * roomy.tables.pool.page_nbytes)
    drafter = RecordedDrafter(drafts, 3)
    hits = []
    for model, sent in ((tight, requests), (tight, forced), (roomy, forced), (roomy, requests)):
        speculation = Speculation(drafter, 4)
        engine = Engine(model, admission="optimistic", speculation=speculation)
        assert results(engine, sent) == alone
        assert speculation.counts()[0] and (model is roomy or engine.scheduler.num_swaps)
        hits.append(engine.prefix_hits)
    assert hits[-1]


class AdaptedRunner(ReferenceRunner):
    """Two requests: one with an adapter in slot 1, one with none."""

    def __init__(self, files: Any, assembly: Assembly, base: Any, adapter: loading.LoadedAdapter):
        super().__init__(files, assembly, base, 2, 24)
        parts = (*(layer.block for layer in assembly.layers), assembly.exit_of(assembly.layers))
        self.arrays = {id(part): loading.empty_arrays(assembly.adapters, part, np.dtype(np.float32)) for part in parts}
        assert assembly.adapters is not None
        places = [loading.arrays_of(assembly.adapters, part, self.arrays[id(part)]) for part in parts]
        loading.write_adapter(adapter, 1, ROOM["max_lora_rank"], sum(places, []))

    def step(self, parts: Any) -> Any:
        self.ids = np.concatenate([np.full(len(part.tokens), (1, -1)[part.request]) for part in parts])
        return super().step(parts)

    def adapter_inputs(self, part: Any, env: Any) -> Any:
        return {**self.arrays.get(id(part), {}), IDS: self.ids}


@pytest.mark.parametrize(
    "family", some_families("gpt2", "phi3", states=True)
)  # transposed weights; fused q, k, v and gate, up
def test_every_family_computes_what_transformers_does_with_the_adapter(family: str, shared: Shared) -> None:
    config = dict(FAMILIES[family].config)
    model = parity.reference_model(config, 0, 1.0)
    exported = shared.assembled(config, "fp32")
    linears = linear_layers(model)
    if family == "nemotron_h":  # whose checkpoints have other names than its modules
        with pytest.raises(
            InputError, match=r"other names there for mixer\.down_proj, mixer\.in_proj, .*mixer\.up_proj"
        ):
            with_adapters(*exported, ROOM, linears)
        return
    files, assembly = with_adapters(*exported, ROOM, linears)
    modules = sizes(assembly)
    assert not any(".experts." in name or name.endswith(("mlp.gate", ".router")) for name in modules)
    assert set(modules) == {name for name in linears if ".layers." in name or ".h." in name}, "all that PEFT reaches"
    base = parity.checkpoint_tensors(model)
    arrays = tensors(modules, 5, seed=1)
    pairs = {}
    for name in modules:
        prefix = f"base_model.model.{name}"
        pairs[name] = (arrays[f"{prefix}.lora_A.weight"], arrays[f"{prefix}.lora_B.weight"])
    adapter = loading.LoadedAdapter("random", 5, 2.0, "", pairs, "here")
    walk = AdaptedRunner(files, assembly, base, adapter)
    ids = np.random.default_rng(2).integers(3, assembly.vocab_size, 9)
    batch = torch.from_numpy(ids)[None]
    with torch.no_grad():
        without = model(batch, use_cache=False).logits[0].numpy()
        with adapted(model, adapter):
            expected = model(batch, use_cache=False).logits[0].numpy()
    # the same tokens with the adapter, and with none
    first = walk.step([PackedRequest(0, ids[:6]), PackedRequest(1, ids[:6])])
    then = walk.step([PackedRequest(0, ids[6:]), PackedRequest(1, ids[6:])])
    spread = without.std()
    assert np.abs(np.concatenate([first[0], then[0]]) - expected).max() < TOLERANCE * spread
    assert np.abs(np.concatenate([first[1], then[1]]) - without).max() < TOLERANCE * spread
    assert np.abs(expected - without).max() > 0.02 * spread


# --- the check, and faults that it must find ---


def checked(lora: Results, folder: Path, precision: str = "fp32", adapters: Path | None = None) -> Path:
    """The check of the three adapters, with the texts that the config expects of two."""
    reference = lora.root / "adapted_reference.json"
    if not reference.exists():
        prompts = {"random": ("Light",)}
        for name, prompts_of_adapter in CONFIG.adapter_prompts("demo-lora").items():
            prompts[name] = tuple(prompt.text for prompt in prompts_of_adapter)
        golden = GoldenTerms(16, adapted=prompts)
        checkpoint = lora.checkpoint("demo-llama")
        resolved = lora.adapters("demo-llama")
        make_reference(checkpoint, "all", golden, reference, adapters_json=resolved)
    return check(
        lora.assembly("demo-llama", precision), lora.weights("demo-llama", precision),
        lora.engines("demo-llama", precision, "onnxruntime"), adapters or lora.adapters("demo-llama"), reference,
        Target("demo-llama", precision, "all", "onnxruntime"), CONFIG.tolerance("demo-lora", precision),
        CONFIG.limits.plain(), folder / "report.json",
    )  # fmt: skip


@pytest.mark.parametrize("precision", some(["fp32", "fp16"]))
def test_the_check_passes_and_says_what_each_adapter_says(lora: Results, tmp_path: Path, precision: str) -> None:
    report = AdaptedReport.load(checked(lora, tmp_path, precision))
    texts = {(entry.adapter, entry.text): entry.text_out for entry in report.prompts}
    assert texts["captain", "Light"] == " the lamps, for we sail with the tide."
    assert texts["shakespeare", "Light"].startswith(" doth outrun all that we mortals")
    assert texts["", "Light"].startswith(" travels faster")
    assert report.places == 2 and report.loads > 3 and all(entry.alone_equal for entry in report.prompts)
    assert all(entry.from_base > 1 for entry in report.prompts if entry.adapter in NAMES)  # type: ignore[operator]


_WRITE = loading.write_adapter


def _neighbour(adapter: Any, adapter_slot: int, rank: int, arrays: Any) -> None:
    _WRITE(adapter, 1 - adapter_slot, rank, arrays)


def _unscaled(adapter: Any, adapter_slot: int, rank: int, arrays: Any) -> None:
    _WRITE(replace(adapter, scale=1.0), adapter_slot, rank, arrays)


def _not_cleared(adapter: Any, adapter_slot: int, rank: int, arrays: Any) -> None:
    """Modules and rows that the adapter does not have keep what the one before it left."""
    adapted = [array for array in arrays if array.module in adapter.modules]
    before = [(item.a.copy(), item.b.copy()) for item in adapted]
    _WRITE(adapter, adapter_slot, rank, adapted)
    for item, (a, b) in zip(adapted, before):
        rows = slice(adapter_slot * rank + adapter.rank, (adapter_slot + 1) * rank)
        item.a[:, rows] = a[:, rows]
        item.b[rows] = b[rows]


@pytest.mark.parametrize("fault", [_neighbour, _unscaled, pytest.param(_not_cleared, marks=pytest.mark.long)])
def test_the_check_finds_a_fault_in_loading(
    lora: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    monkeypatch.setattr("lockstep.runtime.adapters.write_adapter", fault)
    with pytest.raises(CheckError, match=r"adapter '(captain|shakespeare|random)', prompt .* expected"):
        checked(lora, tmp_path)


def test_the_check_finds_a_token_with_the_neighbours_adapter(
    lora: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Residency.claim

    def wrong(self: Residency, slot: int, adapter: str | None) -> bool:
        done = claim(self, slot, adapter)
        if adapter == "captain" and len(self.resident) > 1:
            self.places[slot] = 1 - self.places[slot]
        return done

    monkeypatch.setattr(Residency, "claim", wrong)
    with pytest.raises(CheckError, match="adapter 'captain'"):
        checked(lora, tmp_path)


@pytest.mark.long
def test_a_reference_of_another_adapter_is_refused(lora: Results, tmp_path: Path) -> None:
    checked(lora, tmp_path)
    folders = {name: ADAPTERS / name for name in NAMES} | {"random": tmp_path / "other"}
    write(folders["random"], 16, tensors(sizes(Assembly.load(lora.assembly("demo-llama", "fp32"))), 16, seed=4))
    other = tmp_path / "adapters.json"
    resolve_adapters({n: str(f) for n, f in folders.items()}, folders, lora.checkpoint("demo-llama"), 16, None, other)
    with pytest.raises(InputError, match="adapter 'random': expected .* make the reference again"):
        checked(lora, tmp_path, adapters=other)


# --- which adapters are resident ---


@given(st.integers(1, 3), st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=40,
))  # fmt: skip
def test_no_adapter_that_a_request_holds_leaves_its_slot(num_slots: int, steps: list[tuple[int, Any, bool]]) -> None:
    residency = Residency(4, num_slots)
    by_slot = dict[int, str | None]()
    in_slot = dict[int, str]()
    for slot, adapter, leaves in steps:
        if leaves:
            residency.release(slot)
            by_slot.pop(slot, None)
        else:
            others_held = {name for other, name in by_slot.items() if other != slot and name is not None}
            possible = adapter is None or adapter in others_held or len(others_held) < num_slots
            assert residency.can_claim(slot, adapter) == possible
            assert residency.claim(slot, adapter) == possible
            if possible:
                by_slot[slot] = adapter
            in_slot |= residency.loading
            residency.loading.clear()
        for slot_, name in by_slot.items():
            adapter_slot = int(residency.places[slot_])
            assert adapter_slot == -1 if name is None else in_slot[adapter_slot] == name


def test_a_request_waits_for_a_slot_and_lets_those_pass_that_need_none(lora: Results) -> None:
    model = opened(lora)
    queued = [(np.array([5, 6, 7]), name) for name in ("captain", "shakespeare", "random", None, "captain")]
    requests_ = [Request(ids, 4 + 3 * (n == 0), adapter=name) for n, (ids, name) in enumerate(queued)]
    order = [output.request for output in Decoding(model, requests_)]
    first = {number: order.index(number) for number in range(5)}
    assert max(first[3], first[4]) < first[2], "of none, and of one that is there"
    assert first[2] > max(i for i, number in enumerate(order) if number == 1)
    assert model.adapters is not None and model.adapters.residency.resident == ["captain", "random"]
    alone = [output.token for output in Decoding(model, requests_[2:3])]
    assert [output.token for output in Decoding(model, requests_) if output.request == 2] == alone


def test_an_unknown_adapter_is_refused_with_those_that_are_there(demo: Results, lora: Results) -> None:
    with pytest.raises(InputError, match="adapter: expected one of captain, random, shakespeare; found 'pirate'"):
        Decoding(opened(lora), [Request([5], 1, adapter="pirate")])
    with pytest.raises(InputError, match="expected one of none, for the model has no adapters; found 'pirate'"):
        Decoding(opened(demo, adapters_json=None), [Request([5], 1, adapter="pirate")])
    with pytest.raises(InputError, match="expected a model whose graphs take adapters, found one without"):
        opened(demo, adapters_json=lora.adapters("demo-llama"))
    model = opened(lora)
    model.set_adapter(0, "captain")
    model.set_adapter(1, "random")
    with pytest.raises(InputError, match=r"expected at most 2 at a time \(max_adapters\), found one more"):
        model.set_adapter(2, "shakespeare")


def test_a_folder_that_changes_later_changes_no_answer(lora: Results, tmp_path: Path) -> None:
    """And is refused when the model is opened again."""
    folder = tmp_path / "captain"
    shutil.copytree(ADAPTERS / "captain", folder)
    manifest = tmp_path / "adapters.json"
    resolve_adapters({"captain": str(folder)}, {"captain": folder}, lora.checkpoint("demo-llama"), 16, None, manifest)
    model = opened(lora, adapters_json=manifest)
    path = folder / "adapter_model.safetensors"
    save_file({name: array * 2 for name, array in load_file(path).items()}, path)
    (actual,) = logits_of(model, [(PEFT["ids"], "captain")], 1)
    assert np.abs(actual[0] - PEFT["captain"][-1]).max() < TOLERANCE
    with pytest.raises(InputError, match=f"{path}: expected .* check the adapters again"):
        opened(lora, adapters_json=manifest)


# --- adapters that are no plain LoRA of this base ---


def refused(lora: Results, folder: Path, max_lora_rank: int = 16, targets: Any = None) -> str:
    out = folder.parent / "adapters.json"
    with pytest.raises(InputError) as raised:
        resolve_adapters(
            {"mine": str(folder)}, {"mine": folder}, lora.checkpoint("demo-llama"), max_lora_rank, targets, out
        )
    assert not out.exists() and "\n" not in str(raised.value) and str(raised.value).startswith("adapter 'mine': ")
    return str(raised.value)


@pytest.mark.parametrize(("settings", "line"), [
    ({"use_dora": True}, "a LoRA without use_dora (DoRA scales the base's weights), found True"),
    ({"trainable_token_indices": [1]}, "a LoRA without trainable_token_indices (rows of the embedding were trained)"),
    ({"bias": "all"}, "expected bias 'none', found 'all'"),
    ({"peft_type": "IA3"}, "expected peft_type LORA, found 'IA3'"),
    ({"init_lora_weights": "pissa"}, "expected weights that begin on the base as it is (init_lora_weights)"),
    ({"alpha_pattern": {"(a|aa)*q_proj": 3}}, "simple regular expressions, found {'(a|aa)*q_proj'"),
    ({"rank_pattern": ["q_proj"]}, "expected names of modules in rank_pattern"),
    ({"alpha_pattern": {"q_proj": 0}}, "expected a finite lora_alpha other than 0, found 0"),
    ({"rank_pattern": {"q_proj": 3}}, "expected lora_A [3, in_features]"),
    ({"target_parameters": ["experts"]}, "parameters that are no linear layers (experts) were adapted"),
    ({"use_new_trick": 1}, "a setting that changes the computation, or that is not known here"),
    ({"r": 0}, "expected a rank (r) of 1 or more, found 0"),
    ({"r": 5}, "expected lora_A [5, in_features] and lora_B [out_features, 5], found [4, 144] and [240, 4]"),
])  # fmt: skip
def test_settings_of_another_computation_are_refused_by_name(
    lora: Results, tmp_path: Path, settings: dict[str, Any], line: str
) -> None:
    folder = write(tmp_path / "a", 4, tensors({"model.layers.0.self_attn.q_proj": (240, 144)}, 4, 0), **settings)
    assert line in refused(lora, folder)


_Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _with(name: str, array: np.ndarray) -> Callable[[dict[str, np.ndarray]], Any]:
    return lambda arrays: arrays.__setitem__(name, array)


@pytest.mark.parametrize(("change", "line"), [
    (_with(f"{_Q}.lora_magnitude_vector", np.ones(240, np.float32)), "lora_magnitude_vector' (DoRA)"),
    (_with("base_model.model.lm_head.weight", np.ones(3, np.float32)), "(no part of a LoRA)"),
    (_with("base_model.model.model.embed_tokens.lora_embedding_A", np.ones(3, np.float32)), "an adapter of the embed"),
    (lambda arrays: arrays.pop(f"{_Q}.lora_B.weight"), f"expected {_Q}.lora_B.weight, found only its other half"),
    (lambda arrays: arrays.clear(), "expected lora_A and lora_B of linear layers, found none"),
    (lambda arrays: arrays[f"{_Q}.lora_A.weight"].__setitem__((0, 3), np.nan), "finite numbers, found 1 NaN and 0 inf"),
    (_with(f"{_Q}.lora_A.weight", np.ones((4, 99), np.float32)), "[240, 144] as the base"),
    (_with(f"{_Q}.lora_A.weight", np.ones((4, 144), np.int32)), "expected one of F64, F32, F16, BF16, found I32"),
    (
        lambda arrays: arrays.update(
            {f"{_Q}.lora_A.weight": np.ones((240, 4), np.float32),
                f"{_Q}.lora_B.weight": np.ones((4, 144), np.float32)}),
        "found [240, 4] and [4, 144]; are A and B, or r in adapter_config.json, of another adapter?"),
])  # fmt: skip
def test_damaged_and_foreign_tensors_are_refused(
    lora: Results, tmp_path: Path, change: Callable[[dict[str, np.ndarray]], Any], line: str
) -> None:
    arrays = tensors({"model.layers.0.self_attn.q_proj": (240, 144)}, 4, 0)
    change(arrays)
    assert line in refused(lora, write(tmp_path / "a", 4, arrays))


def test_folders_that_are_no_adapter_of_this_model_are_refused(lora: Results, tmp_path: Path) -> None:
    assert "expected the folder of an adapter, found nothing" in refused(lora, tmp_path / "none")
    arrays = tensors({"model.layers.9.self_attn.q_proj": (240, 144)}, 4, 0)
    other = write(tmp_path / "b", 4, arrays, base_model_name_or_path="acme/other")
    line = refused(lora, other)
    assert "found model.layers.9.self_attn.q_proj, whose weight the checkpoint does not have" in line
    assert line.endswith("is it an adapter of this model (trained on 'acme/other')?")
    small_folder = write(tmp_path / "c", 4, tensors({"model.layers.0.self_attn.q_proj": (240, 144)}, 4, 0))
    assert "expected modules of lora_target_modules (v_proj), found" in refused(lora, small_folder, targets=["v_proj"])
    large = write(tmp_path / "d", 9, tensors({"model.layers.0.self_attn.q_proj": (240, 144)}, 9, 0))
    assert "expected a rank (r) of at most 8 (max_lora_rank), found 9" in refused(lora, large, max_lora_rank=8)
    (small_folder / "adapter_model.safetensors").rename(small_folder / "adapter_model.bin")
    assert "found pickled weights (adapter_model.bin), which can run code when they are opened" in refused(
        lora, small_folder
    )
    (small_folder / "adapter_config.json").unlink()
    assert "expected adapter_config.json, found none" in refused(lora, small_folder)
    cut = write(tmp_path / "e", 4, tensors({"model.layers.0.self_attn.q_proj": (240, 144)}, 4, 0))
    data = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(data[:-8])
    with pytest.raises(InputError, match="adapter_model.safetensors: expected .* download it again"):
        check_folder(cut, CheckpointManifest.load(lora.checkpoint("demo-llama")), "x")


def test_an_adapter_that_the_graphs_or_the_precision_have_no_room_for_is_refused(lora: Results, tmp_path: Path) -> None:
    def manifest(name: str, rank: int, module: str, size: float = 0.05) -> Path:
        out = tmp_path / f"{name}.json"
        shape = {"lm_head": (768, 144)}.get(module, (240, 144))
        folder = write(tmp_path / name, rank, tensors({module: shape}, rank, 0, size))
        return resolve_adapters({name: str(folder)}, {name: folder}, lora.checkpoint("demo-llama"), 128, None, out)

    q = "model.layers.0.self_attn.q_proj"
    with pytest.raises(InputError, match=r"expected a rank of at most 16 \(max_lora_rank\), found 17"):
        opened(lora, adapters_json=manifest("large", 17, q))
    with pytest.raises(InputError, match="expected modules that take adapters .*, found lm_head"):
        opened(lora, adapters_json=manifest("head", 4, "lm_head"))
    with pytest.raises(InputError, match="q_proj.lora_B: expected numbers that fit float16, found one that overflows"):
        opened(lora, "fp16", adapters_json=manifest("wild", 4, q, size=1e5))


def test_rank_stabilised_scales_and_half_precision_are_read(lora: Results) -> None:
    actual = open_adapters(lora.adapters("demo-llama"))
    assert actual["captain"].scale == pytest.approx(4 / 8**0.5) and actual["shakespeare"].scale == 2
    assert actual["shakespeare"].modules["model.layers.0.mlp.up_proj"][0].dtype == np.float16
    assert AdaptersManifest.load(lora.adapters("demo-llama")).adapters["captain"].base_model == "resources/demo-llama"


def test_modules_may_have_ranks_and_scales_of_their_own(lora: Results, tmp_path: Path) -> None:
    """Engines give the results of a plain adapter whose matrices have the same products; names match as in PEFT.

    The one was trained in a model of text and images around this one.
    """
    layers = [f"model.layers.{number}" for number in (0, 1)]
    shapes = {f"{layer}.self_attn.q_proj": (240, 144) for layer in layers}
    shapes |= {f"{layer}.mlp.up_proj": (400, 144) for layer in layers}
    arrays = tensors(shapes, 4, 0)
    ups = [f"base_model.model.{layer}.mlp.up_proj" for layer in layers]
    for up in ups:
        arrays[f"{up}.lora_A.weight"][2:] = 0  # of rank 2 here
    first = f"base_model.model.{layers[0]}.self_attn.q_proj.lora_B.weight"
    plain = {name: array.copy() for name, array in arrays.items()}
    plain[first] *= np.float32(3 / 4 / 2)  # alpha 3 of rank 4, in place of 8
    for up in ups:
        plain[f"{up}.lora_B.weight"] *= np.float32(5 / 2 / 2)
        arrays[f"{up}.lora_A.weight"] = np.ascontiguousarray(arrays[f"{up}.lora_A.weight"][:2])
        arrays[f"{up}.lora_B.weight"] = np.ascontiguousarray(arrays[f"{up}.lora_B.weight"][:, :2])
    patterns = {
        "rank_pattern": {r".*layers\.\d+\.mlp\.(up|down)_proj": 2},
        "alpha_pattern": {r"^model.language_model.layers.[0]\.self_attn.q_proj$": 3, "up_proj": 5},
    }
    arrays = {name.replace("model.layers", "model.language_model.layers"): array for name, array in arrays.items()}
    folders = {"own": write(tmp_path / "own", 4, arrays, **patterns), "plain": write(tmp_path / "plain", 4, plain)}
    sources = {name: str(folder) for name, folder in folders.items()}
    manifest = tmp_path / "adapters.json"
    resolve_adapters(sources, folders, lora.checkpoint("demo-llama"), 16, None, manifest)
    actual = AdaptersManifest.load(manifest).adapters["own"]
    assert (actual.rank, actual.scale) == (4, 2) and actual.scales == {
        f"{layers[0]}.self_attn.q_proj": 0.75, **{f"{layer}.mlp.up_proj": 2.5 for layer in layers}
    }  # fmt: skip
    model = opened(lora, adapters_json=manifest)
    ours, expected, base = logits_of(model, [(PEFT["ids"], name) for name in ("own", "plain", None)], 1)
    # One rounding of B apart; the base is far.
    assert np.abs(ours[0] - expected[0]).max() < 1e-4 < 1e-2 < np.abs(ours[0] - base[0]).max()


def test_adapters_of_experts_are_refused_when_they_are_read(lora: Results, tmp_path: Path) -> None:
    arrays = tensors({"model.layers.0.mlp.experts.1.up_proj": (400, 144)}, 4, 0)
    line = refused(lora, write(tmp_path / "a", 4, arrays))
    assert "expected linear layers that every token passes, found model.layers.0.mlp.experts.1.up_proj" in line


# --- config and stages ---

CHECKS = ("adapted_reference", "quantized_adapted_reference", "adapted")


def config(**changes: Any) -> dict[str, Any]:
    value = yaml.safe_load((ROOT / "config" / "adapters.yaml").read_text())
    value["models"]["demo-lora"] |= changes
    return value


@pytest.mark.parametrize(("changes", "line"), [
    ({"tensor_parallel": 2},
        "models.demo-lora.adapters: expected none for a model that is split over 2 ranks; found 2"),
    ({"backends": ["openvino"]},
        "adapters: expected none for backend openvino; adapters run on cuda, onnxruntime, tensorrt; found 2"),
    ({"backends": ["cuda"], "precisions": ["w8a16"]},
        "adapters: expected none for backend cuda in w8a16; there they run in fp16, bf16; found 2"),
    ({"max_lora_rank": 12}, "models.demo-lora.max_lora_rank"),
    ({"max_adapters": 0}, "models.demo-lora.max_adapters"),
    ({"adapters": {"a:b": {"source": "x"}}}, "models.demo-lora.adapters"),
    ({"adapters": {"a": {"source": "random:x.json"}}}, "expected the folder of an adapter, or hf:org/name@revision"),
    ({"adapters": {"a": {"source": "hf:a b"}}}, "adapters.a.source: expected hf:org/name or hf:org/name@revision"),
    ({"adapters": {"a": {"source": "x", "prompts": [{"text": "a", "expected": {3: "b"}}]}}}, "as the key; found 3"),
])  # fmt: skip
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as raised:
        load.load(config(**changes))
    assert line in str(raised.value) and "\n" not in str(raised.value)


def test_a_folder_that_is_not_there_is_refused_with_every_place(tmp_path: Path) -> None:
    config_read = load.load(config(adapters={"a": {"source": "nowhere"}}))
    with pytest.raises(
        InputError, match="adapters.a.source: expected the folder of an adapter.*found none at .*nowhere"
    ):
        config_read.adapter_folders("demo-lora", [tmp_path])


def test_another_adapter_changes_nothing_that_graphs_weights_or_engines_are_made_from() -> None:
    adapters = {name: {"source": f"x/{name}"} for name in ("captain", "other", "third")}
    before = load.load(config(adapters={"captain": adapters["captain"]}))
    after = load.load(config(adapters=adapters))
    names = {"model": "demo-lora", "precision": "fp32", "layers": "all", "backend": "onnxruntime"}
    changed = set()
    for stage in STAGES.values():
        names_of_stage = {name: names[name] for name in stage.wildcards}
        if stage.name not in ("fetch", "make_checkpoint", "config") and stage.options(
            before, names_of_stage
        ) != stage.options(after, names_of_stage):
            changed.add(stage.name)
        assert "adapters" not in stage.rule.inputs or stage.name in CHECKS
    assert changed == {"adapters", *CHECKS}
    assert STAGES["export"].options(before, {"model": "demo-lora", "precision": "fp32"}) == {
        "adapters": {"max_adapters": 4, "max_lora_rank": 16, "targets": None}
    }


def test_a_model_without_adapters_has_no_such_stage_and_the_graphs_of_before(demo: Results) -> None:
    plain = load.load(config(adapters={}))
    assert not {"adapters", "adapted"} & {job.stage for job in jobs(plain, Path(), plain.targets())}
    assert STAGES["export"].options(plain, {"model": "demo-lora", "precision": "fp32"}) == {}
    assert "adapters" not in Assembly.load(demo.assembly("demo-llama", "fp32")).to_json()


def test_target_modules_narrow_what_graphs_take(shared: Shared) -> None:
    small_assembly = shared.assembled(dict(FAMILIES["phi3"].config), "fp32")
    _, assembly = with_adapters(*small_assembly, {**ROOM, "targets": ["qkv_proj"]})
    assert {name.rpartition(".")[2] for name in sizes(assembly)} == {"qkv_proj"}
    with pytest.raises(
        InputError, match=r"lora_target_modules: expected linear layers of the model \(.*qkv_proj.*found q_proj"
    ):
        with_adapters(*small_assembly, {**ROOM, "targets": ["q_proj", "qkv_proj"]})
    linears = {"model.layers.0.mlp.odd_proj", "model.layers.0.self_attn.qkv_proj", "lm_head"}
    with pytest.raises(InputError, match=r"lora_target_modules: expected .*qkv_proj.*found mlp.odd_proj, whose"):
        with_adapters(*small_assembly, ROOM, linears)
    with_adapters(*small_assembly, {**ROOM, "targets": ["qkv_proj"]}, linears)


def test_an_assembly_whose_adapters_do_not_fit_its_graphs_is_refused(lora: Results, tmp_path: Path) -> None:
    assembly = Assembly.load(lora.assembly("demo-llama", "fp32"))
    assert assembly.adapters is not None
    entry = assembly.adapters.classes["entry"]
    slot = replace(next(iter(entry.values())), in_features=143)
    wrong = {**assembly.adapters.classes, "entry": {**entry, next(iter(entry)): slot}}
    replace(assembly, adapters=LoraSlots(2, 16, wrong)).save(tmp_path / "assembly.json")
    with pytest.raises(InputError, match="adapters.classes.entry"):
        Assembly.load(tmp_path / "assembly.json")
    replace(assembly, adapters=None).save(tmp_path / "assembly.json")
    with pytest.raises(InputError, match="adapter_ids"):
        Assembly.load(tmp_path / "assembly.json")
