"""Dense models with grouped-query attention, as other projects train them: read as an M3 with a new index branch.

M3's layer is such a model's layer where three of its settings have other values: an MLP whose `up` is not shifted
(`swiglu_beta` 0), whose gate is not steepened (`swiglu_alpha` 1), and whose hidden values are not clamped. Qwen3 is
that: its queries and keys have a norm per head, as M3's have. A Llama's have none; it is read in units in which M3's
norms of heads are linear (`m3jax.train.units`). What is read so computes the same logits as the source, as long as
every block is selected.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Float

from m3jax import config_keys as keys
from m3jax.checkpoint import LoadReport, tree
from m3jax.checkpoint.loading import read_parameters
from m3jax.checkpoint.names import Part, Target, canonical, targets
from m3jax.checkpoint.plan import Source
from m3jax.checkpoint.reader import FLOATS, CheckpointError, StoredTensor, read_folder
from m3jax.config import DENSE_MLP, FULL, SPARSE, M3Config
from m3jax.files import SINGLE_NAME, current_file, read_json, replace_file
from m3jax.files.tensors import packed
from m3jax.messages import listed, printable, shown
from m3jax.model import M3, abstract, shardings
from m3jax.parallel import as_mesh, put
from m3jax.train.units import LARGE_UNIT, WRITERS, stream_unit

QWEN3, LLAMA = "qwen3", "llama"  # model_type of what can be converted
INDEX = ".index_"  # in the names of the index branch's parameters, and in no others

# What an M3 cannot be made of, and why not.
_OTHERS = {
    "mistral": 'its attention may slide; if its sliding_window is null it is a Llama: write model_type "llama"',
    "qwen2": "its queries and keys have biases, and no matrix of M3 adds the like behind its norms",
    "phi3": "its projections are stored joined",
    "olmo2": "its norms stand behind attention and MLP, and M3's before them",
    "gemma2": "its MLP is a GELU, its logits are capped, and it has norms behind attention and MLP",
    "gemma3_text": "its MLP is a GELU, and it has norms behind attention and MLP",
    "qwen3_moe": "its router is a softmax without a bias, and M3's a sigmoid with one",
    "mixtral": "its router is a softmax without a bias, and M3's a sigmoid with one",
    "gpt_oss": "its attention has sinks and biases, and M3's has neither",
    **dict.fromkeys(keys.MODEL_TYPES, "it is an M3 already: `python -m m3jax.train sft --index-loss 1` trains it"),
}
_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings",
)  # fmt: skip
# Keys with the values that M3's layer can have; an absent key means the first.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
}
_FIXED_IN_LLAMA: dict[str, tuple[Any, ...]] = {"mlp_bias": (False,), "sliding_window": (None,)}
_READ = {
    *_SIZES, *_FIXED, "rms_norm_eps", "rope_theta", "rope_parameters", "layer_types", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "model_type",
}  # fmt: skip
# Where use_sliding_window is false; how a Llama's products were once split.
_WITHOUT_MEANING = {QWEN3: {"sliding_window", "max_window_layers"}, LLAMA: {"pretraining_tp"}}
# Below it a Llama's eps in the large unit is not far enough above the squares of its queries and keys.
_LEAST_EPS = 1e-7
_OF_HEADS = ("q_norm", "k_norm")  # norms that a Llama does not have
_NORMS = "norm"  # in the names of weights that a norm multiplies with, which M3 stores less 1


def dense_config(
    data: Mapping[str, Any],
    *,
    block_size: int = 128,
    topk_blocks: int = 16,
    index_dim: int | None = None,
    dense_layers: int = 0,
) -> M3Config:
    """Return the configuration of the M3 that a dense model becomes.

    Args:
      data: the parsed config.json of a Qwen3 or a Llama.
      block_size: P.
      topk_blocks: J, the blocks that a query keeps.
      index_dim: I, width of an index head; head_dim by default. All dims of it that a head rotates are rotated.
      dense_layers: the first layers, which go on attending to every block; M3 has 3.

    Raises:
      ValueError: another architecture, with what M3 lacks for it; a key that is missing, unknown, or has a value that
        M3 cannot have.
    """
    kind = data.get("model_type")
    if kind not in (QWEN3, LLAMA):
        why = _OTHERS.get(kind, "no one has shown that M3's layer can compute it")
        raise ValueError(f"model_type = {shown(kind)} cannot become an MSA model: {why}; give a Qwen3 or a Llama "
                         f"(model_type {QWEN3!r} or {LLAMA!r})")  # fmt: skip
    fixed = _FIXED if kind == QWEN3 else _FIXED | _FIXED_IN_LLAMA
    if kind == LLAMA:
        data = _with_defaults_of_llama(data)
    is_integer = lambda value: isinstance(value, int) and not isinstance(value, bool)
    problems = [f"{name} is missing" for name in (*_SIZES, "rms_norm_eps") if data.get(name) is None]
    problems += [
        f"{name} = {shown(data[name])}: must be a positive integer"
        for name in _SIZES
        if data.get(name) is not None and not (is_integer(data[name]) and data[name] > 0)
    ]
    ends = data.get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(map(is_integer, ends)):
        problems.append(f"eos_token_id = {shown(data['eos_token_id'])}: must be an integer or a list of them")
    problems += [
        f"{name} = {shown(data[name])} is not supported (only {' or '.join(map(repr, allowed))})"
        for name, allowed in fixed.items()
        if name in data and data[name] not in allowed
    ]
    if any(kind != FULL for kind in data.get("layer_types") or ()):
        problems.append(f"layer_types = {shown(data['layer_types'])}: only {FULL!r} is supported")
    rope = data.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", "default") != "default" or (
        set(rope) - {"rope_type", "rope_theta", "partial_rotary_factor"} or rope.get("partial_rotary_factor", 1) != 1
    ):  # fmt: skip
        problems.append(f"rope_parameters = {shown(rope)} is not supported (only all dims, and no scaling)")
    elif (theta := rope.get("rope_theta", data.get("rope_theta"))) is None:
        problems.append("rope_theta is missing")
    eps = data.get("rms_norm_eps")
    least = _LEAST_EPS if kind == LLAMA else keys.SMALLEST_REAL
    if eps is not None and not (isinstance(eps, float) and least <= eps <= 1):
        problems.append(f"rms_norm_eps = {shown(eps)}: must be a number from {least:g} to 1 in a {kind}")
    unknown = sorted(set(data) - _READ - set(fixed) - _WITHOUT_MEANING[kind] - keys.HARMLESS)
    problems += [f"unknown key {shown(key)}: remove it if it does not change the arithmetic" for key in unknown]
    if problems:
        raise ValueError("this model cannot become an MSA model: " + listed(problems))
    layers, hidden = data["num_hidden_layers"], data["intermediate_size"]
    eps = eps if kind == QWEN3 else eps * LARGE_UNIT**2
    if not 0 <= dense_layers <= layers:
        raise ValueError(f"dense_layers = {dense_layers}: the model has {layers} layers")
    return M3Config(
        **{name: data[name] for name in _SIZES if name != "intermediate_size"},
        dense_intermediate_size=hidden, rms_norm_eps=eps, rope_theta=theta,
        rotary_dim=data["head_dim"], swiglu_alpha=1.0, swiglu_beta=0.0, swiglu_limit=keys.LARGEST_REAL,
        layer_types=(FULL,) * dense_layers + (SPARSE,) * (layers - dense_layers), mlp_layer_types=(DENSE_MLP,) * layers,
        # Of experts, which no layer has.
        intermediate_size=hidden, shared_intermediate_size=hidden, num_local_experts=1, num_experts_per_tok=1,
        index_n_heads=data["num_key_value_heads"], index_head_dim=data["head_dim"] if index_dim is None else index_dim,
        index_block_size=block_size, index_topk_blocks=topk_blocks, bos_token_id=data.get("bos_token_id"),
        eos_token_id=tuple(ends),
    )  # fmt: skip


def _with_defaults_of_llama(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Llama's config.json with the sizes that it may leave out: of a head, and as many KV heads as heads."""
    heads, width, out = data.get("num_attention_heads"), data.get("hidden_size"), dict(data)
    if data.get("head_dim") is None and all(isinstance(n, int) and n > 0 for n in (heads, width)):
        out["head_dim"] = width // heads
    if data.get("num_key_value_heads") is None and heads is not None:
        out["num_key_value_heads"] = heads
    return out


def read_dense(folder: str | Path, seed: int = 0, mesh: Mesh | str | None = None, **settings: Any) -> M3:
    """Read a dense model's folder as an M3 with float32 weights, whose index branch is not trained yet.

    An index query begins as the mean of its group's queries, the index key as the mean of all keys, with the norms of
    the heads: of one head that is the head itself, of several a far better guess than chance (docs/training.md).

    Args:
      folder: of a Qwen3 or a Llama, in the hub's layout.
      seed: of the index branch's projections where its heads are wider than the model's, so that there is no mean to
        begin with: normal with standard deviation D**-0.5.
      mesh: devices to divide the model over, as in `m3jax.load`; each process reads what its devices hold.
      **settings: of `dense_config`.

    Returns:
      The model. Where every block is selected, or under `with_dense`, its logits are the source's.

    Raises:
      ValueError: as `dense_config`; a folder without a config.json or weights; tensors that are missing, unexpected, of
        another shape or no floats, all of them in one error; a mesh that does not divide the model.
    """
    return read_dense_with_report(folder, seed, mesh, **settings)[0]


def read_dense_with_report(
    folder: str | Path, seed: int = 0, mesh: Mesh | str | None = None, **settings: Any
) -> tuple[M3, LoadReport]:
    """Read a dense model's folder as `read_dense` does, and report which bytes were read.

    Args:
      folder, seed, mesh, settings: as in `read_dense`.

    Returns:
      The model and the report.

    Raises:
      ValueError: as `read_dense`.
    """
    folder, mesh = Path(folder), as_mesh(mesh)
    source = _read_config(folder)
    config = dense_config(source, **settings)
    stored = read_folder(folder)
    by_name = {canonical(name)[0]: tensor for name, tensor in stored.tensors.items() if "rotary_emb" not in name}
    if source.get("tie_word_embeddings", False):
        by_name.setdefault("language_model.lm_head.weight", by_name.get("language_model.model.embed_tokens.weight"))
    places = _places(config)
    problems = [*stored.problems]
    if not problems:
        problems += _misfits(by_name, places)
    if problems:
        raise CheckpointError(folder, problems)
    template, where = abstract(config, "float32", mesh), shardings(config, mesh)
    sources = ((target, Source(by_name[name], None, Part(name))) for name, target in places.items())
    report = LoadReport()
    weights = read_parameters(template, where, sources, report.bytes_read)
    weights = {name: value - 1.0 if _NORMS in name else value for name, value in weights.items()}
    sharding_of = tree.flatten(where)
    zeros = lambda name, leaf: jnp.zeros(leaf.shape, leaf.dtype, device=sharding_of[name])
    weights |= {name: zeros(name, leaf) for name, leaf in tree.flatten(template).items() if name not in weights}
    weights = in_model_units(weights, config)
    _begin_index(weights, config, sharding_of, seed)
    return tree.replace(template, weights), report


def in_model_units(weights: Mapping[str, Any], config: M3Config) -> dict[str, Any]:
    """Return the parameters of a dense model in the units of the M3 that it becomes, with norms of heads at hand.

    Args:
      weights: of the source, by the parameters' names; those of a Qwen3 are returned as they are.
      config: from `dense_config`.
    """
    unit = stream_unit(config)
    if unit == 1:
        return dict(weights)
    # Where x^2 is far below eps, g x / sqrt(x^2 + eps) is x: g is sqrt(eps), and stored less 1.
    linear = config.rms_norm_eps**0.5 - 1.0

    def of_model(name, value):
        if name.endswith(_OF_HEADS):
            return jnp.full_like(value, linear)
        return value * np.float32(unit) if name.endswith(WRITERS) else value

    return {name: of_model(name, value) for name, value in weights.items()}


def _places(config: M3Config) -> dict[str, Target]:
    """Return where the source's tensors go, by name: it has no index branch, and as a Llama no norms of heads."""
    absent = (INDEX,) if stream_unit(config) == 1 else (INDEX, *(f".{name}." for name in _OF_HEADS))
    return {name: target for name, target in targets(config).items() if not any(part in name for part in absent)}


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the parsed config.json of a folder, or say what is missing."""
    if not folder.is_dir():
        raise ValueError(f"{printable(str(folder))}: no such folder; give a dense model's, in the hub's layout")
    file = current_file(folder, "config.json")
    if not file.is_file():
        raise ValueError(f"{printable(str(folder))} has no config.json; give a folder in the hub's layout")
    return read_json(file)


def write_dense(model: M3, folder: str | Path) -> None:
    """Write a model without an index branch as the Qwen3 or the Llama that it is.

    Args:
      model: whose layers all attend to every block, with the MLP that `dense_config` describes. Of a Llama the linear
        norms of heads become a part of the projections before them.
      folder: made if it is not there.

    Raises:
      ValueError: a model that is neither.
      OSError: a file that cannot be written.
    """
    c = model.config
    is_qwen3 = (c.swiglu_alpha, c.swiglu_beta, c.rotary_dim) == (1.0, 0.0, c.head_dim)
    if not is_qwen3 or set(c.layer_types) != {FULL} or set(c.mlp_layer_types) != {DENSE_MLP}:
        raise ValueError("this model is no Qwen3 and no Llama: it needs dense attention and MLPs in all layers, "
                         "swiglu_alpha 1, swiglu_beta 0, and heads that are rotated whole")  # fmt: skip
    unit, leaves = stream_unit(c), {name: np.asarray(leaf) for name, leaf in tree.flatten(model).items()}
    kind, architecture = (QWEN3, "Qwen3ForCausalLM") if unit == 1 else (LLAMA, "LlamaForCausalLM")
    data = {name: getattr(c, name) for name in _SIZES} | {
        "architectures": [architecture], "model_type": kind, "intermediate_size": c.dense_intermediate_size,
        "rms_norm_eps": c.rms_norm_eps / unit**2, "rope_theta": c.rope_theta, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": c.bos_token_id,
        "eos_token_id": list(c.eos_token_id) or None, "torch_dtype": model.dtype.name,
    }  # fmt: skip
    if unit != 1:
        leaves = _in_llamas_units(leaves, c)
    tensors = {}
    for name, target in _places(c).items():
        value = leaves[target.param][target.index].transpose(np.argsort(target.perm)).reshape(target.hub_shape)
        tensors[name.removeprefix("language_model.")] = value + 1 if _NORMS in name else value
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / SINGLE_NAME, packed(tensors, {"format": "pt"}))
    replace_file(folder / "config.json", (json.dumps(data, indent=2, sort_keys=True) + "\n").encode())


def _in_llamas_units(leaves: Mapping[str, np.ndarray], config: M3Config) -> dict[str, np.ndarray]:
    """Return the parameters that `in_model_units` had, with what the norms of heads multiply by in the projections."""
    out = dict(leaves)
    for name, value in leaves.items():
        if name.endswith(WRITERS):
            out[name] = value / np.asarray(stream_unit(config), value.dtype)
        elif name.endswith(_OF_HEADS):
            factors = (1.0 + value.astype(np.float64)) / config.rms_norm_eps**0.5  # [L H]
            projection = name.removesuffix("_norm") + "_proj"
            out[projection] = (leaves[projection] * factors[:, None, None]).astype(value.dtype)  # [L D N H]
    return out


def index_weights(model: M3) -> dict[str, Float[Any, "..."]]:
    """Return the parameters of a model's index branch, by name.

    Args:
      model: any.
    """
    return {name: leaf for name, leaf in tree.flatten(model).items() if INDEX in name}


def with_index_weights(model: M3, weights: Mapping[str, Float[Any, "..."]]) -> M3:
    """Return a model with other parameters of its index branch.

    Args:
      model: not changed.
      weights: from `index_weights`.
    """
    return tree.replace(model, tree.flatten(model) | dict(weights))


def _begin_index(weights: dict[str, Array], config: M3Config, where: Mapping[str, Sharding], seed: int) -> None:
    """Put the first weights of the index branch into `weights`, as `read_dense` says, each where it has to lie."""
    draw = np.random.default_rng(seed)
    for number, stack in enumerate(config.stacks):
        if not stack.is_sparse:
            continue
        part = lambda name, number=number: f"stacks.{number}.self_attn.{name}"
        projections = part("index_q_proj"), part("index_k_proj")
        if config.index_head_dim != config.head_dim:
            for name in projections:
                drawn = draw.normal(0, config.hidden_size**-0.5, weights[name].shape).astype(np.float32)
                weights[name] = put(drawn, where[name])
            continue
        means = jax.jit(
            partial(_means, groups=config.num_key_value_heads), out_shardings=tuple(where[name] for name in projections)
        )
        weights |= zip(projections, means(weights[part("q_proj")], weights[part("k_proj")]), strict=True)
        for name in ("q_norm", "k_norm"):
            weights[part(f"index_{name}")] = jnp.copy(weights[part(name)])


def _means(
    q: Float[Array, "L D N H"], k: Float[Array, "L D K H"], groups: int
) -> tuple[Float[Array, "L D K H"], Float[Array, "L D H"]]:
    """Return the mean of the query projections of each group, and that of the key projections."""
    return q.reshape(*q.shape[:2], groups, -1, q.shape[3]).mean(axis=3), k.mean(axis=2)


def _misfits(stored: Mapping[str, StoredTensor | None], places: Mapping[str, Target]) -> list[str]:
    """Return a line for each tensor that is missing, unexpected, of another shape or no floats."""
    problems = [f"{name} is missing" for name in places if stored.get(name) is None]
    problems += [f"{name}: unexpected" for name in stored if name not in places]
    for name, target in places.items():
        tensor = stored.get(name)
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            problems.append(f"{name}: {tensor.dtype} is not supported; give weights in {', '.join(FLOATS)}")
        elif tensor.shape != target.hub_shape:
            problems.append(f"{name}: shape {list(tensor.shape)}, config.json needs {list(target.hub_shape)}")
    return problems
