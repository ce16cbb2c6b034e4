"""Where one request's output stands in its grammar."""

from collections.abc import Sequence

from llguidance import LLMatcher

from engine.grammar import GrammarError


class GrammarMatcher:
    """Belongs to the engine's thread. Replaying a request's output on another node leads to the same place."""

    def __init__(self, compiled: LLMatcher, vocab_size: int) -> None:
        """`compiled` stands at the beginning, and stays there."""
        self._matcher = compiled.deep_copy()
        self._num_bytes = -(-vocab_size // 8)

    def mask(self) -> bytes:
        """One bit for each token of the vocabulary, lowest first; set where the token may come next.

        No bit is set once the grammar has become too complex: `error` says so then.
        """
        mask = self._matcher.compute_bitmask()[: self._num_bytes]
        return bytes(self._num_bytes) if self._matcher.is_error() else mask

    def accept(self, token_id: int) -> None:
        """Moves on. Raises `GrammarError` if the token may not come next."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"token {token_id} does not follow: {self._matcher.get_error()}")

    @property
    def is_over(self) -> bool:
        """Nothing but the end can come next."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why it cannot go on, if it cannot."""
        return self._matcher.get_error() or None


def without_needless_bans(mask: bytes, banned_token_ids: Sequence[int]) -> Sequence[int]:
    """No bans where they would leave nothing to sample: the grammar comes first."""
    allowed = int.from_bytes(mask, "little")
    for token_id in banned_token_ids:
        allowed &= ~(1 << token_id)
    return banned_token_ids if allowed else ()
