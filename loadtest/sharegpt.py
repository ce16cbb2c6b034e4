"""Conversations from a file: ShareGPT's `conversations` (from, value) or `messages` (role, content), JSON or JSONL."""

import json
from pathlib import Path
from typing import Any

from loadtest.conversation import Conversation, Turn
from loadtest.errors import SettingError

_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_TOKENS_PER_WORD = 1.3
"""Of English prose; the answers in the file only say about how long ours should be."""


def read_sharegpt(path: Path, *, max_turns: int, think_time: float) -> list[Conversation]:
    """Those that begin with a question and have an answer to it; an answer's length is that of the file's."""
    found = (_conversation(entry, max_turns, think_time) for entry in _entries(path))
    conversations = [conversation for conversation in found if conversation is not None]
    if not conversations:
        raise SettingError(f"--file {path} has no conversation with a question and an answer")
    return conversations


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text()
        if text.lstrip().startswith("["):
            entries = json.loads(text)
        else:
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingError(f"--file {path}: {error}") from error
    return [entry for entry in entries if isinstance(entry, dict)]


def _conversation(entry: dict[str, Any], max_turns: int, think_time: float) -> Conversation | None:
    said = [_said(message) for message in entry.get("conversations") or entry.get("messages") or ()]
    system = said.pop(0)[1] if said and said[0][0] == "system" else ""
    turns = []
    for question, answer in zip(said[::2], said[1::2], strict=False):
        if (question[0], answer[0]) != ("user", "assistant") or not question[1] or not answer[1]:
            break
        turns.append(Turn(text=question[1], num_output_tokens=_about_num_tokens(answer[1])))
    if not turns:
        return None
    return Conversation(kind="sharegpt", turns=tuple(turns[:max_turns]), system=system, think_time=think_time)


def _said(message: object) -> tuple[str, str]:
    if not isinstance(message, dict):
        return "", ""
    role, text = message.get("from", message.get("role")), message.get("value", message.get("content"))
    return _ROLES.get(str(role), ""), text if isinstance(text, str) else ""


def _about_num_tokens(text: str) -> int:
    return max(1, round(len(text.split()) * _TOKENS_PER_WORD))


def about_num_prompt_tokens(conversation: Conversation) -> int:
    """Of the last turn, whose prompt is the longest."""
    texts = [conversation.system, *(turn.text for turn in conversation.turns)]
    answers = sum(turn.num_output_tokens for turn in conversation.turns[:-1])
    return answers + sum(_about_num_tokens(text) for text in texts if text)
