"""scripts/peer_llama_cpp.py: where each parameter goes, what a dump is made of, and llama.cpp where it is installed."""

import runpy
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.dumps import VECTORS, golden

from m3jax.checkpoint.names import targets
from m3jax.compare.names import meanings
from m3jax.compare.running import compare_sides
from m3jax.config import M3Config
from m3jax.model import init

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "peer_llama_cpp.py"), run_name="peer_llama_cpp"))
CONFIG = M3Config.tiny(index_topk_blocks=2)  # of 8 blocks at 64 tokens
# The tensors that src/models/minimax-m3.cpp creates: of the whole model, of every layer, of a dense and of a MoE layer.
WHOLE = ["token_embd.weight", "output_norm.weight", "output.weight"]
EVERY = "attn_norm ffn_norm attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm"
DENSE = "ffn_gate ffn_up ffn_down"
SPARSE = (
    "ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps ffn_gate_shexp ffn_up_shexp ffn_down_shexp "
    "indexer.q_proj indexer.k_proj indexer.q_norm indexer.k_norm"
)


def expected_names(config: M3Config) -> list[str]:
    names = [*WHOLE]
    for layer, kind in enumerate(config.mlp_layer_types):
        names += [
            f"blk.{layer}.{name}.weight" for name in (EVERY + " " + (DENSE if kind == "dense" else SPARSE)).split()
        ]
        names += [] if kind == "dense" else [f"blk.{layer}.exp_probs_b.bias"]
    return sorted(names)


def test_every_parameter_is_converted_once():
    """Each parameter of the text model goes into one tensor of llama.cpp, or into its expert's place in one."""
    found = {hub: SCRIPT.llama_name(hub) for hub in targets(CONFIG)}
    assert not [hub for hub, place in found.items() if place is None]
    counts = Counter((name, expert) for name, expert, _ in found.values())
    assert set(counts.values()) == {1}
    experts: dict[str, list[int]] = {}
    for name, expert in counts:
        experts.setdefault(name, []).append(expert)
    assert sorted(experts) == expected_names(CONFIG)
    for name, ids in experts.items():
        assert sorted(ids) == [*range(CONFIG.num_local_experts)] if "_exps" in name else ids == [None], name
    # M3's norms multiply with 1 + w, llama.cpp's with w.
    assert {name for name, _, change in found.values() if change == "+1"} == {
        name for name in experts if "norm" in name
    }


def test_the_tower_is_not_converted():
    embedded = M3Config.from_pretrained(ROOT / "m3jax" / "assets" / "tiny")
    left = [hub for hub in targets(embedded) if SCRIPT.llama_name(hub) is None]
    assert left and all(hub.startswith(("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")) for hub in left)


@pytest.mark.parametrize(
    "changes",
    [
        dict(swiglu_limit=5.0), dict(swiglu_alpha=1.0), dict(index_init_blocks=1), dict(shared_intermediate_size=96),
        dict(layer_types=("full_attention",) * 2 + ("minimax_m3_sparse",) * 2),
        dict(mlp_layer_types=("sparse", "dense", "sparse", "sparse"),
             layer_types=("minimax_m3_sparse", "full_attention", "minimax_m3_sparse", "minimax_m3_sparse")),
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_other_arithmetic_is_refused(changes):
    """llama.cpp has constants, or no key, where a configuration may say otherwise: the file would be another model."""
    assert SCRIPT.check_config(CONFIG) == 1
    with pytest.raises(ValueError, match=r"^llama\.cpp's M3 has other arithmetic"):
        SCRIPT.check_config(M3Config.tiny(**changes))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("peer_llama_cpp", ["convert", "m3.gguf"]), ("peer_llama_cpp", ["compare", "m3.gguf"]),
        ("peer_llama_cpp", ["dump", "m3.gguf", "out.npz"]),
        ("bench", ["cpu", "--beside", "llama.cpp"]),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_not_installed_is_named_in_one_line(script, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("gguf", "llama_cpp"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    main = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name=script)["main"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    package = "llama-cpp-python" if words[:1] in (["compare"], ["dump"]) else "gguf"
    name = "bench.py cpu" if script == "bench" else script
    assert line.startswith(f"{name}: {package} is not installed") and line.endswith("pip install 'm3jax[llama-cpp]'")
    assert not list(tmp_path.iterdir())


class Recorded:
    """In the place of llama.cpp: 12 tokens in passes of 8 and 4, blocks of 4, of which two are kept for each head."""

    def __init__(self):
        self.passes = [{}]

    def number(self, key: str) -> int:
        return {"attention.indexer.block_size": 4, "attention.indexer.top_k": 2}[key]

    def read(self, tokens, every):
        assert every
        for first, count in ((0, 8), (8, 4)):
            mask = np.full((1, 2, count, 4), -np.inf, np.float32)  # [1 K T M], room for 4 blocks
            mask[0, 0, :, :2] = 0  # the first head keeps blocks 0 and 1, which the first tokens do not see yet
            mask[0, 1, :, [0, first // 4 + (count > 4)]] = 0
            scores = np.full((1, count, 2, 4), -3.4e38, np.float32)
            scores[..., : first // 4 + 1] = first
            self.passes[-1] = {
                "Qcur-1": np.full((1, count, 2, 3), first, np.float32), "msa_bs-1": scores, "msa_block_mask-1": mask,
                "result_output": np.full((1, 1, count, 5), first, np.float32),
            }  # fmt: skip
            self.passes.append({})


def test_a_dump_has_the_tokens_of_all_passes():
    """Passes in a row, blocks out of llama.cpp's mask of them, and no score for a block that nobody sees."""
    found = SCRIPT.values_of(Recorded(), [*range(12)])
    assert {name: array.shape for name, array in found.items()} == {
        "tokens": (12,), "Qcur-1": (12, 2, 3), "msa_bs-1": (12, 2, 3), "msa_blocks-1": (12, 2, 2),
        "result_output": (12, 5),
    }  # fmt: skip
    assert found["result_output"][:, 0].tolist() == [0] * 8 + [8] * 4
    assert found["msa_blocks-1"][:, 0].tolist() == [[0, -1]] * 4 + [[0, 1]] * 8
    assert found["msa_blocks-1"][:, 1].tolist() == [[0, -1]] * 4 + [[0, 1]] * 4 + [[0, 2]] * 4
    assert found["msa_bs-1"][0, 0].tolist() == [0, -np.inf, -np.inf] and found["msa_bs-1"][8, 0].tolist() == [8, 8, 8]
    names = {name: meaning.names for name, meaning in meanings([*found]).items()}
    assert names == {
        "Qcur-1": ("layers.1.q",), "msa_bs-1": ("layers.1.block_scores",), "msa_blocks-1": ("layers.1.blocks",),
        "result_output": ("logits",),
    }  # fmt: skip


def test_a_gguf_file_has_the_models_numbers(tmp_path):
    """By gguf's own reader: llama.cpp's names and shapes, 1 + w in the norms, experts one after the other."""
    gguf = pytest.importorskip("gguf", reason="it reads GGUF files (pip install 'm3jax[test]')")
    model = init(CONFIG, 3)
    written = SCRIPT.convert(model, tmp_path / "m3.gguf")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m3.gguf").tensors}
    assert sorted(tensors) == sorted(written) == expected_names(CONFIG)
    assert {name: array.shape for name, array in tensors.items()} == written
    same = lambda name, expected: np.testing.assert_array_equal(tensors[name], np.asarray(expected), err_msg=name)
    same("token_embd.weight", model.embed_tokens[...])
    stack = model.stacks[1]
    same("blk.2.attn_norm.weight", stack.input_layernorm[1] + 1)
    same("blk.2.attn_q.weight", np.asarray(stack.self_attn.q_proj[1]).transpose(1, 2, 0).reshape(128, 64))
    same("blk.2.attn_output.weight", np.asarray(stack.self_attn.o_proj[1]).reshape(128, 64).T)
    same("blk.3.ffn_down_exps.weight", np.asarray(stack.mlp.experts.down_proj[2]).transpose(0, 2, 1))
    same("blk.3.ffn_gate_exps.weight", np.asarray(stack.mlp.experts.gate_proj[2]).transpose(0, 2, 1))


def test_llama_cpp_has_our_logits_and_greedy_tokens(tmp_path):
    """96 tokens of random ids, 2 of up to 12 blocks kept: prefill in one and in six passes, then decoding.

    Passes of fewer than 64 tokens add up values in float16 in the dense layer. Without flash attention every layer is
    dense, which is what this test must be able to see (T18).
    """
    for name in ("gguf", "llama_cpp"):
        pytest.importorskip(name, reason="llama.cpp is compiled apart (pip install 'm3jax[llama-cpp]')")
    model = init(CONFIG, 3)
    SCRIPT.convert(model, tmp_path / "m3.gguf")
    prompt = np.random.default_rng(5).integers(0, CONFIG.vocab_size, 96).tolist()
    (ours,), (continued,) = SCRIPT.our_logits(model, [prompt]), SCRIPT.our_greedy(model, [prompt], 8)
    errors = {}
    for ubatch, flash_attention in ((128, True), (16, True), (128, False)):
        peer = SCRIPT.LlamaCpp(tmp_path / "m3.gguf", 112, threads=1, ubatch=ubatch, flash_attention=flash_attention)
        theirs = peer.read(prompt, every=True)
        errors[ubatch, flash_attention] = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
        if flash_attention:
            assert peer.greedy(theirs[-1], 8) == continued, ubatch
        peer.close()
    assert errors[128, True] < 5e-4 and errors[16, True] < 5e-3 and errors[128, False] > 0.02, errors


def test_the_table_names_llama_cpps_tensors(tmp_path):
    """A dump by llama.cpp's names leads to the quantities without a map."""
    names = {
        "Qcur": "q",
        "kqv_out": "attention",
        "l_out": "output",
        "msa_blocks": "blocks",
        "ffn_moe_topk": "expert_ids",
    }
    right = golden(only=r"layers\.\d\.(q|attention|output|blocks|expert_ids)$|logits|embedding")
    flat = {name: x if name.endswith("blocks") else x.reshape(88, *x.shape[2:]) for name, x in right.items()}
    theirs = {"tokens": flat["tokens"], "embd": flat["embedding"], "result_output": flat["logits"]}
    for layer in range(3):
        for name, quantity in names.items():
            if (array := flat.get(f"layers.{layer}.{quantity}")) is not None:
                tokens_first = lambda x: x.transpose(0, 2, 1, 3).reshape(88, x.shape[1], -1)  # [B K T J] -> [X K J]
                theirs[f"{name}-{layer}"] = tokens_first(array) if quantity == "blocks" else array
        theirs[f"kqv_out-{layer}"] = theirs[f"kqv_out-{layer}"].reshape(88, -1)
    np.savez(tmp_path / "theirs.npz", **theirs)
    report = compare_sides(str(VECTORS), str(tmp_path / "theirs.npz"), [row.tolist() for row in right["tokens"]])
    assert report.beyond == [] and len(report.compared) == len(theirs) - 1, report
