"""Text: streams give whole characters and together the text of all tokens; stop strings hide what follows them."""

import functools
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from lockstep.artifacts.files import write_json
from lockstep.errors import CheckError, InputError
from lockstep.runtime.completion import StopFilter
from lockstep.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level(demo):
    return Tokenizer.open(demo.assembly("demo-llama", "fp32"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """As Llama 2's: pieces that begin with a mark for the space, bytes for what no piece covers, the first space taken
    off."""
    vocabulary = [
        "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581city", "\u2581in", "Nor",
        "th", "é",
    ]  # fmt: skip
    library = Library(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    library.add_special_tokens(["<s>", "</s>"])
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(path))
    return Tokenizer(path)


def test_a_token_has_the_text_that_it_has_after_others(byte_level, byte_fallback):
    ids = byte_level.encode("San Francisco is a")
    assert "".join(map(byte_level.token_text, ids)) == "San Francisco is a"
    assert byte_level.token_text(0) == "<eos>" and byte_level.decode([0]) == ""
    for token, text in (("\u2581city", " city"), ("\u2581", " "), ("th", "th"), ("</s>", "</s>"), ("<0xE4>", "\ufffd")):
        assert byte_fallback.token_text(byte_fallback.token_id(token)) == text


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("text", ["Zürich 🙂 日本", "  two  spaces\n", "", "a\u0301 é", "👩‍👩‍👧"])
def test_a_text_comes_back_in_pieces_of_whole_characters(byte_level, text):
    pieces = streamed(byte_level, byte_level.encode(text))
    assert "".join(pieces) == text == byte_level.decode(byte_level.encode(text))
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_of_bytes_comes_when_it_is_whole(byte_fallback):
    word = [3 + byte for byte in "日".encode()]
    assert streamed(byte_fallback, [260, 261, *word, 262]) == [" city"[1:], " in", "", "", "日", "Nor", ""]
    assert streamed(byte_fallback, [260, *word[:2]])[-1].startswith("\N{REPLACEMENT CHARACTER}")  # cut off by the end


@given(st.lists(st.integers(0, 767), max_size=30))
def test_any_tokens_of_a_byte_level_tokenizer_give_their_text(byte_level, ids):
    assert "".join(streamed(byte_level, ids)) == byte_level.decode(ids)


@given(st.lists(st.integers(0, 264), max_size=30))
def test_bytes_that_are_no_text_do_no_harm(byte_fallback, ids):
    assert isinstance("".join(streamed(byte_fallback, ids)), str)


def test_special_tokens_are_silent(byte_fallback):
    assert "".join(streamed(byte_fallback, [1, 260, 2, 261])) == byte_fallback.decode([1, 260, 2, 261]) == "city in"


def test_token_ids_are_int32(byte_level):
    assert byte_level.encode("Light").dtype == np.int32


def test_a_tokenizer_that_is_absent_changed_or_none_is_refused(demo, tmp_path):
    with pytest.raises(InputError, match="expected a tokenizer, found no file"):
        Tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(InputError, match=r"expected a tokenizer\.json, found"):
        Tokenizer(tmp_path / "tokenizer.json")
    write_json(
        tmp_path / "assembly.json",
        {"format": "lockstep.assembly/1", "tokenizer": {"file": "tokenizer.json", "sha256": "0" * 64}},
    )
    with pytest.raises(CheckError, match="sha256: expected 0000"):
        Tokenizer.open(tmp_path / "assembly.json")


TEXTS = st.text() | st.text("ab \n<>eos\u00e9\u4e16", max_size=60)


@given(TEXTS, st.booleans())
def test_a_text_has_the_ids_of_the_librarys_encode(byte_level, byte_fallback, text, special):
    for tokenizer in (byte_level, byte_fallback):
        expected = library(tokenizer).encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, special).tolist() == expected


@functools.cache
def library(tokenizer):
    """The same file in the tokenizers package."""
    return Library.from_file(str(tokenizer.path))


@pytest.mark.long
def test_a_long_text_keeps_no_other_thread_out(byte_level):
    text = "It was the best of times, it was the worst of times. " * 30_000
    thread = threading.Thread(target=byte_level.encode, args=(text,))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20  # with the lock held it was one or two


@given(TEXTS)
def test_no_text_has_fewer_tokens_than_the_least(byte_level, text):
    assert 0 <= byte_level.min_tokens(len(text)) <= len(byte_level.encode(text, special=False))
    assert byte_level.min_tokens(1 << 20) > 1 << 12


def test_where_tokens_may_stand_for_any_text_nothing_is_known_of_its_length(tmp_path):
    words = Library(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path / "tokenizer.json").min_tokens(1 << 20) == 0


def filtered(stop, pieces):
    stop_filter = StopFilter(stop)
    out = [stop_filter.push(piece) for piece in pieces]
    return "".join(out) + stop_filter.finish(), stop_filter.found is not None


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["."], ["One.", " Two."], ("One", True)),
        (["END"], ["a E", "N", "D b"], ("a ", True)),  # spans tokens
        (["END"], ["a E", "N", "E", "ND"], ("a ENE"[:4], True)),
        (["END"], ["a EN"], ("a EN", False)),  # held back text comes at the end
        (["aab"], ["a", "a", "a", "b"], ("a", True)),
        (["bc", "abcd"], ["ab", "c"], ("a", True)),
        (["cd", "b"], ["abcd"], ("a", True)),  # the first in the text, not in the list
        ([], ["any", "thing"], ("anything", False)),
        (["\n"], ["\n"], ("", True)),
    ],
)
def test_text_ends_before_a_stop_string(stop, pieces, expected):
    assert filtered(stop, pieces) == expected


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.lists(st.text("ab", max_size=3), max_size=12))
def test_any_cut_of_a_text_gives_what_comes_before_the_stop_string_that_ends_first(stop, pieces):
    text = "".join(pieces)
    out, stop_found = filtered(stop, pieces)
    assert text.startswith(out)
    assert not any(word in out for word in stop)
    assert stop_found == any(word in text for word in stop)
    assert stop_found or out == text


def test_a_stop_string_of_millions_of_characters_costs_nothing():
    began = time.thread_time()  # not the time of what else runs
    stop_filter = StopFilter(["ab" * 1_800_000])
    assert stop_filter.push("xab") == "x" and stop_filter.push("abc") == "ababc"
    assert time.thread_time() - began < 1


def test_a_stop_string_counts_that_ends_in_a_text_that_may_end():
    stop_filter = StopFilter(["bc", "b"])
    assert stop_filter.push("abc", may_end=False) == "abc" and stop_filter.found is None
    stop_filter = StopFilter(["bcd", "b"])
    assert (
        stop_filter.push("ab", may_end=False) + stop_filter.push("c", may_end=False) == "a"
    )  # it may yet be the first of them
    assert stop_filter.push("d") == "" and stop_filter.found == "bcd"
    assert StopFilter(["b"]).push("b") == ""


def test_a_prompt_that_is_no_text_is_refused(byte_level):
    with pytest.raises(
        InputError, match=r"^prompt: expected text in UTF-8, found '\\udcff' at character 2; correct it$"
    ):
        byte_level.encode("ab\udcff")  # what a shell's byte 0xff becomes


@pytest.mark.parametrize(("change", "text", "expected"), [
    ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}}, "b", "found 'b': WordLevel "
"error: Missing"),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?:(x+)+$)"}, "behavior": "Isolated", "invert": False}}, "x" * 40 + "!", "found 'xxxx"),  # noqa: E501
])  # fmt: skip
def test_a_text_that_the_tokenizer_fails_on_is_one_line(tmp_path, change, text, expected):
    """The first raises an Exception, the second a panic of native code, which is none."""
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": {"x": 0}, "merges": []}, **change})
    )
    with pytest.raises(InputError) as caught:
        Tokenizer(tmp_path / "tokenizer.json").encode(text)
    assert expected in str(caught.value) and str(caught.value).splitlines() == [str(caught.value)]
