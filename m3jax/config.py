"""The configuration of a MiniMax-M3 text model, to and from the hub's config.json."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from m3jax import config_keys as keys
from m3jax.files import current_file, read_json, replace_file
from m3jax.messages import listed, no_model_folder, note_problems, printable, shortened, shown

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
DENSE_MLP, MOE = "dense", "sparse"


class Stack(NamedTuple):
    """A run of consecutive layers of one kind; its parameters are stacked and scanned."""

    first_layer: int
    num_layers: int
    attention: str
    mlp: str

    @property
    def is_sparse(self) -> bool:
        """True if attention in these layers selects blocks; False if it is dense."""
        return self.attention == SPARSE

    @property
    def is_moe(self) -> bool:
        """True if the feed-forward part of these layers is a mixture of experts."""
        return self.mlp == MOE


@dataclass(frozen=True, kw_only=True)
class M3Config:
    """Every number of the text model that changes its arithmetic.

    Field names are those of transformers' flat config. Widths and counts are in elements. Hashable, so it can
    be static under `jax.jit`; `vision_config` and `extra` are carried along and take no part in equality.

    Source: config.json of MiniMaxAI/MiniMax-M3; transformers `MiniMaxM3VLTextConfig`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    dense_intermediate_size: int
    shared_intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    rotary_dim: int
    index_n_heads: int
    index_head_dim: int
    index_block_size: int = 128
    index_topk_blocks: int = 16
    index_local_blocks: int = 1
    index_init_blocks: int = 0
    index_score_type: str = "max"
    routed_scaling_factor: float = 2.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5e6
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    swiglu_beta: float = 1.0
    max_position_embeddings: int = 1_048_576
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    vision_config: dict | None = field(default=None, compare=False)
    extra: dict = field(default_factory=dict, compare=False)

    def __post_init__(self):
        _validate(self)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The runs of consecutive layers that share an attention kind and an MLP kind."""
        stacks, first_layer = [], 0
        for (attention, mlp), layers in groupby(zip(self.layer_types, self.mlp_layer_types, strict=True)):
            num_layers = len(list(layers))
            stacks.append(Stack(first_layer, num_layers, attention, mlp))
            first_layer += num_layers
        return tuple(stacks)

    @classmethod
    def m3(cls) -> "M3Config":
        """The full 428B configuration, as published."""
        return cls.from_dict(keys.m3_hub_config())

    @classmethod
    def tiny(cls, **changes: Any) -> "M3Config":
        """A small configuration for experiments: one dense and three sparse layers, 64 wide, 3 of 128 blocks of 8.

        Args:
          **changes: values of other fields, as in `tiny(index_topk_blocks=2)`.

        Raises:
          ValueError: values that do not go together.
        """
        values = dict(
            vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
            head_dim=16, intermediate_size=64, dense_intermediate_size=128, shared_intermediate_size=64,
            num_local_experts=8, num_experts_per_tok=2, rotary_dim=8, layer_types=(FULL, SPARSE, SPARSE, SPARSE),
            mlp_layer_types=(DENSE_MLP, MOE, MOE, MOE), index_n_heads=2, index_head_dim=16, index_block_size=8,
            index_topk_blocks=3, max_position_embeddings=1024, rope_theta=1e4,
        )  # fmt: skip
        return cls(**(values | changes))

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "M3Config":
        """Read the config.json of a model folder.

        Args:
          path: a folder in the hub's layout.

        Raises:
          ValueError: no such folder, no config.json, broken JSON, or a key that is missing or not supported; the
            message names the file.
        """
        return read_config(path)[0]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "M3Config":
        """Build a configuration from a parsed config.json: nested (`text_config`), flat as transformers', or text only.

        Args:
          data: the parsed JSON object.

        Raises:
          ValueError: names every key that is missing, inconsistent, or would change the arithmetic in a way
            that is not supported.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"a config is a JSON object, got {type(data).__name__}")
        is_nested = "text_config" in data
        text = data["text_config"] if is_nested else data
        if not isinstance(text, Mapping):
            raise ValueError(f"text_config is a JSON object, got {type(text).__name__}")
        if not isinstance(data.get("vision_config"), Mapping | None):
            raise ValueError(f"vision_config = {shown(data['vision_config'])}: must be an object or null")
        extra = dict(data) if is_nested else {}
        for read_elsewhere in ("text_config", "vision_config"):
            extra.pop(read_elsewhere, None)
        values = keys.read_text_config(text, top=extra)
        return cls(**values, vision_config=data.get("vision_config"), extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """The configuration in the hub's nested form, which `from_dict`, transformers and the other engines read."""
        values = {name: value for name, value in asdict(self).items() if name not in ("vision_config", "extra")}
        data = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl"}
        data |= {key: value for key, value in self.extra.items() if key != "quantization_config"}
        data["text_config"] = keys.write_text_config(values)
        if self.vision_config is not None:
            data["vision_config"] = self.vision_config
        return data

    def save_pretrained(self, path: str | Path) -> None:
        """Write the configuration as config.json into a folder, which is made if it is not there; all of it or nothing.

        Args:
          path: the folder.

        Raises:
          OSError: names the path; a config.json that was there is as it was.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        replace_file(Path(path) / "config.json", text.encode("utf-8"))


def read_config(path: str | Path) -> tuple[M3Config, dict[str, Any]]:
    """Read the config.json of a model folder, once.

    Args:
      path: a folder in the hub's layout.

    Returns:
      The configuration, and all that the file holds.

    Raises:
      ValueError: as `M3Config.from_pretrained`.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(no_model_folder(str(path)))
    file = current_file(folder, "config.json")
    if not file.is_file():
        raise ValueError(f"{printable(str(path))} has no config.json; give a folder in the hub's layout")
    data = read_json(file)
    try:
        return M3Config.from_dict(data), data
    except ValueError as error:
        error.args = (shortened(f"{printable(str(file))}: {error}"),)
        raise


_REALS = ("routed_scaling_factor", "rms_norm_eps", "rope_theta", "swiglu_alpha", "swiglu_limit")
_MAY_BE_ZERO = ("index_init_blocks", "index_local_blocks")  # `_shape_problems` says what these can be


def _validate(c: M3Config) -> None:
    """Raise ValueError with every reason why a model cannot have this configuration."""
    is_number = lambda value, kinds: isinstance(value, kinds) and not isinstance(value, bool)
    counts = [entry.name for entry in fields(c) if entry.type is int and entry.name not in _MAY_BE_ZERO]
    problems = [
        f"{name} = {shown(value)}: must be a positive integer of 32 bits"
        for name, value in ((name, getattr(c, name)) for name in counts)
        if not (is_number(value, int) and 0 < value <= keys.LARGEST_INTEGER)
    ]
    problems += [
        f"{name} = {shown(value)}: must be a positive number, no smaller or larger than float32 can be"
        for name, value in ((name, getattr(c, name)) for name in _REALS)
        if not (is_number(value, int | float) and keys.SMALLEST_REAL <= value <= keys.LARGEST_REAL)
    ]
    checks = [
        (len(c.layer_types) == c.num_hidden_layers, f"layer_types has {len(c.layer_types)} entries for "
         f"{c.num_hidden_layers} layers"),
        (len(c.mlp_layer_types) == c.num_hidden_layers, f"mlp_layer_types has {len(c.mlp_layer_types)} entries "
         f"for {c.num_hidden_layers} layers"),
        (set(c.layer_types) <= {FULL, SPARSE}, f"layer_types: allowed are {FULL!r} and {SPARSE!r}, got "
         f"{shown(sorted(set(c.layer_types)))}"),
        (set(c.mlp_layer_types) <= {DENSE_MLP, MOE}, f"mlp_layer_types: allowed are {DENSE_MLP!r} and {MOE!r}, "
         f"got {shown(sorted(set(c.mlp_layer_types)))}"),
        (c.swiglu_beta in keys.SWIGLU_BETAS, f"swiglu_beta = {shown(c.swiglu_beta)}: allowed are 1.0, and 0.0 for an "
         "MLP whose up is not shifted"),
        (c.index_score_type in ("max", "lse"), f"index_score_type (sparse_score_type) = {shown(c.index_score_type)}: "
         "allowed are 'max' and 'lse'"),
    ]  # fmt: skip
    problems += [message for is_right, message in checks if not is_right]
    if not problems:
        problems += _shape_problems(c)
    if problems:
        error = ValueError("unsupported configuration: " + listed(problems))
        note_problems(error, problems)
        raise error


def _shape_problems(c: M3Config) -> list[str]:
    """Return a line for each contradiction between values that are each of the right kind."""
    forced = c.index_local_blocks + c.index_init_blocks
    checks = [
        (c.num_attention_heads % c.num_key_value_heads == 0, f"num_attention_heads = {c.num_attention_heads} is "
         f"no multiple of num_key_value_heads = {c.num_key_value_heads}"),
        (c.index_n_heads == c.num_key_value_heads or SPARSE not in c.layer_types, "index_n_heads "
         f"(sparse_num_index_heads) = {c.index_n_heads}: there is one index head per KV head, "
         f"num_key_value_heads = {c.num_key_value_heads}"),
        (c.rotary_dim % 2 == 0 and c.rotary_dim <= min(c.head_dim, c.index_head_dim), f"rotary_dim = {c.rotary_dim}: "
         f"must be even and at most head_dim = {c.head_dim} and index_head_dim = {c.index_head_dim}"),
        (c.num_experts_per_tok <= c.num_local_experts, f"num_experts_per_tok = {c.num_experts_per_tok} of only "
         f"{c.num_local_experts} experts"),
        (c.index_init_blocks >= 0, f"index_init_blocks = {c.index_init_blocks}: must not be negative"),
        (forced <= c.index_topk_blocks, f"index_local_blocks + index_init_blocks = {forced} forced blocks do not "
         f"fit in index_topk_blocks = {c.index_topk_blocks}"),
        (c.index_local_blocks >= 1, f"index_local_blocks (sparse_local_block) = {c.index_local_blocks}: a query "
         "always keeps its own block, so at least 1"),
        (all(0 <= i < c.vocab_size for i in c.eos_token_id), f"eos_token_id = {shown(list(c.eos_token_id))}: outside "
         f"the vocabulary of {c.vocab_size}"),
        (c.bos_token_id is None or 0 <= c.bos_token_id < c.vocab_size, f"bos_token_id = {c.bos_token_id}: outside the "
         f"vocabulary of {c.vocab_size}"),
    ]  # fmt: skip
    return [message for is_right, message in checks if not is_right]
