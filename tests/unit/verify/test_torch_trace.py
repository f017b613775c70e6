"""The record of a torch model: compared with transformers' own cache, hidden states and a module's input."""

import json

import numpy as np
import pytest
import torch
import transformers
from demo_model import DEMO
from families import FAMILIES

from lockstep.artifacts.files import read_json
from lockstep.checkpoint import resolve
from lockstep.errors import InputError
from lockstep.export.random_model import make
from lockstep.export.torch_model import cut_config, float32_tensor, is_within, load_folder, load_tensors
from lockstep.verify.golden.teacher_forced import run_after
from lockstep.verify.validate.torch_trace import HOOK, TorchModel
from lockstep.weights import Weights, convert
from some import some

CONFIG = json.loads((DEMO / "config.json").read_text())
IDS = np.array([681, 221, 667, 572, 396, 353, 301, 259])


def weights_of(model, folder):
    """A weights manifest over a model's own tensors."""
    model.save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    resolve(str(folder / "model"), folder / "model", folder / "checkpoint.json")
    convert(folder / "checkpoint.json", "fp32", folder / "weights.json")
    return read_json(folder / "checkpoint.json")["config"], Weights.open(folder / "weights.json")


@pytest.mark.parametrize("layers", [2, "all"])
def test_a_record_is_what_transformers_has_in_its_cache_and_hidden_states(demo, layers):
    record = TorchModel(CONFIG, Weights.open(demo.weights("demo-llama", "fp32")), layers).record(IDS)
    model = load_folder(DEMO, cut_config(CONFIG, layers))
    recorded = {}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args, i=i: recorded.update({i: args[0][0]}))
    with torch.no_grad():
        output = model(torch.from_numpy(IDS)[None], use_cache=True, output_hidden_states=True)
    assert len(record.layers) == (6 if layers == "all" else layers)
    # The same operations on the same numbers, so no tolerance.
    assert np.array_equal(record.logits, output.logits[0].numpy())
    assert np.array_equal(record.embedded, output.hidden_states[0][0].numpy())
    for i, layer in enumerate(record.layers):
        cache = output.past_key_values.layers[i]
        assert np.array_equal(layer.keys, cache.keys[0].transpose(0, 1).numpy())
        assert np.array_equal(layer.values, cache.values[0].transpose(0, 1).numpy())
        assert np.array_equal(layer.attention, recorded[i].numpy())
        assert np.array_equal(layer.hidden, output.hidden_states[i][0].numpy())


def test_fp16_weights_are_computed_with_in_float32(demo):
    record = TorchModel(CONFIG, Weights.open(demo.weights("demo-llama", "fp16")), 2).record(IDS)
    assert record.logits.dtype == np.float32
    # The demo is stored in fp16: its fp32 weights are the same numbers.
    assert np.array_equal(
        record.logits, TorchModel(CONFIG, Weights.open(demo.weights("demo-llama", "fp32")), 2).record(IDS).logits
    )


@pytest.mark.exports
@pytest.mark.parametrize("family", some(["gpt2", "gemma3_text", "mixtral", "nemotron_h"]))
def test_mapped_weights_compute_what_those_in_float32_do(tmp_path, family):
    """Computed buffers (scaled embeddings, two ropes), parameters outside layers, tensors that are put together."""
    (tmp_path / "shape.json").write_text(json.dumps(FAMILIES[family].config))
    make(tmp_path / "shape.json", 0, tmp_path / "model")
    checkpoint = resolve("model", tmp_path / "model", tmp_path / "checkpoint.json")
    weights = Weights.open(convert(checkpoint, "fp16", tmp_path / "weights.json"))
    config = read_json(checkpoint)["config"]
    ids = np.array([5, 9, 100, 33, 7, 250, 8])
    in_memory, mapped = (TorchModel(config, weights, 2) for _ in range(2))
    tensors = {name: float32_tensor(array) for name, array in weights.dequantized() if is_within(name, 2)}
    in_memory.model = load_tensors(tensors, cut_config(config, 2), HOOK, "whole")
    record = in_memory.record(ids)
    other = mapped.record(ids)
    # The same operations on the same numbers, so no tolerance.
    assert np.array_equal(record.logits, other.logits) and np.array_equal(record.embedded, other.embedded)
    for layer, same in zip(record.layers, other.layers, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(layer.arrays, same.arrays, strict=True))


@pytest.mark.exports
def test_positions_go_on_after_a_cache_where_a_class_counts_from_0(tmp_path):
    """Bamba's does, for golden's reference and for the record after a synthetic cache."""
    config = FAMILIES["bamba"].config
    (tmp_path / "shape.json").write_text(json.dumps(config))
    make(tmp_path / "shape.json", 0, tmp_path / "model")
    checkpoint = resolve("model", tmp_path / "model", tmp_path / "checkpoint.json")
    record = TorchModel(config, Weights.open(convert(checkpoint, "fp32", tmp_path / "weights.json")), "all")
    golden = load_folder(tmp_path / "model", cut_config(config, "all"))
    seen = []
    for model in (record.model, golden):
        model.get_decoder().rotary_emb.register_forward_hook(lambda module, args, output: seen.append(output[0][0]))
    ids = IDS % config["vocab_size"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rows = np.ones((5, config["num_key_value_heads"], head_dim), np.float32)
    layers = record.record(ids).layers
    record.record(ids[5:], past=[None if layer.states else (rows, rows) for layer in layers])
    with torch.no_grad():
        _, cached = run_after(golden, ids[:5].tolist())
        run_after(golden, ids[5:].tolist(), cached)
    whole, recorded, _, after = (rows for rows in seen if len(rows) > 1)  # `embed` runs one token
    assert torch.equal(after, whole[5:]) and torch.equal(recorded, whole[5:])


def test_embedded_tokens_give_the_logits_of_their_ids(demo):
    model = TorchModel(CONFIG, Weights.open(demo.weights("demo-llama", "fp32")), "all")
    record = model.record(IDS)
    assert np.array_equal(model.logits(record.embedded), record.logits)


def test_a_model_without_the_attention_interface_is_refused(tmp_path):
    """bloom ignores the hook; its export would be wrong without a word, and so would a comparison."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    values, weights = weights_of(transformers.BloomForCausalLM(config), tmp_path)
    with pytest.raises(InputError, match="expected one attention for each of 2 layers"):
        TorchModel(values, weights, "all").record(np.array([1, 2, 3]))


def test_an_unknown_model_type_is_refused(demo):
    with pytest.raises(InputError, match="model_type: expected a type of transformers .*, found 'none'"):
        cut_config({"model_type": "none"}, 1)
    with pytest.raises(InputError, match="layers: expected 1 to 6 or 'all', found 0"):
        cut_config(CONFIG, 0)


def test_lists_with_an_entry_for_each_layer_are_cut_too():
    config = transformers.Gemma2Config(num_hidden_layers=4, eos_token_id=[1, 2, 3, 4]).to_dict()
    cut = cut_config(config, 3)
    assert (cut.num_hidden_layers, len(cut.layer_types), cut.eos_token_id) == (3, 3, [1, 2, 3, 4])


@pytest.fixture
def minicpm3(tmp_path):
    """A checkpoint whose layers scale their residuals by scale_depth / sqrt(num_hidden_layers)."""
    config = FAMILIES["minicpm3"].config
    (tmp_path / "shape.json").write_text(json.dumps(config))
    return config, make(tmp_path / "shape.json", 0, tmp_path / "checkpoint")


def test_a_cut_model_is_the_first_layers_of_the_whole_one(minicpm3, tmp_path):
    """As golden loads it, and as validate does."""
    config, folder = minicpm3
    weights = convert(resolve("model", folder, tmp_path / "checkpoint.json"), "fp32", tmp_path / "weights.json")
    full, cut = (load_folder(folder, cut_config(config, layers)) for layers in ("all", 2))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        states = full(ids, use_cache=False, output_hidden_states=True).hidden_states[2]
        output = cut(ids, use_cache=False, output_hidden_states=True)
    assert torch.equal(cut.get_decoder().norm(states), output.hidden_states[-1])
    record = TorchModel(config, Weights.open(weights), 2).record(ids[0].numpy())
    assert np.array_equal(record.logits, output.logits[0].numpy())


def test_a_model_whose_first_layers_depend_on_how_many_follow_is_refused(minicpm3, monkeypatch):
    config, folder = minicpm3
    layer = transformers.models.minicpm3.modeling_minicpm3.MiniCPM3DecoderLayer
    init = layer.__init__

    def counts_from_the_end(self, config, layer_idx):
        init(self, config, layer_idx)
        self.shares_keys = layer_idx >= config.num_hidden_layers - 1

    monkeypatch.setattr(layer, "__init__", counts_from_the_end)
    with pytest.raises(
        InputError,
        match=r"model.layers.1.shares_keys is False in the whole model and True in one of 2 layers; use layers: all",
    ):
        load_folder(folder, cut_config(config, 2))
