"""transformers' model of a configuration, for subjects that measure beside it."""

import time
from collections.abc import Sequence

from benchmarks.harness import CORES
from m3jax import M3Config


class TransformersText:
    """Prefill and greedy decoding by transformers: batch 1, a dynamic cache, the last token's logits alone.

    Weights are random.

    Raises:
      ValueError: transformers is missing, or torch has no such device.
    """

    name = "transformers sdpa"

    def __init__(self, config: M3Config, dtype: str, device: str = "cpu"):
        try:
            import torch
            from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig
            from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM
        except ImportError as error:
            raise ValueError(f"transformers cannot be imported: {error}") from None
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch has no GPU here")
        settings = MiniMaxM3VLConfig.from_dict(config.to_dict()).text_config
        settings._attn_implementation = "sdpa"
        torch.manual_seed(0)
        torch.set_num_threads(CORES)
        with torch.device("cpu" if device == "cpu" else "meta"):
            model = MiniMaxM3VLForCausalLM(settings).to(getattr(torch, dtype)).eval()
        if device != "cpu":  # weights by the device: drawing 25B numbers on the host takes minutes
            model = model.to_empty(device=device)
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.data.normal_(0.0, 0.02)
        self._model = model

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the seconds until the logits of a prompt's last token."""
        import torch

        ids = torch.tensor([list(prompt)], device=self._model.device)
        began = self._now()
        with torch.no_grad():
            self._out = self._model(ids, logits_to_keep=1, use_cache=True)
        return self._now() - began

    def decode(self, new_tokens: int) -> float:
        """Return the seconds of a new token behind the prompt."""
        import torch

        began = self._now()
        with torch.no_grad():
            for _ in range(new_tokens):
                token, cache = self._out.logits[:, -1:].argmax(-1), self._out.past_key_values
                self._out = self._model(token, past_key_values=cache, logits_to_keep=1, use_cache=True)
        return (self._now() - began) / new_tokens

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()
