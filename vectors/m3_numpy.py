"""MiniMax-M3's operations in plain float64 numpy, one query at a time, for `check_numpy.py` to recompute outputs by.

Written from the paper and docs/msa.md without a look at the package's arrays: it shares no line with m3jax. Letters: B
rows, T queries, S keys, N query heads, K KV heads, H and I widths, P tokens of a block, M blocks, J slots.
"""

import math

import numpy as np

# --- rounding


def to_bf16(x):
    """Float64 numbers rounded to float32 and from there to bfloat16, to nearest, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.nan, rounded.view(np.float32).astype(np.float64))


# --- selection


def block_scores(index_q, index_k, positions, lengths, block_size, score="max"):
    """[B K T M]: of each query the largest product with a key of the block that it sees; -inf where it sees none."""
    rows, length, heads, width = index_q.shape
    out = np.full((rows, heads, length, -(-index_k.shape[1] // block_size)), -np.inf)
    for b, k, t in np.ndindex(out.shape[:3]):
        if not 0 <= positions[b, t] < lengths[b]:
            continue
        with np.errstate(invalid="ignore"):
            token = (index_k[b, : positions[b, t] + 1] * index_q[b, t, k]).sum(-1)
        for m in range(positions[b, t] // block_size + 1):
            seen = token[m * block_size : (m + 1) * block_size]
            out[b, k, t, m] = seen.max() if score == "max" else log_sum_exp(seen / math.sqrt(width))
    return out


def log_sum_exp(x):
    return x.max() + math.log(np.exp(x - x.max()).sum())


def select(scores, positions, lengths, rule):
    """Blocks [B K T J], ascending and then -1, and the scores at the cut, [B K T] each."""
    local, init = rule.get("local_blocks", 1), rule.get("init_blocks", 0)
    blocks = np.full((*scores.shape[:3], rule["top_k"]), -1)
    last_kept, first_dropped = np.full(scores.shape[:3], np.inf), np.full(scores.shape[:3], -np.inf)
    largest = np.finfo(np.float64).max
    for b, k, t in np.ndindex(blocks.shape[:3]):
        if not 0 <= positions[b, t] < lengths[b]:
            continue
        own, row = positions[b, t] // rule["block_size"], scores[b, k, t]
        forced = [m for m in range(own + 1) if m > own - local or m < init]
        free = [m for m in range(own + 1) if m not in forced]
        # NaN after every number, an infinity as the largest number of its sign, of equal scores the lower id.
        free.sort(
            key=lambda m: (math.isnan(row[m]), 0 if math.isnan(row[m]) else -np.clip(row[m], -largest, largest), m)
        )
        count = max(rule["top_k"] - len(forced), 0)
        ids = sorted(forced + free[:count])
        blocks[b, k, t, : len(ids)] = ids
        number = lambda m, row=row: -math.inf if math.isnan(row[m]) else row[m]
        last_kept[b, k, t] = min(map(number, free[:count]), default=np.inf)
        first_dropped[b, k, t] = max(map(number, free[count:]), default=-np.inf)
    return blocks, last_kept, first_dropped


def selection(x, rule):
    if "scores" in x:
        return {"blocks": select(x["scores"], x["positions"], x["lengths"], rule)[0]}
    where = x["positions"], x["lengths"]
    scores = block_scores(x["index_q"], x["index_k"], *where, rule["block_size"], rule.get("score", "max"))
    blocks, last_kept, first_dropped = select(scores, *where, rule)
    return {"block_scores": scores, "blocks": blocks, "last_kept": last_kept, "first_dropped": first_dropped}


# --- attention


def attention(q, k, v, positions, lengths, blocks=None, block_size=None, rounded=False):
    """(out [B T N H], lse [B T N]) over the chosen blocks, or all; `rounded` as bfloat16 rounds (docs/numerics.md)."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    group = q.shape[2] // k.shape[2]
    for b, t, g in np.ndindex(*q.shape[:2], k.shape[2]):
        seen = np.arange(positions[b, t] + 1) if 0 <= positions[b, t] < lengths[b] else np.arange(0)
        if blocks is not None:
            seen = seen[((seen // block_size)[:, None] == blocks[b, g, t]).any(axis=-1)]
        for n in range(g * group, (g + 1) * group) if len(seen) else ():
            score = k[b, seen, g] @ q[b, t, n] / math.sqrt(q.shape[-1])
            weight = np.exp(score - score.max())
            value = (to_bf16(weight) if rounded else weight) @ v[b, seen, g]
            out[b, t, n] = value / weight.sum()
            lse[b, t, n] = score.max() + math.log(weight.sum())
    return (to_bf16(out) if rounded else out), lse


def dense(q, k, v, positions, lengths):
    return attention(q, k, v, positions, lengths)


def sparse_attention(x, rule):
    chosen = {} if "given_blocks" in x else selection(x, rule)
    blocks = chosen.get("blocks", x.get("given_blocks"))
    operands = (x["q"], x["k"], x["v"], x["positions"], x["lengths"], blocks, rule["block_size"])
    (out, lse), (out_bf16, lse_bf16) = attention(*operands), attention(*operands, rounded=True)
    return {"out": out, "lse": lse, "out_bf16": out_bf16, "lse_bf16": lse_bf16} | chosen


# --- pages


def to_e4m3(x):
    """Numbers rounded to float8_e4m3fn, to nearest, ties to even; beyond 448 they are cut off."""
    x = np.clip(x, -448, 448)
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(x))), -6)
    return np.rint(x / 2.0 ** (exponent - 3)) * 2.0 ** (exponent - 3)


def float8_values(exponent_bits, bias, nan_codes):
    """The 256 numbers of a float8: a sign, bits of exponent, and what is left of seven bits of fraction.

    `nan_codes` has a value, NaN or an infinity, for each code that is no number by the general rule.
    """
    code = np.arange(256)
    fraction_bits = 7 - exponent_bits
    exponent, fraction = code >> fraction_bits & (1 << exponent_bits) - 1, code & (1 << fraction_bits) - 1
    part = fraction / (1 << fraction_bits)
    size = np.where(exponent == 0, np.ldexp(part, 1 - bias), np.ldexp(1 + part, exponent - bias))
    values = np.where(code >= 128, -size, size)
    for number, value in nan_codes.items():
        values[number] = value
    return values


def e4m3fn():
    """Four bits of exponent, no infinity; NaN of both signs has all bits set."""
    return float8_values(4, 7, {0x7F: np.nan, 0xFF: np.nan})


def e4m3fnuz():
    """AMD's of MI300: half of e4m3fn's numbers; the one NaN is in the place of -0."""
    return float8_values(4, 8, {0x80: np.nan})


def e5m2():
    """Five bits of exponent, infinities and NaN as in wider floats."""
    special = {0x7C: np.inf, 0xFC: -np.inf} | {sign | code: np.nan for sign in (0, 0x80) for code in (0x7D, 0x7E, 0x7F)}
    return float8_values(5, 15, special)


def float8_kinds(x, rule):
    return {"e4m3fn": e4m3fn()[x["bytes"]], "e4m3fnuz": e4m3fnuz()[x["bytes"]], "e5m2": e5m2()[x["bytes"]]}


def move_heads(shards, count):
    """[R X K/R P H] of one engine's devices as those of `count` devices: heads are numbered through all of them."""
    heads = [shard[:, h] for shard in shards for h in range(shard.shape[1])]
    share = len(heads) // count
    return [np.stack(heads[r * share : (r + 1) * share], axis=1) for r in range(count)]


def resharded(x, rule):
    """`cached` over the shards of the receiving devices, whose heads are put behind one another."""
    received = {kind: move_heads(x[f"{kind}_shards"], rule["target_shards"]) for kind in ("k", "v")}
    rest = {name: array for name, array in x.items() if not name.endswith("_shards")}
    outputs = cached(
        rest | {f"{kind}_pages": np.concatenate(shards, axis=1) for kind, shards in received.items()}, rule
    )
    for kind in ("k", "v"):
        pool = outputs.pop(f"{kind}_pages_after")
        outputs[f"{kind}_shards_after"] = np.stack(np.split(pool, rule["target_shards"], axis=1))
    return outputs


def cached(x, rule):
    if "bytes" in x:
        return float8_kinds(x, rule)
    if "k_shards" in x:
        return resharded(x, rule)
    size, table = rule["block_size"], x.get("target_table", x["table"])
    pools = {kind: x[f"{kind}_pages"] for kind in ("k", "v", "index")}
    pools |= {"exact_index": x["exact_index_pages"]} if "exact_index_pages" in x else {}
    scales = {kind: x.get(f"{kind}_scale") for kind in pools}
    rows, lowered = {}, {}
    for kind, pool in pools.items():
        pool = imported(pool, x["table"], table, rule["target_pages"]) if "target_table" in x else pool.copy()
        pools[kind] = pool
        # A page has a head axis, [K P H], but for index keys, [P I]; a scale is one for each head.
        scale = None if scales[kind] is None else scales[kind][:, None] if scales[kind].ndim else scales[kind]
        new = x[{"k": "k", "v": "v"}.get(kind, "index_k")]
        for b, t in np.argwhere(x["positions"] >= 0):
            page, offset = table[b, x["positions"][b, t] // size], x["positions"][b, t] % size
            pool[page, ..., offset, :] = new[b, t] if scale is None else to_e4m3(new[b, t] / scale)
        read = pool if scale is None else pool * (scale[:, None] if np.ndim(scale) else scale)
        rows[kind] = gathered(read, table)
        lowered[kind] = rows[kind] if scale is None else to_bf16(rows[kind])
    where = {"positions": x["positions"], "lengths": x["lengths"]}
    chosen = selection({"index_q": x["index_q"], "index_k": rows["index"], **where}, rule)
    rest = (*where.values(), chosen["blocks"], size)
    (out, lse), (out_bf16, lse_bf16) = (
        attention(x["q"], keys["k"], keys["v"], *rest, rounded=keys is lowered) for keys in (rows, lowered)
    )
    outputs = chosen | {"out": out, "lse": lse, "out_bf16": out_bf16, "lse_bf16": lse_bf16}
    if "exact_index" in rows:
        exact = selection({"index_q": x["index_q"], "index_k": rows["exact_index"], **where}, rule)
        outputs["blocks_of_exact_keys"] = exact["blocks"]
    return outputs | {f"{kind}_pages_after": pools[kind] for kind in ("k", "v", "index")}


def imported(pool, source, target, count):
    """The pool of another engine, NaN before, with the pages that rows had."""
    out = np.full((count, *pool.shape[1:]), np.nan)
    for old, new in zip(source[target >= 0], target[target >= 0], strict=True):
        out[new] = pool[old]
    return out


def gathered(pool, table):
    """[B S ...]: each row's pages behind one another; NaN where it has none."""
    rows = np.where((table >= 0).reshape(*table.shape, *[1] * (pool.ndim - 1)), pool[table], np.nan)
    rows = rows if pool.ndim == 3 else rows.swapaxes(2, 3)
    return rows.reshape(len(table), -1, *rows.shape[3:])


# --- cells


def order_of(cell_rows, cell_positions, row):
    """The cells of a row in the order of its positions."""
    own = np.flatnonzero(cell_rows == row)
    return own[np.argsort(cell_positions[own])]


def cells(x, rule):
    keys = {"k": x["k_cells"], "v": x["v_cells"], "index_k": x["index_cells"]}
    most = len(x["cell_rows"]) + -len(x["cell_rows"]) % rule["block_size"]
    rows = {name: np.full((len(x["lengths"]), most, *pool.shape[1:]), np.nan) for name, pool in keys.items()}
    for b in range(len(x["lengths"])):
        order = order_of(x["cell_rows"], x["cell_positions"], b)
        for name, pool in keys.items():
            rows[name][b, : len(order)] = pool[order]
    return sparse_attention(x | rows, rule)


# --- context parallelism


def device_part(q, k, v, positions, lengths, blocks, size, rounded, device, count):
    """(out, lse) of one of `count` devices, over `blocks`: those of the chosen ones that it holds."""
    return attention(q, k, v, positions, lengths, blocks, size, rounded)


def shards(x, rule):
    chosen, count = selection(x, rule), rule["shards"]
    where = x["q"], x["k"], x["v"], x["positions"], x["lengths"]
    own = lambda ids, device: np.where((ids >= 0) & (ids % count == device), ids, -1)
    outputs = {}
    for rounded in (False, True):
        divided = [own(chosen["blocks"], device) for device in range(count)]
        parts = [
            device_part(*where, blocks, rule["block_size"], rounded, device, count)
            for device, blocks in enumerate(divided)
        ]
        outs, lses = (np.stack(x) for x in zip(*parts, strict=True))
        highest = lses.max(0)
        shift = np.where(np.isinf(highest), 0, highest)
        weights = np.exp(lses - shift)
        total = weights.sum(0)
        with np.errstate(divide="ignore"):
            lse = np.where(total > 0, shift + np.log(total), -np.inf)
        out = (outs * (weights / np.where(total > 0, total, 1))[..., None]).sum(0)
        found = {"shard_out": outs, "shard_lse": lses, "out": to_bf16(out) if rounded else out, "lse": lse}
        outputs |= {f"{name}_bf16" if rounded else name: value for name, value in found.items()}
    ids = np.arange(chosen["block_scores"].shape[-1])
    on_device = [np.where(ids % count == device, chosen["block_scores"], -np.inf) for device in range(count)]
    return outputs | chosen | {"shard_scores": np.stack(on_device)}


# --- experts


def weigh(scores, ids, biased):
    """The weights of chosen experts: their scores, without the bias, divided by their sum. 0 / 0 is NaN."""
    weights = np.take_along_axis(scores, ids, -1)
    with np.errstate(invalid="ignore"):
        return weights / weights.sum(-1, keepdims=True)


def experts(x, rule):
    if "gate_values" in x:
        hidden = swiglu(x["gate_values"], x["up_values"], rule)
        return {"activated": hidden, "activated_bf16": to_bf16(hidden)}
    count = rule["experts_per_token"]
    # Column by column, so that equal columns give equal sums.
    logits = np.stack([(x["x"] * column).sum(-1) for column in x["gate"].T], axis=-1)
    with np.errstate(over="ignore"):
        scores = 1 / (1 + np.exp(-logits))
    order = np.argsort(-(scores + x["bias"]), axis=-1, kind="stable")
    biased = np.take_along_axis(scores + x["bias"], order, -1)
    ids = order[:, :count]
    weights = weigh(scores, ids, scores + x["bias"])
    outputs = {"router_scores": scores, "expert_ids": ids, "expert_weights": weights}
    outputs |= {"last_kept": biased[:, count - 1], "first_dropped": biased[:, count]}
    if "gate_proj" not in x:
        return outputs
    for rounded in (False, True):
        tail = "_bf16" if rounded else ""
        matrices = [[x[f"{part}_proj"][e] for part in ("gate", "up", "down")] for e in range(x["gate"].shape[1])]
        one_token = lambda token, row, rounded=rounded, m=matrices: [mlp(token, *m[e], rule, rounded) for e in row]
        each = np.array([one_token(token, row) for token, row in zip(x["x"], ids, strict=True)])
        shared = mlp(x["x"], *(x[f"shared_{part}_proj"] for part in ("gate", "up", "down")), rule, rounded)
        out = rule["routed_scaling_factor"] * (each * weights[..., None]).sum(1) + shared
        outputs |= {f"expert_out{tail}": each, f"shared_out{tail}": shared, f"out{tail}": out}
    return outputs


def mlp(x, gate_proj, up_proj, down_proj, rule, rounded=False):
    hidden = swiglu(x @ gate_proj, x @ up_proj, rule)
    return (to_bf16(hidden) if rounded else hidden) @ down_proj


def swiglu(gate, up, rule):
    """Clamped SwiGLU: the gate is clamped above alone, up on both sides."""
    gate, up = np.minimum(gate, rule["limit"]), np.clip(up, -rule["limit"], rule["limit"])
    return (up + 1) * gate / (1 + np.exp(-rule["alpha"] * gate))


# --- norm and rotary embedding


def norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rope(x, positions, rotary_dim, theta):
    """[..., T N H] turned at positions [..., T]: dims (i, i + R) by position * theta^(-i / R), R = rotary_dim / 2."""
    half = rotary_dim // 2
    angle = positions[..., None] * theta ** (-2 * np.arange(half) / rotary_dim)
    cos, sin = np.cos(angle)[..., None, :], np.sin(angle)[..., None, :]
    first, second = x[..., :half], x[..., half:rotary_dim]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:]], -1)


def norms(x, rule):
    normed = norm(x["x"], 1 + x["weight"], rule["eps"])
    return {"normed": normed, "normed_bf16": to_bf16(normed)}


def rotary(x, rule):
    angle = x["positions"][..., None] * rule["theta"] ** (-np.arange(0, rule["rotary_dim"], 2) / rule["rotary_dim"])
    normed = norm(x["x"], 1 + x["weight"], rule["eps"])
    rotated = rope(normed, x["positions"], rule["rotary_dim"], rule["theta"])
    if "picked" in x:
        picked = rotated[0, x["picked"][:, 0], x["picked"][:, 1]]
        return {"rotated_at": picked, "rotated_at_bf16": to_bf16(picked)}
    rounded = {"normed_bf16": to_bf16(normed), "rotated_bf16": to_bf16(rotated)}
    return {"normed": normed, "cos": np.cos(angle), "sin": np.sin(angle), "rotated": rotated} | rounded


# --- MXFP8


def scale_of(largest):
    """The exponent of a block's scale: the largest number comes to lie in the last binade of E4M3, 256 to 448."""
    return math.floor(math.log2(largest)) - 8


def to_mxfp8(x, block):
    """([X C] numbers of E4M3, [X Q] scale bytes), block by block; a block with NaN or an infinity is NaN."""
    codes, scales = np.zeros(x.shape), np.zeros((len(x), x.shape[1] // block), int)
    for row, i in np.ndindex(scales.shape):
        numbers = x[row, i * block : (i + 1) * block]
        largest = np.abs(numbers).max()
        if not np.isfinite(largest):
            scales[row, i], codes[row, i * block : (i + 1) * block] = 255, np.nan
        elif largest > 0:
            scales[row, i] = max(scale_of(largest) + 127, 0)
            codes[row, i * block : (i + 1) * block] = to_e4m3(numbers / 2.0 ** (scales[row, i] - 127))
    return codes, scales


def mxfp8(x, rule):
    outputs = {}
    if "codes" in x:
        scale = np.repeat(x["scales"].astype(int), rule["block"], axis=1)
        with np.errstate(over="ignore"):
            wide = np.where(scale == 255, np.nan, x["codes"] * 2.0 ** (scale - 127))
            weights = wide.astype(np.float32).astype(np.float64)
        outputs = {"weights": weights, "weights_bf16": to_bf16(weights)}
    if "activations" in x:
        codes, scales = to_mxfp8(x["activations"], rule["block"])
        outputs |= {"encoded": codes, "encoded_scales": scales}
        if "codes" in x:
            read = codes * 2.0 ** (np.repeat(scales, rule["block"], axis=1) - 127)
            outputs |= {"product": read @ weights.T, "product_of_exact": x["activations"] @ weights.T}
    return outputs


# --- sampling


def edit(x, b, logits, later):
    """{token: logit} of what may be drawn, after bias and penalties; `later` are tokens after those of the inputs."""
    known = lambda name: [i for i in x[name][b].tolist() if i >= 0] if name in x else []
    prompt = known("prompt") if "prompt" in x else np.flatnonzero(x["seen"][b]).tolist()
    new = known("new") + list(later)
    text, out = prompt + new, dict(enumerate(logits.tolist()))
    if "mask" in x:
        bits = int.from_bytes(x["mask"][b].astype("<u4").tobytes(), "little")
        out = {i: value for i, value in out.items() if bits >> i & 1}
        words = [[i for i in word if i >= 0] for word in x["bad_words"][b].tolist()]
        banned = [word[-1] for word in words if word and (word[:-1] == text[-len(word) + 1 :] or len(word) == 1)]
        banned += known("stop_ids") if len(new) < x["min_tokens"][b] else []
        biases = dict(zip(x["bias_ids"][b].tolist(), x["biases"][b].tolist(), strict=True))
        out = {i: value + biases.get(i, 0.0) for i, value in out.items() if i not in banned}
    penalty = float(x["repetition_penalty"][b])
    out |= {i: out[i] / penalty if out[i] > 0 else out[i] * penalty for i in set(text) & out.keys()}
    if "presence_penalty" in x:
        each, once = float(x["frequency_penalty"][b]), float(x["presence_penalty"][b])
        out |= {i: out[i] - each * new.count(i) - once for i in set(new) & out.keys()}
    return out


def keep(x, temperature, top_k, top_p, min_p):
    """{token: probability} of what the knobs leave of {token: logit}."""
    ranked = sorted(x, key=lambda i: (-x[i], i))
    if temperature == 0:
        return {ranked[0]: 1.0}
    weight = {i: math.exp((value - max(x.values())) / temperature) for i, value in x.items()}
    ranked = ranked[: int(top_k) or len(ranked)]
    total, before, kept = math.fsum(weight[i] for i in ranked), 0.0, []
    for i in ranked:
        if top_p < 1 and before / total >= top_p:
            break
        kept.append(i)
        before += weight[i]
    kept = [i for i in kept if weight[i] >= min_p]
    total = math.fsum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept}


def draw(weights, uniform):
    """The token of the largest log weight - log(-log u); of equal ones the lowest id."""
    return max(sorted(weights), key=lambda i: math.log(weights[i]) - math.log(-math.log(uniform[i])))


def knobs(x, b):
    return [float(x[name][b]) for name in ("temperature", "top_k", "top_p", "min_p")]


def sampling(x, rule):
    p, tokens = np.zeros(x["logits"].shape), []
    for b in range(len(p)):
        kept = keep(edit(x, b, x["logits"][b], ()), *knobs(x, b))
        p[b, list(kept)] = list(kept.values())
        tokens.append(draw(kept, x["uniform"][b]))
    return {"kept": p > 0, "probabilities": p, "tokens": np.array(tokens)}


def verification(x, rule):
    rows, count = x["proposals"].shape
    accepted, tokens, logprobs = np.zeros(rows, int), np.full((rows, count + 1), -1), np.zeros((rows, count + 1))
    for b in range(rows):
        for column in range(count + 1):
            p = keep(edit(x, b, x["logits"][b, column], tokens[b, :column].tolist()), *knobs(x, b))
            token = x["proposals"][b, column] if column < count else -1
            q = {} if token < 0 else {token: 1.0}
            if token >= 0 and "draft_probabilities" in x:
                q = dict(enumerate(x["draft_probabilities"][b, column]))
            is_accepted = token >= 0 and x["accept_uniform"][b, column] * q[token] < p.get(token, 0.0)
            if not is_accepted:
                rest = {i: p[i] - q.get(i, 0.0) for i in p if p[i] > q.get(i, 0.0)}
                token = draw(rest or p, x["draw_uniform"][b, column])
            tokens[b, column] = token
            logprobs[b, column] = x["logits"][b, column, token] - log_sum_exp(x["logits"][b, column])
            if not is_accepted:
                break
            accepted[b] += 1
    return {"accepted": accepted, "tokens": tokens, "logprobs": logprobs}


# --- the draft


def eagle3(x, rule):
    eps, taps = rule["rms_norm_eps"], x["taps"]
    taps = norm(taps, x["fc_norm"], eps) if rule["fc_norm"] else taps
    features = sum(taps[:, :, a] @ x["fc"][a] for a in range(taps.shape[2]))
    found = {"feature": features} | {name: [] for name in ("q", "k", "v", "hidden", "logits", "proposals")}
    for b in range(len(taps)):
        tokens, past = [*x["next_tokens"][b], *x["drafted"][b]], {name: [] for name in found}
        for position, token in enumerate(tokens):
            feature = features[b, position] if position < taps.shape[1] else (
                norm(past["hidden"][-1], x["norm"], eps) if rule["norm_output"] else past["hidden"][-1]
            )  # fmt: skip
            normed = norm(feature, x["hidden_norm"], eps)
            both = np.concatenate([norm(x["embed_tokens"][token], x["input_layernorm"], eps), normed])
            width = x["q_proj"].shape[-1]
            turned = lambda y, p=position, width=width: rope(y[None], np.array([p]), width, rule["rope_theta"])[0]
            for name in ("q", "k", "v"):
                y = np.tensordot(both, x[f"{name}_proj"], 1)
                past[name].append(y if name == "v" else turned(y))
            keys, values = (np.stack(past[name])[None] for name in ("k", "v"))
            place = np.array([[position]]), np.array([position + 1])
            attended, _ = attention(past["q"][-1][None, None], keys, values, *place)
            hidden = (normed if rule["norm_before_residual"] else feature) + np.tensordot(
                attended[0, 0], x["o_proj"], 2
            )
            inner = norm(hidden, x["post_attention_layernorm"], eps)
            gate = inner @ x["gate_proj"]
            hidden = hidden + (gate / (1 + np.exp(-gate)) * (inner @ x["up_proj"])) @ x["down_proj"]
            past["hidden"].append(hidden)
            past["logits"].append(x["lm_head"] @ norm(hidden, x["norm"], eps))
            past["proposals"].append(x["target_ids"][np.argmax(past["logits"][-1])])
        for name in ("q", "k", "v", "hidden", "logits", "proposals"):
            found[name].append(np.stack(past[name]))
    return {name: np.stack(value) for name, value in found.items()}


# --- the model


def model(x, rule):
    """All named values; `rule["weights"]` has the hub's tensors, [out, in] each."""
    w, eps = rule["weights"], rule["eps"]
    x_positions = np.broadcast_to(np.arange(x["tokens"].shape[1]), x["tokens"].shape)
    where = {"positions": x_positions, "lengths": np.full(len(x["tokens"]), x["tokens"].shape[1])}
    stream = w["language_model.model.embed_tokens.weight"][x["tokens"]]
    outputs, taken = {"embedding": stream}, [stream]
    for number, kind in enumerate(rule["layers"]):
        own = {name.split(f"layers.{number}.")[1]: value for name, value in w.items() if f".layers.{number}." in name}
        found = {"input": stream, "attention_norm": norm(stream, 1 + own["input_layernorm.weight"], eps)}
        found |= attention_layer(found["attention_norm"], own, where, rule)
        stream = stream + found["attention_out"]
        found["ffn_norm"] = norm(stream, 1 + own["post_attention_layernorm.weight"], eps)
        found |= experts_layer(found["ffn_norm"], own, kind, rule)
        stream = found["output"] = stream + found["ffn_out"]
        outputs |= {f"layers.{number}.{name}": value for name, value in found.items()}
        taken.append(stream)
    final = norm(stream, 1 + w["language_model.model.norm.weight"], eps)
    taps = np.stack([taken[n] for n in rule["taps"]], axis=2)
    return outputs | {"final_norm": final, "logits": final @ w["language_model.lm_head.weight"].T, "taps": taps}


def attention_layer(x, own, where, rule):
    def heads(name, count):
        y = x @ own[f"self_attn.{name}_proj.weight"].T
        y = y.reshape(*x.shape[:2], count, -1)
        if name == "v":
            return y
        y = norm(y, 1 + own[f"self_attn.{name}_norm.weight"], rule["eps"])
        return rope(y, where["positions"], rule["rotary_dim"], rule["theta"])

    kv_heads = rule["num_kv_heads"]
    found = {"q": heads("q", rule["num_heads"]), "k": heads("k", kv_heads), "v": heads("v", kv_heads)}
    blocks = None
    if "self_attn.index_q_proj.weight" in own:
        found |= {"index_q": heads("index_q", kv_heads), "index_k": heads("index_k", 1)[:, :, 0]}
        found |= selection({name: found[name] for name in ("index_q", "index_k")} | where, rule)
        blocks = found["blocks"]
    operands = found["q"], found["k"], found["v"], *where.values()
    found["attention"], _ = attention(*operands, blocks, rule["block_size"])
    flat = found["attention"].reshape(*x.shape[:2], -1)
    return found | {"attention_out": flat @ own["self_attn.o_proj.weight"].T}


def experts_layer(x, own, kind, rule):
    def matrices(prefix, names):
        return [own[f"{prefix}{name}.weight"].T for name in names]

    if kind == "dense":
        return {"ffn_out": mlp(x, *matrices("mlp.", ("gate_proj", "up_proj", "down_proj")), rule)}
    prefix, flat = "block_sparse_moe.", x.reshape(-1, x.shape[-1])
    gate, count = own[f"{prefix}gate.weight"], range(len(own[f"{prefix}gate.weight"]))
    routed = [matrices(f"{prefix}experts.{e}.", ("w1", "w3", "w2")) for e in count]
    shared = matrices(f"{prefix}shared_experts.", ("gate_proj", "up_proj", "down_proj"))
    operands = {f"{part}_proj": np.stack([e[i] for e in routed]) for i, part in enumerate(("gate", "up", "down"))}
    operands |= {f"shared_{part}_proj": shared[i] for i, part in enumerate(("gate", "up", "down"))}
    bias = own[f"{prefix}e_score_correction_bias"]
    found = experts({"x": flat, "gate": gate.T, "bias": bias} | operands, rule)
    shaped = {"ffn_out": found["out"], "expert_ids": found["expert_ids"], "expert_weights": found["expert_weights"]}
    return {name: value.reshape(*x.shape[:2], -1) for name, value in shaped.items()}


GROUPS = {
    "selection": selection, "sparse_attention": sparse_attention, "pages": cached, "decode": cached, "float8": cached,
    "exchange": cached, "cells": cells, "shards": shards, "experts": experts, "norm": norms, "rotary": rotary,
    "mxfp8": mxfp8, "sampling": sampling, "verification": verification, "eagle3": eagle3, "model": model,
}  # fmt: skip
