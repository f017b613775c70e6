"""The config's types: accepted values, and the line for each mistake."""

from __future__ import annotations

import collections
import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.artifacts.files import write_json
from lockstep.config.backends import backends
from lockstep.config.load import load, load_merged
from lockstep.config.schema import Config
from lockstep.errors import InputError
from lockstep.stages import params
from lockstep.targets import Artefact, Results, Target
from lockstep.tolerances import Tolerances

REPOSITORY = Path(__file__).resolve().parents[3]

FULL = """\
models:
  demo-llama:
    source: checkpoint
    layers: [2, all]
    precisions: [fp32, fp16]
    backends: [onnxruntime]
    golden:
      max_new_tokens: 16
      prompts:
        - text: San Francisco is a
          expected: {2: two, all: city}
limits: {max_batch_size: 4, max_input_len: 128, max_seq_len: 256, max_num_tokens: 512}
tolerances:
  fp16: {noise: 2.0e-2}
"""
SMALLEST = {"models": {"m": {"source": "checkpoint", "golden": {"prompts": [{"text": "Hello"}]}}}}


def message(path: Path, text: str) -> str:
    """What `load` says about a file with this text, without the file's name."""
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load(path)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(str(path))
    return line.removeprefix(str(path)).removeprefix(": ")


def test_what_is_left_out_has_a_default():
    config = load(SMALLEST)
    model = config.models["m"]
    assert (model.layers, model.precisions, model.backends) == (("all",), ("fp32",), ("onnxruntime",))
    assert model.golden.max_new_tokens == 16
    assert config.limits.max_batch_size == 4


def test_a_tolerance_left_out_keeps_its_default_by_precision():
    config = load({**SMALLEST, "tolerances": {"fp16": {"noise": 4}}})
    assert (config.tolerances.fp16.noise, config.tolerances["fp32"].noise) == (4, 6)
    with pytest.raises(KeyError):
        config.tolerances["fp8"]


def test_a_file_and_its_mapping_give_the_same_config(tmp_path):
    (tmp_path / "config.yaml").write_text(FULL)
    from_file = load(tmp_path / "config.yaml")
    assert from_file.models["demo-llama"].golden.prompts[0].expected == {2: "two", "all": "city"}
    assert load(from_file.dump()) == from_file
    assert load(collections.OrderedDict(from_file.dump())) == from_file
    write_json(tmp_path / "config.json", from_file.dump())
    assert load(tmp_path / "config.json") == from_file


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "1.0e-4", "0.0001"])
def test_a_number_with_an_exponent_needs_no_point(tmp_path, number):
    (tmp_path / "config.yaml").write_text(FULL + f"  fp32: {{noise: {number}}}\n")
    assert load(tmp_path / "config.yaml").tolerances.fp32.noise == 1e-4


MISTAKES = [
    # a part of FULL, its replacement, the message; " ... " represents more of it
    ("[fp32, fp16]", "[fp32, fp8]", "models.demo-llama.precisions[1]: expected one of fp32, fp16, ... found 'fp8'"),
    ("[fp32, fp16]", "[fp32, bf16]", "models.demo-llama.precisions[1]: expected one of fp32, ... found 'bf16'"),
    ("[fp32, fp16]", "[fp32, fp32]", "models.demo-llama.precisions[1]: expected each item once; found 'fp32' again"),
    ("[fp32, fp16]", "[]", "models.demo-llama.precisions: expected at least one item; found an empty list"),
    ("[fp32, fp16]", "fp32", "models.demo-llama.precisions: expected a list; found 'fp32'; write [fp32]"),
    ("[onnxruntime]", "[tensorflow]", "models.demo-llama.backends[0]: expected one of ... found 'tensorflow'"),
    ("[2, all]", "[0, all]", "models.demo-llama.layers[0]: expected a positive integer or the word all; found 0"),
    ("[2, all]", "[yes]", "models.demo-llama.layers[0]: expected a positive integer or the word all; found true"),
    ("[2, all]", "[every]", "models.demo-llama.layers[0]: expected a positive integer or the word all; found 'every'"),
    ("[2, all]", "", "models.demo-llama.layers: expected a list; found nothing"),
    ("[2, all]", "[all]", "models.demo-llama.golden.prompts[0].expected.2: expected one of the ... found 2"),
    ("layers:", "layer:", "models.demo-llama.layer: unknown key, did you mean layers? allowed: "),
    ("golden:", "goldn:", "models.demo-llama.goldn: unknown key, did you mean golden? allowed: "),
    ("source: checkpoint", "source: ''", "models.demo-llama.source: expected text that is not empty; found ''"),
    ("source: checkpoint", "source: 7", "models.demo-llama.source: expected text; found 7 (put it in quotes)"),
    ("source: checkpoint", "source: hf:meta-llama/Llama-2-7b-hf@",
     "models.demo-llama.source: expected hf:org/name or ... found 'hf:meta-llama/Llama-2-7b-hf@'"),
    ("source: checkpoint", "source: random:llama.json?sed=1",
     "models.demo-llama.source: expected random:path/to/config.json or ... found 'random:llama.json?sed=1'"),
    ("    source: checkpoint\n", "", "models.demo-llama.source: expected this key; found nothing"),
    ("text: San Francisco is a", "text: no",
     "models.demo-llama.golden.prompts[0].text: expected text; found false (YAML reads yes, no, ... in quotes)"),
    ("text: San Francisco is a", "text: 2024-01-31",
     "models.demo-llama.golden.prompts[0].text: expected text; found date 2024-01-31 (put it in quotes)"),
    ("- text: San Francisco is a\n          expected: {2: two, all: city}", "- San Francisco is a",
     "models.demo-llama.golden.prompts[0]: expected a mapping of text, expected; found 'San Francisco is a'"),
    ("{2: two, all: city}", "{2: two, '2': too}",
     "models.demo-llama.golden.prompts[0].expected: expected each layer ... found 2 as a number and as text"),
    ("{2: two, all: city}", "{none: two}",
     "models.demo-llama.golden.prompts[0].expected.none: expected a positive integer or the ... found 'none'"),
    ("{2: two, all: city}", "{2: 4}", "models.demo-llama.golden.prompts[0].expected.2: ... found 4 (put it in quotes)"),
    ("max_new_tokens: 16", "max_new_tokens: 256",
     "models.demo-llama.golden.max_new_tokens: expected less than limits.max_seq_len (256), ... found 256"),
    ("max_batch_size: 4", "max_batchsize: 4",
     "limits.max_batchsize: unknown key, did you mean max_batch_size? allowed: "),
    ("max_batch_size: 4", "threads: 4", "limits.threads: unknown key, allowed: "),
    ("max_batch_size: 4", "4: 4", "limits.4: expected text as the key; found 4 (put it in quotes)"),
    ("max_batch_size: 4", "max_batch_size: 0", "limits.max_batch_size: expected at least 1; found 0"),
    ("max_batch_size: 4", "max_batch_size: '4'",
     "limits.max_batch_size: expected an integer; found '4' (remove the quotes)"),
    ("max_batch_size: 4", "max_batch_size: 4000000000",
     "limits.max_batch_size: expected at most 2147483647; found 4000000000"),
    ("max_batch_size: 4", "max_batch_size: 513",
     "limits.max_num_tokens: expected at least max_batch_size (513), a token for each request; found 512"),
    ("max_input_len: 128", "max_input_len: 257", "limits.max_input_len: expected at most max_seq_len (256); found 257"),
    ("max_input_len: 128", "max_input_len: -1, max_output_len: 3, max_beam_width: 1",
     "limits.max_output_len: unknown key, did you mean max_input_len? allowed: ... (and 2 more)"),
    ("noise: 2.0e-2", "noise: 0", "tolerances.fp16.noise: expected more than 0; found 0"),
    ("noise: 2.0e-2", "noise: .inf", "tolerances.fp16.noise: expected a finite number; found inf"),
    ("noise: 2.0e-2", "noise: '0.02'", "tolerances.fp16.noise: expected a number; found '0.02'"),
    ("  fp16: {", "  fp61: {", "tolerances.fp61: unknown key, did you mean fp16? allowed: "),
    ("demo-llama:", "demo/llama:", "models.demo/llama: expected a name of letters, digits, ... found 'demo/llama'"),
    ("demo-llama:", ".hidden:", "models..hidden: expected a name of letters, digits, '.', '_' ... found '.hidden'"),
    ("demo-llama:", "7:", "models.7: expected text; found 7 (put it in quotes)"),
    ("demo-llama:", "config.json:", "models.config.json: expected another name, for ... found 'config.json'"),
    ("demo-llama:", "Report:", "models.Report: expected another name, for results/Report is ... found 'Report'"),
    ("limits: {", "backends: {tensorrt: {workspace_gb: 4}}\nlimits: {",
     "backends.tensorrt.workspace_gb: unknown key, did you mean workspace_mb? allowed: "),
    ("limits: {", "backends: {tensorrt: {optimization_level: 0, tactics: record}}\nlimits: {",
     "backends.tensorrt.optimization_level: expected at least 1 with tactics: record, since level ... found 0"),
    ("demo-llama:", "Demo-Llama: {source: a, golden: {prompts: [{text: Hi}]}}\n  demo-llama:",
     "models.demo-llama: expected names that differ in more than capitals; found 'Demo-Llama' and 'demo-llama'"),
    ("source: checkpoint", "source: \"a\\0b\"",
     "models.demo-llama.source: expected a path without the character U+0000; found 'a\\x00b'"),
    ("models:", "modles:", "modles: unknown key, did you mean models? allowed: ... (and 1 more)"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), MISTAKES, ids=[f"{old}->{new}"[:60] for old, new, _ in MISTAKES])
def test_a_mistake_gives_one_line_that_names_the_key(tmp_path, old, new, expected):
    assert FULL.count(old) == 1
    check(message(tmp_path / "config.yaml", FULL.replace(old, new)), expected)


def check(message: str, expected: str) -> None:
    """Hold a message to its parts, the first of which opens it."""
    first, *parts = expected.split(" ... ")
    assert message.startswith(first) and all(part in message for part in parts), message


@pytest.mark.parametrize(("text", "expected"), [
    ("", "expected a mapping of models, limits, ... found an empty file"),
    ("# only a comment\n", "expected a mapping of models, limits, ... found an empty file"),
    ("- a\n- b\n", "expected a mapping of models, limits, ... found a list"),
    ("just text\n", "expected a mapping of models, limits, ... found 'just text'"),
    ("models:\n", "models: expected a mapping; found nothing"),
    ("models: {}\n", "models: expected at least one item; found an empty mapping"),
    ("models:\n  m:\n", "models.m: expected a mapping of source, layers, ... found nothing"),
    ("limits: {}\n", "models: expected this key; found nothing"),
])  # fmt: skip
def test_a_file_without_models_says_what_is_expected(tmp_path, text, expected):
    check(message(tmp_path / "config.yaml", text), expected)


@pytest.mark.parametrize("name", ["a", "Llama-2-7b.v1_x", "0", "summary-t5", "x" * 100])
def test_names_that_are_good_folder_names_are_accepted(name):
    assert [target.model for target in load({"models": {name: SMALLEST["models"]["m"]}}).targets()] == [name]


def test_no_model_can_be_named_as_what_lies_beside_the_models_folders():
    artefacts = [value for value in vars(Results).values() if isinstance(value, Artefact)]
    beside = {artefact.pattern.split("/")[0] for artefact in artefacts} - {"{model}"}
    assert beside >= {"config.json", "summary.json"}
    for name in beside:
        with pytest.raises(InputError, match="is used for results"):
            load({"models": {name: SMALLEST["models"]["m"]}})


def test_a_mapping_is_called_config_and_a_given_name_wins():
    with pytest.raises(
        InputError,
        match=r"^config: foo: unknown key, allowed: models, limits, tolerances, compare_seconds, "
        r"compare_seed, cache, skip_missing_backends, skip_missing_precisions, require_run, check_server, backends, "
        r"devices, endpoints$",
    ):
        load({**SMALLEST, "foo": "bar"})  # what `snakemake --config foo=bar` does
    with pytest.raises(InputError, match=r"^my.yaml: foo: unknown key"):
        load({**SMALLEST, "foo": "bar"}, where="my.yaml")


def test_merged_config_reads_its_files_again_strictly(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("models: {}\nmodels: {}\n")
    with pytest.raises(InputError, match="config.yaml:2: expected YAML; found the key 'models' twice"):
        load_merged(SMALLEST, [path])
    path.write_text("models: {}\n")
    with pytest.raises(InputError, match=f"^{path}: models: expected at least one item"):
        load_merged({"models": {}}, [path])
    with pytest.raises(InputError, match="^config: models: expected a mapping"):  # --config changed what the file says
        load_merged({"models": 3}, [path])
    assert load_merged(SMALLEST, [path]) == load(SMALLEST)


def test_numbers_of_the_command_line_are_numbers_in_mappings_too():
    """Snakemake leaves them text there: `--config limits='{max_batch_size: 8}'`."""
    overrides = {"limits": {"max_batch_size": "8"}, "check_server": False}
    merged = {**SMALLEST, "limits": {"max_batch_size": "8", "max_seq_len": 64, "max_input_len": 32}}
    config = load_merged(merged, [], options=overrides)
    assert (config.limits.max_batch_size, config.limits.max_seq_len) == (8, 64)
    with pytest.raises(InputError, match="^config: limits.max_batch_size: expected an integer; found '8'"):
        load_merged(merged, [])  # of a file


def test_targets_come_in_one_order():
    models = {
        "b": {**SMALLEST["models"]["m"], "layers": ["all", 3], "precisions": ["fp16", "fp32"]},
        "a": SMALLEST["models"]["m"],
    }
    expected = ["a/fp32/all", "b/fp16/all", "b/fp16/3", "b/fp32/all", "b/fp32/3"]
    expected = [f"{name}/onnxruntime" for name in expected]
    assert [str(target) for target in load({"models": models}).targets()] == expected
    assert [str(target) for target in load({"models": dict(sorted(models.items()))}).targets()] == expected


@pytest.mark.parametrize(
    ("text", "layers"), [("demo-llama/fp16/2", 2), ("demo-llama/fp16/2/onnxruntime", 2), ("demo-llama/fp16", "all")]
)
def test_a_target_is_found_by_name(tmp_path, text, layers):
    (tmp_path / "c.yaml").write_text(FULL)
    assert load(tmp_path / "c.yaml").parse_target(text) == Target("demo-llama", "fp16", layers, "onnxruntime")


@pytest.mark.parametrize(("text", "guess"), [
    ("demo-llama/fp16/3", "; did you mean demo-llama/fp16/2?"), ("", ""), ("zzz", ""),
    ("demo-lama/fp16/all", "; did you mean demo-llama/fp16/all?"),
    ("demo-llama/fp32/2/openvino", "; did you mean demo-llama/fp32/2/onnxruntime?"),
])  # fmt: skip
def test_an_unknown_target_lists_the_targets(tmp_path, text, guess):
    (tmp_path / "c.yaml").write_text(FULL)
    with pytest.raises(InputError) as caught:
        load(tmp_path / "c.yaml").parse_target(text)
    allowed = "demo-llama/fp32/2, demo-llama/fp32/all, demo-llama/fp16/2, demo-llama/fp16/all"
    assert str(caught.value) == f"target: expected one of {allowed}; found {text!r}{guess}"


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True).filter(
    lambda name: name[0] not in "cCrRsSlLbB"
)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
MODELS = st.fixed_dictionaries(
    {
        "source": TEXT.filter(lambda text: not text.startswith(("hf:", "random:")) and "\0" not in text),
        "golden": st.fixed_dictionaries(
            {
                "prompts": st.lists(
                    st.fixed_dictionaries(
                        {"text": TEXT}, optional={"expected": st.dictionaries(st.sampled_from([2, "all"]), TEXT)}
                    ),
                    min_size=1,
                    max_size=3,
                )
            }
        ),
    },
    optional={"precisions": st.sampled_from([["fp32"], ["fp16", "fp32"]])},
).map(lambda model: {**model, "layers": [2, "all"]})


def _differ_in_more_than_capitals(models):
    return len({name.casefold() for name in models}) == len(models)


CONFIGS = st.fixed_dictionaries(
    {"models": st.dictionaries(NAMES, MODELS, min_size=1, max_size=3).filter(_differ_in_more_than_capitals)},
    optional={
        "tolerances": st.fixed_dictionaries(
            {
                "fp16": st.fixed_dictionaries(
                    {"noise": st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)}
                )
            }
        )
    },
)


@settings(deadline=None)
@given(CONFIGS)
def test_dump_is_plain_json_and_loads_again(value):
    config = load(value)
    text = json.dumps(config.dump(), sort_keys=True)
    assert load(json.loads(text)) == config
    assert json.dumps(load(json.loads(text)).dump(), sort_keys=True) == text


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3)
KEYS = st.sampled_from(
    ["models", "limits", "tolerances", "m", "source", "golden", "prompts", "text", "expected", "fp16", "layers"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | SCALARS, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.long
@given(st.dictionaries(KEYS | SCALARS, VALUES))
@example({"[key]": None})  # pydantic's own mark for a wrong key
@example({"models": {"[key]": {"[key]": 1}}})
@example({"models": {"[key]": 1}})
@example(
    {"models": {"m": {"golden": {"prompts": [{"text": "a", "expected": {"[key]": "b", 16**6000: "c", 2.5: "d"}}]}}}}
)
def test_any_mapping_gives_a_config_or_one_line(value):
    try:
        assert isinstance(load(value), Config)
    except InputError as error:
        assert "\n" not in str(error)


def test_a_build_is_given_its_backends_settings_and_the_limits_that_its_engines_have():
    config = load(SMALLEST | {"backends": {"tensorrt": {"tactics": "record"}}, "limits": {"max_batch_size": 7}})
    assert config.build_options("onnxruntime") == {}
    assert config.build_options("tensorrt") == {
        "workspace_mb": 4096, "optimization_level": 4, "tactics": "record",
        "attention": "fused", "max_batch_size": 7, "max_num_tokens": 512, "max_seq_len": 256,
    }  # fmt: skip


def test_another_setting_of_tactics_is_a_parameter_of_tensorrts_builds_alone():
    """So Snakemake runs these jobs again, and those that read their engines."""
    model = {**SMALLEST["models"]["m"], "precisions": ["fp32", "fp16"], "backends": ["onnxruntime", "tensorrt"]}
    before, after = (load({"models": {"m": model}, "backends": {"tensorrt": {"tactics": tactics}}})
                     for tactics in ("free", "record"))  # fmt: skip
    differing = set()
    for name in params.names():
        _, values = params.table(name, before, before.targets())
        _, others = params.table(name, after, after.targets())
        differing |= {(name, place) for place in values if values[place] != others[place]}
    assert differing == {("config", ""), ("options", "tensorrt")}


def test_tensorrt_computes_in_every_precision():
    model = {**SMALLEST["models"]["m"], "precisions": ["fp32", "fp16", "bf16"], "backends": ["tensorrt"]}
    assert [target.precision for target in load({"models": {"m": model}}).targets()] == ["fp32", "fp16", "bf16"]


def test_a_model_may_have_tolerances_of_its_own():
    model = {**SMALLEST["models"]["m"], "tolerances": {"fp16": {"noise": 3}}}
    config = load({"models": {"own": model, "m": SMALLEST["models"]["m"]}, "tolerances": {"fp16": {"noise": 4}}})
    assert config.tolerance("own", "fp16") == Tolerances("fp16", noise=3)
    assert config.tolerance("m", "fp16") == Tolerances("fp16", noise=4)
    assert config.tolerance("own", "fp32") == config.tolerance("m", "fp32") == Tolerances("fp32")
    assert load(config.dump()) == config
    with pytest.raises(InputError, match=r"models.own.tolerances.fp16.noise: expected .* found 0"):
        load({"models": {"own": {**model, "tolerances": {"fp16": {"noise": 0}}}}})
    with pytest.raises(InputError, match=r"models.own.tolerances.fp16.logits: unknown key, allowed: noise$"):
        load({"models": {"own": {**model, "tolerances": {"fp16": {"logits": 0.15}}}}})


DEVICES = {
    "h100": {"backend": "tensorrt", "gpu": "NVIDIA H100 80GB HBM3", "gpu_model": "h100"},
    "l4": {"backend": "tensorrt", "gpu": "NVIDIA L4"},
    "arm": {"backend": "onnxruntime", "cpu": "aarch64"},
}


def with_devices(devices, **model):
    return {"models": {"m": {**SMALLEST["models"]["m"], **model}}, "devices": devices}


def test_a_model_names_devices_where_it_may_name_backends():
    options = {
        "backends": ["h100", "l4", "onnxruntime"],
        "precisions": ["fp32"],
        "backend_precisions": {"l4": ["bf16"]},
    }
    config = load(with_devices(DEVICES, **options))
    assert list(map(str, config.targets())) == ["m/fp32/all/h100", "m/fp32/all/onnxruntime", "m/bf16/all/l4"]
    assert [config.backend_of(name) for name in ("h100", "l4", "arm", "tensorrt")] == [
        *["tensorrt"] * 2,
        "onnxruntime",
        "tensorrt",
    ]
    assert config.device_of("h100") == {"backend": "tensorrt", "hardware": "NVIDIA H100 80GB HBM3"}
    assert config.device_of("arm") == {"backend": "onnxruntime", "hardware": "aarch64"}
    assert config.device_of("tensorrt") is None
    assert (config.gpus("l4"), config.gpus("arm")) == (1, 0)
    assert config.build_options("l4") == config.build_options("tensorrt")
    assert load(config.dump()) == config


def test_without_devices_the_config_is_as_it_was():
    assert "devices" not in load(SMALLEST).dump()


@pytest.mark.parametrize(
    ("devices", "model", "expected"),
    [
        (DEVICES, {"backends": ["b200"]}, f"models.m.backends[0]: expected one of {', '.join([*backends(), *DEVICES])}; found 'b200'"),  # noqa: E501
        (DEVICES, {"backend_precisions": {"h200": ["fp16"]}}, "models.m.backend_precisions.h200: expected one of "),
        ({"tensorrt": DEVICES["l4"]}, {}, "devices.tensorrt: expected another name, for tensorrt is a backend"),
        ({"a": {"backend": "tensorrt"}}, {}, "devices.a.gpu: expected its name, for tensorrt runs on it; found"),
        ({"a": {**DEVICES["l4"], "cpu": "x86_64"}}, {}, "devices.a.cpu: expected gpu with tensorrt; found 'x86_64'"),
        ({"A b": DEVICES["l4"]}, {}, "devices.'A b': expected a name of small letters, digits and '_' that opens"),
        ({"a": {"backend": "metal", "gpu": "x"}}, {}, f"devices.a.backend: expected one of {', '.join(backends())}; found 'metal'"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_mistake_in_the_devices_is_one_line(devices, model, expected):
    with pytest.raises(InputError) as error:
        load(with_devices(devices, **model))
    assert f"config: {expected}" in str(error.value) and "\n" not in str(error.value)


def test_a_run_is_for_a_device_of_the_config():
    config = load(with_devices(DEVICES))
    assert config.check_device(None) is None and config.check_device("l4") == "l4"
    for other, devices in ((config, "h100, l4, arm"), (load(SMALLEST), "none, for the config has no devices")):
        with pytest.raises(InputError, match=rf"^device: expected one of {devices}; found 'b'$"):
            other.check_device("b")


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed here")
def test_backends_that_are_missing_are_known_and_a_devices_are_not_looked_at() -> None:
    model = {**SMALLEST["models"]["m"], "precisions": ["fp16"], "backends": ["tensorrt"]}
    (reason,) = load({"models": {"m": model}}).missing_backends().values()
    assert reason.startswith("the Python package tensorrt is") and 'pip install ".[tensorrt]"' in reason
    device = {"devices": {"gpu": {"backend": "tensorrt", "gpu": "A"}}}
    assert not load({"models": {"m": {**model, "backends": ["gpu"]}}, **device}).missing_backends()
