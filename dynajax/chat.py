"""Chat templates: how a model wants a conversation written down. They come with models, so they run in a sandbox."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, Undefined
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from dynajax.checkpoint.gguf_file import CHAT_TEMPLATE
from dynajax.checkpoint.gguf_header import is_gguf, read_header
from dynajax.checkpoint.json_file import read_json
from dynajax.checkpoint.paths import stray_link
from dynajax.checkpoint.wording import located, plain, quoted
from dynajax.errors import ModelError, StorageError, UsageError
from dynajax.text import CONFIG_BYTES, CONFIG_NAME, Tokenizer, load_tokenizer

TEMPLATE_NAME, OLD_TEMPLATE_NAME = "chat_template.jinja", "chat_template.json"
TEMPLATE_BYTES = 2**18
OUTPUT_CHARS = 2**22
LARGEST_FACTOR = 2**16  # of a * b and a ** b in a template

Message = Mapping[str, Any]  # role and content


@dataclass(frozen=True, slots=True)
class Chat:
    """A model's template with the two tokens it may write."""

    template: str
    bos_token: str
    eos_token: str

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, ready for the assistant to go on; encode it with `special=False`."""
        return render_chat(self.template, messages, bos_token=self.bos_token, eos_token=self.eos_token)


class _Generation(Extension):
    """{% generation %} marks what the assistant wrote, for training; here its content is written as it stands."""

    tags = {"generation"}  # noqa: RUF012  the base class has it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also bounds the operators that make large things out of small ones."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if any(not isinstance(side, int | float) or abs(side) > LARGEST_FACTOR for side in (left, right)):
            raise SecurityError(f"{operator} is allowed for numbers up to {LARGEST_FACTOR} only")
        if operator == "**" and abs(right) > 64:
            raise SecurityError("powers up to 64 are allowed")
        return super().call_binop(context, operator, left, right)


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
) -> str:
    """The conversation as `template` writes it. ModelError in one line: a faulty template, or one that refuses.

    The sandbox keeps a template from the machine; size caps and bounded operators from most of its memory. One that
    never ends cannot be told from a slow one: Ctrl-C ends it.
    """
    if len(template.encode("utf-8", "replace")) > TEMPLATE_BYTES:
        raise ModelError(f"the chat template has more than {TEMPLATE_BYTES} bytes")
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    sandbox.filters["tojson"] = _to_json
    functions = {"raise_exception": _refuse, "strftime_now": _now}
    values = {
        "messages": [dict(message) for message in messages],
        "bos_token": bos_token,
        "eos_token": eos_token,
        "add_generation_prompt": add_generation_prompt,
    }
    parts, size = [], 0
    try:
        for part in sandbox.from_string(template, functions).generate(values):
            size += len(part)
            if size > OUTPUT_CHARS:
                raise ModelError(f"the chat template writes more than {OUTPUT_CHARS} characters")
            parts.append(part)
    except ModelError:
        raise
    except TemplateError as error:
        where = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ModelError(f"the chat template failed{where}: {_one_line(error)}") from error
    except Exception as error:  # whatever an expression in a template can raise
        raise ModelError(f"the chat template failed: {type(error).__name__}: {_one_line(error)}") from error
    return "".join(parts)


def load_chat_template(path: Path) -> str | None:
    """The template of a model folder or GGUF file; None if it has none.

    chat_template.jinja goes before chat_template.json, and that before tokenizer_config.json, where of several
    named ones "default" is taken.
    """
    if is_gguf(path):
        value = read_header(path).metadata.get(CHAT_TEMPLATE)
        return _checked(value, f"{located(path)}: {CHAT_TEMPLATE}")
    if os.path.lexists(path / TEMPLATE_NAME):
        return _read_template(path / TEMPLATE_NAME)
    if os.path.lexists(path / OLD_TEMPLATE_NAME):
        return _checked(_record(path, OLD_TEMPLATE_NAME).get("chat_template"), OLD_TEMPLATE_NAME)
    return _checked(_record(path, CONFIG_NAME).get("chat_template"), CONFIG_NAME)


def load_chat(path: Path, tokenizer: Tokenizer | None = None) -> Chat | None:
    """Template and tokens of a model folder or GGUF file; None without a template."""
    template = load_chat_template(path)
    if template is None:
        return None
    tokens = _gguf_tokens(path, tokenizer) if is_gguf(path) else _folder_tokens(path)
    return Chat(template, *tokens)


def chat_ids(path: Path, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation in the model's template, which writes the special tokens itself. UsageError without one."""
    chat = load_chat(path, tokenizer)
    if chat is None:
        raise UsageError(f"{path} has no chat template: leave --chat out")
    return tokenizer.encode(chat.render(messages), special=False)


def _read_template(path: Path) -> str:
    if problem := stray_link(path):
        raise ModelError(problem)
    try:
        if not path.is_file():
            raise ModelError(f"{located(path)} is not a plain file")
        with path.open("rb") as file:
            raw = file.read(TEMPLATE_BYTES + 1)
    except OSError as error:
        raise StorageError(f"cannot read {located(path)}: {error.strerror or error}") from error
    if len(raw) > TEMPLATE_BYTES:
        raise ModelError(f"{located(path)} has more than the {TEMPLATE_BYTES} bytes that a template may have")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{located(path)} is not UTF-8") from error


def _record(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder; {} if it is not there."""
    path = folder / name
    if not os.path.lexists(path):
        return {}
    if problem := stray_link(path):
        raise ModelError(problem)
    return read_json(path, CONFIG_BYTES)


def _checked(value: object, where: str) -> str | None:
    """The template in a value: a text, or the one called "default" of a list of them."""
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict)]
        value = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if value is None or isinstance(value, str):
        return value
    raise ModelError(f"{where}: the chat template must be text, got {quoted(value)}")


def _folder_tokens(folder: Path) -> tuple[str, str]:
    """bos_token and eos_token of tokenizer_config.json, each a text or an object with its content; "" for none."""
    config = _record(folder, CONFIG_NAME)
    found = []
    for name in ("bos_token", "eos_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if not isinstance(value, str | None):
            raise ModelError(f"{located(folder / CONFIG_NAME)}: {name} must be text, got {quoted(value)}")
        found.append(value or "")
    return found[0], found[1]


def _gguf_tokens(path: Path, tokenizer: Tokenizer | None) -> tuple[str, str]:
    tokenizer = tokenizer or load_tokenizer(path)
    metadata = read_header(path).metadata
    ids = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")]
    texts = [tokenizer.token_text(i) if tokenizer and isinstance(i, int) else None for i in ids]
    return texts[0] or "", texts[1] or ""


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """As transformers has it: no HTML escapes, other alphabets as they are."""
    if isinstance(value, Undefined):
        raise TemplateError("tojson of a value that is not there")
    known: dict[str, Any] = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, indent=indent, ensure_ascii=options.get("ensure_ascii") is True, **known)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: object) -> None:
    raise TemplateError(str(message))


def _one_line(error: Exception) -> str:
    return plain(" ".join(str(error).split())[:150] or type(error).__name__)
