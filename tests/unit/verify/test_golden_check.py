"""The golden check passes engines that equal the reference, and names prompt, step and tokens of others."""

import itertools
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
from demo_model import GOLDEN, LIMITS, TOLERANCES
from onnx import numpy_helper
from pipeline import run_golden
from safetensors.numpy import load_file, save_file

from faults.table import FAULTS
from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.backends.builder import build
from lockstep.errors import CheckError, InputError
from lockstep.step.host import HostExecutor
from lockstep.targets import Target
from lockstep.verify.golden.decoding import DecodingCheck
from lockstep.verify.golden.prompts import Decoded, read_reference
from lockstep.verify.metrics import failed_path


def check(results, tmp_path, precision="fp32", layers=2, **changes):
    target = Target("demo-llama", precision, layers, "onnxruntime")
    options = {"expected": [prompt.expected.get(layers) for prompt in GOLDEN.prompts], **changes}
    return run_golden(results, target, TOLERANCES[precision], LIMITS, tmp_path, **options)


@pytest.mark.parametrize(("precision", "layers"), [
    ("fp16", "all"), pytest.param("fp32", 2, marks=pytest.mark.long),
    pytest.param("fp32", "all", marks=pytest.mark.long), pytest.param("fp16", 2, marks=pytest.mark.long),
])  # fmt: skip
def test_the_demos_engines_say_what_the_reference_says(references, tmp_path, precision, layers):
    report = check(references, tmp_path, precision, layers)
    assert report["format"] == "lockstep.golden/3"
    assert report["result"] == "pass" and report["max_logit_error"] <= report["tolerance"]
    assert report["target"] == {
        "model": "demo-llama",
        "precision": precision,
        "layers": layers,
        "backend": "onnxruntime",
    }
    for prompt, entry in zip(GOLDEN.prompts, report["prompts"], strict=True):
        assert entry["tokens_equal"] and entry["alone_equal"] and entry["generate_equal"] and not entry["differences"]
        assert entry["text_out"] == prompt.expected[layers] == entry["expected"]
    speed = read_json(tmp_path / "speed.json", "lockstep.speed/1")
    assert speed["prefill_tokens_per_s"] > 0 and speed["decode_tokens_per_s"] > 0 and speed["batch_size"] == 4
    assert [entry["requests"] for entry in speed["by_requests"]] == [1, 2, 4]
    assert all(entry["decode_tokens_per_s"] > 0 for entry in speed["by_requests"])
    positions = report["positions"]
    assert 32 < len(positions) <= 64 and positions[-1]["num_tokens"] > 240
    assert max(entry["logit_error"] for entry in positions) == report["max_logit_error"]
    assert all(entry["logit_error"] <= entry["tolerance"] for entry in positions)


def test_a_device_that_chooses_other_tokens_than_its_logits_say_fails(references, tmp_path, monkeypatch):
    """`lockstep generate` leaves the choice to the device: the check decodes so too."""
    tokens = HostExecutor.tokens
    monkeypatch.setattr(
        HostExecutor,
        "tokens",
        lambda self, advances, following: (
            tokens(self, advances, following) + (max(advance.start for advance in advances) > 5)
        ),
    )
    with pytest.raises(CheckError, match="as lockstep generate decodes: expected token"):
        check(references, tmp_path)
    entries = read_json(failed_path(tmp_path / "golden.json"))["prompts"]
    assert not any(entry["generate_equal"] for entry in entries) and all(entry["tokens_equal"] for entry in entries)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("draft-accepted", "with drafts, greedy: expected token"),
        ("draft-stale", "with drafts, greedy: expected"),
        ("draft-noise", "with drafts, drawn: expected token"),
    ],
)
def test_what_drafts_change_fails(references, tmp_path, name, words):
    with FAULTS[name].change(), pytest.raises(CheckError, match=words):
        check(references, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "limits", [{"max_batch_size": 3, "max_num_tokens": 10}, {"max_batch_size": 1, "max_num_tokens": 7}], ids=str
)
def test_more_prompts_than_slots_and_prompts_in_chunks_give_the_same(references, tmp_path, limits):
    report = check(references, tmp_path, limits=replace(LIMITS, **limits))
    assert [entry["text_out"] for entry in report["prompts"]] == [prompt.expected[2] for prompt in GOLDEN.prompts]


# --- engines that differ ---


@pytest.fixture
def copy(references, tmp_path):
    """A copy of the results to change."""
    root = tmp_path / "results"
    shutil.copytree(references.root, root)
    return type(references)(root)


def fails(results, tmp_path, message, **changes):
    with pytest.raises(CheckError, match=message) as error:
        check(results, tmp_path, **changes)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "golden.json").exists() and not (tmp_path / "speed.json").exists()
    report = read_json(failed_path(tmp_path / "golden.json"), "lockstep.golden/3")
    assert report["result"] == "fail"
    return report


def edit_graph(results, name, change, kind=None):
    """Change a graph of the fp32 assembly in place, and build its engines."""
    path = results.assembly("demo-llama", "fp32")
    assembly = read_json(path)
    entry = assembly["kinds"]["attention"][kind] if kind else assembly["classes"][name]
    model = onnx.load(path.parent / entry["graph"])
    change(model.graph)
    onnx.save(model, path.parent / entry["graph"])
    entry["sha256"] = sha256_file(path.parent / entry["graph"])
    write_json(path, assembly)
    build(path, "onnxruntime", results.engines("demo-llama", "fp32", "onnxruntime"))


def scale_logits(factor):
    def change(graph):
        last = graph.node[-1]
        graph.initializer.append(numpy_helper.from_array(np.array(factor, np.float32), "factor"))
        graph.node.append(onnx.helper.make_node("Mul", ["before", "factor"], [last.output[0]], name="planted"))
        last.output[0] = "before"

    return change


def test_logits_over_tolerance_fail_though_the_tokens_are_equal(copy, tmp_path):
    edit_graph(copy, "exit", scale_logits(1.01))
    report = fails(
        copy,
        tmp_path,
        r"prompt 'San Francisco is a', step 0, along the reference's tokens: "
        r"expected a logit error of at most 0\.000\d+, found 0.1",
    )
    assert all(entry["tokens_equal"] for entry in report["prompts"])


def test_nan_fails(copy, tmp_path):
    edit_graph(copy, "exit", scale_logits(np.nan))
    report = fails(copy, tmp_path, "prompt 'San Francisco is a', step 0, ")
    assert report["max_logit_error"] is None


def test_nan_beside_other_requests_fails_where_requests_alone_are_right(copy, tmp_path):
    """The batch, whose logits are NaN, is then what another run is compared with."""

    def spoil(graph):
        scale_logits(1.0)(graph)
        constants = {"axis": np.array(0), "one": np.array(1), "nan": np.float32(np.nan), "right": np.float32(1)}
        graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
        nodes = [("Shape", "before"), ("Gather", "shape axis"), ("Greater", "count one"), ("Where", "more nan right")]
        outputs = ("shape", "count", "more", "spoilt")
        graph.node[-1].input[1] = "spoilt"
        planted = graph.node.pop()
        graph.node.extend(
            onnx.helper.make_node(kind, inputs.split(), [output], name=f"planted {output}")
            for (kind, inputs), output in zip(nodes, outputs)
        )
        graph.node.append(planted)

    edit_graph(copy, "exit", spoil)
    report = fails(copy, tmp_path, "prompt 'San Francisco is a', step ")
    differences = itertools.chain(*(entry["alone_differences"] for entry in report["prompts"]))
    assert None in [difference["gap"] for difference in differences]


def test_another_token_fails_and_is_named_with_its_gap(copy, tmp_path):
    edit_graph(copy, "exit", scale_logits(-1.0))
    first = read_json(copy.reference("demo-llama", 2))["prompts"][0]
    second, largest = np.sort(step_logits(copy, 0))[-2:]
    gap = f"{largest - second:.3g}"
    report = fails(
        copy,
        tmp_path,
        rf"step 0, decoding freely: expected token {first['tokens'][0]}, found "
        rf"\d+; .* below 0\.000\d+, here it is {gap}",
    )
    assert report["prompts"][0]["differences"][0]["accepted"] is False


def test_requests_that_see_each_other_give_something_else_alone(copy, tmp_path):
    """Decode over the mean of all requests' keys: right for one request, wrong for several."""

    def mix_requests(graph):
        for node in graph.node:
            node.input[:] = ["mixed" if name == "past_key" else name for name in node.input]
        graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "requests"))
        graph.node.insert(
            0, onnx.helper.make_node("ReduceMean", ["past_key", "requests"], ["mixed"], keepdims=1, name="planted")
        )

    edit_graph(copy, None, mix_requests, kind="decode")
    report = fails(copy, tmp_path, "prompt .*, step ")
    assert all(entry["alone_max_logit_difference"] > 1e-3 for entry in report["prompts"])
    check(copy, tmp_path, limits=replace(LIMITS, max_batch_size=1))  # the same engines, one request at a time


def edit_reference(results, change, layers=2):
    """Change the reference's manifest and logits through `change(manifest, logits)`."""
    path = results.reference("demo-llama", layers)
    manifest = read_json(path)
    logits = dict(load_file(path.with_suffix(".safetensors")))
    change(manifest, logits)
    save_file(logits, path.with_suffix(".safetensors"))
    manifest["logits"]["sha256"] = sha256_file(path.with_suffix(".safetensors"))
    write_json(path, manifest)


def step_logits(results, step):
    """The logits of a step of the first prompt."""
    return load_file(results.reference("demo-llama", 2).with_suffix(".safetensors"))["logits.0"][step]


def prefer_the_second(manifest, logits):
    """Let the reference of the first prompt take the second likeliest token at step 2, and end there."""
    prompt = manifest["prompts"][0]
    row = logits["logits.0"][2]
    second, first = np.argsort(row)[-2:]
    row[[second, first]] = row[[first, second]]
    prompt["tokens"] = [*prompt["tokens"][:2], int(second)]
    for name in ("logits.0", "noise.0"):
        logits[name] = logits[name][:3].copy()


def allowing(results, gap):
    """Return tolerances with which a logit of step 2 of the first prompt may be off by `gap`."""
    prompt = read_reference(results.reference("demo-llama", 2), (), TOLERANCES["fp32"])[0][0]
    return replace(TOLERANCES["fp32"], noise=gap / prompt.bounds.cost_at(prompt.count(2)))


def test_a_token_nearly_as_likely_is_accepted_and_reported(copy, tmp_path):
    edit_reference(copy, prefer_the_second)
    logits = step_logits(copy, 2)
    engines, references = np.argsort(logits)[-2:].tolist()
    gap = float(logits[references] - logits[engines])
    report = check(copy, tmp_path, tolerance=allowing(copy, gap * 1.01), expected=[None] * 4)
    difference = {"step": 2, "reference": references, "found": engines, "gap": gap, "accepted": True}
    (actual,) = report["prompts"][0]["differences"]
    assert actual.items() >= difference.items()
    assert report["prompts"][0]["text_out"].startswith(actual["text_before"] + actual["found_text"])
    assert actual["text_before"] and actual["reference_text"] != actual["found_text"]
    assert not report["prompts"][0]["tokens_equal"]
    assert report["prompts"][0]["alone_equal"]
    fails(
        copy, tmp_path / "narrow", "step 2, decoding freely", tolerance=allowing(copy, gap * 0.99),
        expected=[None] * 4,
    )  # fmt: skip


def test_an_unlikely_token_is_not_accepted_for_a_small_gap(copy, tmp_path):
    """A gap says that the two likeliest tokens may change places, not that any token will do."""

    def hold_it_for_unlikely(manifest, logits):
        prefer_the_second(manifest, logits)
        row = logits["logits.0"][2]
        row[np.argsort(row)[-2]] = row.min()

    edit_reference(copy, hold_it_for_unlikely)
    second, largest = np.sort(step_logits(copy, 2))[-2:].tolist()
    gap = largest - second
    tolerance = allowing(copy, gap * 1.01)
    fails(copy, tmp_path, "step 2, decoding freely", tolerance=tolerance, expected=[None] * 4)


def test_a_second_difference_is_judged_by_the_logits_of_the_batch(references):
    """Where the batch took another token than the reference, the reference says nothing of the next one."""
    decoding = DecodingCheck(
        references.assembly("demo-llama", "fp32"), references.weights("demo-llama", "fp32"),
        references.engines("demo-llama", "fp32", "onnxruntime"), references.reference("demo-llama", 2),
        Target("demo-llama", "fp32", 2, "onnxruntime"), TOLERANCES["fp32"], LIMITS, [None] * 4, None,
    )  # fmt: skip
    prompt = decoding.prompts[0]
    logits = np.zeros_like(prompt.logits)
    logits[:, 7] = 1
    logits[3, 8] = 1
    batch = Decoded(list(logits), [7] * len(logits))
    other = Decoded(list(logits), [7, 7, 7, 8, *batch.tokens[4:]])
    (difference,) = decoding.first_difference(prompt, "alone", batch, other)
    assert difference.accepted and difference.gap == 0 and not decoding.failures
    logits[3, 8] = 0
    (difference,) = decoding.first_difference(prompt, "alone", batch, other)
    assert not difference.accepted


def test_a_text_other_than_the_configs_fails_and_both_are_shown(references, tmp_path):
    expected = [" sunny city", *(prompt.expected[2] for prompt in GOLDEN.prompts[1:])]
    fails(
        references,
        tmp_path,
        r"text: expected ' sunny city' as in the config, found ' cars on fog .*' \(the reference says ' cars on",
        expected=expected,
    )


def test_other_prompt_ids_than_transformers_fail(copy, tmp_path):
    edit_reference(
        copy,
        lambda manifest, logits: manifest["prompts"][0].update(prompt_ids=manifest["prompts"][0]["prompt_ids"][1:]),
    )
    fails(copy, tmp_path, r"prompt ids: expected \[221, .*\] as in transformers, found \[681, 221")


@pytest.mark.long
def test_other_end_tokens_than_transformers_fail(copy, tmp_path):
    edit_reference(copy, lambda manifest, logits: manifest.update(eos_token_ids=[0, 7]))
    fails(copy, tmp_path, r"end-of-sequence tokens: expected \[0, 7\] as in transformers, found \[0\]")


def test_engines_of_another_export_are_refused(copy, tmp_path):
    path = copy.engines("demo-llama", "fp32", "onnxruntime")
    manifest = read_json(path)
    manifest["engines"]["middle"]["graph_sha256"] = "0" * 64
    write_json(path, manifest)
    with pytest.raises(CheckError, match="graph of engine middle"):
        check(copy, tmp_path)


# --- inputs that do not fit together ---


@pytest.mark.parametrize(("changes", "message"), [
    ({"expected": [None]}, "prompts: expected 1 as in the config, found 4"),
    ({"limits": replace(LIMITS, max_input_len=20)},
        r"'Lake Zürich .*': expected at most 20 tokens " r"\(limits.max_input_len\), found 24"),
    ({"limits": replace(LIMITS, max_seq_len=30)}, r"within 30 tokens \(limits.max_seq_len\), found 24 \+ 16"),
])  # fmt: skip
def test_a_mistake_of_the_user_is_one_line(references, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        check(references, tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_a_reference_of_other_layers_or_without_its_logits_is_refused(copy, tmp_path):
    with pytest.raises(InputError, match="layers: expected 2, found all"):
        check(copy, tmp_path, reference_json=copy.reference("demo-llama", "all"))
    logits = copy.reference("demo-llama", 2).with_suffix(".safetensors")
    logits.write_bytes(logits.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(InputError, match="found other bytes"):
        check(copy, tmp_path)
    logits.unlink()
    with pytest.raises(InputError, match="found no file"):
        check(copy, tmp_path)
