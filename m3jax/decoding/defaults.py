"""What a model folder says about how to decode: generation_config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from m3jax.decoding.sampling import Sampling

_KNOBS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OTHERS = ("do_sample", "eos_token_id", "max_new_tokens")
# Keys that say nothing about how tokens are chosen.
_NEUTRAL = ("bos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "use_cache")


@dataclass(frozen=True)
class Defaults:
    """Settings of a model folder; what the folder does not set is off, not transformers' own default.

    Attributes:
      knobs: keyword arguments of `Sampling`; temperature is 0 where the folder says `do_sample: false`.
      stop_ids: EOS ids; None if the folder leaves them to config.json.
      max_new_tokens: None if the folder does not say.
      ignored: keys with a value that this package does not know.
    """

    knobs: Mapping[str, float | int]
    stop_ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Defaults":
        """Read a folder's generation_config.json; without the file nothing is set.

        Raises:
          ValueError: broken JSON, or a value outside its range; names the file.
        """
        file = Path(folder) / "generation_config.json"
        if not file.is_file():
            return cls({})
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            return cls.from_dict(data)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, data: object) -> "Defaults":
        """Read a parsed generation_config.json.

        Raises:
          ValueError: a value outside its range.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"a generation config is a JSON object, got {type(data).__name__}")
        given = {key: value for key, value in data.items() if value is not None}
        knobs = {name: given[name] for name in _KNOBS if name in given}
        if given.get("do_sample") is False:
            knobs["temperature"] = 0
        Sampling(**knobs)
        eos = given.get("eos_token_id")
        known = {*_KNOBS, *_OTHERS, *_NEUTRAL}
        return cls(
            knobs=knobs,
            stop_ids=eos if eos is None else tuple(eos if isinstance(eos, list) else [eos]),
            max_new_tokens=given.get("max_new_tokens"),
            ignored=tuple(sorted(given.keys() - known)),
        )
