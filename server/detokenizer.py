"""Token ids of one sequence, as they arrive, to text that never ends within a character.

The pieces joined are the text of all tokens, less an unfinished character at the very end.
"""

import codecs
from collections.abc import Sequence, Set

from server.tokenizer import Tokenizer


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
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids - shown_special if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.decode_errors)
        # Only the first token of all that is visible can lose its space.
        self._strips_space = tokenizer.strips_first_space and not any(map(self._bytes_of, reversed(prompt)))

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token."""
        text = self._utf8.decode(self._bytes_of(token_id))
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._token_bytes(token_id)
