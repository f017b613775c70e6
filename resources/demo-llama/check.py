"""What the demo checkpoint must do, measured with transformers: fp32, eager, greedy.

`runs` takes the checkpoint's folder and gives every prompt's continuation and logit gaps, at full depth
and cut after CUT_LAYERS; `unmet` and `undocumented` give one line for each requirement that is not met.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).resolve().parent
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "expected.json")

CUT_LAYERS = 2
PROMPTS = (
    "San Francisco is a",
    "A",
    "Light",
    "Ice floats because",
    "Lake Zürich is long and narrow, and on clear days the snow",
    "A bridge must carry its own weight before it can carry anything else. An arch turns that weight into"
    " a push against the ground, while a cable turns it into a pull, and so stone",
    "Rivers carry sand and clay from the mountains down to the sea. Where the stream slows, the grains"
    " sink to the quiet bottom, and over thousands of years they build a flat and fertile delta on which"
    " farmers grow rice and wheat. In spring the floods bring",
)
NEW_TOKENS = 16
NEW_TOKENS_CHECKED = 24

MIN_GAP = 1.0
# fp16 arithmetic moves a logit of this model by about 0.02 (README.md): far from the next token here too.
MIN_GAP_CUT = 0.5
MAX_LOGIT = 60.0
MAX_BYTES = 5_900_000  # of FILES; the sources bring the folder to 6 MB at most


def paragraphs() -> list[str]:
    """The lines of text.txt, in order."""
    return (FOLDER / "text.txt").read_text(encoding="utf-8").splitlines()


@dataclass(frozen=True)
class Run:
    """One greedy run in fp32, eager."""

    text: str
    prompt_tokens: int
    new_text: str  # after NEW_TOKENS tokens or EOS
    long_text: str  # after NEW_TOKENS_CHECKED tokens or EOS
    ends: bool  # EOS is among the new tokens
    gaps: list[float]  # first logit minus second, for each new token
    max_logit: float
    std_logit: float


def load(folder: Path, layers: int) -> LlamaForCausalLM:
    """The first `layers` layers of the checkpoint with its final norm and head, fp32, eager."""
    config = LlamaConfig.from_pretrained(folder, num_hidden_layers=layers)
    return LlamaForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def run(model: LlamaForCausalLM, tokenizer, text: str, new_tokens: int) -> Run:
    prompt = tokenizer(text, return_tensors="pt")
    count = prompt.input_ids.shape[1]
    out = model.generate(
        **prompt, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    ids = out.sequences[0].tolist()
    logits = torch.stack(out.logits)[:, 0]
    first, second = logits.topk(2).values.unbind(-1)

    def new_text(length: int) -> str:
        whole = tokenizer.decode(ids[: count + length], skip_special_tokens=True)
        return whole[len(tokenizer.decode(ids[:count], skip_special_tokens=True)) :]

    return Run(
        text=text,
        prompt_tokens=count,
        new_text=new_text(NEW_TOKENS),
        long_text=new_text(new_tokens),
        ends=model.config.eos_token_id in ids[count:],
        gaps=(first - second).tolist(),
        max_logit=logits.abs().max().item(),
        std_logit=logits.std().item(),
    )


def runs(folder: Path) -> tuple[list[Run], list[Run]]:
    """Every prompt at full depth and at CUT_LAYERS."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole = load(folder, LlamaConfig.from_pretrained(folder).num_hidden_layers)
    cut = load(folder, CUT_LAYERS)
    return (
        [run(whole, tokenizer, text, NEW_TOKENS_CHECKED) for text in PROMPTS],
        [run(cut, tokenizer, text, NEW_TOKENS) for text in PROMPTS],
    )


def expected(whole: list[Run], cut: list[Run]) -> list[dict]:
    """The content of expected.json. Gaps are rounded down to 0.01: smaller digits differ between CPUs."""

    def entry(run: Run) -> dict:
        gap = math.floor(min(run.gaps[:NEW_TOKENS]) * 100) / 100
        return {"new_text": run.new_text, "smallest_gap": gap}

    return [
        {"text": a.text, "prompt_tokens": a.prompt_tokens, "all": entry(a), str(CUT_LAYERS): entry(b)}
        for a, b in zip(whole, cut, strict=True)
    ]


def unmet(folder: Path, whole: list[Run], cut: list[Run]) -> list[str]:
    """One line for each requirement that the checkpoint in `folder` does not meet."""
    texts = paragraphs()
    lines = []

    def require(met: bool, line: str) -> None:
        if not met:
            lines.append(line)

    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(folder)
    config = LlamaConfig.from_pretrained(folder)
    heads = config.num_attention_heads
    require(config.num_hidden_layers >= 6, f"at least 6 layers: {config.num_hidden_layers}")
    require(config.num_key_value_heads < heads, "fewer key/value heads than heads")
    require(config.head_dim * heads != config.hidden_size, "a head_dim other than hidden_size / num_heads")
    rows = config.vocab_size
    require(fast.get_vocab_size() == rows, f"{fast.get_vocab_size()} tokens for {rows} rows of the embedding")
    for text in texts:
        ids = fast.encode(text).ids
        require(auto(text).input_ids == ids, f"AutoTokenizer and tokenizer.json differ: {text!r}")
        require(fast.decode(ids) == text, f"the tokenizer does not give back: {text!r}")

    for a, b in zip(whole, cut, strict=True):
        where = repr(a.text[:20])
        require(min(a.gaps) >= MIN_GAP, f"{where}: gap {min(a.gaps):.3f} < {MIN_GAP}")
        require(min(b.gaps) >= MIN_GAP_CUT, f"{where}, {CUT_LAYERS} layers: gap {min(b.gaps):.3f} < {MIN_GAP_CUT}")
        largest = max(a.max_logit, b.max_logit)
        require(largest <= MAX_LOGIT, f"{where}: logit of {largest:.1f} > {MAX_LOGIT}")
        known = any(t.startswith(a.text + a.long_text) for t in texts)
        require(known, f"{where}: not a sentence of the text: {a.long_text!r}")
        require(a.new_text != b.new_text, f"{where}: the same text at {CUT_LAYERS} layers")
        require("\ufffd" not in a.new_text + b.new_text, f"{where}: the last character is cut in two")
    require(any(a.ends for a in whole), f"no prompt reaches end-of-sequence within {NEW_TOKENS_CHECKED} tokens")

    found = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    wanted = expected(whole, cut)
    for a, b in zip(found, wanted, strict=True):
        for depth in ("all", str(CUT_LAYERS)):
            same = a["text"] == b["text"] and a[depth]["new_text"] == b[depth]["new_text"]
            require(same, f"expected.json: {a['text'][:20]!r}, {depth}: found {b[depth]['new_text']!r}")
    size = sum((folder / name).stat().st_size for name in FILES)
    require(size <= MAX_BYTES, f"the files have {size} bytes, more than {MAX_BYTES}")
    return lines


def undocumented(entries: list[dict]) -> list[str]:
    """One line for each continuation of expected.json that README.md does not show."""
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    texts = [entry[depth]["new_text"] for entry in entries for depth in ("all", str(CUT_LAYERS))]
    return [f"README.md does not show {text!r}" for text in texts if f"`{text}`" not in readme]


def show(whole: list[Run], cut: list[Run]) -> None:
    for title, group in (("all layers", whole), (f"{CUT_LAYERS} layers", cut)):
        print(f"\n{title}")
        for r in group:
            print(
                f"  {r.prompt_tokens:3d} tokens  gap {min(r.gaps):6.3f}  |logit| <= {r.max_logit:5.1f}"
                f"  std {r.std_logit:.2f}  {r.text[-24:]!r} -> {r.new_text!r}"
            )
