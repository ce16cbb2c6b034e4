"""One sequence's output as the client will see it: text, the tokens behind it, and how it ended."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from connector.kv_transfer_params import KVTransferParams
from connector.server_messages import TokenOutput
from engine.prompt_logprobs import PromptLogprobs
from engine.request import SampledToken
from server.detokenizer import Detokenizer
from server.stop_strings import StopStrings
from server.tokenizer import Tokenizer
from server.tool_parser import CallArguments, CallStart, Piece, ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How token ids become text."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    is_prompt_only: bool = False
    """The one token that had to be generated is not shown."""
    make_tool_parser: Callable[[], ToolParser] | None = None
    """Where the text may hold tool calls: what splits one choice's."""
    shown_special_ids: frozenset[int] = frozenset()
    """Special tokens whose text is wanted, because tool calls are marked with them."""


@dataclass(slots=True)
class Delta:
    """What a choice gained. `tokens` are those whose text is in `text`, or was held back until now."""

    index: int
    text: str = ""
    """Content. Tool calls are no part of it."""
    pieces: list[Piece] = field(default_factory=list)
    """Content and tool calls in their order, where the text is split; else empty."""
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def shows(self) -> bool:
        """Whether there is anything to tell the client."""
        return bool(self.text or self.pieces or self.tokens) or self.finish_reason is not None


class Choice:
    """Turns outputs into deltas. The client's stop strings end it here, before the node knows."""

    def __init__(self, index: int, tokenizer: Tokenizer, prompt: Sequence[int], options: OutputOptions) -> None:
        self.index = index
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[PromptLogprobs] = []
        """Complete when the first delta is."""
        self._last_arguments = ""
        self.num_calls = 0
        """Tool calls that have begun."""
        self.kv_transfer_params: KVTransferParams | None = None
        """Where the node holds the KV, if it was asked to."""
        self._options = options
        self._detokenizer = Detokenizer(
            tokenizer, prompt, skip_special_tokens=options.skip_special_tokens, shown_special=options.shown_special_ids
        )
        self._tool_parser = options.make_tool_parser() if options.make_tool_parser else None
        self._stops = StopStrings(options.stop, include_in_output=options.include_stop_str_in_output)
        self._held_tokens: list[SampledToken] = []

    def add(self, output: TokenOutput) -> Delta:
        """The delta of one output. After one with a finish reason no other may be added."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.kv_transfer_params = output.kv_transfer_params
        if self._options.is_prompt_only:
            return Delta(self.index, finish_reason=output.finish_reason and "length")
        delta = Delta(self.index, finish_reason=output.finish_reason, stop_reason=output.stop_reason)
        delta.text = self._read(output)
        if delta.finish_reason is not None:
            delta.text += self._stops.flush()
        if self._stops.matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", self._stops.matched
        if self._tool_parser is not None:
            self._split(delta, self._tool_parser)
        if delta.text or delta.pieces or delta.finish_reason is not None:
            delta.tokens, self._held_tokens = self._held_tokens, []
        return delta

    def _split(self, delta: Delta, parser: ToolParser) -> None:
        delta.pieces = parser.feed(delta.text)
        if delta.finish_reason is not None:
            delta.pieces += parser.flush()
        delta.text = "".join(piece for piece in delta.pieces if isinstance(piece, str))
        for piece in delta.pieces:
            match piece:
                case CallStart():
                    self.num_calls += 1
                    self._last_arguments = ""
                case CallArguments(text=text):
                    self._last_arguments += text

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, and nothing cut the last one short."""
        try:
            return self.num_calls > 0 and json.loads(self._last_arguments) is not None
        except ValueError:
            return False

    def _read(self, output: TokenOutput) -> str:
        """The text that the output's tokens free. Stops at a stop string."""
        is_stop_token = output.finish_reason == "stop" and not output.is_last_text
        hides_last = is_stop_token and not self._options.include_stop_str_in_output
        text = ""
        for position, token in enumerate(output.tokens, start=1):
            self.num_tokens += 1
            self._held_tokens.append(token)
            if not (hides_last and position == len(output.tokens)):
                may_end = self.num_tokens >= self._options.min_tokens
                text += self._stops.feed(self._detokenizer.feed(token.token_id), may_end=may_end)
            if self._stops.matched is not None:
                break
        return text
