"""What a newcomer gets wrong, or the network and the disk do: one line, its exit code, and nothing half-written."""

import pytest

from tests.e2e.relullama import ALIAS, REPO, SHARDS

NOWHERE = "http://127.0.0.1:9"
GENERATE = ("--prompt", "Call me Ishmael.", "--max-new-tokens", 4)
ASK = {
    "generate": lambda name: ("generate", "--model", name, *GENERATE),
    "plan": lambda name: ("plan", "--model", name, "--json"),
    "fetch_model": lambda name: ("fetch_model", name),
}
every_command = pytest.mark.parametrize("verb", [pytest.param("generate"), *(
    pytest.param(verb, marks=pytest.mark.slow) for verb in ("plan", "fetch_model")
)])  # fmt: skip


def files_in(machine):
    """Everything that is there under a name that counts: of partial downloads only those that are resumed."""
    found = [path for path in machine.home.rglob("*") if path.is_file() and path.suffix != ".incomplete"]
    return sorted(str(path.relative_to(machine.home)) for path in found)


def limit(count):
    """Files of a process are at most this large: as a disk that is full."""
    return f"resource.setrlimit(resource.RLIMIT_FSIZE, ({count}, {count}))"


@every_command
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("relulama-13b", ("no model relulama-13b", "did you mean relullama-13b")),
        ("SparseLLM/ReluLLaMA-13", ("no model SparseLLM/ReluLLaMA-13 on the hub", "did you mean relullama-13b")),
        ("nobody/nothing", ("no model nobody/nothing on the hub", "set HF_TOKEN")),
        (f"{ALIAS}@v9", (f"{REPO} has no revision v9: name a branch, a tag or a commit",)),
        (f"{ALIAS}@../../etc", ("no model",)),
    ],
)
def test_names_that_lead_nowhere(machine, verb, name, words):
    ended = machine.run(*ASK[verb](name))
    assert (ended.code, ended.err.count("\n")) == (3, 1)
    assert all(word in ended.refusal for word in words)
    assert files_in(machine) == []


@every_command
def test_no_network(machine, verb):
    ended = machine.run(*ASK[verb](ALIAS), HF_ENDPOINT=NOWHERE)
    assert (ended.code, ended.err.count("\n")) == (6, 1)
    assert f"cannot download {REPO} from {NOWHERE}" in ended.refusal and "check the network" in ended.refusal
    assert files_in(machine) == []


@pytest.mark.parametrize("verb", ["generate", pytest.param("plan", marks=pytest.mark.slow)])
def test_offline_with_an_empty_cache(machine, hub, verb):
    ended = machine.run(*ASK[verb](ALIAS), "--offline")
    assert (ended.code, ended.err.count("\n")) == (3, 1)
    assert "--offline is set: run once without it" in ended.refusal
    assert (hub.requests, files_in(machine)) == (0, [])


@every_command
@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (401, {}, "set HF_TOKEN to a valid token"),
        (401, {"X-Error-Code": "RepoNotFound"}, "if it is private or gated, set HF_TOKEN"),
        (403, {"X-Error-Code": "GatedRepo"}, "is gated: accept its licence on"),
    ],
)
def test_a_token_that_is_missing(machine, hub, verb, status, headers, words):
    for where in ("api_status", "file_status"):
        hub.trouble.headers = headers
        setattr(hub.trouble, where, status)
        ended = machine.run(*ASK[verb](ALIAS))
        assert (ended.code, ended.err.count("\n")) == (3, 1)
        assert words in ended.refusal
        setattr(hub.trouble, where, None)
    assert files_in(machine) == []


def test_a_disk_that_is_full(machine, hub):
    """While downloading and while converting; what came before is not asked for again."""
    ended = machine.run("fetch_model", ALIAS, before=limit(2**18))
    assert ended.code == 6
    assert "make room and run again, the download resumes" in ended.refusal
    assert not any(name.endswith(".bin") or "dynajax" in name or "/refs/" in name for name in files_in(machine))
    (partial,) = machine.partial()
    assert partial.stat().st_size == 2**18
    hub.forget()
    ended = machine.run("fetch_model", ALIAS, before=limit(2**20))
    assert ended.code == 6
    assert str(machine.converted) in ended.refusal and "make room" in ended.refusal
    assert list(machine.converted.iterdir()) == []
    assert [seen.start for seen in hub.files] == [2**18] + [0] * (SHARDS - 1)
    hub.forget()
    assert machine.run("fetch_model", ALIAS).code == 0
    assert hub.sent() == 0


@pytest.mark.slow
def test_a_disk_that_is_full_of_predictors(machine):
    ended = machine.run("fetch_model", ALIAS, "--predictors", before=limit(2**22))
    assert ended.code == 0
    places = machine.home / "dynajax" / "predictors"
    (folder,) = places.iterdir()
    (folder / "manifest.json").unlink()  # so that it must be made again
    ended = machine.run("fetch_model", ALIAS, "--predictors", before=limit(2**14))
    assert ended.code == 6 and str(folder) in ended.refusal and "make room" in ended.refusal
    assert list(places.iterdir()) == []


def test_a_cache_that_cannot_be_written(machine):
    (machine.home / "hf").write_text("a file")
    ended = machine.run("fetch_model", ALIAS)
    assert ended.code == 6 and "check the folder, or set HF_HOME" in ended.refusal
    (machine.home / "hf").unlink()
    (machine.home / "dynajax").write_text("a file")
    ended = machine.run("fetch_model", ALIAS)
    assert ended.code == 6 and "cannot write" in ended.refusal
