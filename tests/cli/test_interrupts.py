import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynajax.cli.interrupts import Interrupted, Interrupts

ROOT = Path(__file__).parents[2]
BOTH = pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


def send(signum):
    os.kill(os.getpid(), signum)


@BOTH
def test_a_signal_raises_while_nobody_was_asked(signum, code):
    with pytest.raises(Interrupted) as caught, Interrupts():
        send(signum)
    assert caught.value.exit_code == code


@BOTH
def test_the_first_signal_asks_and_the_second_ends_the_process(signum, code, monkeypatch):
    asked = []
    monkeypatch.setattr("dynajax.cli.interrupts.os._exit", sys.exit)
    with Interrupts() as interrupts:
        interrupts.check()
        interrupts.ask(lambda: asked.append(1))
        send(signum)
        assert asked == [1]
        with pytest.raises(Interrupted) as held:
            interrupts.check()
        with pytest.raises(SystemExit, match="143"):
            send(signal.SIGTERM)
    assert asked == [1]
    assert held.value.exit_code == code


@BOTH
def test_a_signal_while_jax_is_at_work_waits_for_the_next_look(signum, code):
    """An exception thrown into the middle of a compilation crashes the process at its end."""
    with Interrupts() as interrupts:
        interrupts.hold()
        send(signum)
        for look in (interrupts.check, lambda: interrupts.ask(lambda: None)):
            with pytest.raises(Interrupted) as caught:
                look()
            assert caught.value.exit_code == code


@BOTH
@pytest.mark.parametrize("moment", ["importing or compiling", "device dense", "load: 16/16", "prefill: 100/100"])
def test_generate_ends_with_the_code_whatever_it_was_doing(signum, code, moment):
    """A second after its start, or as soon as stderr says how far it is; 500 tokens take longer than that."""
    command = [sys.executable, "scripts/generate.py", "--prompt", "Once upon", "--max-new-tokens", "500"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        if moment == "importing or compiling":
            time.sleep(1.0)
        else:
            assert any(line.startswith(moment) for line in child.stderr), "the command ended before that"
        child.send_signal(signum)
        _, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert "Traceback" not in err
    assert "interrupted" in err


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


SLOW_COMMAND = """
import sys, time, typer
from dynajax.cli.errors import run
from dynajax.cli.output import write_out
app = typer.Typer()
@app.command()
def command(context: typer.Context):
    stop = []
    if "{mode}" == "asks":
        context.obj.ask(lambda: stop.append(1))
    write_out("partial")
    while not stop:
        time.sleep(0.01)
    write_out(" text")
    context.obj.check()
sys.exit(run(app, []))
"""


@BOTH
@pytest.mark.parametrize(("mode", "text"), [("asks", "partial text"), ("ignores", "partial")])
def test_a_process_ends_with_the_code_and_keeps_its_text(signum, code, mode, text):
    command = [sys.executable, "-c", SLOW_COMMAND.replace("{mode}", mode)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.read(7) == "partial"
        time.sleep(0.2)
        child.send_signal(signum)
        out, err = child.communicate(timeout=20)
    assert (child.returncode, "partial" + out, err) == (code, text, "interrupted\n")


def test_a_closed_pipe_ends_the_command_quietly():
    code = SLOW_COMMAND.replace("while not stop:", "while True:\n        write_out('more')")
    script = f'{sys.executable} -c "$0" | head -c 3; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", script, code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("par141\n", "")
