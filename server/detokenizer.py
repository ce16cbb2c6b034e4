"""Token ids of one sequence, as they arrive, to text that never ends within a character.

The pieces joined are the text of all tokens, less an unfinished character at the very end.
"""

import codecs
from collections.abc import Sequence, Set

from tokenizers.decoders import DecodeStream

from server.tokenizer import Tokenizer

MAX_PENDING = 16
"""A character takes four tokens at most. What stays unreadable for longer is not text, and for each token the stream
decodes again all that it holds back."""
MIN_PRIME, MAX_PRIME = 4, 24
_INVALID_PREFIX = "Invalid prefix encountered"


class Detokenizer:
    """One per sequence."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_special: Set[int] = frozenset(),
    ) -> None:
        """`shown_special`: ids of special tokens that are not skipped with the others."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown_special if skip_special_tokens else frozenset()
        # The library skips all or none.
        self._skips_itself = skip_special_tokens and bool(shown_special)
        self._skip_special = skip_special_tokens and not shown_special
        # The end of the prompt decides whether the first token's text starts with a space.
        self._anchor = self._readable_end(prompt)
        self._pending: list[int] = []
        self._stream = self._new_stream(self._anchor)

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token."""
        if self._skips_itself and token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer.file, token_id)
        except Exception as error:
            # Raised bare by the library when bytes that looked like a character turn out not to be one.
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            return self._restart()
        if text is not None:
            self._anchor, self._pending = self._pending, []
            return text
        return self._restart() if len(self._pending) >= MAX_PENDING else ""

    def flush(self) -> str:
        """The text still held back, without an unfinished character. No token may follow."""
        decoder = _utf8_decoder()
        text = "".join(decoder.decode(self._bytes_of(token_id)) for token_id in self._pending)
        self._pending = []
        return text

    def _restart(self) -> str:
        """Gives out what is pending up to the last boundary of a character, and begins anew with the rest."""
        decoder = _utf8_decoder()
        text, boundary, pieces = "", 0, ""
        for position, token_id in enumerate(self._pending, start=1):
            pieces += decoder.decode(self._bytes_of(token_id))
            if not decoder.getstate()[0]:
                text, boundary = pieces, position
        self._pending = self._pending[boundary:]
        self._stream = self._new_stream(self._pending or self._anchor)
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _new_stream(self, prime: Sequence[int]) -> DecodeStream:
        return DecodeStream(ids=list(prime), skip_special_tokens=self._skip_special)

    def _readable_end(self, prompt: Sequence[int]) -> Sequence[int]:
        """A few last tokens of the prompt whose text does not end within a character; none if there are no such."""
        for length in range(min(MIN_PRIME, len(prompt)), min(MAX_PRIME, len(prompt)) + 1):
            end = prompt[len(prompt) - length :]
            if "\ufffd" not in self._tokenizer.decode(end, skip_special_tokens=self._skip_special):
                return end
        return ()


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
