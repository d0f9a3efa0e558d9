"""llama.cpp, an implementation of MiniMax-M3 in C++, beside this package on the CPU (docs/compare.md).

    python scripts/peer_llama_cpp.py convert m3.gguf                # the embedded model; or --model FOLDER
    python scripts/peer_llama_cpp.py compare m3.gguf                # logits of all positions, greedy tokens
    python scripts/peer_llama_cpp.py dump m3.gguf theirs.npz        # named values, for python -m m3jax.compare

Needs `pip install 'm3jax[llama-cpp]'`, which compiles llama.cpp. `--no-flash-attention` and `--ubatch` are
llama.cpp's own settings; without flash attention it runs every layer dense, which is a warning of its log and no error.
"""

import argparse
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

EXTRA = "pip install 'm3jax[llama-cpp]'"
ARCHITECTURE = "minimax-m3"
ERROR = 2

# Every parameter of the text model: the hub's name, llama.cpp's, and what becomes of the values. The hub's axes stay
# as they are, [out, in]; GGUF writes their lengths the other way round. N is the layer and E the expert, and one tensor
# of llama.cpp has all experts of a layer. "+1": llama.cpp's norm multiplies with w, M3's with 1 + w.
TABLE = (
    ("embed_tokens.weight", "token_embd.weight", ""),
    ("norm.weight", "output_norm.weight", "+1"),
    ("lm_head.weight", "output.weight", ""),
    ("layers.N.input_layernorm.weight", "blk.N.attn_norm.weight", "+1"),
    ("layers.N.post_attention_layernorm.weight", "blk.N.ffn_norm.weight", "+1"),
    ("layers.N.self_attn.q_proj.weight", "blk.N.attn_q.weight", ""),
    ("layers.N.self_attn.k_proj.weight", "blk.N.attn_k.weight", ""),
    ("layers.N.self_attn.v_proj.weight", "blk.N.attn_v.weight", ""),
    ("layers.N.self_attn.o_proj.weight", "blk.N.attn_output.weight", ""),
    ("layers.N.self_attn.q_norm.weight", "blk.N.attn_q_norm.weight", "+1"),
    ("layers.N.self_attn.k_norm.weight", "blk.N.attn_k_norm.weight", "+1"),
    ("layers.N.self_attn.index_q_proj.weight", "blk.N.indexer.q_proj.weight", "float32"),
    ("layers.N.self_attn.index_k_proj.weight", "blk.N.indexer.k_proj.weight", "float32"),
    ("layers.N.self_attn.index_q_norm.weight", "blk.N.indexer.q_norm.weight", "+1"),
    ("layers.N.self_attn.index_k_norm.weight", "blk.N.indexer.k_norm.weight", "+1"),
    ("layers.N.mlp.gate_proj.weight", "blk.N.ffn_gate.weight", ""),
    ("layers.N.mlp.up_proj.weight", "blk.N.ffn_up.weight", ""),
    ("layers.N.mlp.down_proj.weight", "blk.N.ffn_down.weight", ""),
    ("layers.N.block_sparse_moe.gate.weight", "blk.N.ffn_gate_inp.weight", "float32"),
    ("layers.N.block_sparse_moe.e_score_correction_bias", "blk.N.exp_probs_b.bias", "float32"),
    ("layers.N.block_sparse_moe.shared_experts.gate_proj.weight", "blk.N.ffn_gate_shexp.weight", ""),
    ("layers.N.block_sparse_moe.shared_experts.up_proj.weight", "blk.N.ffn_up_shexp.weight", ""),
    ("layers.N.block_sparse_moe.shared_experts.down_proj.weight", "blk.N.ffn_down_shexp.weight", ""),
    ("layers.N.block_sparse_moe.experts.E.w1.weight", "blk.N.ffn_gate_exps.weight", ""),
    ("layers.N.block_sparse_moe.experts.E.w3.weight", "blk.N.ffn_up_exps.weight", ""),
    ("layers.N.block_sparse_moe.experts.E.w2.weight", "blk.N.ffn_down_exps.weight", ""),
)
CACHES = {"f32": 0, "f16": 1, "bf16": 30}  # ggml_type
# What a dump keeps of llama.cpp's graph. A name that several tensors of a layer have stays with the last: Qcur after
# norm and RoPE, ffn_gate of the dense MLP or the shared expert.
KEPT = (
    "attn_norm", "Qcur_normed", "Kcur_normed", "Qcur", "Kcur", "Vcur", "msa_bs", "msa_block_mask", "kqv_out", "ffn_inp",
    "ffn_norm", "ffn_moe_logits", "ffn_moe_probs_biased", "ffn_moe_topk", "ffn_moe_weights_norm", "ffn_gate", "ffn_up",
    "ffn_out", "l_out",
)  # fmt: skip
_KEPT = re.compile(rf"(?:{'|'.join(KEPT)})-\d+|embd|inp_embd|result_norm|result_output")
_DTYPES = {0: np.float32, 1: np.float16, 26: np.int32}  # by ggml_type
_NEVER = -1e30  # at and below it a number stands for "not seen": llama.cpp's largest of an empty block is -FLT_MAX


# Conversion


def llama_name(hub_name: str) -> tuple[str, int | None, str] | None:
    """Return llama.cpp's name of a hub tensor, the expert's place in it (None for a whole one) and what it needs.

    Args:
      hub_name: as `m3jax.checkpoint.names.targets` has it; None comes back for a tensor outside the text model.
    """
    for hub, ours, change in TABLE:
        pattern = re.escape(hub).replace(r"\.N\.", r"\.(?P<layer>\d+)\.").replace(r"\.E\.", r"\.(?P<expert>\d+)\.")
        prefix = "language_model." if hub.startswith("lm_head") else "language_model.model."
        if (match := re.fullmatch(re.escape(prefix) + pattern, hub_name)) is not None:
            found = match.groupdict()
            expert = found.get("expert")
            name = ours.replace(".N.", f".{found['layer']}.") if "layer" in found else ours
            return name, None if expert is None else int(expert), change
    return None


def check_config(config: Any) -> int:
    """Return how many layers at the start are dense; raise ValueError for what llama.cpp's M3 does not compute.

    Args:
      config: `m3jax.M3Config`.
    """
    is_dense = [kind == "dense" for kind in config.mlp_layer_types]
    is_full = [kind == "full_attention" for kind in config.layer_types]
    dense = is_dense.index(False) if False in is_dense else len(is_dense)
    wrong = {
        "layers: dense ones first, in attention and MLP alike": is_dense != is_full or any(is_dense[dense:]),
        "swiglu_alpha 1.702, swiglu_limit 7 and swiglu_beta 1":
            (config.swiglu_alpha, config.swiglu_limit, config.swiglu_beta) != (1.702, 7.0, 1.0),
        "index_n_heads = num_key_value_heads": config.index_n_heads != config.num_key_value_heads,
        "shared_intermediate_size: a multiple of intermediate_size":
            config.shared_intermediate_size % config.intermediate_size != 0,
        'index_score_type "max"': config.index_score_type != "max",
        "index_init_blocks 0": config.index_init_blocks != 0,
    }  # fmt: skip
    if unmet := [need for need, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(f"llama.cpp's M3 has other arithmetic than this model: it needs {'; '.join(unmet)}")
    return dense


def convert(
    model: Any, path: Path, dtype: str = "float32", vocabulary: Path | None = None
) -> dict[str, tuple[int, ...]]:
    """Write a model's text part as a GGUF file: token ids in, logits out, and texts where it has a vocabulary.

    Args:
      model: `m3jax.M3` on this process's devices.
      path: of the new file.
      dtype: "float32", or "bfloat16" for all matrices but the router's and the indexer's, which llama.cpp's own
        converter keeps in float32 too.
      vocabulary: folder of a byte-level tokenizer and a chat template, for llama.cpp's server; None writes neither.

    Returns:
      The shape of each tensor in it, [out, in].

    Raises:
      ValueError: the gguf package is not installed, or the model is one that llama.cpp cannot compute.
    """
    gguf = imported("gguf")
    from m3jax.checkpoint import tree
    from m3jax.checkpoint.names import targets

    parameters, written = tree.flatten(model), {}
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    add_config(writer, model.config, gguf)
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(model.config.vocab_size)
    else:
        add_vocabulary(writer, vocabulary, gguf)
    experts: dict[str, list[np.ndarray]] = {}
    for hub_name, target in targets(model.config).items():
        if (found := llama_name(hub_name)) is None:
            continue  # the vision tower, which llama.cpp keeps in a file of its own
        name, expert, change = found
        values = np.asarray(parameters[target.param][target.index], np.float32)  # as the package has its axes
        values = values.transpose(np.argsort(target.perm)).reshape(target.hub_shape)
        if expert is not None:
            experts.setdefault(name, []).append(values)
            if len(experts[name]) < model.config.num_local_experts:
                continue
            values = np.stack(experts.pop(name))  # [E out in]
        values = np.ascontiguousarray(values + 1 if change == "+1" else values)
        written[name] = values.shape
        if dtype == "bfloat16" and values.ndim > 1 and change != "float32":
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def add_config(writer: Any, config: Any, gguf: Any) -> None:
    """Add the numbers of a configuration under llama.cpp's keys; `check_config` says which it has no keys for."""
    dense = check_config(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.dense_intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_count(config.shared_intermediate_size // config.intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    # gguf 0.19 on PyPI is older than M3 in llama.cpp, and has no methods for two of these.
    for key, value in (
        ("head_count", config.index_n_heads), ("key_length", config.index_head_dim),
        ("top_k", config.index_topk_blocks), ("block_size", config.index_block_size),
        ("local_blocks", config.index_local_blocks),
    ):  # fmt: skip
        writer.add_uint32(f"{ARCHITECTURE}.attention.indexer.{key}", value)


def add_vocabulary(writer: Any, folder: Path, gguf: Any) -> None:
    """Add the tokens, merges and chat template of a folder, as llama.cpp's byte-level tokenizer "gpt2" takes them.

    llama.cpp splits a text into words by GPT-2's rule, M3's tokenizer by its own: a few texts get other tokens. No
    token ends an answer, so that each has the length that was asked for.
    """
    import json

    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: token["special"] for token in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    kind = lambda token: gguf.TokenType.CONTROL if added.get(token) else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kind(token) if token in added else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(0)  # the mark of a beginning, which the model never draws
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text(encoding="utf-8"))


# llama.cpp


def imported(name: str) -> Any:
    """Return a module of the extra; raise ValueError that names the extra where it is missing."""
    import importlib

    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # a library that cannot be loaded is a RuntimeError
        package = {"llama_cpp": "llama-cpp-python"}.get(name, name)
        raise ValueError(f"{package} is not installed ({error}): {EXTRA}") from None


class _Tensor(ctypes.Structure):
    """The first fields of a ggml_tensor; name and data are asked for by functions."""

    _fields_ = (
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
    )  # fmt: skip


class LlamaCpp:
    """A GGUF file in llama.cpp, by its C interface, on the CPU.

    Attributes:
      vocab_size: of the model.
      passes: with `keep`, the values by name of each pass through the layers so far.
      log: warnings of llama.cpp, those of all objects; one says that it runs dense, once in a process.
    """

    log: list[str] = []  # noqa: RUF012  (llama.cpp has one log)
    _on_log: Any = None

    def __init__(
        self, path: Path, length: int, *, threads: int, ubatch: int = 512, flash_attention: bool = True,
        cache: str = "f32", keep: bool = False,
    ):  # fmt: skip
        """Load a file and make room for one sequence.

        Args:
          path: of the GGUF file.
          length: tokens of prompt and continuation, at most.
          threads: of prefill and decode alike.
          ubatch: tokens of one pass through the layers; a prompt is given whole.
          flash_attention: llama.cpp has MSA with it alone.
          cache: dtype of keys and values, "f32", "f16" or "bf16".
          keep: True to collect values in `found`, which takes time.

        Raises:
          ValueError: llama-cpp-python is not installed, or refuses the file.
        """
        self._lib = lib = imported("llama_cpp").llama_cpp
        self.passes: list[dict[str, np.ndarray]] = [{}]
        if LlamaCpp._on_log is None:  # kept, for llama.cpp calls it as long as the process lives
            LlamaCpp._on_log = lib.llama_log_callback(_take_log)
            lib.llama_log_set(self._on_log, ctypes.c_void_p(0))
            lib.llama_backend_init()
        settings = lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}: {' '.join(self.log)[-300:]}")
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = length, length, ubatch, 1
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = int(flash_attention)
        options.type_k = options.type_v = CACHES[cache]
        options.no_perf = True
        if keep:
            self._base = _ggml_base(lib)
            self._on_value = lib.ggml_backend_sched_eval_callback(self._take_value)
            options.cb_eval = self._on_value
        self._context = lib.llama_init_from_model(self._model, options)
        if not self._context:
            raise ValueError(f"llama.cpp makes no context for {path}: {' '.join(self.log)[-300:]}")
        self._batch = lib.llama_batch_init(length, 0, 1)
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._past = 0

    def read(self, tokens: Sequence[int], every: bool = False) -> np.ndarray:
        """Read tokens behind those read so far; return the logits of the last one [V], or of every one [T V]."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self._past + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = every or i == count - 1
        if (status := self._lib.llama_decode(self._context, batch)) != 0:
            raise ValueError(f"llama_decode of {count} tokens behind {self._past} gives {status}: {self.log[-1:]}")
        self._past += count
        logits = self._lib.llama_get_logits(self._context)
        rows = count if every else 1
        out = np.ctypeslib.as_array(logits, shape=(rows, self.vocab_size)).copy()
        return out if every else out[0]

    def greedy(self, logits: np.ndarray, count: int) -> list[int]:
        """Return the next tokens, each the most probable one, given the logits of the last token read."""
        tokens: list[int] = []
        for _ in range(count):
            tokens.append(int(logits.argmax()))
            logits = self.read(tokens[-1:])
        return tokens

    def forget(self) -> None:
        """Forget all tokens."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)
        self._past = 0

    def close(self) -> None:
        """Free the memory of the model and its cache."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def number(self, key: str) -> int:
        """Return an integer of the file's configuration, by llama.cpp's key without the architecture."""
        text = ctypes.create_string_buffer(64)
        if self._lib.llama_model_meta_val_str(self._model, f"{ARCHITECTURE}.{key}".encode(), text, len(text)) < 0:
            raise ValueError(f"the GGUF file has no {ARCHITECTURE}.{key}")
        return int(text.value)

    def _take_value(self, address: int, ask: bool, _: Any) -> bool:
        """Answer llama.cpp whether it shall stop behind a tensor, and then copy it."""
        name = self._base.ggml_get_name(address).decode(errors="replace")
        if not _KEPT.fullmatch(name):
            return not ask  # True here lets the rest of the graph go on
        if not ask:
            tensor = _Tensor.from_address(address)
            raw = np.empty(self._base.ggml_nbytes(address), np.uint8)
            self._base.ggml_backend_tensor_get(address, raw.ctypes.data, 0, raw.nbytes)
            if tensor.type not in _DTYPES:  # no exception: nobody would catch it in llama.cpp
                self.log.append(f"{name} has ggml_type {tensor.type}, which is not read here")
                return False
            dtype = _DTYPES[tensor.type]
            values = np.lib.stride_tricks.as_strided(raw.view(dtype), tensor.ne[::-1], tensor.nb[::-1]).copy()
            self.passes[-1][name] = values
            if name == "result_output":  # the last of a pass
                self.passes.append({})
        return True


def _take_log(level: int, text: bytes, _: Any) -> None:
    """Keep a warning or an error of llama.cpp."""
    if level in (3, 4):  # GGML_LOG_LEVEL_WARN, _ERROR; 2 is INFO, 5 continues a line
        LlamaCpp.log.append(text.decode(errors="replace").strip())


def _ggml_base(lib: Any) -> ctypes.CDLL:
    """Return ggml's library of tensors, which stands beside llama.cpp's."""
    folder = Path(lib.__file__).parent / "lib"
    (path, *_) = sorted(folder.glob("*ggml-base*"))
    base = ctypes.CDLL(str(path))
    base.ggml_get_name.argtypes, base.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
    base.ggml_nbytes.argtypes, base.ggml_nbytes.restype = [ctypes.c_void_p], ctypes.c_size_t
    base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    base.ggml_backend_tensor_get.restype = None
    return base


def values_of(peer: LlamaCpp, tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """Return what one run of a prompt computed, by llama.cpp's names, in the form that `m3jax.compare` reads.

    Args:
      peer: with `keep`, and nothing read.
      tokens: of the prompt.

    Returns:
      Arrays with the prompt's tokens on the first axis: "tokens", the graph's values, "msa_bs-N" with -inf for a block
      without a token that is seen, and "msa_blocks-N", ids ascending and then -1, out of the graph's mask of blocks.
    """
    peer.passes = [{}]
    peer.read(tokens, every=True)
    size, slots = peer.number("attention.indexer.block_size"), peer.number("attention.indexer.top_k")
    blocks = -(-len(tokens) // size)
    pieces: dict[str, list[np.ndarray]] = {}
    first = 0
    for one in peer.passes[:-1]:
        count = one["result_output"].shape[-2]
        for name, values in one.items():
            kind = name.rpartition("-")[0] or name
            if kind == "msa_block_mask":
                mask = np.moveaxis(values[0], 0, 1)  # [K T M] -> [T K M]
                own = np.arange(first, first + count) // size
                name = name.replace("msa_block_mask", "msa_blocks")
                values = _ids((mask == 0) & (np.arange(mask.shape[-1]) <= own[:, None, None]), slots)
            elif kind == "msa_bs":
                if count == 1:
                    raise ValueError(
                        "a pass of one token, whose blocks have no name in llama.cpp: give another --ubatch"
                    )
                values = values.reshape(count, *values.shape[-2:])[..., :blocks]  # [T K M]
                values = np.where(values <= _NEVER, -np.inf, values)
                unseen = [(0, 0), (0, 0), (0, blocks - values.shape[-1])]
                values = np.pad(values, unseen, constant_values=-np.inf)
            else:
                rank = 3 if kind[0] in "QKV" else 2
                values = values.reshape(values.shape[-rank:])
            pieces.setdefault(name, []).append(values)
        first += count
    return {"tokens": np.array(tokens, np.int32), **{name: np.concatenate(parts) for name, parts in pieces.items()}}


def _ids(is_kept: np.ndarray, slots: int) -> np.ndarray:
    """Return the indices of True along the last axis, ascending and then -1: [T K M] -> [T K J]."""
    order = np.argsort(~is_kept, axis=-1, kind="stable")[..., :slots]
    ids = np.where(np.take_along_axis(is_kept, order, -1), order, -1)
    return np.pad(ids, [(0, 0), (0, 0), (0, slots - ids.shape[-1])], constant_values=-1).astype(np.int32)


# Comparison


def prompts_of(lengths: Sequence[int], vocab_size: int, is_embedded: bool) -> list[list[int]]:
    """Return prompts of these lengths: held-out code for the embedded model, random ids for another."""
    rng = np.random.default_rng(31)
    if not is_embedded:
        return [rng.integers(2, vocab_size, length).tolist() for length in lengths]
    from tiny.corpus import Corpus

    from m3jax.assets import embedded_path
    from m3jax.text import Tokenizer

    corpus = Corpus.build(Tokenizer.from_pretrained(embedded_path()), "validation")
    starts = [corpus.draw_start(rng, length) for length in lengths]
    return [corpus.tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]


def our_logits(model: Any, prompts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
    """Yield the logits [T V] of each prompt; all are padded to one length, so that one program is compiled."""
    import jax
    import jax.numpy as jnp

    run = jax.jit(lambda model, tokens, lengths: model(tokens, lengths=lengths)[0])
    longest = max(map(len, prompts))
    for prompt in prompts:
        tokens = np.zeros((1, longest), np.int32)
        tokens[0, : len(prompt)] = prompt
        yield np.asarray(run(model, jnp.asarray(tokens), jnp.array([len(prompt)])))[: len(prompt)]


def our_greedy(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the next `count` tokens of each prompt, each the most probable one, by the engine."""
    from m3jax.decoding import Params, Sampling, engine_for

    params = Params(max_new_tokens=count, sampling=Sampling.greedy(), stop_ids=())
    engine = engine_for(model, prompts, [params] * len(prompts), progress=False)
    handles = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    return [list(engine.result(handle).tokens) for handle in handles]


def run_convert(args: argparse.Namespace) -> None:
    """Write the GGUF file."""
    imported("gguf")
    folder = args.model
    if args.vocabulary and folder is None:
        from m3jax.assets import embedded_path

        folder = embedded_path()
    written = convert(loaded(args.model), args.file, args.dtype, folder if args.vocabulary else None)
    size = args.file.stat().st_size
    print(f"{args.file}: {len(written)} tensors, {sum(map(np.prod, written.values())):,} numbers, {size:,} bytes")


def run_compare(args: argparse.Namespace) -> None:
    """Print, for each prompt, how far llama.cpp's logits and greedy tokens are from ours."""
    peer = opened(args, max(args.lengths) + args.new_tokens)
    prompts = prompts_of(args.lengths, peer.vocab_size, args.model is None)
    model = loaded(args.model)
    continued = our_greedy(model, prompts, args.new_tokens)
    print(f"{'tokens':>6s}  {'argmax equal':>14s}  {'relative error':>14s}  {'largest':>8s}  greedy tokens equal")
    positions = equal = 0
    for prompt, ours, tokens in zip(prompts, our_logits(model, prompts), continued, strict=True):
        peer.forget()
        theirs = peer.read(prompt, every=True)
        same = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        error = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
        found = peer.greedy(theirs[-1], args.new_tokens)
        parts = next((i for i, pair in enumerate(zip(tokens, found, strict=True)) if pair[0] != pair[1]), len(found))
        counts = f"{same} of {len(prompt)}"
        largest = np.abs(theirs - ours).max()
        print(f"{len(prompt):6d}  {counts:>14s}  {error:14.1e}  {largest:8.1e}  the first {parts} of {len(found)}")
        positions, equal = positions + len(prompt), equal + same
    print(f"{positions:,} positions, argmax equal in {equal:,} ({positions - equal:,} differ)")
    report_log(peer)


def run_dump(args: argparse.Namespace) -> None:
    """Write the values of one prompt."""
    peer = opened(args, args.tokens, keep=True)
    (prompt,) = prompts_of([args.tokens], peer.vocab_size, args.model is None)
    arrays = values_of(peer, prompt)
    np.savez(args.out, **arrays)
    print(f"{args.out}: {len(arrays)} arrays of {len(prompt)} tokens, in {len(peer.passes) - 1} passes")
    report_log(peer)


def loaded(folder: Path | None) -> Any:
    """Return the model of a folder in float32; the embedded one for None."""
    import m3jax
    from m3jax.assets import embedded_path

    return m3jax.load(embedded_path() if folder is None else folder, dtype="float32", progress=False)


def opened(args: argparse.Namespace, length: int, keep: bool = False) -> LlamaCpp:
    """Return the model of the command line's file, under its settings."""
    return LlamaCpp(
        args.file, length, threads=2, ubatch=args.ubatch, flash_attention=args.flash_attention, keep=keep,
    )  # fmt: skip


def report_log(peer: LlamaCpp) -> None:
    """Print what llama.cpp warned of, but for the tokens without text, which every such file has."""
    for line in peer.log:
        if "DENSE" in line:
            print(f"llama.cpp: {line}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line's arguments."""
    out = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = out.add_subparsers(required=True, metavar="COMMAND")
    about: dict[str, tuple[Callable[[argparse.Namespace], None], str]] = {
        "convert": (run_convert, "write a model's text part as GGUF"),
        "compare": (run_compare, "logits of all positions and greedy tokens beside ours, float32"),
        "dump": (run_dump, "named values of one prompt, as .npz"),
    }
    for name, (run, text) in about.items():
        one = commands.add_parser(name, help=text, description=text)
        one.set_defaults(run=run)
        one.add_argument("file", type=Path, help="the GGUF file")
        if name == "dump":
            one.add_argument("out", type=Path, help="the .npz file to write")
        one.add_argument("--model", type=Path, help="the hub folder that is, or becomes, the file (default: embedded)")
        if name == "convert":
            one.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
            one.add_argument("--vocabulary", action="store_true", help="with tokens and chat template, for a server")
            continue
        if name == "compare":
            one.add_argument("--lengths", type=int, nargs="+", default=[200, 500, 1000, 2000, 4000])
            one.add_argument("--new-tokens", type=int, default=64)
        else:
            one.add_argument("--tokens", type=int, default=1000)
        one.add_argument("--ubatch", type=int, default=512, help="tokens of a pass (default: 512, llama.cpp's)")
        one.add_argument("--no-flash-attention", dest="flash_attention", action="store_false")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return 2 after an error, which is one line on stderr."""
    args = parser().parse_args(argv)
    try:
        args.run(args)
    except ValueError as error:
        print(f"peer_llama_cpp: {error}", file=sys.stderr)
        return ERROR
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # beside llama.cpp on the CPU
    sys.exit(main())
