"""GGUF tokenizer metadata to tokenizer.json and tokenizer_config.json. Torch-free.

Two kinds of tokenizer.ggml.model are understood, everything else is refused by name:

    gpt2    byte-level BPE; tokenizer.ggml.pre names how text is split before merging (`_PRE_TOKENIZERS`)
    llama   SentencePiece BPE with byte fallback; merges are recovered from the pieces' scores

A wrong split still produces text, only worse text, so an unknown tokenizer.ggml.pre is refused rather than guessed.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import ConfigError, UnsupportedModelError
from engine.gguf_file import GgufFile

logger = logging.getLogger(__name__)


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type, as in llama.h."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How a byte-level tokenizer cuts text into the words that are merged on their own."""

    split: str | None = None
    """Regex of the words; None for GPT-2's."""
    single_digits: bool = False
    """Every digit is a word, before anything else is split."""
    ignore_merges: bool = False
    """A word that is a token as it stands is taken without merging."""
    normalize_nfc: bool = False
    add_bos: bool = False
    """Whether a beginning token is added where the file does not say."""


# The regexes are those of the models' own tokenizer.json files.
_GPT2 = PreTokenizer()
_SINGLE_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3 = PreTokenizer(
    split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    add_bos=True,
)
_QWEN2 = PreTokenizer(
    split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    normalize_nfc=True,
)
_TEKKEN = PreTokenizer(
    split=r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    add_bos=True,
)
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}

_SPACE = "▁"


def write_tokenizer(file: GgufFile, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `target`.

    Raises `UnsupportedModelError` naming the tokenizer that is not understood, `ConfigError` for a damaged file.
    """
    build_tokenizer(file).save(str(target / "tokenizer.json"))
    text = json.dumps(tokenizer_config(file), indent=2, ensure_ascii=False)
    (target / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that the file describes, ids as in the file."""
    vocab = _vocab(file)
    match file.require("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer = _byte_level(file, vocab)
        case "llama":
            tokenizer = _sentencepiece(file, vocab)
        case kind:
            raise UnsupportedModelError(
                f"--model: {file.path} has a tokenizer of type {kind}; known are gpt2 and llama"
            )
    _add_whole_tokens(tokenizer, file)
    if _adds_bos(file):
        tokenizer.post_processor = _bos_first(file)
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json: the chat template and the tokens that it names."""
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    tokens = {name: _special_token(file, key) for name, key in keys.items()}
    template = file.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: token for name, token in tokens.items() if token is not None},
        "add_bos_token": _adds_bos(file),
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.get_of_architecture("context_length", 0)) or None,
        **({"chat_template": template} if template else {}),
    }


def _vocab(file: GgufFile) -> dict[str, int]:
    tokens: Sequence[str] = file.require("tokenizer.ggml.tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConfigError(f"--model: {file.path}: tokenizer.ggml.tokens names a token twice")
    return vocab


def _byte_level(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    pre = _pre_tokenizer(file)
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    except Exception as error:  # tokenizers raises the bare class, for a merge of tokens that do not exist
        raise ConfigError(f"--model: {file.path}: tokenizer.ggml.merges: {error}") from error
    if pre.normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(_splits(pre)))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _splits(pre: PreTokenizer) -> Iterator[pre_tokenizers.PreTokenizer]:
    if pre.single_digits:
        yield pre_tokenizers.Digits(individual_digits=True)
    if pre.split is not None:
        yield pre_tokenizers.Split(Regex(pre.split), behavior="isolated")
    yield pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None)


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    name = file.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedModelError(
            f"--model: {file.path} splits text in the way {name} (tokenizer.ggml.pre); known are {known}"
        )
    if name == "default":
        logger.warning("%s does not say how text is split (tokenizer.ggml.pre); taking GPT-2's way", file.path)
    return _PRE_TOKENIZERS[name]


def _sentencepiece(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    """As transformers converts a Llama 2 tokenizer: spaces are ▁, one stands before the text and is taken off again."""
    scores: Sequence[float] = file.require("tokenizer.ggml.scores")
    unk_token = _special_token(file, "unknown") or "<unk>"
    merges = list(_merges_from_scores(vocab, scores, _token_types(file)))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    )
    spaces: normalizers.Normalizer = normalizers.Replace(" ", _SPACE)
    restore = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        restore.append(decoders.Strip(content=" ", left=1))
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(restore)
    return tokenizer


def _merges_from_scores(
    vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first.

    SentencePiece joins the neighbours whose joint piece scores highest; a merge list in that order does the same.
    Control, unknown and byte pieces never take part: text cannot spell them.
    """
    joinable = {token: i for token, i in vocab.items() if types[i] in (TokenType.NORMAL, TokenType.USER_DEFINED)}
    for piece in sorted(joinable, key=lambda token: (-scores[joinable[token]], joinable[token])):
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [pair for pair in cuts if pair[0] in joinable and pair[1] in joinable]
        yield from sorted(pairs, key=lambda pair: (joinable[pair[0]], joinable[pair[1]]))


def _add_whole_tokens(tokenizer: Tokenizer, file: GgufFile) -> None:
    """Control and user-defined tokens are found in the text before it is split; only the first are special."""
    tokens: Sequence[str] = file.require("tokenizer.ggml.tokens")
    for token, kind in zip(tokens, _token_types(file), strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])


def _token_types(file: GgufFile) -> Sequence[int]:
    num_tokens = len(file.require("tokenizer.ggml.tokens"))
    types: Sequence[int] = file.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * num_tokens
    if len(types) != num_tokens:
        raise ConfigError(f"--model: {file.path}: tokenizer.ggml.token_type and .tokens differ in length")
    return types


def _special_token(file: GgufFile, key: str) -> str | None:
    token_id = file.get(f"tokenizer.ggml.{key}_token_id")
    if token_id is None:
        return None
    tokens: Sequence[str] = file.require("tokenizer.ggml.tokens")
    if not 0 <= token_id < len(tokens):
        raise ConfigError(f"--model: {file.path}: tokenizer.ggml.{key}_token_id {token_id} is not in the vocabulary")
    return str(tokens[token_id])


def _adds_bos(file: GgufFile) -> bool:
    if _special_token(file, "bos") is None:
        return False
    said = file.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    return file.get("tokenizer.ggml.model") == "llama" or _pre_tokenizer(file).add_bos


def _bos_first(file: GgufFile) -> processors.TemplateProcessing:
    bos = _special_token(file, "bos")
    token_id = int(file.require("tokenizer.ggml.bos_token_id"))
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, token_id)]
    )
