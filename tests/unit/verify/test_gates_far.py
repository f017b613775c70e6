"""Gates look as far as the limits allow: faults that begin after 64 tokens, at a wide window, in chunks or in some
rows only are caught."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from demo_model import CONFIG, GOLDEN, LIMITS, TOLERANCES
from families import tiny
from graph_faults import change_file, change_input, is_window, plant_in_engine, replace_constant
from onnx import helper, numpy_helper
from pipeline import make_engines, run_golden, run_validate

from lockstep.artifacts.files import read_json, write_json
from lockstep.errors import CheckError
from lockstep.export.random_model import make
from lockstep.stages import STAGES, Job
from lockstep.targets import Results, Target
from lockstep.verify import compare
from lockstep.verify.boundaries import both_sides, config_lengths, edges, synthetic_past

WIDE = 300  # tokens
WINDOWED = "windowed"
# A gate searches a position, a row or a window, in graphs of one form; other precisions differ in the tolerance.
PRECISION = "fp16"


# --- faults: changes of an attention graph, as exported or as an engine holds it ---


POSITIONS_CLAMPED_AT_63 = change_input("position_ids", "Min", 63)
ROWS_FROM_64_ON_FORGOTTEN = change_input("past_lengths", "Min", 64)
PAST_IGNORED = change_input("past_lengths", "Mul", 0)
WINDOWS = {
    "right": None,
    "one more": replace_constant(is_window(WIDE), lambda array: array + 1),
    "removed": replace_constant(is_window(WIDE), lambda array: 1 << 20),
}


def third_row_sees_the_second(graph):
    """Right for two requests, wrong for more."""
    for node in graph.node:
        node.input[:] = ["mixed" if name == "past_value" else name for name in node.input]
    tensors = (
        helper.make_node("Shape", ["past_value"], ["shape"], start=0, end=1),
        helper.make_node("Squeeze", ["shape"], ["rows"]),
        helper.make_node("Range", ["zero", "rows", "one"], ["each"]),
        helper.make_node("Equal", ["each", "two"], ["is_third"]),
        helper.make_node("Where", ["is_third", "one", "each"], ["taken"]),
        helper.make_node("Gather", ["past_value", "taken"], ["mixed"], axis=0, name="planted"),
    )
    for at, node in enumerate(tensors):
        graph.node.insert(at, node)
    for name, value in (("zero", 0), ("one", 1), ("two", 2)):
        graph.initializer.append(numpy_helper.from_array(np.array(value), name))


# --- as a graph: validate ---


def plant(folder: Path, phase: str, fault) -> None:
    """Let `fault` change a phase of the assembly's attention, and make its digest right."""
    assembly = read_json(folder / "assembly.json")
    entry = assembly["kinds"]["attention"][phase]
    entry["sha256"] = change_file(folder / entry["graph"], fault)
    write_json(folder / "assembly.json", assembly)


@pytest.mark.parametrize(("fault", "phase", "tensor"), [
    pytest.param(POSITIONS_CLAMPED_AT_63, "prefill", r"after 63 cached tokens, chunked\.key_out",
        marks=pytest.mark.long),
    (POSITIONS_CLAMPED_AT_63, "decode", r"after 63 cached tokens, decode\.key_out"),
    (ROWS_FROM_64_ON_FORGOTTEN, "decode", r"after 63 cached tokens, decode\.attention"),
    pytest.param(ROWS_FROM_64_ON_FORGOTTEN, "prefill", r"after 127 cached tokens, chunked\.attention",
        marks=pytest.mark.long),
])  # fmt: skip
def test_a_graph_that_goes_wrong_behind_64_tokens_is_caught(demo, tmp_path, fault, phase, tensor):
    folder = shutil.copytree(demo.assembly("demo-llama", PRECISION).parent, tmp_path / "graphs")
    plant(folder, phase, fault)
    with pytest.raises(
        CheckError,
        match=rf"^layer 0 \(block entry, attention\): {tensor}: expected an error "
        rf"of at most",
    ):
        run_validate(
            demo, Target("demo-llama", PRECISION, 2, "onnxruntime"), TOLERANCES[PRECISION], LIMITS.max_seq_len,
            tmp_path, assembly_json=folder / "assembly.json", threads=1,
        )  # fmt: skip


@pytest.fixture
def windowed(shared) -> Results:
    """A random Mistral whose layers have a window of 300 tokens, taken through all stages up to the engines."""
    config = {**tiny("mistral", sliding_window=WIDE).config, "max_position_embeddings": 512, "num_hidden_layers": 2}

    def run_stages(root: Path) -> None:
        write_json(root / "shape.json", config)
        folder = make(root / "shape.json", 0, root / "checkpoint")
        make_engines(folder, Results(root / "results"), WINDOWED, PRECISION)

    return Results(shared.folder(f"windowed-{PRECISION}", run_stages) / "results")


@pytest.mark.long
@pytest.mark.parametrize("fault", WINDOWS.values(), ids=WINDOWS)
def test_a_wide_window_that_is_off_by_one_is_caught(windowed, tmp_path, fault):
    def validated():
        target = Target(WINDOWED, PRECISION, "all", "onnxruntime")
        changes = {"assembly_json": folder / "assembly.json", "threads": 1}
        return run_validate(windowed, target, TOLERANCES[PRECISION], 512, tmp_path, **changes)

    folder = shutil.copytree(windowed.assembly(WINDOWED, PRECISION).parent, tmp_path / "graphs")
    if fault is None:
        caches = validated()["long_context"]["caches"]
        assert [cache["num_past"] for cache in caches] == [63, 127, 255, 299, 447, 509]
        assert all(cache["relative_error"] <= cache["tolerance"] / 2 for cache in caches)  # there is room
        return
    for phase, past in (("decode", "decode"), ("prefill", "chunked")):
        plant(folder, phase, fault)
        with pytest.raises(
            CheckError,
            match=rf"after 299 cached tokens, {past}\.attention: expected an "
            rf"error of at most",
        ):
            validated()
        shutil.rmtree(folder)
        shutil.copytree(windowed.assembly(WINDOWED, PRECISION).parent, folder)


# --- as an engine: compare, and golden ---


@pytest.mark.parametrize(
    ("fault", "phase", "message"),
    [
        pytest.param(
            *(POSITIONS_CLAMPED_AT_63, "prefill", r"the long prompt', after 240 tokens, in one piece"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(POSITIONS_CLAMPED_AT_63, "decode", r"the long prompt', after \d+ tokens, in (one piece|pieces)"),
            marks=pytest.mark.long,
        ),
        (ROWS_FROM_64_ON_FORGOTTEN, "decode", r"the long prompt', after \d+ tokens, in (one piece|pieces)"),
        *(
            pytest.param(*item, marks=pytest.mark.long)
            for item in (
                (PAST_IGNORED, "prefill", r"the long prompt', after \d+ tokens, in"),
                (third_row_sees_the_second, "decode", r"prompt '.*, step 1"),
            )
        ),
    ],
)
def test_an_engine_that_is_wrong_far_on_in_chunks_or_in_one_row_is_caught_by_both_checks(
    references, tmp_path, fault, phase, message
):
    engines = (
        shutil.copytree(references.engines("demo-llama", PRECISION, "onnxruntime").parent, tmp_path / "engines")
        / "engines.json"
    )
    plant_in_engine(engines, f"attention.{phase}", fault)
    assembly = references.assembly("demo-llama", PRECISION)
    weights = references.weights("demo-llama", PRECISION)
    with pytest.raises(
        CheckError,
        match=rf"engine attention\.{phase}, profile 0 \(.*\), "
        rf"(attention|key_out): expected an error of at most",
    ):
        compare.run(
            assembly, weights, engines, TOLERANCES[PRECISION], CONFIG.limits.plain(),
            tmp_path / "compare.json", threads=1,
        )  # fmt: skip
    with pytest.raises(CheckError, match=message):
        run_golden(
            references, Target("demo-llama", PRECISION, 2, "onnxruntime"), TOLERANCES[PRECISION], LIMITS, tmp_path,
            engines_json=engines, expected=[prompt.expected[2] for prompt in GOLDEN.prompts],
        )  # fmt: skip


def test_a_golden_check_that_fails_says_which_engine_leaves_its_graph(references, tmp_path):
    """Along the tokens that fail: here the long prompt alone does."""
    engines = (
        shutil.copytree(references.engines("demo-llama", "fp32", "onnxruntime").parent, tmp_path / "engines")
        / "engines.json"
    )
    plant_in_engine(engines, "attention.decode", ROWS_FROM_64_ON_FORGOTTEN)
    names = {
        "assembly": references.assembly("demo-llama", "fp32"),
        "weights": references.weights("demo-llama", "fp32"),
        "engines": engines,
    }
    with pytest.raises(
        CheckError, match=r"the long prompt', after .*/2\.failed\.json; engine: .*attention\.decode"
    ) as error:
        STAGES["golden"].run(
            Job(
                "golden",
                {"model": "demo-llama", "precision": "fp32", "layers": "2", "backend": "onnxruntime"},
                {**names, "reference": references.reference("demo-llama", 2)},
                {
                    "tolerance": asdict(TOLERANCES["fp32"]),
                    "limits": asdict(LIMITS),
                    "expected": [prompt.expected[2] for prompt in GOLDEN.prompts],
                },
                Results(tmp_path).golden("demo-llama", "fp32", 2, "onnxruntime"),
            )
        )
    assert "\n" not in str(error.value)


def test_the_report_says_how_far_the_checks_looked(references, tmp_path):
    target = Target("demo-llama", "fp32", 2, "onnxruntime")
    report = run_golden(references, target, TOLERANCES["fp32"], LIMITS, tmp_path)
    long = report["long_prompt"]
    assert long["num_tokens"] == 240 and len(long["tokens"]) == 16 and long["generate_equal"]
    for entry in (long, *report["prompts"]):
        assert 0 < entry["mixed_max_logit_error"] <= report["max_logit_error"] <= report["tolerance"]
    reference = read_json(references.reference("demo-llama", 2))["long"]
    assert reference["edges"] == [63, 64, 65, 127, 128, 129, 191, 192, 193, 240] and reference["counts"] == list(
        range(1, 241)
    )


# --- their parts ---


def test_lengths_are_those_that_a_config_names():
    config = {
        "sliding_window": 300,
        "rope_parameters": {"full": {"original_max_position_embeddings": 96, "factor": 4.0}},
        "use_sliding_window": True,
        "window_sizes": [0, 7],
    }
    assert config_lengths(config) == {300, 96, 7}
    assert edges(512, [300]) == [64, 128, 256, 300, 448, 512] and edges(40) == [40]
    assert both_sides(130, [5]) == [4, 5, 6, 63, 64, 65, 127, 128, 129, 130]


@pytest.mark.parametrize("rows", [63, 512, 20_000])
def test_each_row_at_an_edge_of_a_synthetic_cache_shows(rows):
    """Attention without one of them differs by an amount that fp16's tolerance sees."""
    keys, values = synthetic_past(np.random.default_rng(1), rows, 1, (32, 32), [300])
    query = 0.5 / 32**0.5 * np.random.default_rng(2).standard_normal(32)
    weights = np.exp(keys[:, 0] @ query)
    full = weights @ values[:, 0] / weights.sum()
    shown = [row for row in {0, 63, 64, rows - 1, rows - 300, rows - 299} if 0 <= row < rows]
    for row in shown:
        is_kept = np.arange(rows) != row
        without = weights[is_kept] @ values[is_kept, 0] / weights[is_kept].sum()
        assert np.abs(without - full).max() / max(1, np.sqrt(np.mean(full**2))) > 0.03, row
