"""transformers' speed on the four layers of `bench_engine.py --model m3`, on the same GPU: the outside measure.

    python scripts/bench_transformers.py                          # prompts of 2,048, 8,192 and 16,384, then decoding
    python scripts/bench_engine.py --model m3 --transformers      # after our own lines, in one run
    python scripts/bench_transformers.py --model tiny --prompts 256 --device cpu   # to see that it works

Random weights in bfloat16, attention by sdpa, batch 1, a dynamic cache, the last token's logits alone. Each
prompt is read twice, and the second time counts; what does not fit into memory is said.
"""

import argparse
import time
from collections.abc import Iterator

from bench_engine import four_layers

from m3jax import M3Config

NEW_TOKENS = 16


def main() -> None:
    """Print a line for each prompt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "m3"), default="m3")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192, 16384], help="tokens of each")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    config = four_layers() if args.model == "m3" else M3Config.tiny()
    for line in lines(config, args.prompts, args.device):
        print(line, flush=True)


def lines(config: M3Config, prompts: list[int], device: str = "cuda") -> Iterator[str]:
    """Yield a line with transformers' seconds for each prompt and a token behind it; one line if it cannot run.

    Args:
      config: of the text model; a tower is left out.
      prompts: tokens of each.
      device: torch's name of it.
    """
    try:
        import torch
        import transformers
        from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM
    except ImportError as error:
        yield f"transformers: {error}"
        return
    if device == "cuda" and not torch.cuda.is_available():
        yield "transformers: torch has no GPU here"
        return
    settings = MiniMaxM3VLConfig.from_dict(config.to_dict()).text_config
    settings._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = MiniMaxM3VLForCausalLM(settings)
    # Weights by the device: drawing 25B numbers on the host takes minutes.
    model = model.to(torch.bfloat16).to_empty(device=device).eval()
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data.normal_(0.0, 0.02)
    yield f"transformers {transformers.__version__}, torch {torch.__version__}, sdpa, bfloat16"
    for length in prompts:
        try:
            yield _measured(model, torch.randint(2, config.vocab_size, (1, length), device=device))
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            yield f"{length:8d} tokens: out of memory ({torch.cuda.mem_get_info()[0] / 2**30:.0f} GiB were free)"


def _measured(model, prompt) -> str:
    """Return the seconds of a prompt, and of a token after it."""
    import torch

    def now() -> float:
        if prompt.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    with torch.no_grad():
        for _ in range(2):
            begin = now()
            out = model(prompt, logits_to_keep=1, use_cache=True)
            prefill = now() - begin
        begin = now()
        for _ in range(NEW_TOKENS):
            token = out.logits[:, -1:].argmax(-1)
            out = model(token, past_key_values=out.past_key_values, logits_to_keep=1, use_cache=True)
        step = (now() - begin) / NEW_TOKENS
    length = prompt.shape[1]
    of_prompt = f"{length:8d} tokens: {prefill * 1e3:9.1f} ms, {length / prefill:9.0f} tokens/s"
    return f"{of_prompt}; {step * 1e3:7.2f} ms a new token"


if __name__ == "__main__":
    main()
