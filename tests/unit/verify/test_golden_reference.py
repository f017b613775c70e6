"""The reference is what transformers' own `generate` gives, is cut with the layers, and is the same bytes each time."""

import json
import shutil

import numpy as np
import pytest
import torch
from demo_model import DEMO
from families import FAMILIES
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from answers import compute
from lockstep.artifacts.files import read_json, sha256_file
from lockstep.checkpoint import resolve
from lockstep.errors import InputError
from lockstep.export.torch_model import cut_config
from lockstep.verify.golden.reference import follow, make_reference
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.verify.golden.text import new_text

PROMPTS = ("San Francisco is a", "Ice floats because", "Light")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return resolve(str(DEMO), DEMO, tmp_path_factory.mktemp("reference") / "checkpoint.json")


@pytest.fixture(scope="module")
def reference_json(checkpoint):
    return make_reference(checkpoint, 2, GoldenTerms(12, PROMPTS), checkpoint.parent / "2.json")


@pytest.mark.parametrize("layers", [2, "all"])
def test_tokens_are_those_of_generate(layers):
    config = json.loads((DEMO / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    if layers != "all":
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    tokenizer = AutoTokenizer.from_pretrained(DEMO, local_files_only=True)
    reference = compute(DEMO, config, layers, PROMPTS, 12)
    for number, answer in enumerate(reference.prompts):
        inputs = tokenizer(answer.text, return_tensors="pt")
        assert answer.prompt_ids == tuple(inputs["input_ids"][0].tolist())
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
        assert answer.tokens == tuple(out[len(answer.prompt_ids) :].tolist())
        with torch.no_grad():  # without a cache, all at once
            full = model(out[None, :-1]).logits[0, len(answer.prompt_ids) - 1 :].numpy()
        # fp32 sums in another order: 1e-5 on logits of size 10; ten times the room
        assert np.abs(full - reference.arrays[f"logits.{number}"]).max() < 1e-4


def test_a_hybrid_that_is_cut_before_its_attention_has_a_reference():
    """Of transformers' cache a layer with attention knows the length, and none is left."""
    torch.manual_seed(0)
    config = cut_config(FAMILIES["lfm2"].config, 2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    tokens, logits, *_ = follow(model, [5, 9, 100], {3}, 6, ())
    with torch.no_grad():
        full = model(torch.tensor([[5, 9, 100, *tokens[:-1]]]), use_cache=False).logits[0, 2:].numpy()
    assert logits.shape == full.shape and np.abs(full - logits).max() < 1e-6  # sums of another length
    assert tokens == tuple(full.argmax(-1))


def test_decoding_stops_at_the_end_of_the_text_and_keeps_its_token(checkpoint):
    config = json.loads((DEMO / "config.json").read_text())
    reference = compute(DEMO, config, "all", ["Ice floats because"], 30)
    (answer,) = reference.prompts
    assert len(answer.tokens) < 30 and answer.tokens[-1] == config["eos_token_id"]
    assert reference.arrays["logits.0"].shape == (len(answer.tokens), config["vocab_size"])
    assert answer.new_text == " it is lighter than water."


def test_the_logits_beside_the_manifest_are_those_that_tokens_were_chosen_from(reference_json):
    manifest = read_json(reference_json, "lockstep.reference/4")
    logits = load_file(reference_json.with_suffix(".safetensors"))
    assert (manifest["layers"], manifest["eos_token_ids"]) == (2, [0])
    assert [prompt["text"] for prompt in manifest["prompts"]] == list(PROMPTS)
    assert manifest["logits"] == {
        "file": "2.safetensors",
        "sha256": sha256_file(reference_json.with_suffix(".safetensors")),
    }
    for i, prompt in enumerate(manifest["prompts"]):
        rows = logits[f"logits.{i}"]
        assert rows.dtype == np.float32 and rows.argmax(1).tolist() == prompt["tokens"]


def test_two_references_are_the_same_bytes(checkpoint, reference_json, tmp_path):
    again = make_reference(checkpoint, 2, GoldenTerms(12, PROMPTS), tmp_path / "2.json")
    assert again.read_bytes() == reference_json.read_bytes()
    assert again.with_suffix(".safetensors").read_bytes() == reference_json.with_suffix(".safetensors").read_bytes()


def test_a_prompt_that_cannot_be_answered_is_refused(checkpoint, tmp_path):
    with pytest.raises(InputError, match=r"within 512 tokens .*found 8 \+ 505"):
        make_reference(checkpoint, 1, GoldenTerms(505, PROMPTS[:1]), tmp_path / "1.json")
    with pytest.raises(InputError, match="at least one token"):
        make_reference(checkpoint, 1, GoldenTerms(1, ("",)), tmp_path / "1.json")
    with pytest.raises(InputError, match="layers: expected 1 to 6 or 'all', found 7"):
        make_reference(checkpoint, 7, GoldenTerms(1, PROMPTS), tmp_path / "7.json")
    assert not list(tmp_path.iterdir())


def test_a_missing_tensor_is_an_error_not_a_random_weight(tmp_path):
    shutil.copytree(DEMO, tmp_path / "model")
    config = json.loads((DEMO / "config.json").read_text()) | {"num_hidden_layers": 7}
    with pytest.raises(InputError, match="expected all tensors of the model, found missing keys: model.layers.6"):
        compute(tmp_path / "model", config, "all", PROMPTS, 1)


@pytest.mark.parametrize(("file", "change", "expected"), [
    ("config.json", {"intermediate_size": 401}, "expected tensors that transformers can load, found "
"RuntimeError: "),
    ("config.json", {"num_attention_heads": "six"}, "expected the config of a 'llama' model, found one that it "
"refuses: "),
    ("tokenizer_config.json", {"tokenizer_class": 3}, "expected a tokenizer that transformers can load, found "),
    ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "expected a tokenizer that transformers can load, found "),
])  # fmt: skip
def test_what_transformers_refuses_is_one_line(tmp_path, file, change, expected):
    folder = shutil.copytree(DEMO, tmp_path / "model")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(InputError) as caught:
        compute(folder, json.loads((folder / "config.json").read_text()), 2, PROMPTS, 1)
    assert expected in str(caught.value) and str(caught.value).splitlines() == [str(caught.value)]


def test_a_tokenizer_of_another_model_is_refused_by_the_first_token_that_this_one_lacks(tmp_path):
    folder = shutil.copytree(DEMO, tmp_path / "model")
    text = json.loads((folder / "tokenizer.json").read_text())
    text["added_tokens"].append({**text["added_tokens"][0], "id": 768, "content": "<new>"})
    (folder / "tokenizer.json").write_text(json.dumps(text))
    config = json.loads((DEMO / "config.json").read_text())
    assert compute(folder, config, 2, PROMPTS[:1], 1).prompts[0].tokens
    with pytest.raises(
        InputError,
        match="golden prompt 'a <new> word': expected tokens below 768, as the model's embedding has rows, found 768",
    ):
        compute(folder, config, 2, ["a <new> word"], 1)


def test_text_is_decoded_behind_the_prompt():
    """As in tokenizers of the SentencePiece kind, which drop the first space of a text."""
    words = ["", " San", " Francisco", " is"]

    def decode(ids):
        return "".join(words[i] for i in ids)[1:]

    assert new_text(decode, [1, 2], [3]) == " is" and decode([3]) == "is"
    # the prompt's own text changed: the new tokens alone
    assert new_text(lambda ids: f"<{len(ids)}>", [1], [2]) == "<1>"
