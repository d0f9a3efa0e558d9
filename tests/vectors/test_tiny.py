"""`vectors/tiny`: the embedded checkpoint's answers are this package's, and mistakes in somebody's are named."""

import importlib
import json
import runpy
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import m3jax
from m3jax.assets import embedded_path
from m3jax.files.tensors import packed
from m3jax.vectors.files import sha256

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "vectors" / "tiny"


@pytest.fixture(scope="module", autouse=True)
def numpy_path():
    """`vectors/` is where `check_numpy.py` finds its arithmetic when it is run."""
    sys.path.insert(0, str(ROOT / "vectors"))
    yield
    sys.path.remove(str(ROOT / "vectors"))


@cache
def about() -> dict:
    return json.loads((FOLDER / "tiny.json").read_text(encoding="utf-8"))


@cache
def stored() -> dict[str, np.ndarray]:
    found = importlib.import_module("check_numpy").read_safetensors(FOLDER / "tiny.safetensors")
    return {name: array for name, (_, array) in found.items()}


def said(tmp_path, capsys, tensors: dict[str, np.ndarray]) -> tuple[int, list[str]]:
    """The exit status of the check of these tensors, and its lines."""
    (tmp_path / "mine.safetensors").write_bytes(packed({n: np.ascontiguousarray(x) for n, x in tensors.items()}))
    status = importlib.import_module("check_numpy").main(["--tiny", str(tmp_path)])
    return status, capsys.readouterr().out.splitlines()


def test_the_stored_answers_are_whole_and_of_this_checkpoint():
    """Five prompts of 200 to 4,000 tokens; in each of them most selections drop blocks; greedy tokens are 32."""
    for name, expected in about()["checkpoint"].items():
        assert sha256((embedded_path() / name).read_bytes()) == expected, name
    assert [len(prompt["prompt"]) for prompt in about()["prompts"]] == [200, 500, 1000, 2000, 4000]
    for prompt in about()["prompts"]:
        blocks = stored()[f"{prompt['name']}/blocks"]
        length = len(prompt["prompt"]) + len(prompt["tokens"]) - 1
        assert blocks.shape == (4, 2, length, 8) and len(prompt["tokens"]) == 32
        own = np.arange(length) // 16
        drops = own >= 8
        assert (blocks[..., drops, :] != about()["unused"]).all() and drops.mean() > 0.4, prompt["name"]
        assert np.isfinite(stored()[f"{prompt['name']}/margin"][..., drops]).all()
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 2.5 * 2**20


@pytest.mark.further  # a model beside other implementations: tests/model
def test_this_package_s_answers_agree(tmp_path, capsys):
    """In float32, to the shortest prompt; `scripts/tiny_oracle.py dump m3jax` gives all five."""
    oracle = runpy.run_path(str(ROOT / "scripts" / "tiny_oracle.py"), run_name="tiny_oracle")
    model, mine = m3jax.load(dtype="float32", progress=False), {}
    for prompt in about()["prompts"][:1]:
        found, _ = oracle["of_m3jax"](model, [*prompt["prompt"], *prompt["tokens"][:-1]])
        mine |= {f"{prompt['name']}/{kind}": x for kind, x in found.items()}
    status, lines = said(tmp_path, capsys, mine)
    assert status == 0 and lines[-1].startswith("m3jax vectors 0.1.0, tiny: blocks 100%"), lines
    assert "experts 100%, tokens 1/1, logits " in lines[-1] and lines[-1].endswith(" float32")


def of_prompt(name: str, kind: str, change) -> dict[str, np.ndarray]:
    """All of one kind of answer, changed in one prompt's."""
    found = {f"{p['name']}/{kind}": stored().get(f"{p['name']}/{kind}") for p in about()["prompts"]}
    if kind == "tokens":
        found = {f"{p['name']}/tokens": np.array(p["tokens"], np.int32) for p in about()["prompts"]}
    key = f"{name}/{kind}"
    return found | {key: change(found[key].copy()).astype(found[key].dtype if kind != "logits" else np.float32)}


def swapped_once(blocks):
    """One block of one selection, far from the cut."""
    blocks[2, 1, 150, 0] = next(i for i in range(9) if i not in blocks[2, 1, 150])
    return blocks


def with_a_zero(x):
    x[0, :, 100] = [0, 0]
    return x


def with_one_changed(x):
    x[7] += 1
    return x


PLANTED = {
    "one selection for all heads": ("blocks", lambda x: np.repeat(x[:, :1], 2, axis=1), "same selection (T1)"),
    "a layer's selection for the next": ("blocks", lambda x: x[[0, 0, 1, 2]], "the one before it (T25)"),
    "a block twice": ("blocks", lambda x: np.concatenate([x[..., :1], x[..., :-1]], -1), "an id twice (T4)"),
    "a block too few": ("blocks", lambda x: np.where(np.arange(8) == 7, 255, x), "fewer blocks than the rule"),
    "heads in the other order": ("blocks", lambda x: x[:, ::-1], "heads are in the other order"),
    "one other block": ("blocks", swapped_once, "l=2 k=1 t=150: expected ["),
    "one other expert": ("expert_ids", lambda x: np.where(np.arange(x.shape[1])[:, None] == 9, [5, 6], x), "l=0 t=9: "),
    "a factor": ("logits", lambda x: 1.5 * x, "all of them are 1.5 times"),
    "off by one": ("logits", lambda x: np.roll(x, 1, axis=0), "the one before it should have: off by one"),
    "NaN": ("logits", lambda x: np.where(np.arange(2048) == 5, np.nan, x), "32 numbers are NaN"),
    "another token": ("tokens", with_one_changed, "token 7 of 32: expected "),
    "a log-probability": ("logprobs", lambda x: x - 0.1, "off by 0.1 at "),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_named(mistake, tmp_path, capsys):
    """The same answers are right before, wrong after, and the line of the prompt says how."""
    kind, change, words = PLANTED[mistake]
    assert said(tmp_path, capsys, of_prompt("p200", kind, lambda x: x))[0] == 0
    status, lines = said(tmp_path, capsys, of_prompt("p200", kind, change))
    assert status == 1 and len(lines) == 2, lines
    assert lines[0].startswith(f"p200/{kind}: ") and words in lines[0], lines
    share = {"blocks": "blocks 9", "expert_ids": "experts 9", "tokens": "tokens 4/5", "logits": "logits ",
             "logprobs": "logprobs 1e-1"}[kind]  # fmt: skip
    assert f"tiny: {share}" in lines[1] and "100%" not in lines[1], lines


def test_answers_that_are_none(tmp_path, capsys):
    """One line on stderr's way: no tensor of a known name, and one of another shape, with the axes that are swapped."""
    check = importlib.import_module("check_numpy")
    for tensors, words in (
        ({"logits": np.ones((32, 4), np.float32)}, "no tensor of yours has one of the names p200/blocks"),
        ({"p200/blocks": stored()["p200/blocks"].swapaxes(1, 2).copy()}, "heads and tokens are swapped (T7)"),
    ):
        (tmp_path / "mine.safetensors").write_bytes(packed(tensors))
        with pytest.raises(ValueError) as caught:
            check.main(["--tiny", str(tmp_path)])
        assert words in str(caught.value)
