"""Chat templates: rendered as transformers renders them, kept in a sandbox, found wherever models keep them."""

import json

import gguf
import pytest

from dynajax.chat import OUTPUT_CHARS, TEMPLATE_BYTES, load_chat, load_chat_template, render_chat
from dynajax.errors import ModelError

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content.strip() + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""
LOOPS = """{% for message in messages %}
  {% if loop.index > 2 %}{% break %}{% endif %}
  {%- generation %}{{ message.content | tojson }}{% endgeneration %}
{% endfor %}"""
TALK = [
    {"role": "user", "content": " Say <b>'ü'</b> \n"},
    {"role": "assistant", "content": "ü"},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]


def refusal(template, messages=TALK):
    with pytest.raises(ModelError) as caught:
        render_chat(template, messages)
    assert caught.value.exit_code == 3
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_small_templates():
    assert render_chat(CHATML, TALK[:1]) == ("<|im_start|>user\n Say <b>'ü'</b> \n<|im_end|>\n<|im_start|>assistant\n")
    assert render_chat(CHATML, [], add_generation_prompt=False) == ""
    assert render_chat(LLAMA2, TALK, bos_token="<s>", eos_token="</s>") == (
        "<s>[INST] Say <b>'ü'</b> [/INST] ü</s>[INST] {{ 7 * 7 }} [/INST]"
    )
    assert render_chat("{{ messages | tojson }}", TALK[1:2]) == '[{"role": "assistant", "content": "ü"}]'
    assert render_chat("{{ messages[0] | tojson(indent=1) }}", [{"a": "<"}]) == '{\n "a": "<"\n}'
    assert render_chat(LOOPS, TALK) == '" Say <b>\'ü\'</b> \\n""ü"'
    assert len(render_chat("{{ strftime_now('%Y') }}", [])) == 4
    assert render_chat("{% if x is defined %}1{% endif %}\n  {% if true %}\n  a\n  {% endif %}\n", []) == "  a\n"


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA2, LOOPS, "{% for m in messages %}{{ m | tojson(indent=2) }}\n{% endfor %}"]
)
def test_as_transformers_renders(template):
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [message for message in TALK if message["role"] == "user"]
    (theirs,), _ = rendering.render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert render_chat(template, messages, bos_token="<s>", eos_token="</s>") == theirs


def test_refusals_of_templates_and_faults_in_them():
    assert "Only user and assistant roles are supported!" in refusal(LLAMA2, [{"role": "tool", "content": "x"}])
    assert "the chat template failed in line 2" in refusal("a\n{% for %}")
    assert "the chat template failed: TypeError" in refusal("{{ 1 + 'a' }}")
    assert "the chat template failed: ZeroDivisionError" in refusal("{{ 1 / 0 }}")
    assert "tojson of a value that is not there" in refusal("{{ nothing | tojson }}")
    assert refusal("{{ raise_exception('two\nlines \x1b[31m') }}")
    assert "has no attribute 'x'" in refusal("{{ messages[0].x.y }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ 'a' * 10**9 }}",
        "{{ 9 ** 99999 }}",
        "{{ [0] * 1000000000 }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_what_the_sandbox_forbids(template):
    refusal(template)


def test_sizes_are_bounded():
    assert f"more than {TEMPLATE_BYTES} bytes" in refusal("a" * (TEMPLATE_BYTES + 1))
    text = [{"role": "user", "content": "a" * (OUTPUT_CHARS // 2)}]
    assert len(render_chat("{{ messages[0].content }}" * 2, text)) == OUTPUT_CHARS
    assert "writes more than" in refusal("{{ messages[0].content }}" * 3, text)


# --- where templates are ------------------------------------------------------------------------------


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_files_of_a_folder_in_their_order(tmp_path):
    assert load_chat_template(tmp_path) is None
    assert load_chat(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>"})
    assert load_chat_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert load_chat_template(tmp_path) == "d"
    write(tmp_path, "tokenizer_config.json", {"chat_template": named[:1]})
    assert load_chat_template(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {"chat_template": "c"})
    assert load_chat_template(tmp_path) == "c"
    write(tmp_path, "chat_template.json", {"chat_template": "j"})
    assert load_chat_template(tmp_path) == "j"
    write(tmp_path, "chat_template.jinja", "é {{ bos_token }}{{ eos_token }}")
    assert load_chat_template(tmp_path).startswith("é")
    write(tmp_path, "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": None})
    assert load_chat(tmp_path).render([]) == "é <s>"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tokenizer_config.json", {"chat_template": 5}, "the chat template must be text, got 5"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", {"chat_template": "", "bos_token": 5}, "bos_token must be text, got 5"),
        ("chat_template.json", {"chat_template": ["x"], "a": 1}, None),
        ("chat_template.jinja", "a" * (TEMPLATE_BYTES + 1), "more than the"),
    ],
)
def test_templates_that_are_none(tmp_path, name, value, words):
    write(tmp_path, name, value)
    if words is None:
        assert load_chat(tmp_path) is None
        return
    with pytest.raises(ModelError) as caught:
        load_chat(tmp_path)
    assert words in str(caught.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="is not UTF-8"):
        load_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").mkdir()
    with pytest.raises(ModelError, match="is not a plain file"):
        load_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").rmdir()
    (tmp_path / "chat_template.jinja").symlink_to("/etc/hostname")
    with pytest.raises(ModelError, match="leads outside the model folder"):
        load_chat_template(tmp_path)


def test_the_template_in_a_gguf(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_string("tokenizer.chat_template", LLAMA2)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "</s>", "a", "aa"])
    writer.add_array("tokenizer.ggml.token_type", [3, 3, 1, 1])
    writer.add_array("tokenizer.ggml.merges", ["a a"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 0)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert load_chat_template(tmp_path / "m.gguf") == LLAMA2
    chat = load_chat(tmp_path / "m.gguf")
    assert (chat.bos_token, chat.eos_token) == ("<s>", "")  # no token has the id 7
    assert chat.render(TALK[:1]) == "<s>[INST] Say <b>'ü'</b> [/INST]"
