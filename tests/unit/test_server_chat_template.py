"""Our rendering against transformers' for templates that use what real ones use."""

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import ConfigError, RequestError
from server.chat_template import ChatTemplate, load_chat_template, special_tokens
from tests.server_rig import CHAT_TEMPLATE

MESSAGES = [
    {"role": "system", "content": "Be brief & <exact>."},
    {"role": "user", "content": "  Wie heißt 'das'? 👍 "},
    {"role": "assistant", "content": "So "},
]
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "blocks and trimming": """
    {%- for message in messages %}
        {% if message.role == 'user' %}
    [INST] {{ message['content'] | trim }} [/INST]
        {%- else %}
    {{ message.content }}{{ eos_token }}
        {%- endif %}
    {%- endfor %}
    """,
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index0 == 2 %}{% break %}{% endif %}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ dict(a=1) | tojson }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tools": "{% if tools is none and not documents %}none{% endif %}{{ bos_token }}",
    "kwargs": "{{ flag if flag is defined else 'unset' }}{{ strftime_now('%Y') }}",
    "macro": "{% macro show(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{{ show(messages[-1]) }}",
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("extra", [{}, {"flag": "x"}])
def test_equals_transformers(name: str, add_generation_prompt: bool, extra: dict[str, Any]) -> None:
    source = TEMPLATES[name]
    ours = ChatTemplate(source, TOKENS).render(MESSAGES, add_generation_prompt=add_generation_prompt, extra=extra)
    (theirs,), _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=add_generation_prompt, **TOKENS, **extra
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["chatml", "blocks and trimming"])
def test_continuing_the_final_message_equals_transformers(name: str) -> None:
    source = TEMPLATES[name]
    ours = ChatTemplate(source, TOKENS).render(MESSAGES, add_generation_prompt=False, continue_final_message=True)
    (theirs,), _ = render_jinja_template([MESSAGES], chat_template=source, continue_final_message=True, **TOKENS)
    assert ours == theirs


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
DOCUMENTS = [{"title": "T", "text": "<x> & über"}]
WITH_TOOLS = """
{%- if tools is not none and tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for d in documents or [] %}{{ d.title }}: {{ d['text'] }}
{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }},{% endfor %}){% endfor %}
{% endfor %}"""


@pytest.mark.parametrize(("tools", "documents"), [(TOOLS, DOCUMENTS), ([], []), (TOOLS, [])])
def test_tools_and_documents_equal_transformers(tools: list[dict[str, Any]], documents: list[dict[str, Any]]) -> None:
    function = {"name": "f", "arguments": {"a": [1, "é"], "b": None}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    ours = ChatTemplate(WITH_TOOLS).render(messages, tools=tools, documents=documents, add_generation_prompt=False)
    (theirs,), _ = render_jinja_template(
        [messages], tools=tools or None, documents=documents or None, chat_template=WITH_TOOLS
    )
    assert ours == theirs
    assert ChatTemplate(WITH_TOOLS).names >= {"tools", "documents"}


def test_keys_without_a_value_are_hidden_from_the_template() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.keys() | list | length }}{% endfor %}")
    assert template.render([{"role": "user", "content": None, "name": None}]) == "1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 'a' + messages }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(__x=1) %}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_refuses_is_the_users_error(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="--model: the chat template"):
        ChatTemplate("{% for %}")


def test_the_file_comes_before_the_tokenizer_config(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, {}) is None
    assert load_chat_template(tmp_path, {"chat_template": []}) is None
    in_config = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "config"}]}
    templates = load_chat_template(tmp_path, in_config)
    assert templates is not None
    assert templates.for_tools(False).render(MESSAGES) == "config"
    assert templates.for_tools(True).render(MESSAGES) == "t"
    (tmp_path / "chat_template.jinja").write_text("file")
    templates = load_chat_template(tmp_path, in_config)
    assert templates is not None
    assert templates.for_tools(True).render(MESSAGES) == "file"


def test_special_tokens_come_as_text_or_as_objects() -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "unk_token": None,
        "add_bos_token": 1,
    }
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}
