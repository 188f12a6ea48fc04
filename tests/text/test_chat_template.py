"""Chat templates: the dialect that models are written for, and clear errors."""

import gc
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.text.chat_template import ChatTemplate, load_chat_template
from stagemesh.errors import CheckpointError, ConfigError
from tests.text import builders

HI = [{"role": "user", "content": "Hi"}]

# The constructs of today's templates in one: namespaces, macros, loop controls, tools, inheritance
# of white space, generation blocks.
LARGE_TEMPLATE = """\
{%- macro head(role) -%}
<|start|>{{ role }}
{% endmacro -%}
{{- bos_token }}
{%- set ns = namespace(system='', last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content | trim %}
        {%- continue %}
    {%- endif %}
    {%- if message['role'] not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {%- set ns.last = loop.index0 %}
{%- endfor %}
{{- head('system') ~ ns.system ~ '\\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages[1:] %}
    {{- head(message.role) }}
    {%- if message.content is string and '</think>' in message.content %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- elif message.content is none %}
        {{- 'null' }}
    {%- else %}
        {% generation %}{{- message.content }}{% endgeneration %}
    {%- endif %}
    {{- eos_token }}
{% endfor %}
{%- if add_generation_prompt %}
    {{- head('assistant') }}
{%- endif %}
{{- dict(a=1).items() | list }} {{ '%s-%d' % ('x', 3) }}
{{ messages | map(attribute='role') | join(',') }}
"""
LARGE_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be <kind> & brief \u00e9. "},
    {"role": "user", "content": "It's 5 > 3"},
    {"role": "assistant", "content": "<think>x</think>\n\nYes \U0001f336"},
    {"role": "assistant", "content": None},
    {"role": "tool", "content": ""},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "<\u00e9>", "parameters": {}}}
]


@pytest.fixture
def render() -> Iterator[Any]:
    """A function that renders a source once, with special tokens set."""
    templates = []

    def call(source: str, messages: Any = HI, **options: Any) -> str:
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
        templates.append(template)
        return template.render(messages, **options)

    yield call
    for template in templates:
        template.close()


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(
    render: Any, tools: list[dict[str, Any]] | None, add_generation_prompt: bool
) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    (expected,), _ = utils.render_jinja_template(
        conversations=[LARGE_MESSAGES],
        chat_template=LARGE_TEMPLATE,
        bos_token="<s>",
        eos_token="</s>",
        **options,
    )
    assert render(LARGE_TEMPLATE, LARGE_MESSAGES, **options) == expected
    assert "Be <kind> & brief \u00e9.\n" in expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ pad_token }}|{{ bos_token }}|{{ eos_token }}", "|<s>|</s>"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{{ {'a': '<\u00e9>'} | tojson }}", '{"a": "<\u00e9>"}'),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ messages[0].content }}{{ tools is none }}{{ documents is none }}", "HiTrueTrue"),
    ],
)
def test_dialect(render: Any, source: str, expected: str) -> None:
    assert render(source) == expected


def test_date_is_the_coordinators(render: Any) -> None:
    before = datetime.now().strftime("%d %b %Y")
    assert render("{{ strftime_now('%d %b %Y') }}") in (
        before,
        datetime.now().strftime("%d %b %Y"),
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text", "text"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([], ""),
        (None, "None"),
        ("half a pair: \ud800", "half a pair: \ud800"),
    ],
)
def test_content(render: Any, content: Any, expected: str) -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == expected


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"type": "text"}])
def test_other_parts_are_refused(render: Any, part: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="text or a list of text parts"):
        render("{{ messages }}", [{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for x in %}", r"TemplateSyntaxError.*line 1"),
        ("\n\n{{ nofilter | nosuch }}", r"nosuch.*line 3"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].missing.deeper }}", "UndefinedError.*missing"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('a' * 5000) }}", "a{400,500}$"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_template_faults_are_named(render: Any, source: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        render(source)


def test_values_that_are_no_json_are_refused(render: Any) -> None:
    with pytest.raises(ConfigError, match="plain JSON values"):
        render("x", [{"role": "user", "content": object()}])


def test_a_template_keeps_its_renderer_and_ends_it() -> None:
    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    before = children()
    template = ChatTemplate("{{ messages[0].content }}", bos_token=None, eos_token=None)
    assert children() == before  # none before it is needed
    template.render(HI)
    (renderer,) = children() - before
    template.render(HI)
    assert children() - before == {renderer}
    template.close()
    assert children() == before
    assert template.render(HI) == "Hi"
    del template  # as good as close()
    gc.collect()
    assert children() == before


@pytest.mark.parametrize(
    ("config", "template_file", "expected"),
    [
        ({"chat_template": "config"}, None, "config"),
        ({"chat_template": "config"}, "file", "file"),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "tools"},
                    {"name": "default", "template": "default"},
                ]
            },
            None,
            "default",
        ),
    ],
)
def test_where_templates_come_from(
    tmp_path: Path, config: dict[str, Any], template_file: str | None, expected: str
) -> None:
    folder = builders.write_folder(
        tmp_path, builders.byte_tokenizer(), config=config, template_file=template_file
    )
    assert load_chat_template(builders.folder_spec(folder)).source == expected


def test_template_in_its_own_json_and_its_tokens(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "pad_token": {"content": "<pad>"}}
    folder = builders.write_folder(tmp_path, builders.byte_tokenizer(), config=config)
    content = {"chat_template": "{{ bos_token }}{{ pad_token }}{{ eos_token }}."}
    (folder / "chat_template.json").write_text(json.dumps(content), encoding="utf-8")
    template = load_chat_template(builders.folder_spec(folder))
    assert template.render(HI) == "<s><pad>."
    template.close()


@pytest.mark.parametrize("config", [{}, {"chat_template": [{"name": "rag", "template": "x"}, 3]}])
def test_model_without_a_chat_template(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = builders.write_folder(tmp_path, builders.byte_tokenizer(), config=config)
    with pytest.raises(ConfigError, match=r"no chat template.*/v1/completions"):
        load_chat_template(builders.folder_spec(folder))


def test_template_of_a_wrong_type_is_refused(tmp_path: Path) -> None:
    config = {"chat_template": 5}
    folder = builders.write_folder(tmp_path, builders.byte_tokenizer(), config=config)
    with pytest.raises(CheckpointError, match="neither text nor a list"):
        load_chat_template(builders.folder_spec(folder))
