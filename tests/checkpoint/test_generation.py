import json

import pytest

from dynajax.checkpoint.generation import read_generation_config
from dynajax.errors import ModelError


def write(folder, value):
    (folder / "generation_config.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_what_is_set_is_found_and_the_rest_is_left_out(tmp_path):
    assert read_generation_config(tmp_path) == {}
    assert read_generation_config(write(tmp_path, {"eos_token_id": 2, "max_length": "x", "top_k": None})) == {
        "eos_token_id": [2]
    }
    full = {"eos_token_id": [2, 7], "bos_token_id": 1, "do_sample": True, "top_k": 0}
    full |= {"temperature": 1, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.1}
    found = read_generation_config(write(tmp_path, full | {"transformers_version": "5"}))
    assert found == full
    assert isinstance(found["temperature"], float)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("eos_token_id", [-1, "2", 1.5, True, [1, None], list(range(257)), 2**40, {}]),
        ("bos_token_id", [-1, "1", [1], True]),
        ("do_sample", ["true", 1, []]),
        ("top_k", [-1, 2.5, True, 2**30]),
        ("temperature", [-0.1, 101, "1", True, [], float("nan"), float("inf")]),
        ("top_p", [0, 1.01, -1, "x", float("nan")]),
        ("min_p", [-0.01, 1.5, float("nan")]),
        ("repetition_penalty", [0, -1, 101, float("inf")]),
    ],
)
def test_garbage_is_named(tmp_path, name, bad):
    for value in bad:
        with pytest.raises(ModelError) as caught:
            read_generation_config(write(tmp_path, {name: value}))
        assert f"{name} must be " in str(caught.value)
        assert str(caught.value).isprintable()


def test_everything_wrong_is_named_at_once(tmp_path):
    with pytest.raises(ModelError, match=r"temperature must be.*; top_p must be|top_p must be.*; temperature"):
        read_generation_config(write(tmp_path, {"temperature": -1, "top_p": 3}))


@pytest.mark.parametrize("raw", ["", "[]", "{", '{"top_k": 1, "top_k": 2}'])
def test_what_is_no_json_object(tmp_path, raw):
    with pytest.raises(ModelError, match="generation_config.json"):
        read_generation_config(write(tmp_path, raw))


def test_a_link_that_leaves_the_folder(tmp_path):
    (outside := tmp_path / "secret").write_text("{}")
    (folder := tmp_path / "model").mkdir()
    (folder / "generation_config.json").symlink_to(outside)
    with pytest.raises(ModelError, match="leads outside the model folder"):
        read_generation_config(folder)
