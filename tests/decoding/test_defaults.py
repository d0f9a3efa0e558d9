"""generation_config.json: what a folder says about decoding, and what no folder can say."""

import json

import pytest

from m3jax.completion import Defaults

WRONG = {
    "eos_token_id": ("[e~[", 1.5, -1, 2**31, True, [1, "a"], {"a": 1}, [1] * 5000, [[1]]),
    "max_new_tokens": (0, -1, 1.5, "8", [8], True, 2**31),
    "do_sample": ("false", 0, [], "x" * 10_000),
    "temperature": (-1, "hot", [1], True),
    "top_k": (-1, 1.5, 2**31),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_setting_of_the_wrong_kind_is_refused_with_file_and_name(name, tmp_path, unchecked):
    file = tmp_path / "generation_config.json"
    for value in WRONG[name]:
        file.write_text(json.dumps({name: value}))
        with pytest.raises(ValueError) as caught:
            Defaults.from_pretrained(tmp_path)
        assert str(caught.value).startswith(f"{file}: {name} = "), caught.value
        assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"temperature": NaN}', '{"top_k": 1e999}', "[" * 10**5])
def test_what_is_no_object_of_numbers_is_refused_with_the_file(text, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        Defaults.from_pretrained(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "generation_config.json"))


def test_what_is_said_is_read(tmp_path):
    assert Defaults.from_pretrained(tmp_path) == Defaults({}) == Defaults.from_pretrained(tmp_path / "nowhere")
    data = {"eos_token_id": [1, 2], "max_new_tokens": 8, "do_sample": False, "top_p": 0.5, "penalty_alpha": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(data))
    expected = Defaults({"top_p": 0.5, "temperature": 0}, (1, 2), 8, ("penalty_alpha",))
    assert Defaults.from_pretrained(tmp_path) == expected


def test_bad_words_have_the_hubs_name_and_penalties_have_none(unchecked):
    """What the hub's file does not know is named as left out, not taken for a setting of ours."""
    found = Defaults.from_dict({"bad_words_ids": [[3], [4, 5]], "presence_penalty": 1.0, "logit_bias": {"3": 1}})
    assert found == Defaults({"bad_words": [[3], [4, 5]]}, ignored=("logit_bias", "presence_penalty"))
    with pytest.raises(ValueError, match="bad_words = 7: give sequences of token ids"):
        Defaults.from_dict({"bad_words_ids": 7})


def test_settings_at_their_limits():
    """4,096 stop ids and numbers of 31 bits are taken; no draw is a temperature of 0, whatever the folder's is."""
    largest = 2**31 - 1
    found = Defaults.from_dict({"eos_token_id": [0, *[largest] * 4095], "max_new_tokens": largest, "top_k": None})
    assert len(found.stop_ids) == 4096 and found.max_new_tokens == largest and dict(found.knobs) == {}
    with pytest.raises(ValueError, match="eos_token_id = "):
        Defaults.from_dict({"eos_token_id": [0] * 4097})
    assert Defaults.from_dict({"eos_token_id": 5, "max_new_tokens": 1}).stop_ids == (5,)
    assert Defaults.from_dict({"eos_token_id": []}).stop_ids == () and Defaults.from_dict({}).stop_ids is None
    greedy = Defaults.from_dict({"do_sample": False, "temperature": 0.7, "top_p": 0.5, "zzz": 1, "use_cache": True})
    assert dict(greedy.knobs) == {"temperature": 0, "top_p": 0.5} and greedy.ignored == ("zzz",)
    assert dict(Defaults.from_dict({"do_sample": True, "temperature": 0.7}).knobs) == {"temperature": 0.7}
