"""GGUF tokenizer metadata to tokenizer.json: tiny vocabularies, and the demo model's own."""

import json
import logging
from itertools import pairwise

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine.errors import ConfigError, UnsupportedModelError
from engine.gguf_file import GgufFile
from engine.gguf_tokenizer import TokenType, build_tokenizer, write_tokenizer
from engine.model_source import BUILTIN_MODELS, cached_builtin
from tests.gguf_builder import CHAT_TEMPLATE, write_byte_level_tokenizer, write_metadata

VOCAB_SIZE = 288


def byte_level_file(tmp_path, pre="smollm", change=lambda writer: None):
    def fill(writer):
        write_byte_level_tokenizer(writer, VOCAB_SIZE, pre)
        change(writer)

    return GgufFile(write_metadata(tmp_path / "t.gguf", fill=fill))


def pieces(tokenizer, text):
    return tokenizer.encode(text).tokens


TEXTS = [
    "hello world 123",
    "it's  two   spaces\n\n and\ttabs\r\n",
    "Grüße, 東京 🎉 e\u0301",
    "<|im_start|>user\nhello<|im_end|>",
    "",
    " leading",
]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "tekken"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_comes_back(tmp_path, pre, text):
    tokenizer = build_tokenizer(byte_level_file(tmp_path, pre))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "1", "2"]),
        ("qwen2", ["1", "2", "1", "2"]),
        ("gpt-2", ["12", "12"]),
        ("llama-bpe", ["12", "1", "2"]),
        ("tekken", ["1", "2", "1", "2"]),
    ],
)
def test_digits_are_split_as_the_file_says(tmp_path, pre, expected):
    tokenizer = build_tokenizer(byte_level_file(tmp_path, pre))
    assert pieces(tokenizer, "1212") == expected


def test_merges_apply_within_words(tmp_path):
    tokenizer = build_tokenizer(byte_level_file(tmp_path))
    assert pieces(tokenizer, "hello w") == ["hello", "Ġw"]
    assert pieces(tokenizer, "it's") == ["i", "t", "'s"]


def test_qwen_composes_characters(tmp_path):
    tokenizer = build_tokenizer(byte_level_file(tmp_path, "qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301").ids) == "é"


def test_ids_are_those_of_the_file(tmp_path):
    file = byte_level_file(tmp_path)
    tokenizer = build_tokenizer(file)
    tokens = file.require("tokenizer.ggml.tokens")
    assert tokenizer.get_vocab_size() == len(tokens) == VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in tokens] == list(range(VOCAB_SIZE))


def test_control_tokens_are_special_and_user_defined_ones_are_whole(tmp_path):
    tokenizer = build_tokenizer(byte_level_file(tmp_path))
    ids = tokenizer.encode("<|im_start|>h<think>").ids
    assert ids[0] == 0
    assert tokenizer.id_to_token(ids[2]) == "<think>"
    assert tokenizer.decode(ids) == "h<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>h<think>"


@pytest.mark.parametrize(
    ("pre", "said", "added"),
    [("smollm", None, False), ("llama-bpe", None, True), ("smollm", True, True), ("llama-bpe", False, False)],
)
def test_the_beginning_token_is_added_where_the_file_or_its_family_does(tmp_path, pre, said, added):
    def fill(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(["<s>", "a", "b", "ab"])
        writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * 3])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        if said is not None:
            writer.add_add_bos_token(said)

    tokenizer = build_tokenizer(GgufFile(write_metadata(tmp_path / "t.gguf", fill=fill)))
    assert tokenizer.encode("a").ids == ([0, 1] if added else [1])
    assert tokenizer.encode("a", add_special_tokens=False).ids == [1]


def test_written_files_load_in_transformers(tmp_path):
    write_tokenizer(byte_level_file(tmp_path), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert loaded.encode(text) == ours.encode(text).ids
    rendered = loaded.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered == "<|im_start|>hello<|im_end|>"


def test_unknown_splits_and_kinds_are_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedModelError, match="jina-v2"):
        build_tokenizer(byte_level_file(tmp_path, "jina-v2"))

    def fill(writer):
        writer.add_tokenizer_model("t5")
        writer.add_token_list(["a"])

    with pytest.raises(UnsupportedModelError, match="t5"):
        build_tokenizer(GgufFile(write_metadata(tmp_path / "u.gguf", fill=fill)))


def test_a_file_that_names_no_split_is_taken_as_gpt2_and_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        tokenizer = build_tokenizer(byte_level_file(tmp_path, "default"))
    assert pieces(tokenizer, "1212") == ["12", "12"]
    assert "tokenizer.ggml.pre" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "types", "merges", "bos", "named"),
    [
        (["a", "a"], [1, 1], ["a a"], 0, "twice"),
        (["a", "aa"], [1], ["a a"], 0, "length"),
        (["a", "b"], [1, 1], ["a c"], 0, "merges"),
        (["a", "aa"], [1, 1], ["a a"], 9, "bos_token_id 9"),
    ],
)
def test_contradictions_in_a_file_are_config_errors(tmp_path, tokens, types, merges, bos, named):
    def fill(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(bos)

    with pytest.raises(ConfigError, match=named):
        build_tokenizer(GgufFile(write_metadata(tmp_path / "t.gguf", fill=fill)))


SP_PIECES = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "he",
    "ll",
    "hell",
    "hello",
    "▁hello",
    "▁w",
    "or",
    "▁wor",
    "ld",
    "ell",
]


def sentencepiece_file(tmp_path, add_space_prefix=True):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SP_PIECES]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * len(SP_PIECES)
    # As sentencepiece trains BPE: the longer a piece's history, the lower its score.
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(SP_PIECES))]

    def fill(writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(add_space_prefix)

    return GgufFile(write_metadata(tmp_path / "sp.gguf", fill=fill))


def best_score_merging(text, scores):
    """SentencePiece's own algorithm: join the neighbours whose joint piece scores highest, leftmost first."""
    symbols = list(text)
    while True:
        joints = [(scores.get(a + b, None), -i) for i, (a, b) in enumerate(pairwise(symbols))]
        joints = [joint for joint in joints if joint[0] is not None]
        if not joints:
            return symbols
        place = -max(joints)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@pytest.mark.parametrize("text", ["hello world", "hell", "hellohello", "wo rld ", "ellhe  hello", "lllll"])
def test_sentencepiece_merges_by_score(tmp_path, text):
    tokenizer = build_tokenizer(sentencepiece_file(tmp_path))
    scores = {piece: -float(rank) for rank, piece in enumerate(SP_PIECES)}
    expected = best_score_merging("▁" + text.replace(" ", "▁"), scores)
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<s>", *expected]
    assert tokenizer.decode(encoded.ids) == text


def test_sentencepiece_falls_back_to_bytes(tmp_path):
    tokenizer = build_tokenizer(sentencepiece_file(tmp_path))
    encoded = tokenizer.encode("hello é")
    assert encoded.tokens == ["<s>", "▁hello", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded.ids) == "hello é"


def test_sentencepiece_without_a_space_before_the_text(tmp_path):
    tokenizer = build_tokenizer(sentencepiece_file(tmp_path, add_space_prefix=False))
    assert tokenizer.encode("hello").tokens == ["<s>", "hello"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"


@pytest.fixture
def demo_directory():
    """Fails rather than skips where the model is absent: `make test` fetches it first."""
    path = cached_builtin("smollm2-135m")
    assert path is not None, "run `pdserve model fetch smollm2-135m` first"
    return path


@pytest.fixture
def demo_tokenizer(demo_directory):
    return Tokenizer.from_file(str(demo_directory / "tokenizer.json"))


@pytest.mark.demo_model
@pytest.mark.parametrize("text", [*TEXTS, "def f(x):\n    return x**2  # 3.14\n", "a" * 5000, "\u0000\uffff"])
def test_demo_text_comes_back(demo_tokenizer, text):
    assert demo_tokenizer.decode(demo_tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.demo_model
def test_demo_splits_like_smollm2(demo_tokenizer):
    assert pieces(demo_tokenizer, "in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert pieces(demo_tokenizer, "Hello world") == ["Hello", "Ġworld"]
    assert pieces(demo_tokenizer, "it's") == ["it", "'s"]
    assert demo_tokenizer.encode("What is the capital of France?").ids == [1780, 314, 260, 3575, 282, 4649, 47]


@pytest.mark.demo_model
def test_demo_special_tokens(demo_tokenizer, demo_directory):
    ids = demo_tokenizer.encode("<|im_start|>user\nHi<|im_end|><|endoftext|>").ids
    assert (ids[0], ids[-2], ids[-1]) == (1, 2, 0)
    assert demo_tokenizer.decode(ids) == "user\nHi"
    assert demo_tokenizer.get_vocab_size() == 49152
    generation = json.loads((demo_directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == demo_tokenizer.token_to_id("<|im_end|>")


@pytest.mark.demo_model
def test_demo_chat_template(demo_directory):
    config = json.loads((demo_directory / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in config["chat_template"]
    assert config["add_bos_token"] is False


@pytest.mark.demo_model
def test_demo_directory_is_named_by_the_pinned_digest(demo_directory):
    assert BUILTIN_MODELS["smollm2-135m"].sha256[:12] in demo_directory.name
