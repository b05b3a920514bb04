"""What `generate` refuses before it loads: one line on stderr, nothing on stdout, and the exit code of its kind."""

import pytest
from safetensors.numpy import load_file, save_file

from dynajax.testing import TINY, make_checkpoint

PROMPT = ("--prompt-ids", "random:3", "--max-new-tokens", 2)


@pytest.fixture
def refused(command):
    """refused(code, *argv) -> the one line on stderr."""

    def execute(code, *argv):
        ended = command("generate", *argv)
        assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1), ended.err
        assert ended.err.startswith("error: ")
        return ended.err

    return execute


def test_a_missing_shard(refused, tmp_path):
    folder = make_checkpoint(tmp_path / "model", TINY, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refused(3, "--model", folder, *PROMPT)


def test_a_truncated_shard(refused, tmp_path):
    path = make_checkpoint(tmp_path / "model", TINY) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "model.safetensors is truncated or corrupt" in refused(3, "--model", path.parent, *PROMPT)


def test_a_wrong_shape(refused, tmp_path):
    path = make_checkpoint(tmp_path / "model", TINY) / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name] = tensors[name][1:].copy()
    save_file(tensors, path, metadata={"format": "pt"})
    line = refused(3, "--model", path.parent, *PROMPT)
    assert name in line
    assert "47" in line
    assert "48" in line


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_act": "swoosh"}, "swoosh"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "bert"),
        ({"architectures": ["OtherForCausalLM"]}, "OtherForCausalLM"),
    ],
)
def test_what_is_not_computed(refused, tmp_path, changes, word):
    folder = make_checkpoint(tmp_path / "model", TINY, config=changes)
    assert word in refused(3, "--model", folder, *PROMPT)


def test_a_misspelt_name_brings_the_right_one(refused):
    line = refused(3, "--model", "tiny-relulama", *PROMPT)
    assert line.startswith("error: no model tiny-relulama")
    assert "tiny-relullama" in line


def test_a_budget_without_a_unit(refused, bare_model):
    assert "write 8GiB" in refused(2, "--model", bare_model, *PROMPT, "--vram-budget", "8")


def test_a_prompt_longer_than_the_context(refused, bare_model):
    line = refused(2, "--model", bare_model, "--prompt-ids", "random:65", "--ctx", 64)
    assert "the prompt has 65 tokens, more than the context of 64: shorten it or raise --ctx" in line


def test_one_byte_too_few(refused, command, bare_model):
    argv = ("--model", bare_model, "--ctx", 256, "--vram-budget")
    least = command("plan", *argv, "64MiB", "--json").json("plan")["smallest_budget_bytes"]
    assert f"use --vram-budget {least}B or more" in refused(4, *argv, f"{least - 1}B", *PROMPT)
    assert command("generate", *argv, f"{least}B", *PROMPT).code == 0
