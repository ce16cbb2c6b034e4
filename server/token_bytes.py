"""What each token of a vocabulary stands for, in bytes, as the decoder of its `tokenizer.json` says.

Two kinds exist among causal models: byte-level vocabularies, whose characters stand for bytes, and SentencePiece's,
with a mark for spaces and tokens such as <0x0A> for single bytes. Bytes and not text, because a token may end within a
character.
"""

import codecs
import json
import re
from typing import Any

from tokenizers import Tokenizer as TokenizerFile

from engine.errors import ConfigError

REPLACE_EACH = "pdserve.replace_each"
"""Error handler of SentencePiece: U+FFFD for each byte that belongs to no character, not for each broken sequence."""
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Raises `ConfigError` for a decoder that does more than turn each token into bytes."""

    def __init__(self, file: TokenizerFile) -> None:
        self.strips_first_space = False
        """Whether a space at the very beginning of a text was only put there for the tokenizer."""
        self.decode_errors = "replace"
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._replacements: list[tuple[str, str]] = []
        for step in _steps(file):
            self._read(step)

    def __call__(self, token: str) -> bytes:
        if self._is_byte_level:
            return _byte_level_bytes(token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return token.encode()

    def _read(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._is_byte_level = True
            case {"type": "ByteFallback"}:
                self._has_byte_tokens, self.decode_errors = True, REPLACE_EACH
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                self._replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                self._replacements.append((mark, " "))
                self.strips_first_space = scheme != "never"
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                self.strips_first_space = bool(start)
            case {"type": "Fuse"}:
                pass
            case _:
                raise ConfigError(f"--model: tokenizer.json has a decoder that cannot stream: {json.dumps(step)}")


def _steps(file: TokenizerFile) -> list[dict[str, Any]]:
    if file.decoder is None:
        raise ConfigError("--model: tokenizer.json has no decoder")
    state: dict[str, Any] = json.loads(file.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH, _replace_each)


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
