"""Runs of a model whose values are compared: m3jax's own or transformers', from a folder in the hub's layout."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from m3jax.assets import embedded_path
from m3jax.checkpoint import load
from m3jax.compare.names import meanings
from m3jax.compare.sides import Source
from m3jax.config import M3Config
from m3jax.model import M3
from m3jax.model.layers import MLP, gemma_norm
from m3jax.numerics import einsum
from m3jax.ops import project

Tensor = Shaped[np.ndarray, "..."]


def run_m3jax(label: str, folder: str, prompts: Sequence[Sequence[int]], dtype: str, mesh: str | None) -> Source:
    """Run this package's model; return its named values and those between them: projections, norms, router scores.

    Args:
      label: the user's argument for it.
      folder: of the model; "" is the embedded one.
      prompts: token ids.
      dtype, mesh: as in `m3jax.load`.
    """
    checkpoint = Path(folder) if folder else embedded_path()
    config = M3Config.from_pretrained(checkpoint)
    tokens, lengths = _padded(prompts, config)
    model = load(checkpoint, dtype, mesh)
    values = model.intermediates(jnp.asarray(tokens), lengths=jnp.asarray(lengths))
    outputs = {name: value for name, value in values.items() if name != "layers"}
    for index, (layer, between) in enumerate(zip(values["layers"], _between(model, values["layers"]), strict=True)):
        named = layer | between
        outputs |= {f"layers.{index}.{name}": value for name, value in named.items()}
    arrays = {name: [np.asarray(value)] for name, value in jax.device_get(outputs).items()}
    return Source(label, arrays | {"tokens": [tokens], "lengths": [lengths]}, config)


@jax.jit
def _between(model: M3, layers: list[dict[str, Array]]) -> list[dict[str, Array]]:
    """Return, for each layer, the quantities that `M3.intermediates` leaves out."""
    return [_between_in(model, index, values) for index, values in enumerate(layers)]


def _between_in(model: M3, index: int, values: dict[str, Array]) -> dict[str, Array]:
    """Return one layer's projections, their norms and the router's scores, computed from its intermediate values."""
    layer, eps, dtype = model.layer(index), model.config.rms_norm_eps, values["input"].dtype
    attention, x = layer.self_attn, values["attention_norm"]
    heads = {"q": (attention.q_proj, attention.q_norm), "k": (attention.k_proj, attention.k_norm)}
    if attention.is_sparse:
        heads["index_q"] = attention.index_q_proj, attention.index_q_norm
        heads["index_k"] = attention.index_k_proj, attention.index_k_norm
    quantities: dict[str, Array] = {}
    for name, (weight, norm) in heads.items():
        projected = project("btd,d...h->bt...h", x, weight[0])
        quantities[f"{name}_proj"] = projected.astype(dtype)
        quantities[f"{name}_normed"] = gemma_norm(projected, norm[0], eps).astype(dtype)
    x = values["ffn_norm"]
    mlp = layer.mlp if isinstance(layer.mlp, MLP) else layer.mlp.shared_experts
    quantities["gate"], quantities["up"] = (
        project("btd,df->btf", x, weight[0]) for weight in (mlp.gate_proj, mlp.up_proj)
    )
    if not isinstance(layer.mlp, MLP):
        quantities["router_logits"] = einsum(
            "btd,de->bte", x.astype(jnp.promote_types(dtype, jnp.float32)), layer.mlp.gate[0]
        )
        quantities["router_scores"] = jax.nn.sigmoid(quantities["router_logits"]) + layer.mlp.e_score_correction_bias[0]
    return quantities


def run_transformers(label: str, folder: str, prompts: Sequence[Sequence[int]], dtype: str) -> Source:
    """Run transformers' text model; return the outputs and inputs of its modules that are quantities, by module name.

    Args:
      label, folder, prompts: as in `run_m3jax`.
      dtype: of weights and activations.

    Raises:
      ValueError: PyTorch or transformers is not installed, or the folder lacks weights.
    """
    config = M3Config.from_pretrained(folder)
    tokens, lengths = _padded(prompts, config)
    try:
        import torch
        from transformers.models.minimax_m3_vl import MiniMaxM3VLConfig
        from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
    except ImportError as error:
        raise ValueError(f"transformers:{folder}: {error}; pip install 'm3jax[oracle]'") from None
    settings = MiniMaxM3VLConfig.from_pretrained(folder)
    settings.vision_config.num_hidden_layers = 0  # prompts of text never reach the tower, so none is built
    with _quiet():
        model, loaded = modeling.MiniMaxM3SparseForConditionalGeneration.from_pretrained(
            folder, config=settings, dtype=getattr(torch, dtype), attn_implementation="eager", output_loading_info=True
        )
    if missing := sorted(name for name in loaded["missing_keys"] if "language_model" in name or "lm_head" in name):
        raise ValueError(f"transformers:{folder}: transformers finds no {missing[0]} in it ({len(missing)} missing)")
    is_token = np.arange(tokens.shape[1]) < lengths[:, None]
    with recorded(model.eval(), modeling) as calls, torch.no_grad():
        model(
            input_ids=torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(is_token).long(), use_cache=False
        )
    arrays = {name: [_as_numpy(value)] for name, value in calls.items()}
    return Source(label, arrays | {"tokens": [tokens], "lengths": [lengths]}, config)


@contextmanager
def recorded(model: Any, modeling: Any) -> Iterator[dict[str, Any]]:
    """Collect, while `model` runs, the inputs and outputs of its modules that are quantities, and heads after RoPE.

    Args:
      model: of transformers, with `named_modules`.
      modeling: the module that it is defined in, whose function for RoPE no hook reaches.
    """
    calls: dict[str, Any] = {}
    turned: list[tuple[Any, Any]] = []

    def keep(name: str, value: Any) -> None:
        parts = [(f"{name}.{i}", x) for i, x in enumerate(value)] if isinstance(value, tuple) else [(name, value)]
        calls.update({key: part.detach() for key, part in parts if hasattr(part, "shape") and meanings([key])})

    def after(name: str) -> Any:
        def hook(module, args, kwargs, output):
            taken = args[0] if args else kwargs.get("hidden_states")
            keep(f"{name}.input", taken)
            keep(name, output)
            if type(module).__name__.endswith(("Attention", "Indexer")) and turned:
                # An indexer's own call ends before that of the attention around it, whose rotation came first.
                is_index = type(module).__name__.endswith("Indexer")
                pair = turned.pop() if is_index else turned.pop(0)
                layer = name[: name.index(".self_attn")]
                for kind, heads in zip(("index_q", "index_k") if is_index else ("q", "k"), pair, strict=True):
                    calls[f"{layer}.{kind}"] = heads.detach().transpose(1, 2)  # [B N T H] -> [B T N H]

        return hook

    rotate = modeling.apply_rotary_pos_emb

    def rotate_and_keep(*args, **kwargs):
        turned.append(rotate(*args, **kwargs))
        return turned[-1]

    modules = [(name, module) for name, module in model.named_modules() if name]
    hooks = [module.register_forward_hook(after(name), with_kwargs=True) for name, module in modules]
    modeling.apply_rotary_pos_emb = rotate_and_keep
    try:
        yield calls
    finally:
        modeling.apply_rotary_pos_emb = rotate
        for hook in hooks:
            hook.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers, which would be about the unused vision tower."""
    from transformers.utils import logging

    level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if has_bar:
            logging.enable_progress_bar()


def _as_numpy(tensor: Any) -> Tensor:
    """Return a tensor of PyTorch as a numpy array of the same bits."""
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.contiguous().view(type(tensor)([]).short().dtype).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def _padded(prompts: Sequence[Sequence[int]], config: M3Config) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Return prompts as one array, padded on the right with 0, and their lengths.

    Raises:
      ValueError: an empty prompt, or an id that the model does not have.
    """
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number} has no token")
        if wrong := [token for token in prompt if not 0 <= token < config.vocab_size]:
            raise ValueError(f"prompt {number}: token {wrong[0]}, and the model has 0 to {config.vocab_size - 1}")
        if len(prompt) > config.max_position_embeddings:
            raise ValueError(
                f"prompt {number}: {len(prompt)} tokens, and the model takes {config.max_position_embeddings}"
            )
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths
