"""The whole command with a real engine on a small random model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynajax.cli.output import size

ROOT = Path(__file__).parents[2]
PROMPT = ("--prompt", "Call me Ishmael.", "--max-new-tokens", 6)


@pytest.fixture(scope="module")
def budget(model):
    """A budget that holds about half of the neurons."""
    from dynajax.config import EngineConfig
    from dynajax.engine import plan_for

    plan = plan_for(str(model), EngineConfig(ctx=256))
    return f"{plan.smallest_budget_bytes + plan.pool // 2}B"


def test_json_is_the_committed_schema(command, model, budget):
    ended = command("generate", "--model", model, *PROMPT, "--vram-budget", budget, "--seed", 7, "--json")
    result = ended.json("generate")
    assert result["model"] == result["model_path"] == str(model)
    assert (result["finish_reason"], len(result["token_ids"]), result["seed"]) == ("length", 6, 7)
    assert (result["policy"], result["sparsity"], result["predictor"]) == ("static", "exact", "none")
    assert 0 < result["units"]["hot_share"] < 1
    assert result["memory"]["peak_bytes"] <= result["memory"]["budget_bytes"]
    assert result["memory"]["pool_bytes"] > 0
    assert "load: 6/6\n" in ended.err  # attention, then FFN, of each of three layers
    assert "budget" not in ended.err


def test_text_goes_to_stdout_and_the_rest_to_stderr(command, model, budget):
    argv = ("--model", model, *PROMPT, "--vram-budget", budget, "--temperature", 1.5, "--seed", 3)
    streamed = command("generate", *argv)
    whole = command("generate", *argv, "--no-stream", "--policy", "none", "--host-mode", "callback")
    text = command("generate", *argv, "--json", "--sparsity", "dense").json("generate")["text"]
    assert text
    assert streamed.out == whole.out == (text if text.endswith("\n") else text + "\n")
    table = streamed.err[: streamed.err.index("load: ")].splitlines()
    names = [line.split("  ")[0] for line in table]
    assert names[:2] == ["device dense", "device kv"]
    assert names[-2:] == ["device, without margin", "budget"]
    assert table[-1].endswith(size(int(budget[:-1])))
    summary = streamed.err.splitlines()[-4:]
    assert summary[0].startswith("6 tokens (length) after a prompt of ")
    assert "policy static, sparsity exact, seed 3" in summary[0]
    assert "decode" in summary[1]
    assert "hot share" in summary[2]
    assert "peak" in summary[3]


def test_a_model_without_a_tokenizer_gives_ids(command, bare_model):
    argv = ("--model", bare_model, "--prompt-ids", "topics:20", "--max-new-tokens", 3)
    result = command("generate", *argv, "--json").json("generate")
    assert (result["text"], result["prompt_tokens"]) == (None, 20)
    ended = command("generate", *argv)
    assert ended.out.strip() == " ".join(map(str, result["token_ids"]))
    ended = command("generate", "--model", bare_model, "--prompt", "a")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "has no tokenizer: give --prompt-ids" in ended.err


def test_a_full_context_is_named(command, bare_model):
    argv = ("--model", bare_model, "--prompt-ids", "random:5", "--ctx", 8)
    assert "3 tokens (the context is full)" in command("generate", *argv, "--max-new-tokens", 50).err
    assert "2 tokens (length)" in command("generate", *argv, "--max-new-tokens", 2).err


def test_the_prompt_can_come_from_a_file_of_ids(command, bare_model, tmp_path):
    (tmp_path / "ids").write_text("5 6 7")
    argv = ("--model", bare_model, "--prompt-ids", tmp_path / "ids", "--max-new-tokens", 0, "--json")
    result = command("generate", *argv).json("generate")
    assert (result["prompt_tokens"], result["token_ids"], result["finish_reason"]) == (3, [], "length")


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (("--prompt-ids", "random:513"), 2, "between 1 and the model's context 512"),
        (
            ("--prompt-ids", "random:300", "--ctx", "256"),
            2,
            "the prompt has 300 tokens, more than the context of 256: shorten it or raise --ctx",
        ),
        (("--prompt", "word " * 600), 2, "more than the context of 512: shorten it, the model takes no more"),
        (("--prompt-ids", "nowhere.npy"), 6, "cannot read --prompt-ids nowhere.npy"),
        (("--prompt", "a", "--vram-budget", "10KiB"), 4, "or lower --ctx"),
        (("--prompt", "a", "--ctx", "1024"), 2, "--ctx must be at most the model's 512 positions"),
        (("--prompt", "a", "--stats", "nowhere.npz"), 6, "nowhere.npz"),
    ],
)
def test_what_cannot_be_done_is_one_line(command, model, argv, code, line):
    ended = command("generate", "--model", model, *argv)
    assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1)
    assert ended.err.startswith("error: ")
    assert line in ended.err


def test_flags_that_always_hold_change_nothing(command, bare_model):
    argv = ("--model", bare_model, "--prompt-ids", "topics:9", "--max-new-tokens", 4, "--seed", 5, "--temperature", 1)
    plain = command("generate", *argv, "--json").json("generate")
    promised = command("generate", *argv, "--json", "--deterministic", "--offline", "--predictor", "none")
    assert promised.json("generate")["token_ids"] == plain["token_ids"]


def start(model, *argv):
    command = [sys.executable, "scripts/generate.py", "--model", str(model), "--prompt", "a", *argv]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_stream_and_keeps_the_text(model, signum, code):
    with start(model, "--max-new-tokens", "500", "--temperature", "1", "--seed", "1") as child:
        first = os.read(child.stdout.fileno(), 1)
        child.send_signal(signum)
        rest, err = child.communicate(timeout=30)
    assert first
    assert (child.returncode, rest[-1:]) == (code, "\n")
    assert "tokens (cancelled)" in err
    assert err.endswith("interrupted\n")


def test_a_signal_in_json_mode_still_gives_the_object(model):
    with start(model, "--max-new-tokens", "500", "--temperature", "1", "--seed", "1", "--json") as child:
        for line in child.stderr:
            if line.startswith("prefill: 100/100"):
                break
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=30)
    assert child.returncode == 130
    assert json.loads(out)["finish_reason"] == "cancelled"


def test_a_reader_that_leaves_ends_the_command_quietly(model):
    with start(model, "--max-new-tokens", "500", "--temperature", "1", "--seed", "1") as child:
        os.read(child.stdout.fileno(), 1)
        child.stdout.close()
        err = child.stderr.read()
        assert child.wait(timeout=30) == 141
    assert "error" not in err
    assert "Traceback" not in err


def test_the_script_reads_a_prompt_from_stdin(model):
    command = [sys.executable, "scripts/generate.py", "--model", str(model), "--prompt", "-", "--max-new-tokens", "2"]
    done = subprocess.run([*command, "--json"], cwd=ROOT, input="Call me", capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["prompt_tokens"] >= 2
