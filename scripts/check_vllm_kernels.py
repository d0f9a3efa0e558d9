"""Runs vLLM's Triton ops for MiniMax-M3 over golden vectors, on a GPU machine where vLLM's wheel is installed.

    python scripts/check_vllm_kernels.py --out DIR [FOLDER]

FOLDER has golden vectors of the groups selection and sparse_attention with blocks of 128; by default those of
`python -m m3jax.vectors make --large` are made. What the ops give is written to DIR in the vectors' layout, and held
against them as `vectors/check_numpy.py FOLDER DIR --dtype bfloat16` does, whose report and exit status these are: 0
agree, 1 differ, 2 nothing could be checked.

Nobody has run this against vLLM yet. `OPS` says which functions are called and by what names their arguments may go:
those of vLLM's sources of autumn 2026, where a cache is [pages, KV heads, 128, 2 x 128] (earlier versions had K and V
on an axis of their own, and refuse it). A function that is not there or takes something else is refused with a list
of what is there: correct `OPS` then.
"""

import argparse
import importlib
import importlib.util
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PAGE = 128  # tokens of a page and of a block: vLLM has no other


class Op(NamedTuple):
    """A function of vLLM: where it should be, what it should be called, and what it must be given."""

    module: str
    names: tuple[str, ...]
    needs: tuple[str, ...]


_OPS = "vllm.models.minimax_m3.common.ops."
_WHERE = ("block_table", "cu_seqlens", "seq_lens")
OPS = {
    # [heads, tokens, blocks] float32: the largest product, without a scale; columns behind the own block hold anything.
    "score": Op(_OPS + "index_topk", ("minimax_m3_index_score",), ("index_q", "index_cache", *_WHERE)),
    # [heads, tokens, top_k] or [tokens, heads, top_k] int32, in any order, then -1.
    "topk": Op(_OPS + "index_topk", ("minimax_m3_index_topk",), ("scores", "cu_seqlens", "top_k")),
    # [tokens, query heads, 128] of a cache [pages, KV heads, 128, 2 * 128] with K before V.
    "attend": Op(_OPS + "sparse_attn", ("minimax_m3_sparse_attn",), ("q", "kv_cache", "blocks", *_WHERE)),
}
SPELLINGS = {
    "index_q": ("index_q", "idx_q", "q"), "q": ("q", "query"), "index_cache": ("index_cache", "index_kv_cache",
    "index_k_cache", "idx_k_cache", "k_cache", "kv_cache"), "kv_cache": ("kv_cache",), "scores": ("scores", "score"),
    "blocks": ("topk_idx", "topk_indices", "topk_ids", "block_indices"), "block_table": ("block_table", "block_tables"),
    "cu_seqlens": ("cu_seqlens_q", "query_start_loc", "cu_seqlens"), "seq_lens": ("seq_lens", "kv_lens"),
    "prefix_lens": ("prefix_lens", "context_lens"), "max_query_len": ("max_query_len", "max_seqlen_q"),
    "max_seq_len": ("max_seq_len", "max_seqlen_k"), "top_k": ("topk", "top_k", "topk_blocks"),
    "block_size": ("block_size", "page_size"), "init_blocks": ("init_blocks", "num_init_blocks"),
    "local_blocks": ("local_blocks", "num_local_blocks"), "num_kv_heads": ("num_kv_heads",),
    "scale": ("scale", "sm_scale", "softmax_scale"), "out": ("out", "output"),
}  # fmt: skip


def find(op: Op) -> Any:
    """The function, or ValueError with what the module has in its place."""
    try:
        module = importlib.import_module(op.module)
    except ImportError as error:
        raise ValueError(f"vLLM has no {op.module} ({error}); another version than OPS was written for") from None
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    for name in op.names:
        if name in functions:
            return functions[name]
    found = ", ".join(f"{name}{inspect.signature(value)}" for name, value in functions.items()) or "no function"
    raise ValueError(f"{op.module} has none of {', '.join(op.names)}; it has {found}")


def call(op: Op, values: dict[str, Any]) -> Any:
    """The function's result for the arguments that its signature asks for, each by a spelling of its role."""
    function, arguments, roles = find(op), {}, set()
    signature = inspect.signature(function)
    # Its own needs first: "q" is the index queries' name in one op, the queries' in another.
    order = [*op.needs, *(role for role in SPELLINGS if role not in op.needs)]
    for name, parameter in signature.parameters.items():
        role = next((role for role in order if name in SPELLINGS[role] and role in values), None)
        if role is not None:
            arguments[name] = values[role]
            roles.add(role)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD,
        ):  # fmt: skip
            raise ValueError(f"{function.__name__}{signature}: what is {name}? OPS and SPELLINGS do not say")
    if missing := [role for role in op.needs if role not in roles]:
        raise ValueError(f"{function.__name__}{signature}: takes no {missing[0]} by a name that SPELLINGS has")
    result = function(**arguments)
    result = result[0] if isinstance(result, tuple) else result
    if result is None and "out" in roles:
        return values["out"]
    if result is None:
        raise ValueError(f"{function.__name__}{signature}: it returned nothing, and takes no out")
    return result


def tokens_of(x: dict) -> np.ndarray:
    """Return True for each query that is no padding: [B T]."""
    return (x["positions"] >= 0) & (x["positions"] < x["lengths"][:, None])


def why_not(case: dict, x: dict, cut: tuple[np.ndarray, np.ndarray]) -> str | None:
    """Return why a case cannot be given to vLLM; None if it can. `cut` are the scores on the cut's two sides."""
    if (np.isfinite(cut[0]) & (cut[0] == cut[1])).any():
        return "equal scores at the cut, of which vLLM keeps any"
    if case["rule"].get("block_size") != PAGE or case["rule"].get("score", "max") != "max":
        return f"blocks of {case['rule'].get('block_size')} and score {case['rule'].get('score', 'max')}"
    if "index_q" not in x or "given_blocks" in x:
        return "it starts from scores or blocks"
    is_token = tokens_of(x)
    counts = is_token.sum(1)
    last = x["lengths"][:, None] - counts[:, None] + np.arange(is_token.shape[1])
    if (x["positions"] != last)[is_token].any() or (is_token != (np.arange(is_token.shape[1]) < counts[:, None])).any():
        return "queries that are not their rows' last tokens"
    return None


def outputs(case: dict, x: dict, torch: Any, device: str) -> dict[str, np.ndarray]:
    """block_scores, blocks and, where there are queries, out: by vLLM's ops over shuffled pages."""
    from m3jax.compare.layouts import Rows, aligned
    from m3jax.compare.quantities import quantity

    rows, heads = len(x["index_q"]), x["index_q"].shape[2]
    is_token = tokens_of(x)
    counts = is_token.sum(1)
    pages = -(-x["index_k"].shape[1] // PAGE)
    table = np.random.default_rng(0).permutation(rows * pages).reshape(rows, pages)

    def tensor(array):
        return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(device, torch.bfloat16)

    def paged(keys):  # [B S ...] -> [pages P ...], what no row has left at 0
        padded = np.zeros((rows, pages * PAGE, *keys.shape[2:]), np.float32)
        for row, length in enumerate(x["lengths"]):
            padded[row, :length] = keys[row, :length]
        pool = np.empty((rows * pages, PAGE, *keys.shape[2:]), np.float32)
        pool[table.reshape(-1)] = padded.reshape(rows * pages, PAGE, *keys.shape[2:])
        return pool

    integers = lambda array: torch.tensor(np.asarray(array).tolist(), dtype=torch.int32, device=device)
    values = {
        "index_q": tensor(x["index_q"][is_token]), "index_cache": tensor(paged(x["index_k"])),
        "block_table": integers(table), "cu_seqlens": integers([0, *np.cumsum(counts)]), "num_kv_heads": heads,
        "seq_lens": integers(x["lengths"]), "prefix_lens": integers(x["lengths"] - counts),
        "max_query_len": int(counts.max()),
        "max_seq_len": int(x["lengths"].max()), "top_k": case["rule"]["top_k"], "block_size": PAGE,
        "init_blocks": case["rule"].get("init_blocks", 0), "local_blocks": case["rule"].get("local_blocks", 1),
    }  # fmt: skip
    values["scores"] = call(OPS["score"], values)
    values["blocks"] = call(OPS["topk"], values)
    where = Rows(is_token, np.argwhere(is_token))
    host = lambda y: y.float().cpu().numpy()

    def by_row(kind, array, filler, axes=None):  # however it lies -> [X K ...] -> [B K T ...]
        lying = aligned(quantity(f"layers.0.{kind}"), [array], where, {"K": heads}, axes)
        out = np.full((*is_token.shape, *lying.shape[1:]), filler, lying.dtype)
        out[is_token] = lying
        return out.swapaxes(1, 2)

    own = np.where(is_token, x["positions"] // PAGE, -1)
    visible = np.arange(pages) <= own[:, None, :, None]
    scores = by_row("block_scores", host(values["scores"]), -np.inf, "K X M")[..., :pages]
    found = {"block_scores": np.where(visible, scores, -np.inf).astype(np.float64)}
    found["blocks"] = by_row("blocks", values["blocks"].cpu().numpy(), -1).astype(np.int32)
    if "q" in x:
        kv = np.concatenate([paged(x["k"]), paged(x["v"])], axis=-1).swapaxes(1, 2)  # [pages K P 2H]
        q = tensor(x["q"][is_token])
        values |= {"q": q, "kv_cache": tensor(kv), "scale": x["q"].shape[-1] ** -0.5, "out": torch.empty_like(q)}
        found["out"] = np.zeros(x["q"].shape)
        found["out"][is_token] = host(call(OPS["attend"], values)).reshape(len(q), *x["q"].shape[2:])
    return found


def run(args: argparse.Namespace) -> int:
    """Check what can be checked."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed here (pip install vllm, on a GPU machine): nothing was checked")
    torch = importlib.import_module("torch")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no GPU that PyTorch can use: vLLM's Triton ops need one, and nothing was checked")
    from m3jax.files.tensors import packed
    from m3jax.vectors.files import read_case, read_manifest
    from m3jax.vectors.making import make

    folder = args.folder
    if folder is None:
        folder = args.out / "vectors"
        make(folder, ["selection", "sparse_attention"], large=True)
    checked = 0
    for case in read_manifest(folder)["cases"]:
        if case["group"] not in ("selection", "sparse_attention"):
            continue
        arrays, _ = read_case(folder, case)
        given = {name: array for name, array in arrays.items() if case["tensors"][name]["role"] == "input"}
        x = {name: y if y.dtype.kind in "iub" else y.astype(np.float32) for name, y in given.items()}
        cut = arrays.get("last_kept", np.array(np.nan)), arrays.get("first_dropped", np.array(np.nan))
        if reason := why_not(case, x, cut):
            print(f"{case['group']}/{case['name']}: left out: {reason}")
            continue
        file = args.out / "outputs" / case["file"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(packed(outputs(case, x, torch, args.device)))
        checked += 1
    if not checked:
        raise ValueError(f"{folder}: no case that vLLM's ops can be given")
    sys.path.insert(0, str(ROOT / "vectors"))
    try:
        check = runpy.run_path(str(ROOT / "vectors" / "check_numpy.py"))["main"]
        return check([str(folder), str(args.out / "outputs"), "--dtype", "bfloat16"])
    finally:
        sys.path.remove(str(ROOT / "vectors"))


def main(argv=None) -> int:
    """Run the command line; every refusal is one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", nargs="?", help="of golden vectors (default: made)")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="a folder for what the ops give")
    parser.add_argument("--device", default="cuda", help="as PyTorch names it (default: cuda)")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"check_vllm_kernels: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
