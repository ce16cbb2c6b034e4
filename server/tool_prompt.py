"""Tools for models whose chat template does not know them: in the system message, as text.

What the template cannot show is put into words it can: calls in an assistant's turn become the text that the parser
reads, and a tool's answer becomes a user's turn.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from server.tool_parser import ToolParser

Message = dict[str, Any]

_INSTRUCTIONS = """\
You can call functions to help the user. These are the functions that you have:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments in exactly this form:
{example}
If no function helps, answer in words."""
_EXAMPLE = ("function_name", {"argument_name": "value"})


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], parser: type[ToolParser]
) -> list[Message]:
    """The same conversation without `tools`, `tool_calls` and the role `tool`."""
    told = list(_as_text(messages, parser))
    if not tools:
        return told
    instructions = _INSTRUCTIONS.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
        example=parser.write_calls([_EXAMPLE]),
    )
    if told and told[0]["role"] == "system":
        first = told.pop(0)
        return [{**first, "content": f"{first.get('content') or ''}\n\n{instructions}"}, *told]
    return [{"role": "system", "content": instructions}, *told]


def _as_text(messages: Sequence[Message], parser: type[ToolParser]) -> Iterator[Message]:
    answers: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            answers.append(f"<tool_response>\n{message.get('content') or ''}\n</tool_response>")
            continue
        yield from _answers_turn(answers)
        answers = []
        yield _without_calls(message, parser)
    yield from _answers_turn(answers)


def _answers_turn(answers: list[str]) -> Iterator[Message]:
    # Several answers are one turn: templates may insist that turns alternate.
    if answers:
        yield {"role": "user", "content": "\n".join(answers)}


def _without_calls(message: Message, parser: type[ToolParser]) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    text = parser.write_calls([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    content = "\n".join(part for part in (message.get("content"), text) if part)
    return {**message, "content": content, "tool_calls": None}
