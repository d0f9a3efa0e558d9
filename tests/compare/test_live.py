"""Models that run live, m3jax's and transformers', and the hooks of docs/compare.md against both."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import oracle
from support.dumps import TINY

from m3jax.checkpoint import load
from m3jax.compare.__main__ import main
from m3jax.compare.live import run_m3jax
from m3jax.compare.running import compare_sides
from m3jax.config import M3Config

ROOT = Path(__file__).resolve().parents[2]
CASE = "m3"
PROMPTS = [[5, 9, 4, 77, 31] * 24, [8, 8, 60, 41] * 20 + [7]]  # the first longer than J blocks of P


@pytest.fixture(scope="module")
def folder() -> Path:
    return oracle.pair(CASE).folder


def test_m3jax_and_transformers_agree_in_every_quantity(folder):
    """Two prompts of different lengths; 26 quantities of a sparse layer; the selection drops blocks (T17)."""
    report = compare_sides(f"m3jax:{folder}", f"transformers:{folder}", PROMPTS)
    assert report.beyond == [] and report.unknown == ((), ()) and report.only[1] == [], report
    # What transformers has nowhere: scores of blocks, and of experts with their bias.
    assert {name.split(".")[-1] for name in report.only[0]} == {"block_scores", "router_scores"}
    kinds = {name.removeprefix("layers.1.") for name in report.compared if name.startswith("layers.1.")}
    assert len(kinds) == 26 and {"q", "index_k", "blocks", "expert_ids", "gate", "index_q_normed"} <= kinds, kinds
    assert report.tokens == 201 and report.layers[1].blocks == (804, 0, 0)
    assert report.logits.same == 201 and report.logits.largest < 2e-4


def test_the_pages_hooks_dump_what_the_tool_reads(folder, tmp_path, monkeypatch, capsys):
    """The blocks of docs/compare.md for transformers, as a reader would paste them, and the command after them."""
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    hooks, dump, *others = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len(others) == 2, "the hooks for vLLM and SGLang"
    for number, code in enumerate(others):
        compile(code, f"block {number} for other engines in docs/compare.md", "exec")
    monkeypatch.chdir(tmp_path)
    names = {"folder": str(folder), "prompts": [PROMPTS[0], PROMPTS[0][::-1]]}
    exec(compile(hooks, "docs/compare.md", "exec"), names)
    exec(compile(dump, "docs/compare.md", "exec"), names)
    assert main([f"m3jax:{folder}", "theirs.safetensors"]) == 0
    out = capsys.readouterr().out
    assert "A and B agree" in out
    found = load_file("theirs.safetensors")
    found["model.language_model.layers.1.self_attn.indexer"][0, 2, 100] = [0, 1, 2, 6]
    save_file(found, "wrong.safetensors")
    assert main([f"m3jax:{folder}", "wrong.safetensors"]) == 1
    out = capsys.readouterr().out
    assert "first beyond its tolerance: layers.1.blocks" in out and "prompt 1, position 100, KV head 2" in out


def test_transformers_missing_is_one_line(folder, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert main([f"transformers:{folder}", f"m3jax:{folder}", "--prompt-tokens", "1,2,3"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "m3jax[oracle]" in err, err


def test_a_folder_without_a_tensor_is_one_line(folder, tmp_path, capsys):
    """transformers would draw what it does not find at random, and the comparison would be of that."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    weights = load_file(copy / "model.safetensors")
    del weights["language_model.model.layers.1.self_attn.k_norm.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert main([f"transformers:{copy}", f"m3jax:{folder}", "--prompt-tokens", "1,2,3"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "k_norm" in err and json.dumps(str(copy))[1:-1] in err, err


def test_prompts_are_of_the_model_s_tokens_and_context():
    config = M3Config.from_pretrained(TINY)
    most, vocabulary = config.max_position_embeddings, config.vocab_size
    for prompts, message in (
        ([[1], []], "prompt 2 has no token"),
        ([[1, vocabulary, 65]], f"prompt 1: token {vocabulary}, and the model has 0 to {vocabulary - 1}"),
        ([[-1]], "prompt 1: token -1, and"),
        ([[1] * (most + 1)], f"prompt 1: {most + 1} tokens, and the model takes {most}"),
    ):
        with pytest.raises(ValueError, match=message):
            run_m3jax("x", str(TINY), prompts, "float32", None)


def test_scores_of_experts_have_their_bias():
    """Which the selection is of; transformers has them nowhere."""
    arrays = {name: x for name, (x,) in run_m3jax("x", str(TINY), [[5, 9, 4]], "float32", None).arrays.items()}
    model = load(TINY, "float32")
    for layer in (1, 2):
        expected = 1 / (1 + np.exp(-arrays[f"layers.{layer}.router_logits"]))
        expected += np.asarray(model.layer(layer).mlp.e_score_correction_bias[0])
        np.testing.assert_allclose(arrays[f"layers.{layer}.router_scores"], expected, rtol=1e-5)
