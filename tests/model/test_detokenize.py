"""Streamed text equals the text decoded at once: characters are whole, stop strings are exact wherever tokens are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import SPECIAL, byte_tokenizer

from qsa.model.detokenize import IncrementalDetokenizer, StopChecker
from qsa.model.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_tokenizer(), bos_id=0, eos_ids=[2], adds_bos=True, special_ids=range(4), chat_template=None)
BYTE_ID = {TOKENIZER.token_bytes(i): i for i in range(4, 260)}
REPLACEMENT = "�"


def byte_ids(data: bytes) -> list[int]:
    return [BYTE_ID[bytes([byte])] for byte in data]


def stream(ids, prompt_ids=(), **options):
    detokenizer = IncrementalDetokenizer(TOKENIZER, prompt_ids, **options)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


def test_every_byte_has_a_token():
    assert len(BYTE_ID) == 256


@pytest.mark.parametrize("text", ["😀", "é", "日本語", "👩‍👩‍👧", "a😀b", "\U0010ffff", "\x00\x7f"])
def test_characters_come_whole(text):
    deltas = stream(byte_ids(text.encode()))
    assert "".join(deltas) == text
    assert all(REPLACEMENT not in delta for delta in deltas)
    assert sum(map(bool, deltas)) == len(text)  # one byte a token: a character appears with its last byte


def test_every_character_streams_bytewise():
    """Exhaustive over the planes' borders and a sample between: encode, stream by single bytes, compare."""
    points = {
        *range(0x3000),
        *range(0xD700, 0xD800),
        *range(0xE000, 0xE100),
        *range(0xFFE0, 0x10020),
        *range(0x3000, 0x110000, 997),
    }
    text = "".join(chr(p) for p in sorted(points) if not 0xD800 <= p < 0xE000)
    assert "".join(stream(byte_ids(text.encode()))) == text


@pytest.mark.parametrize(
    ("data", "deltas"),
    [
        (b"\xa0", [REPLACEMENT, ""]),  # a stray continuation byte is wrong at once
        (b"a\xa0b", ["a", REPLACEMENT, "b", ""]),
        (b"\xff", [REPLACEMENT, ""]),
        (b"\xf0\x9f", ["", "", REPLACEMENT]),  # never completed: one U+FFFD, at the end
        (b"\xf0\x9fA", ["", "", REPLACEMENT + "A", ""]),
        (b"\xed\xa0\x80", ["", "", REPLACEMENT * 3, ""]),  # a surrogate is no character
    ],
)
def test_bytes_that_are_no_text(data, deltas):
    assert stream(byte_ids(data)) == deltas
    assert "".join(deltas) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_prompt_that_ends_within_a_character(cut):
    data = "Hi 😀".encode()
    prompt, rest = byte_ids(data[: len(data) - cut]), data[len(data) - cut :]
    assert "".join(stream(byte_ids(rest + b"!"), prompt)) == "😀!"
    assert "".join(stream(byte_ids(b"ok"), prompt)) == "ok"  # not completed: the prompt's bytes are not generated text
    assert "".join(stream(byte_ids("é".encode()), prompt)) == "é"
    assert "".join(stream([], prompt)) == ""
    assert "".join(stream([BYTE_ID[b"\x80"]], byte_ids(b"\xf0\x9f"))) == REPLACEMENT


def test_whole_prompt_is_not_repeated():
    assert "".join(stream(byte_ids(b" world"), byte_ids("Hello 😀".encode()))) == " world"


def test_control_tokens_are_hidden_unless_asked_for():
    ids = [*byte_ids(b"a"), 2, *byte_ids(b"b")]
    assert "".join(stream(ids)) == "ab" == TOKENIZER.decode(ids, skip_special=True)
    assert "".join(stream(ids, skip_special=False)) == f"a{SPECIAL[2]}b" == TOKENIZER.decode(ids)


def test_ids_without_a_token_are_silent():
    assert stream([5000, -1, BYTE_ID[b"a"]]) == ["", "", "a", ""]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(4, TOKENIZER.vocab_size - 1), max_size=40))
def test_streamed_equals_whole_for_any_tokens(ids):
    deltas = stream(ids)
    assert "".join(deltas) == TOKENIZER.decode(ids)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=12), st.binary(max_size=8), st.integers(0, 4))
def test_prompt_and_generated_text_join(text, generated, cut):
    data = text.encode()
    cut = min(cut, len(data))
    prompt, rest = data[: len(data) - cut], data[len(data) - cut :]
    whole = (data + generated).decode("utf-8", "replace")
    shown = prompt.decode("utf-8", "ignore")  # the prompt's whole characters
    assert shown + "".join(stream(byte_ids(rest + generated), byte_ids(prompt))) == whole


def stop_stream(pieces, stop):
    checker = StopChecker(stop)
    shown, stopped = [], False
    for piece in pieces:
        delta, stopped = checker.push(piece)
        shown.append(delta)
        if stopped:
            break
    return "".join(shown) + ("" if stopped else checker.flush()), stopped, checker.matched


def test_stop_string_across_tokens():
    checker = StopChecker(["DEFGHIJ"])
    results = [checker.push(piece) for piece in ("ABC", "DEF", "G", "HI", "J", "K")]
    assert results == [("ABC", False), ("", False), ("", False), ("", False), ("", True), ("", True)]
    assert checker.flush() == ""
    assert checker.matched == "DEFGHIJ"


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "matched"),
    [
        (["ABC", "DEF", "X"], ["DEFGHIJ"], "ABCDEFX", None),  # held back, then given out
        (["ABC", "DEF"], ["DEFGHIJ"], "ABCDEF", None),  # given out at the end
        (["aaab"], ["aab"], "a", "aab"),  # overlaps itself
        (["a", "a", "a", "b"], ["aab"], "a", "aab"),
        (["xABCD"], ["BCD", "C"], "xAB", "C"),  # the one that ends first wins, as when streamed
        (["xABC"], ["C", "BC"], "xA", "BC"),  # of two that end together the longest
        (["one\n\ntwo"], ["\n\n"], "one", "\n\n"),
        (["stop"], ["stop"], "", "stop"),
        (["text"], [], "text", None),
        (["日本", "語です"], ["本語"], "日", "本語"),
    ],
)
def test_stop_strings(pieces, stop, shown, matched):
    assert stop_stream(pieces, stop) == (shown, matched is not None, matched)


def test_nothing_is_held_longer_than_needed():
    checker = StopChecker(["END"])
    assert checker.push("xE") == ("x", False)
    assert checker.push("Ey") == ("EEy", False)


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])


def first_stop(text: str, stop: list[str]) -> str:
    """The definition, character by character: end when the text read so far ends with a stop string, the longest first."""
    for end in range(1, len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)]
    return text


@settings(max_examples=500, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_do_not_depend_on_the_cuts(text, stop, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    shown, stopped, matched = stop_stream(pieces, stop)
    assert shown == first_stop(text, stop)
    assert stopped == (matched is not None) == any(candidate in text for candidate in stop)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_tokens_characters_and_stops_together(text, stop):
    """Bytes as tokens through both classes: what is shown is the whole text up to the stop string."""
    detokenizer, checker = IncrementalDetokenizer(TOKENIZER), StopChecker(stop)
    shown = ""
    for i in byte_ids(text.encode()):
        delta, stopped = checker.push(detokenizer.push(i))
        shown += delta
        if stopped:
            break
    else:
        delta, stopped = checker.push(detokenizer.flush())
        shown += delta + ("" if stopped else checker.flush())
    assert shown == first_stop(text, stop)
