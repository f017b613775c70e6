"""Train the demo checkpoint: text.txt in, a Hugging Face Llama folder out.

Reads `text.txt` beside this script (one paragraph a line) and writes beside it `config.json`,
`model.safetensors` (fp16), `tokenizer.json`, `tokenizer_config.json` and `expected.json` (prompts
with their greedy continuations and logit gaps).

The model is meant to know the text by heart, so that the right token never hangs on rounding. Two
layers would be enough for that. So that a model cut after two layers says something else, and says it
with clear gaps too, these two are taught another answer: the paragraph's words in a random order.

Needs no network; CPU, two threads, a few minutes. Two runs on one machine with the same package
versions write the same bytes.

    python train.py            train, write, check
    python train.py --check    check the files that are here

Exits with 1 and one line for each requirement that is not met.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

# The tokenizer trainer counts pairs in parallel unless told otherwise; read when it is imported.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from check import CUT_LAYERS, FILES, FOLDER, expected, paragraphs, runs, show, undocumented, unmet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

SEED = 1
STEPS = 400
ROWS, ROW_TOKENS = 8, 192
CUT_WORDS = 24
EARLY_WORDS = 6
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 30

EOS = "<eos>"
# As the rows of training are: a paragraph that the user begins and the assistant ends, then EOS. Without white space of
# its own, which would be tokens that the model never saw there.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- raise_exception('this model knows no tools') }}
    {%- endif %}
    {{- message['content'] }}
    {%- if message['role'] != 'user' %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}"""
VOCAB_SIZE = 768
# No two tensor sizes are equal (hidden 144, query 240, key 80, 400, 768), and neither rope_theta nor
# head_dim is the default: a swapped axis or an ignored key then shows at once.
ARCHITECTURE = {
    "hidden_size": 144,
    "intermediate_size": 400,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE whose only special token is EOS, with id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def rows(documents: list[list[int]], generator: random.Random) -> torch.Tensor:
    """Whole paragraphs in random order, int64 [ROWS, ROW_TOKENS]; each row starts with a paragraph's start."""
    batch = []
    for _ in range(ROWS):
        row: list[int] = []
        while len(row) < ROW_TOKENS:
            row += generator.choice(documents)
        batch.append(row[:ROW_TOKENS])
    return torch.tensor(batch)


def disorder(text: str) -> list[str]:
    """The first CUT_WORDS words of `text` in an order that depends on SEED and the text alone."""
    words = text.split(" ")[:CUT_WORDS]
    random.Random(f"{SEED} {text}").shuffle(words)
    return words


def cut_rows(texts: list[str], tokenizer: Tokenizer, generator: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Paragraphs broken off after a random word and followed by their words in disorder.

    Returns ids and labels, int64 [ROWS, longest]; labels are -100 (ignored) up to the break and in the padding.
    """
    eos = tokenizer.token_to_id(EOS)
    ids, labels = [], []
    for _ in range(ROWS):
        text = generator.choice(texts)
        words = text.split(" ")
        # Short prompts are the hardest to tell apart, so half of the breaks come early.
        last = generator.choice((min(EARLY_WORDS, len(words) - 1), len(words) - 1))
        start = " ".join(words[: generator.randint(1, last)])
        prompt = tokenizer.encode(start).ids
        answer = tokenizer.encode(" " + " ".join(disorder(text))).ids + [eos]
        ids.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([-100] * len(prompt) + answer))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True, padding_value=eos), pad(labels, batch_first=True, padding_value=-100)


def first_layers(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model cut after CUT_LAYERS, sharing all its weights with `model`."""
    config = LlamaConfig(**ARCHITECTURE | {"num_hidden_layers": CUT_LAYERS})
    cut = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    cut.model.embed_tokens = model.model.embed_tokens
    cut.model.layers = model.model.layers[:CUT_LAYERS]
    cut.model.norm = model.model.norm
    cut.lm_head = model.lm_head
    return cut


def learning_rate(step: int) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (1 + math.cos(math.pi * done)) / 2


def train_model(texts: list[str], tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A model in fp32 that knows `texts` by heart and, cut after CUT_LAYERS, answers with their words in disorder."""
    torch.manual_seed(SEED)
    generator = random.Random(SEED)
    documents = [tokenizer.encode(text + EOS).ids for text in texts]
    model = LlamaForCausalLM._from_config(LlamaConfig(**ARCHITECTURE), attn_implementation="eager").train()
    cut = first_layers(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        batch = rows(documents, generator)
        whole_loss = model(input_ids=batch, labels=batch).loss
        cut_ids, cut_labels = cut_rows(texts, tokenizer, generator)
        cut_loss = cut(input_ids=cut_ids, labels=cut_labels).loss
        optimizer.zero_grad()
        (whole_loss + cut_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == STEPS - 1:
            print(f"step {step:4d}  loss {whole_loss.item():.4f}  cut {cut_loss.item():.4f}", flush=True)
    return model.eval()


def write(folder: Path, tokenizer: Tokenizer, model: LlamaForCausalLM) -> None:
    """Write the checkpoint into `folder`: weights in fp16, all else as JSON."""
    model.half().save_pretrained(folder)
    # What generate() needs stands in config.json already.
    (folder / "generation_config.json").unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    # Without the class, transformers would take the one for Llama and replace the pre-tokenizer.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": ARCHITECTURE["max_position_embeddings"],
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def train(folder: Path) -> None:
    """Train and write a whole checkpoint into `folder`."""
    texts = paragraphs()
    tokenizer = train_tokenizer(texts)
    write(folder, tokenizer, train_model(texts, tokenizer))
    write_json(folder / "expected.json", expected(*runs(folder)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="check the files that are here, train nothing")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)

    if arguments.check:
        folder = FOLDER
    else:
        folder = Path(tempfile.mkdtemp(prefix=".train-", dir=FOLDER))
    try:
        if not arguments.check:
            train(folder)
        whole, cut = runs(folder)
        show(whole, cut)
        lines = unmet(folder, whole, cut)
        if arguments.check:
            lines += undocumented(expected(whole, cut))
        if not arguments.check and not lines:
            for name in FILES:
                (folder / name).chmod(0o644)
                os.replace(folder / name, FOLDER / name)
    finally:
        if not arguments.check:
            shutil.rmtree(folder)
    for line in lines:
        print(f"not met: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
