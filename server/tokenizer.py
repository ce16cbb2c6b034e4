"""The tokenizer of a checkpoint directory. One object serves all requests; it is read only and thread safe."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer as TokenizerFile

from engine.errors import ConfigError, RequestError
from server.token_bytes import TokenBytes

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
        self._bytes_of_text = TokenBytes(file)
        self.strips_first_space = self._bytes_of_text.strips_first_space
        self.decode_errors = self._bytes_of_text.decode_errors
        """How bytes that are no text are read: a name for `codecs`."""
        self.token_bytes = lru_cache(TOKEN_CACHE_SIZE)(self._token_bytes)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Raises `ConfigError` naming --model if there is no usable tokenizer.json."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"--model: there is no tokenizer.json in {directory}")
        try:
            file = TokenizerFile.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"--model: cannot read {path}: {error}") from error
        return cls(file)

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
        """The text of `token_ids`. Releases the interpreter lock while it works."""
        texts: list[str] = self.file.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]

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
        return b"" if token is None else self._bytes_of_text(token)
