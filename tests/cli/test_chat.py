"""`generate --chat`: the prompt goes through the model's template, once."""

import shutil

import pytest

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def chatty(model, tmp_path):
    """The small model with a template."""
    folder = shutil.copytree(model, tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_the_prompt_is_the_rendered_template(command, chatty):
    ours = ("--max-new-tokens", 4, "--json")
    chat = command("generate", "--model", chatty, "--chat", "--prompt", "So it was", *ours).json("generate")
    bos = "<|endoftext|>"
    by_hand = command("generate", "--model", chatty, "--prompt", f"{bos}user: So it was\nassistant:", *ours).json(
        "generate"
    )
    plain = command("generate", "--model", chatty, "--prompt", "So it was", *ours).json("generate")
    assert chat["token_ids"] == by_hand["token_ids"]
    assert chat["prompt_tokens"] == by_hand["prompt_tokens"] > plain["prompt_tokens"]
    assert chat["text"] == by_hand["text"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--chat", "--prompt-ids", "random:3"), "--chat goes with --prompt, not with --prompt-ids"),
        (("--chat", "--prompt", "x"), "has no chat template: leave --chat out"),
    ],
)
def test_what_cannot_be_a_chat(command, model, argv, words):
    ended = command("generate", "--model", model, *argv)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert words in ended.err


def test_a_template_that_fails_is_one_line(command, chatty):
    (chatty / "chat_template.jinja").write_text("{{ raise_exception('no\nchat today') }}")
    ended = command("generate", "--model", chatty, "--chat", "--prompt", "x")
    assert (ended.code, ended.out, ended.err) == (3, "", "error: the chat template failed: no chat today\n")
