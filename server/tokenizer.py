"""The tokenizer of a checkpoint directory. One object serves all requests; it is read only and thread safe."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer as TokenizerFile

from engine.errors import ConfigError, RequestError

TOKEN_CACHE_SIZE = 65536


class Tokenizer:
    """Text to token ids and back, as `tokenizer.json` says."""

    def __init__(self, file: TokenizerFile) -> None:
        # A checkpoint's own truncation or padding would silently change prompts.
        file.no_truncation()
        file.no_padding()
        self.file = file
        self.vocab_size = file.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in file.get_added_tokens_decoder().items() if token.special)
        self.max_token_chars = max((len(token) for token in file.get_vocab(with_added_tokens=True)), default=1)
        self._is_byte_level = _has_decoder(file, "ByteLevel")
        self._has_byte_fallback = _has_decoder(file, "ByteFallback")
        self.token_bytes = lru_cache(TOKEN_CACHE_SIZE)(self._token_bytes)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Raises `ConfigError` naming --model if there is no usable tokenizer.json."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"--model: there is no tokenizer.json in {directory}")
        try:
            return cls(TokenizerFile.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"--model: cannot read {path}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Releases the interpreter lock while it works."""
        try:
            # Unlike `encode`, the batch call lets other threads run.
            encodings = self.file.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("the text is not valid Unicode", param="prompt") from error
        ids: list[int] = encodings[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self.file.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """A token by itself, for logprobs. A fragment of a character is shown as `bytes:\\xNN`."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may end within a character; b"" for an id without a token."""
        token = self.file.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _byte_level_bytes(token)
        if self._has_byte_fallback and len(token) == 6 and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()


def _has_decoder(file: TokenizerFile, kind: str) -> bool:
    if file.decoder is None:
        return False
    state = json.loads(file.decoder.__getstate__())
    return any(decoder.get("type") == kind for decoder in [state, *state.get("decoders", [])])


def _byte_level_bytes(token: str) -> bytes:
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
