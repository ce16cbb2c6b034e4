"""A small tokenizer of Llama 2's kind: words with a marked space, single bytes for everything else."""

from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizerFile

FIRST_BYTE = 3
"""Id of the token for byte 0."""
_WORDS = ("▁", "▁the", "▁cat", "a", "b", "t", "h", "e", "é", "th", "the")
_MERGES = (("t", "h"), ("th", "e"), ("▁", "the"))


@cache
def byte_fallback_json() -> str:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": FIRST_BYTE + byte for byte in range(256)}
    vocab |= {word: FIRST_BYTE + 256 + position for position, word in enumerate(_WORDS)}
    file = TokenizerFile(models.BPE(vocab, list(_MERGES), unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    file.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    file.pre_tokenizer = pre_tokenizers.Metaspace()
    file.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return file.to_str()
