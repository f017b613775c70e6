"""Text with the tokenizers of published models: an answer's is what its tokens add to the prompt's."""

import random
import time

import numpy as np
import pytest
from real_tokenizers import NAMES, SENTENCEPIECE, TEKKEN, tokenizer_json
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from lockstep.runtime.bad_words import BadWordFilter, Vocabulary
from lockstep.runtime.completion import Collector
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.sampling import Logprobs
from lockstep_serve.logprobs import LogprobsFormat
from some import some

TEXTS = (" the", "the", "true", "  two\n", "Zürich 日本 🙂", "👩‍👩‍👧", "\ufffd", "x", "\t{", ".")
LOSSY = {
    "WordPiece": (models.WordPiece({"?": 0, "a": 1, "##b": 2, "don": 3, "'": 4, ".": 5}), decoders.WordPiece()),
    "BPEDecoder": (models.BPE({"?": 0, "a": 1, "b</w>": 2, "c</w>": 3}, []), decoders.BPEDecoder("</w>")),
    "Metaspace": (models.BPE({"?": 0, "▁": 1, "▁a": 2, "b": 3, "▁▁": 4}, []), decoders.Metaspace()),
    "none": (models.BPE({"?": 0, "a": 1, "b": 2}, []), None),
}


@pytest.fixture(scope="module", params=some(NAMES))
def tokenizer(shared, request):
    return Tokenizer(tokenizer_json(shared, request.param))


@pytest.fixture(scope="module")
def sentencepiece(shared):
    return Tokenizer(tokenizer_json(shared, SENTENCEPIECE))


@pytest.fixture(scope="module")
def tekken(shared):
    return Tokenizer(tokenizer_json(shared, TEKKEN))


@pytest.fixture(params=LOSSY)
def other(request, tmp_path):
    """Tokenizers of each other way to make text of tokens; the first token is special."""
    library = Library(LOSSY[request.param][0])
    if decoder := LOSSY[request.param][1]:
        library.decoder = decoder
    library.add_special_tokens(["?"])
    library.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path / "tokenizer.json")


def answer_text(tokenizer, prompt, answer, **options):
    collector = Collector(tokenizer, prompt, 1, **options)
    for number, token in enumerate(answer):
        collector.add(0, token, "max_new_tokens" if number == len(answer) - 1 else None, None)
    return collector.completion.choices[0].text


def check_random(tokenizer, size, count):
    numbers = random.Random(0)
    for _ in range(count):
        prompt = [numbers.randrange(size) for _ in range(numbers.randint(1, 5))]
        answer = [numbers.randrange(size) for _ in range(numbers.randint(1, 5))]
        text = tokenizer.decode(prompt + answer)
        before = tokenizer.decode(prompt)
        if text.startswith(before):
            assert answer_text(tokenizer, prompt, answer) == text[len(before) :], (prompt, answer)
        assert tokenizer.text(prompt) + answer_text(tokenizer, prompt, answer, echo=True) == text, (prompt, answer)


def test_an_answers_text_is_what_its_tokens_add_to_the_prompts(tokenizer):
    size = len(tokenizer.vocabulary)
    check_random(tokenizer, size, 1000)
    for prompt in TEXTS:
        ids = tokenizer.encode(prompt).tolist()
        for text in TEXTS:
            answer = tokenizer.encode(text, special=False).tolist()
            assert answer_text(tokenizer, ids, answer) == tokenizer.decode(ids + answer)[len(tokenizer.decode(ids)) :]


def test_so_it_is_with_any_decoder(other):
    check_random(other, len(other.vocabulary), 300)


def test_the_space_before_an_answers_first_word_is_its_own(sentencepiece):
    the = sentencepiece.token_id("▁the")
    assert answer_text(sentencepiece, sentencepiece.encode("x"), [the]) == " the"
    assert answer_text(sentencepiece, sentencepiece.encode(""), [the]) == "the"  # the first word of all
    assert answer_text(sentencepiece, sentencepiece.encode("x"), [the], stop=[" th"]) == ""


def test_a_prompt_that_is_cut_inside_a_character_leaves_its_end_to_the_answer(tokenizer):
    text = "I said: 🙂 日本, and ✅ Zürich 👩‍👩‍👧 \u200d ok"
    ids = tokenizer.encode(text).tolist()
    cuts = 0
    for cut in range(1, len(ids)):
        before = tokenizer.text(ids[:cut])
        answer = answer_text(tokenizer, ids[:cut], ids[cut:])
        assert before + answer == tokenizer.decode(ids) == text
        cuts += tokenizer.decode(ids[:cut]).endswith("\ufffd")
    assert cuts > 5


def test_an_answer_does_not_repeat_what_the_prompt_has_shown_of_no_character(tokenizer):
    x = tokenizer.encode("\nx", special=False).tolist()[-1]
    ids = tokenizer.encode("a 𓀀").tolist()
    cut = next(at for at in range(len(ids), 0, -1) if tokenizer.decode(ids[:at]).endswith("\ufffd"))
    assert answer_text(tokenizer, ids[:cut], [x]) == "x"
    assert tokenizer.text(ids[:cut]) + answer_text(tokenizer, ids[:cut], [x], echo=True) == (
        tokenizer.decode([*ids[:cut], x])
    )


def byte_token(tokenizer, byte):
    token = tokenizer.token_id(f"<0x{byte:02X}>")
    return 1000 + byte if token is None else token  # of tekken: after the special ones


def test_bytes_that_can_become_no_character_go_out_at_once(tokenizer):
    lead, last, letter = (byte_token(tokenizer, byte) for byte in (0xF0, 0x9F, ord("x")))
    stream = tokenizer.stream(tokenizer.encode("x"))
    assert [stream.push(lead) for _ in range(4)] == ["", "\ufffd", "\ufffd", "\ufffd"]
    assert stream.push(last) == "" and stream.push(letter).endswith("\ufffdx") and stream.finish() == ""
    meant = tokenizer.encode("\ufffd", special=False).tolist()
    assert "".join(map(tokenizer.stream(tokenizer.encode("x")).push, meant)).endswith("\ufffd")  # and not at the end


@pytest.mark.parametrize("what", ["bytes", "silent", "meant"])
def test_a_token_costs_the_same_however_many_came_before(tokenizer, what):
    """8,000 tokens took half a minute: 4 ms each, 100 times as long as the first ones."""
    silent = tokenizer.token_id("<s>") or 1
    tokens = {"bytes": [byte_token(tokenizer, 0xF0)], "silent": [silent]}.get(what) or (
        tokenizer.encode("\ufffd" * 9, special=False).tolist()[-3:]
    )
    collector = Collector(tokenizer, tokenizer.encode("x").tolist() + tokens * 4000, 1)
    began = time.thread_time()
    for number in range(8000):
        collector.add(0, tokens[number % len(tokens)], None, None)
    assert time.thread_time() - began < 2


def test_no_token_is_left_out_of_the_likeliest_and_all_together_are_the_text(tokenizer):
    names = ("▁the", "the", "<0x41>", "A") if tokenizer.token_id("▁the") else ("Ġthe", "the", "A", "ĠA")
    tokens = [tokenizer.token_id(name) for name in names] + [byte_token(tokenizer, 0xF0), 1]
    answer = [*tokens, *tokenizer.encode(" 🙂 b", special=False).tolist()]
    prompt = tokenizer.encode("x").tolist()
    format = LogprobsFormat(tokenizer, prompt)
    top = tuple((token, -float(at)) for at, token in enumerate(tokens))
    actual = format.part(answer, [Logprobs(-9.0, top) for _ in answer], "max_new_tokens")
    text = answer_text(tokenizer, prompt, answer)
    assert "".join(actual["tokens"]) == text
    assert [text[at:][: len(part)] for at, part in zip(actual["text_offset"], actual["tokens"])] == actual["tokens"]
    for chosen, part, likeliest in zip(answer, actual["tokens"], actual["top_logprobs"]):
        assert len(likeliest) == len({*tokens, chosen}) and part in likeliest
    (listed,) = LogprobsFormat(tokenizer, prompt).part([tokens[1]], [Logprobs(-1.0, top)])["top_logprobs"]
    assert {" the", "the", r"bytes:\xf0"} < listed.keys()


def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(f"x{text}", special=False).tolist()
        assert b"".join(map(tokenizer.token_bytes, ids)).removeprefix(b" ") == f"x{text}".encode()


WORDS = ("true", " true", "日本", "🙂", "e", "ing the", "aaa", "\n", "A")


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer.pieces, len(tokenizer.vocabulary))


@pytest.mark.parametrize("word", some(WORDS))
def test_a_bad_word_is_in_no_text_whichever_tokens_would_spell_it(tokenizer, vocabulary, word):
    """The tokens that are forbidden are just those after which the text has the word, and all others are not."""
    numbers = random.Random(word)
    size = len(tokenizer.vocabulary)
    prompt = tokenizer.encode("x").tolist()
    parts = sorted(set().union(*map(tokenizer.encode, (word, f" {word}", f"\n{word}", f"x{word}y"))))
    parts += [byte_token(tokenizer, byte) for byte in word.encode()]
    num_cases = 0
    for _ in range(4):
        answer = []
        word_filter = BadWordFilter(vocabulary, [word, "zzzz"], prompt)
        for _ in range(8):
            forbidden = word_filter.tokens()
            for token in (*parts, *numbers.sample(range(size), 5)):
                text = answer_text(tokenizer, prompt, [*answer, token])
                assert (word in text) == (token in forbidden), (answer, token)
                num_cases += token in forbidden
            answer.append(numbers.choice([token for token in parts if token not in forbidden] or [1]))
            word_filter.push(answer[-1])
    assert num_cases


def test_a_word_that_the_prompt_begins_inside_a_character_is_found(tekken):
    vocabulary = Vocabulary(tekken.pieces, len(tekken.vocabulary))
    first, last = (byte_token(tekken, byte) for byte in "é".encode())
    assert last in BadWordFilter(vocabulary, ["é"], [first]).tokens()
    assert last not in BadWordFilter(vocabulary, ["é"]).tokens()


def test_a_bad_word_of_any_length_costs_little(tokenizer, vocabulary):
    words = ["a" * 4000, *("ab" * 3 + str(number) for number in range(63))]
    word_filter = BadWordFilter(vocabulary, words)
    token = tokenizer.encode("\na", special=False).tolist()[-1]
    began = time.thread_time()
    for _ in range(1000):
        word_filter.push(token)
        word_filter.tokens()
    assert time.thread_time() - began < 2  # 1,000 tokens


def test_a_word_has_the_tokens_of_each_place_that_it_may_stand_in(sentencepiece):
    results = [sentencepiece.names(tokens) for tokens in sentencepiece.spellings("true")]
    assert ["▁true"] in results and ["true"] in results
    assert np.all([len(tokens) for tokens in results])
