"""Settings of how conversations are read and answered. `pdserve up` has them too."""

from dataclasses import dataclass

from server.tool_parsers import AUTO, check_tool_parser


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Templates and tool calls."""

    tool_call_parser: str = AUTO
    """Format of the model's tool calls: auto (by the chat template and the vocabulary), hermes, llama3_json, mistral or
    pythonic."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat_template. Templates run in a sandbox, but they may run for long."""

    def __post_init__(self) -> None:
        check_tool_parser(self.tool_call_parser)
