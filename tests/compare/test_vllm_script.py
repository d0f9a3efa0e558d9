"""scripts/check_vllm_kernels.py with a stand-in for vLLM: right ops agree, a wrong one differs, others are refused."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="vLLM's ops are PyTorch's (pip install 'm3jax[oracle]', CPython 3.11)")
ROOT = Path(__file__).resolve().parents[2]
# One query at a time, from the pages alone; the scores have columns that nobody wrote, and the selection any order.
OPS = {
    "index_topk": """
import torch

def minimax_m3_index_score(idx_q, index_kv_cache, block_table, cu_seqlens_q, seq_lens, prefix_lens, max_seqlen_q):
    heads, size = idx_q.shape[1], index_kv_cache.shape[1]
    out = torch.full((heads, len(idx_q), 16), 1e30)
    for row in range(len(seq_lens)):
        keys = index_kv_cache[block_table[row]].flatten(0, 1).float()
        for t in range(cu_seqlens_q[row], cu_seqlens_q[row + 1]):
            position = int(prefix_lens[row] + t - cu_seqlens_q[row])
            for block in range(position // size + 1):
                seen = keys[block * size : min((block + 1) * size, position + 1)]
                out[:, t, block] = (idx_q[t].float() @ seen.T).amax(-1)
    minimax_m3_index_score.own = [int(prefix_lens[row] + i) // size for row in range(len(seq_lens))
                                  for i in range(cu_seqlens_q[row + 1] - cu_seqlens_q[row])]
    return out

def minimax_m3_index_topk(score, cu_seqlens_q, topk, num_init_blocks, num_local_blocks, max_seqlen_q):
    out = torch.full((score.shape[1], score.shape[0], topk), -1, dtype=torch.int32)
    for t, own in enumerate(minimax_m3_index_score.own):
        for head in range(score.shape[0]):
            ranked = score[head, t, : own + 1].nan_to_num(nan=-1e30)
            ranked[:num_init_blocks] = 1e30
            ranked[max(own + 1 - num_local_blocks, 0) :] = 1e29
            best = ranked.topk(min(topk, own + 1)).indices
            out[t, head, : len(best)] = best.flip(0)
    return out
""",
    "sparse_attn": """
import torch

def minimax_m3_sparse_attn(q, kv_cache, topk_idx, block_table, cu_seqlens_q, seq_lens, prefix_lens, sm_scale, out):
    size, group = kv_cache.shape[2], q.shape[1] // kv_cache.shape[1]
    for row in range(len(seq_lens)):
        for t in range(cu_seqlens_q[row], cu_seqlens_q[row + 1]):
            position = int(prefix_lens[row] + t - cu_seqlens_q[row])
            for head in range(kv_cache.shape[1]):
                blocks = [int(b) for b in topk_idx[t, head] if b >= 0]
                pages = kv_cache[block_table[row][blocks].long(), head].float()
                places = torch.tensor(blocks)[:, None] * size + torch.arange(size)
                kv = pages.flatten(0, 1)[(places <= position).flatten()]
                k, v = kv.chunk(2, -1)
                heads = slice(head * group, (head + 1) * group)
                out[t, heads] = ((q[t, heads].float() @ k.T * sm_scale).softmax(-1) @ v).to(out.dtype)
""",
}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs the script over the stored small vectors, with pages of their blocks, against a package called vllm."""
    script = runpy.run_path(str(ROOT / "scripts" / "check_vllm_kernels.py"), run_name="check_vllm_kernels")
    main = script["main"]
    main.__globals__["PAGE"] = 4

    def run(**sources: str) -> int:
        folder = tmp_path / "vllm" / "models" / "minimax_m3" / "common" / "ops"
        folder.mkdir(parents=True)
        for name, source in (OPS | sources).items():
            (folder / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        return main([str(ROOT / "vectors"), "--out", str(tmp_path / "out"), "--device", "cpu"])

    yield run
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def test_right_ops_agree(check, capsys):
    """Scores, selection in another layout and order, and attention; other cases are left out with a reason."""
    assert check() == 0
    out = capsys.readouterr().out
    assert "selection/lse: left out: " in out and "sparse_attention/unused_slots: left out: " in out
    assert out.splitlines()[-1] == "6 of 6 cases agree (13 outputs compared)", out


def test_a_wrong_op_differs(check, capsys):
    """The own block is forgotten in the choice."""
    assert check(index_topk=OPS["index_topk"].replace("= 1e29", "+= 0")) == 1
    assert "selection/ragged: blocks: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "change", "words"),
    [
        ("index_topk", ("minimax_m3_index_score", "score_of_blocks"), "it has score_of_blocks(idx_q, "),
        ("sparse_attn", ("sm_scale, out", "sm_scale, out, sinks"), "what is sinks?"),
        ("sparse_attn", ("topk_idx, ", ""), "takes no blocks"),
    ],
)
def test_what_is_not_expected_is_refused(check, capsys, module, change, words):
    """Another version of vLLM: one line that says what is there."""
    signature, *body = OPS[module].partition("):\n")
    assert check(**{module: signature.replace(*change) + "".join(body)}) == 2
    streams = capsys.readouterr()
    assert words in streams.err and streams.err.count("\n") == 1, streams.err


def test_without_vllm_one_line(tmp_path, capsys):
    script = runpy.run_path(str(ROOT / "scripts" / "check_vllm_kernels.py"), run_name="check_vllm_kernels")
    assert script["main"](["--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "vLLM is not installed here" in err and not (tmp_path / "out").exists()
