"""The stages of the device check on the CPU backend: that they run and say what they should; never how long it took."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_stages.arms import ARMS, WARM_TOKENS
from benchmarks.gpu_stages.isolated import Outcome, run_isolated

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """The stages open the same model again and again: their processes share what they compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        yield


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Makes `source` importable in a child as the module `probe`; -> a function that runs one of its functions."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(source: str, limit_s: float = 30, **arguments) -> Outcome:
        (tmp_path / "probe.py").write_text(source)
        return run_isolated("probe:run", arguments, limit_s=limit_s, group=True)

    return run


def stage(name: str) -> dict:
    record = gpu_check.run_stage(name)
    assert record["ok"], record["error"]
    assert record["stage"] == name and record["error"] is None and record["seconds"] > 0
    json.dumps(record, allow_nan=False)
    return record["figures"]


def test_memory_kinds_moves_data_through_every_kind():
    figures = stage("memory_kinds")
    assert figures["platform"] == "cpu" and "device" in figures["kinds"]
    assert all(figures["put"][kind] == {"kind": kind, "equal": True} for kind in figures["kinds"])
    assert figures["pinned_to_device"]["equal"] and figures["pinned_to_device"]["copies"]
    assert "error" in figures["dma_map"], "the CPU backend has no dma_map; a jax that has one needs other sizes here"


def test_donation_stays_in_place_for_every_type_and_row_count():
    updates = stage("donation")["updates"]
    assert {(u["pool_type"], u["rows"]) for u in updates} == {
        (kind, rows) for kind in ("float16", "float32", "uint16") for rows in (1, 8, 32, 128)
    }
    assert all(u["in_place"] and u["equal"] for u in updates)
    assert len({u["pool_bytes"] for u in updates if u["rows"] == 32 and u["pool_type"] == "float16"}) == 2


def test_link_tries_every_source_and_what_arrives_is_what_was_sent():
    transfers = stage("link")["transfers"]
    measured = [t for t in transfers if "error" not in t]
    assert {"plain", "plain, as_argument", "pinned_host"} <= {t["source"] for t in measured}
    assert len({t["nbytes"] for t in measured}) == 2
    assert all({"alone_us", "together_us", "blocks_us", "hidden"} <= t.keys() and t["whole"] for t in measured)


def test_masked_compares_three_ways_that_agree():
    figures = stage("masked")
    assert [case["share"] for case in figures["cases"]] == [0.1, 1.0]
    assert all({*case["us"]} == {"masked", "gather", "gate_then_gather"} for case in figures["cases"])
    assert figures["choice"] in ("masked", "gather")


def test_host_threads_measures_one_thread_and_all():
    figures = stage("host_threads")
    threads = {(row["dtype"], row["threads"]) for row in figures["rows"]}
    assert {("float16", 1), ("int4", 1)} <= threads
    assert all(row["relative_error"] < 1e-5 and row["read_gb_s"] > 0 for row in figures["rows"])
    assert all((dtype, count) in threads for dtype, count in figures["enough_threads"].items())


def test_readability_compares_one_program_with_two():
    figures = stage("readability")
    assert {"heavy_us", "one_program_us", "two_programs_us", "two_programs_no_async_us"} <= figures.keys()
    assert set(figures["latency_us"]) == {"8192", "16384"}


def test_tokens_agree_whatever_is_on_the_device():
    figures = stage("tokens")
    runs = {run["budget"]: run for run in figures["runs"]}
    assert all(run["agreement"] == figures["new_tokens"] for run in runs.values())
    assert {*runs} == {"smallest", "two_fifths"} and runs["smallest"]["hot_share"] == 0
    assert 0 < runs["two_fifths"]["hot_share"] < 1


def test_step_times_both_programs_at_every_pool_size():
    layers = stage("step")["layers"]
    assert len(layers) == 3 and len({case["slots"] for case in layers}) == 3
    assert all(case["finite"] and case["threads_us"] > 0 for case in layers)


@pytest.mark.slow
def test_budget_holds_for_every_budget():
    figures = stage("budget")
    for name in ("smallest", "two_fifths", "everything"):
        assert figures[name]["peak_bytes"] <= figures[name]["budget_bytes"] == figures["budgets"][name]
    assert figures["pool_update"]["extra_share"] < 0.05


def test_the_last_line_and_the_files_hold_all_stages(tmp_path, capsys):
    status = gpu_check.main(["--stages", "memory_kinds", "--out", str(tmp_path / "out")])
    everything = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0
    assert [record["stage"] for record in everything["stages"]] == ["memory_kinds"]
    assert everything["platform"] == "cpu" and everything["commit"]
    assert json.loads((tmp_path / "out" / "all.json").read_text()) == everything
    assert json.loads((tmp_path / "out" / "memory_kinds.json").read_text())["ok"]


def test_a_stage_that_is_cut_is_reported_and_fails_the_check(capsys):
    status = gpu_check.main(["--stages", "memory_kinds", "--limit-s", "0.05"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["stages"][0]
    assert status == 1 and not record["ok"] and "limit of 0.05 s" in record["error"]


def test_unknown_stages_are_refused(capsys):
    with pytest.raises(SystemExit) as error:
        gpu_check.main(["--stages", "memory_kinds,tokenz"])
    assert error.value.code == 2 and "tokenz" in capsys.readouterr().err


def test_the_default_run_fits_ten_minutes_and_every_stage_is_tested_here():
    assert sum(gpu_check.DEFAULT_S.values()) < 600
    source = Path(__file__).read_text()
    assert all(f'stage("{name}")' in source for name in gpu_check.LIMITS_S)


@pytest.mark.slow
def test_the_whole_check_runs_to_its_end(tmp_path, capsys):
    assert gpu_check.main(["--stages", "all", "--out", str(tmp_path)]) == 0
    stages = json.loads(capsys.readouterr().out.splitlines()[-1])["stages"]
    assert [record["stage"] for record in stages] == list(gpu_check.LIMITS_S)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as error:
        gpu_check.main(["--out", str(tmp_path / "file")])
    assert error.value.code == 2 and "name another folder" in capsys.readouterr().err


def test_every_stage_says_what_would_follow_from_its_answer():
    for name in gpu_check.LIMITS_S:
        source = (ROOT / "benchmarks" / "gpu_stages" / f"{name}.py").read_text()
        body = source.split("def run(report: Report) -> None:")[1]
        assert "?" in body.split('"""')[1].split("\n\n")[0], name


def test_help_does_not_load_jax():
    code = "import sys; from benchmarks import gpu_check, make_checkpoint; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_was_found_before_a_hang_is_kept(script):
    outcome = script("import time\ndef run(report, n):\n report.add(n=n)\n time.sleep(600)", limit_s=2, n=5)
    assert not outcome.ok and outcome.figures == {"n": 5} and "limit of 2 s" in outcome.error


def test_an_exception_is_named(script):
    outcome = script("def run(report):\n report.add(a=1)\n raise ValueError('no such thing')")
    assert outcome.error == "ValueError: no such thing" and outcome.figures == {"a": 1}


def test_a_crash_is_named(script):
    outcome = script("import os, sys\ndef run(report):\n print('bye', file=sys.stderr, flush=True)\n os._exit(7)")
    assert outcome.error == "exit status 7: bye"


def test_a_function_knows_how_long_it_may_run(script):
    outcome = script("def run(report):\n report.add(left_s=report.left_s)", limit_s=20)
    assert outcome.ok and 10 < outcome.figures["left_s"] < 20


def test_a_function_may_fail_and_go_on(script):
    outcome = script("def run(report):\n report.fail('one')\n report.add(a=1)\n report.fail('two')\n report.add(a=2)")
    assert not outcome.ok and outcome.error == "one; two" and outcome.figures == {"a": 2}


def test_children_of_a_stage_end_with_it(script, tmp_path):
    source = (
        "import subprocess, sys, time\n"
        "def run(report):\n"
        " child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        " report.add(pid=child.pid)\n"
        " time.sleep(600)\n"
    )
    pid = script(source, limit_s=2).figures["pid"]
    end = time.monotonic() + 20
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not runs(pid)


def stopped(out: Path, number: int, *, whom: str) -> tuple[int, str, int]:
    """Send the check, or the stage it runs, a signal while its second stage runs -> its exit status, what it printed,
    and the stage's process."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--stages", "memory_kinds,readability", "--out", str(out)]
    check = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not (out / "all.json").exists() and time.monotonic() < end:
            time.sleep(0.01)
        stage_pid = int(child_running(check.pid, "stages.readability"))
        os.kill(check.pid if whom == "check" else stage_pid, number)
        printed, _ = check.communicate(timeout=60)
    finally:
        check.kill()
        check.wait()
    return check.returncode, printed, stage_pid


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_however_the_check_ends_what_is_done_can_be_read_and_no_stage_lives_on(tmp_path, number, status):
    got, printed, stage_pid = stopped(tmp_path, number, whom="check")
    assert got == status
    kept = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {*kept} == {"all.json", "memory_kinds.json"} and kept["memory_kinds.json"]["ok"]
    assert [record["stage"] for record in kept["all.json"]["stages"]] == ["memory_kinds"]
    last = json.loads(printed.splitlines()[-1])
    assert last["stage"] == "memory_kinds" if number == signal.SIGKILL else last == kept["all.json"]
    end = time.monotonic() + 20
    while runs(stage_pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not runs(stage_pid)


def test_a_stage_that_is_killed_is_a_failed_record(tmp_path):
    status, printed, _ = stopped(tmp_path, signal.SIGKILL, whom="stage")
    everything = json.loads((tmp_path / "all.json").read_text())
    assert status == 1 and json.loads(printed.splitlines()[-1]) == everything
    assert [record["ok"] for record in everything["stages"]] == [True, False]
    assert everything["stages"][1]["error"].startswith("exit status -9")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    gpu_check.write(tmp_path, "all", {"stages": []})

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(gpu_check.os, "replace", full)
    with pytest.raises(OSError, match="space"):
        gpu_check.write(tmp_path, "all", {"stages": [1]})
    assert json.loads((tmp_path / "all.json").read_text()) == {"stages": []}


def runs(pid: int) -> bool:
    """False as soon as the process has ended, whether or not anybody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def child_running(parent: int, text: str, limit_s: float = 20) -> str:
    """The pid of the child whose command line holds `text`, as soon as there is one."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            command = Path(f"/proc/{pid}/cmdline")
            if command.exists() and text in command.read_text():
                return pid
        time.sleep(0.02)
    raise AssertionError(f"no child with {text!r}")


def test_staging_sends_whole_blocks_every_way_that_works_here():
    figures = stage("staging")
    assert all(figures["ways"][name]["whole"] for name in ("plain", "pinned_host"))
    assert "cannot be used here" in figures["ways"]["registered"]["error"]
    assert figures["auto"] in ("plain", "pinned_host")


def test_arms_run_every_way_and_equal_ones_choose_equal_tokens():
    figures = stage("arms_13b")
    found = {arm["arm"]: arm for arm in figures["arms"]}
    assert {*found} == {arm.name for arm in ARMS} and not any("error" in arm for arm in found.values())
    assert all(arm["agrees"] == WARM_TOKENS for arm in found.values())
    assert all(0 < found[name]["hot_share"] < 1 for name in ("layer_split", "static", "dynamic", "exact"))
    assert found["static"]["recall"] > 0.7
    # Whole layers: what is found is what the first of the layers holds.
    assert found["layer_split"]["pool_bytes"] * 4 == figures["host_bytes"]


@pytest.mark.slow
def test_the_smaller_model_has_fewer_arms():
    assert [arm["arm"] for arm in stage("arms_7b")["arms"]] == ["layer_split", "static"]


def test_int4_runs_without_predictors():
    figures = stage("int4_70b")
    assert figures["dtype"] == "int4" and [arm["arm"] for arm in figures["arms"]] == ["layer_split", "macro_exact"]
    assert not any("error" in arm for arm in figures["arms"])
    assert figures["host_bytes"] == 4 * 1024 * 3 * 8 * 18  # codes and a scale of 32 columns


def test_nothing_goes_faster_than_the_throttled_link():
    figures = stage("throttled")
    assert [arm["arm"] for arm in figures["link_12_gb_s"]] == ["dynamic", "streaming"]
    assert 0 < figures["fastest_at_12_gb_s"] <= 12


def test_mixtral_gives_the_same_tokens_whatever_moves():
    cases = {case["arm"]: case for case in stage("mixtral")["cases"]}
    assert cases["static"]["migrated"] == 0 < cases["lru"]["migrated"]
    assert all(case["agrees"] for case in cases.values())
    assert cases["scan, residual"]["policy"] == "scan+prefetch=residual"


@pytest.mark.slow
def test_experts_give_the_same_tokens_whatever_moves():
    figures = stage("experts")
    assert [case["wanted"] for case in figures["cases"]] == ["static", "auto", "scan", "lru"]
    assert all(case["agrees"] for case in figures["cases"])
    assert figures["cases"][-1]["migrated"] > 0
