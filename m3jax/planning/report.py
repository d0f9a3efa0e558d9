"""What the planner found, as data and as text."""

from typing import Any

from m3jax.planning.arithmetic import Work
from m3jax.planning.chips import GIB, Chip
from m3jax.planning.job import DRAFT_TOKENS, Job
from m3jax.planning.meshes import Candidate

_SHOWN = 4  # meshes in the list of the best ones
_HEAVIEST = 3  # instructions that are named
_WIDTH = 80


def as_dict(
    job: Job, chosen: Candidate, ranked: list[Candidate], compiled: dict[str, dict[str, Any]] | None
) -> dict[str, Any]:
    """Everything, in bytes and seconds, for one device."""
    chip = job.slice.chip
    programs = {
        name: _program(getattr(chosen, name), (compiled or {}).get(name), chip) for name in ("decode", "prefill")
    }
    memory = _memory(chosen, compiled)
    return {
        "topology": str(job.slice), "devices": job.slice.num_devices, "context": job.context, "batch": job.batch,
        "dtype": job.dtype, "kv_dtype": job.kv, "index_dtype": job.index, "prefill_chunk": job.chunk,
        "draft": job.draft is not None, "mesh": chosen.name, "how": "arithmetic" if compiled is None else "compiled",
        "memory": memory, "fits": _fits(memory, compiled), "decode": programs["decode"], "prefill": programs["prefill"],
        "meshes": [_short(c, chip) for c in ranked[:_SHOWN]],
    }  # fmt: skip


def _memory(chosen: Candidate, compiled) -> dict[str, float]:
    m = chosen.memory
    out = {"weights": m.weights, "experts": m.experts, "keys_and_values": m.cache, "index_keys": m.index_keys,
           "draft": m.draft, "temporaries": m.temporaries, "limit": m.limit}  # fmt: skip
    done = [c for c in (compiled or {}).values() if "error" not in c]
    if done and len(done) == len(compiled):
        out["temporaries"] = max(c["temporaries"] + c["fresh_outputs"] + c["code"] for c in done)
        out["arguments"] = max(c["arguments"] for c in done)
    held = m.weights + m.cache + m.index_keys
    return out | {"total": max(held, out.get("arguments", 0.0)) + m.draft + out["temporaries"]}


def _fits(memory: dict[str, float], compiled) -> bool:
    refused = any("error" in c for c in (compiled or {}).values())
    return not refused and memory["total"] <= memory["limit"]


def _program(work: Work, compiled: dict[str, Any] | None, chip: Chip) -> dict[str, Any]:
    out = {"least": {"flops": work.flops, "traffic": work.traffic, "sent": work.sent, "seconds": work.roofline(chip),
                     "by": work.seconds(chip)}}  # fmt: skip
    if compiled is None or "error" in compiled:
        return out if compiled is None else out | {"compiled": compiled}
    real = Work(compiled["flops"], compiled["traffic"], sum(compiled["collective_bytes"].values()))
    return out | {"compiled": compiled | {"seconds": real.roofline(chip), "by": real.seconds(chip)}}


def _short(c: Candidate, chip: Chip) -> dict[str, Any]:
    times = {name: getattr(c, name).roofline(chip) for name in ("decode", "prefill")}
    return {"mesh": c.name, "fits": c.memory.fits, "total": c.memory.total, **times}


def as_text(plan: dict[str, Any]) -> str:
    """The report that the command line prints."""
    compiled = plan["how"] == "compiled"
    how = "compiled by the TPU's compiler" if compiled else "by arithmetic: nothing was compiled"
    lines = [
        f"{plan['topology']}, {plan['devices']} devices, mesh {plan['mesh']} ({how})",
        f"context {plan['context']:,}, batch {plan['batch']}, weights {plan['dtype']}, keys and values "
        f"{plan['kv_dtype']}, index keys {plan['index_dtype']}",
        "",
        *_memory_lines(plan["memory"], compiled),
        "fits" if plan["fits"] else "DOES NOT FIT",
        "",
        *_program_lines("decode step", f"{plan['batch']} tokens", plan["decode"]),
        *_program_lines(
            "prefill chunk", f"{plan['prefill_chunk']:,} tokens at the end of the context", plan["prefill"]
        ),
        *_mesh_lines(plan),
    ]
    if plan["draft"]:
        lines.append(f"The draft is arithmetic: its weights, keys and values, and a round of {DRAFT_TOKENS} proposals.")
    return "\n".join(lines)


def _memory_lines(m: dict[str, float], compiled: bool) -> list[str]:
    names = ["weights", "keys_and_values", "index_keys", *(["draft"] if m["draft"] else []), "temporaries"]
    notes = {"weights": f"of it experts {m['experts'] / GIB:.1f}", "temporaries": "" if compiled else "a guess"}
    if compiled and "arguments" not in m:
        notes["temporaries"] = "a guess: the compiler refused"
    lines = ["HBM of one device              GiB"]
    for name in names:
        lines.append(f"  {name.replace('_', ' '):22s} {m[name] / GIB:9.2f}  {notes.get(name, '')}".rstrip())
    over = m["total"] / m["limit"]
    return [*lines, f"  {'total':22s} {m['total'] / GIB:9.2f}  of {m['limit'] / GIB:.2f}: {over:.0%}"]


def _program_lines(name: str, what: str, program: dict[str, Any]) -> list[str]:
    least, real = program["least"], program.get("compiled")
    lines = [f"{name} ({what}), one device", f"  {'':12s} {'TFLOP':>9s} {'GB':>9s} {'GB sent':>9s} {'ms':>9s}"]
    lines.append(_row("at least", least["flops"], least["traffic"], least["sent"], least))
    if real and "error" in real:
        lines.append(f"  the compiler refused: {_first_line(real['error'])}")
    elif real:
        sent = sum(real["collective_bytes"].values())
        lines.append(_row("compiled", real["flops"], real["traffic"], sent, real))
        for kind, count in sorted(real["collectives"].items()):
            lines.append(f"  {kind:20s} {count:5d} x, {real['collective_bytes'][kind] / 1e6:12,.2f} MB together")
        for size, times, origin in real["heaviest"][:_HEAVIEST]:
            lines.append(f"  {size / real['traffic']:4.0%} of the traffic: {times} x {_end(origin)}")
        spent = f"lowered in {real['lower_seconds']:.0f} s, compiled in {real['compile_seconds']:.0f} s"
        lines.append(f"  {spent}; {real['unknown_loops']} loops whose length is data count once")
    return [*lines, ""]


def _row(name: str, flops: float | int, traffic: float | int, sent: float | int, times: dict[str, Any]) -> str:
    slowest = max(times["by"], key=times["by"].get)
    numbers = f"{flops / 1e12:9.3f} {traffic / 1e9:9.2f} {sent / 1e9:9.3f} {times['seconds'] * 1e3:9.2f}"
    return f"  {name:12s} {numbers}  by {slowest}"


def _mesh_lines(plan: dict[str, Any]) -> list[str]:
    head = f"best meshes by arithmetic{'':18s} {'GiB':>7s} {'decode ms':>10s} {'prefill ms':>11s}"
    rows = [
        f"  {m['mesh']:41s} {m['total'] / GIB:7.1f} {m['decode'] * 1e3:10.2f} {m['prefill'] * 1e3:11.1f}"
        f"{'' if m['fits'] else '  does not fit'}"
        for m in plan["meshes"]
    ]
    return [head, *rows]


def _end(text: str) -> str:
    return text if len(text) <= _WIDTH else f"...{text[-_WIDTH:]}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
