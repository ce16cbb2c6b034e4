"""Where one request's output stands in its grammar."""

from collections.abc import Sequence

from llguidance import LLMatcher

from engine.grammar import GrammarError


class GrammarMatcher:
    """Belongs to the engine's thread. Replaying a request's output on another node leads to the same place."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_bytes = -(-vocab_size // 8)
        self._last_byte = 0xFF >> (-vocab_size % 8)
        """Bits of the last byte that belong to tokens of the model."""
        self._mask: bytes | None = None
        """Of this place, once it was asked for."""

    def copy(self) -> "GrammarMatcher":
        """One of its own, at the same place."""
        copy = GrammarMatcher(self._matcher.deep_copy(), self._vocab_size)
        copy._mask = self._mask
        return copy

    def mask(self) -> bytes:
        """One bit for each token of the vocabulary, lowest first; set where the token may come next.

        No bit is set once the grammar has become too complex: `error` says so then.
        """
        if self._mask is None:
            mask = self._matcher.compute_bitmask()[: self._num_bytes]
            if self._matcher.is_error():
                mask = bytes(self._num_bytes)
            self._mask = mask[:-1] + bytes((mask[-1] & self._last_byte,))
        return self._mask

    def accept(self, token_id: int) -> None:
        """Moves on. Raises `GrammarError` if the token may not come next."""
        mask = self.mask()
        self._mask = None
        if self._matcher.consume_token(token_id) or self._allows(mask, token_id):
            # One that may come and cannot be taken has made it too complex: `error` says so.
            return
        raise GrammarError(f"token {token_id} does not follow: {self._matcher.get_error()}")

    def _allows(self, mask: bytes, token_id: int) -> bool:
        return token_id < self._vocab_size and bool(mask[token_id >> 3] >> (token_id & 7) & 1)

    @property
    def is_over(self) -> bool:
        """Nothing but the end can come next."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why it cannot go on, if it cannot."""
        return self._matcher.get_error().partition("\n")[0] or None


def leaves_some(mask: bytes, banned_token_ids: Sequence[int]) -> bool:
    """Whether the mask allows a token that is not banned."""
    allowed = int.from_bytes(mask, "little")
    for token_id in banned_token_ids:
        allowed &= ~(1 << token_id)
    return bool(allowed)
