"""Decoders that a stream can follow token by token, and those that it cannot."""

from random import Random
from typing import Any

import pytest
from tokenizers import Regex, decoders
from tokenizers import Tokenizer as TokenizerFile

from engine.errors import ConfigError
from server.detokenizer import Detokenizer
from server.tokenizer import Tokenizer
from tests.byte_fallback import FIRST_BYTE, byte_fallback_json
from tests.server_rig import tokenizer_json

SPACES = decoders.Replace("▁", " ")


def with_decoder(decoder: Any, json: str) -> Tokenizer:
    file = TokenizerFile.from_str(json)
    file.decoder = decoder
    return Tokenizer(file)


@pytest.mark.parametrize(
    ("decoder", "json"),
    [
        (decoders.ByteLevel(), tokenizer_json()),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), tokenizer_json()),
        (decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse()]), byte_fallback_json()),
        (
            decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
            byte_fallback_json(),
        ),
        (decoders.Metaspace(), byte_fallback_json()),
        (decoders.Metaspace(prepend_scheme="never"), byte_fallback_json()),
    ],
)
def test_a_stream_reads_words_as_the_library_does(decoder: Any, json: str) -> None:
    tokenizer = with_decoder(decoder, json)
    words = [i for i in range(tokenizer.vocab_size) if i not in range(FIRST_BYTE, FIRST_BYTE + 256)]
    rng, last = Random(0), tokenizer.encode("a", add_special_tokens=False)
    for _ in range(50):
        ids = [*rng.choices(words, k=rng.randint(1, 8)), *last]
        detokenizer = Detokenizer(tokenizer)
        assert "".join(map(detokenizer.feed, ids)) == tokenizer.decode(ids, skip_special_tokens=True), ids


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (None, "no decoder"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Replace(Regex("a+"), " "), "Regex"),
        (decoders.Sequence([SPACES, decoders.Strip("x", 1, 0)]), "Strip"),
        (decoders.Sequence([SPACES, decoders.Strip(" ", 0, 1)]), "Strip"),
    ],
)
def test_a_decoder_that_looks_at_more_than_one_token_is_refused_by_name(decoder: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"--model: tokenizer.json .*{words}"):
        with_decoder(decoder, byte_fallback_json())


def test_only_hexadecimal_names_are_byte_tokens() -> None:
    tokenizer = with_decoder(decoders.ByteFallback(), byte_fallback_json().replace("<0x0A>", "<0xZZ>"))
    assert tokenizer.token_bytes(FIRST_BYTE + 0x0A) == b"<0xZZ>"
    assert tokenizer.token_bytes(FIRST_BYTE + 0x0B) == b"\x0b"
