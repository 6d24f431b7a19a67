"""Chat templates are rendered as Hugging Face renders them, and can do no harm."""

import json
from pathlib import Path

import pytest

from memsvc.wire.text import ChatMessage
from tokenizer_proc.template import ChatTemplate, load_chat_template

TALK = [ChatMessage("system", "Be brief."), ChatMessage("user", "Hi <b> \u00e9")]


def render(source: str, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(TALK, add_generation_prompt=True)


def test_blocks_swallow_their_line_and_indent() -> None:
    source = "{% for message in messages %}\n    {% if message.role == 'user' %}\n{{ message.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source) == "Hi <b> \u00e9\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[1]['content'] }}{{ eos_token }}", "<s>Hi <b> \u00e9</s>"),
        (
            "{{ messages | tojson }}",
            '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b> \u00e9"}]',
        ),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "system",\n "content": "Be brief."\n}'),
        ("{% if tools is none and not documents %}none{% endif %}{{ nothing }}", "none"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aBe brief.b"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ messages[0].content.strip().split(' ')[-1] }}", "brief."),
    ],
)
def test_names_and_filters_that_templates_rely_on(source: str, text: str) -> None:
    assert render(source, bos_token="<s>", eos_token="</s>") == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ messages[7].content }}", "list object has no element 7"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "by zero"),
    ],
)
def test_a_template_that_gives_up_refuses_the_request(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match="refused the messages") as caught:
        render(source)
    assert reason in str(caught.value)


def test_a_broken_template_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("{{ ok }}\n{% if %}", {})


def test_template_file_comes_before_the_config_entry(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    write_config(tmp_path, {"chat_template": "config", "bos_token": {"content": "<s>"}})
    assert rendered(tmp_path) == "config"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert rendered(tmp_path) == "file <s>"


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain {{ eos_token }}"}]
    write_config(tmp_path, {"chat_template": named})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert rendered(tmp_path) == "plain </s>"
    write_config(tmp_path, {"chat_template": named[:1]})
    assert load_chat_template(tmp_path) is None


def write_config(folder: Path, config: dict[str, object]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def rendered(folder: Path) -> str:
    template = load_chat_template(folder)
    assert template is not None
    return template.render(TALK, add_generation_prompt=True)
