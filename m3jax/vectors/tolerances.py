"""Tolerances of outputs against the stored ones, by the arithmetic that made them, with the origin of each bound."""

# [rtol, atol] by the narrowest floating type of the computation that is compared. float64 is for oracles.
_SUMS = {"float64": [1e-12, 1e-12], "float32": [2e-5, 3e-6]}
TOLERANCES = {
    "bits": {"compare": "bits", "from": "integers, or numbers that nothing rounds: equal bits, NaN equal to NaN"},
    "blocks": {
        "compare": "blocks",
        "from": "sets of ids, in any order of slots, -1 for an unused one; cases are drawn so that scores at the cut "
        "are equal (the lower id stays) or at least 1e-3 apart, far more than float32 sums of bfloat16 products err",
    },
    "scores": _SUMS
    | {
        "compare": "close",
        "bfloat16": [2e-5, 3e-6],
        "from": "float32 sums of products of bfloat16 numbers, which are exact (docs/numerics.md); no rounding after",
    },
    "attention": _SUMS
    | {
        "compare": "close",
        "bfloat16": [3e-2, 3e-2],
        "from": "float32: some 40 terms of size 1, each off by 2^-24; bfloat16: MiniMax-AI/MSA's own bound",
    },
    "lse": _SUMS
    | {
        "compare": "close",
        "bfloat16": [1e-3, 1e-3],
        "from": "as attention; in bfloat16 the sum of exponentials is not rounded: MiniMax-AI/MSA's bound",
    },
    "attention_bf16": {
        "compare": "close",
        "bfloat16": [2**-7, 1e-3],
        "from": "roundings of docs/numerics.md, weights to bfloat16 before the product with v: one last place apart, "
        "and what another order of sums makes of one weight",
    },
    "router": {
        "compare": "close",
        "float64": [1e-12, 1e-12],
        "float32": [2e-5, 3e-6],
        "bfloat16": [2e-5, 3e-6],
        "from": "the router is float32 whatever the model's dtype (docs/numerics.md)",
    },
    "experts": {
        "compare": "close",
        "float64": [1e-12, 1e-12],
        "float32": [2e-5, 1e-5],
        "bfloat16": [3e-2, 3e-2],
        "from": "three products of some 30 terms; in bfloat16 each of the hidden numbers is rounded",
    },
    "experts_bf16": {
        "compare": "close",
        "bfloat16": [1e-4, 5e-3],
        "from": "one rounding, of the hidden numbers; another order of sums moves a few of them by a last place",
    },
    "activation": {
        "compare": "close",
        "float64": [1e-12, 1e-12],
        "float32": [2e-5, 3e-6],
        "bfloat16": [2**-7, 1e-3],
        "from": "float32 inside, one rounding after it",
    },
    "mxfp8": {
        "compare": "close",
        "float64": [1e-12, 1e-12],
        "float32": [2e-5, 3e-5],
        "bfloat16": [2e-5, 3e-5],
        "from": "products of MXFP8 numbers are exact in float32, and so are those with bfloat16 numbers: 96 terms are summed",
    },
    "norm": {
        "compare": "close",
        "float64": [1e-12, 1e-12],
        "float32": [2e-5, 3e-6],
        "bfloat16": [2**-7, 1e-3],
        "from": "float32 inside, one rounding after the weight, or after the rotation",
    },
    "norm_bf16": {"compare": "close", "bfloat16": [2**-7, 1e-3], "from": "one rounding: a last place"},
    "rope": {
        "compare": "close",
        "float64": [1e-12, 1e-12],
        "float32": [0.0, 1e-6],
        "bfloat16": [0.0, 1e-6],
        "from": "tables are float32 whatever the model's dtype; the tensors *_slack have what a float32 angle is off",
    },
    "probabilities": {
        "compare": "close",
        "float64": [1e-12, 1e-12],
        "float32": [1e-5, 1e-6],
        "bfloat16": [1e-5, 1e-6],
        "from": "sampling is float32 whatever the model's dtype: exponentials of up to 10, and a sum",
    },
    "draft": {
        "compare": "close",
        "float64": [1e-11, 1e-11],
        "float32": [2e-5, 1e-5],
        "bfloat16": [3e-2, 1e-1],
        "from": "a whole layer, up to four in a row for the last draft step; largest differences seen on a CPU: 1.6e-6 "
        "in float32, 4.7e-2 in bfloat16, whose ten roundings add up at numbers of size 1 to 4",
    },
    "model": {
        "compare": "close",
        "float64": [1e-11, 1e-11],
        "float32": [2e-5, 5e-5],
        "bfloat16": [1e-1, 1e-1],
        "from": "three layers; largest difference seen in float32: 6.4e-6; in bfloat16 their roundings, as long as no "
        "block and no expert flips: compare blocks and expert_ids first",
    },
}
