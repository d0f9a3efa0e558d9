"""The planner's report, as data and as text."""

from dataclasses import asdict
from typing import Any

from m3jax.planning.arithmetic import Work
from m3jax.planning.chips import GIB, Chip
from m3jax.planning.job import DRAFT_TOKENS, Job
from m3jax.planning.measured import Expected, checks, expected
from m3jax.planning.meshes import Candidate

_SHOWN = 4  # meshes in the list of the best ones
_HEAVIEST = 3  # instructions that are named
_WIDTH = 80


def as_dict(
    job: Job, chosen: Candidate, ranked: list[Candidate], compiled: dict[str, dict[str, Any]] | None
) -> dict[str, Any]:
    """Return everything that the planner found for one device, in bytes and seconds.

    Args:
      job: what was planned.
      chosen: the mesh that the plan is for.
      ranked: all meshes, best first.
      compiled: what `compile_programs` returned for the chosen mesh, or None where nothing was compiled.
    """
    chip = job.slice.chip
    answers = {} if compiled is None else compiled
    memory = _memory(chosen, answers)
    is_refused = any("error" in answer for answer in answers.values())
    shown = [
        {
            "mesh": candidate.name, "fits": candidate.memory.fits, "total": candidate.memory.total,
            "decode": candidate.decode.roofline(chip), "prefill": candidate.prefill.roofline(chip),
        }
        for candidate in ranked[:_SHOWN]
    ]  # fmt: skip
    return {
        "topology": str(job.slice), "devices": job.slice.num_devices, "context": job.context, "batch": job.batch,
        "dtype": job.dtype, "weights": job.weights, "kv_dtype": job.kv, "index_dtype": job.index,
        "prefill_chunk": job.chunk,
        "draft": job.draft is not None, "mesh": chosen.name, "how": "arithmetic" if compiled is None else "compiled",
        "memory": memory, "fits": not is_refused and memory["total"] <= memory["limit"],
        "decode": _program(chosen.decode, answers.get("decode"), chip) | _expected(job, chosen.decode, "decode"),
        "prefill": _program(chosen.prefill, answers.get("prefill"), chip) | _expected(job, chosen.prefill, "prefill"),
        "meshes": shown, "checks": _checks(job),
    } | _images(job, chosen)  # fmt: skip


def _expected(job: Job, work: Work, program: str) -> dict[str, Any]:
    """Return the entry for the time that a call is expected to take: None on a chip where nothing was measured."""
    found = None if job.draft is not None else expected(job, work, program)  # no round with a draft of M3 was measured
    return {"expected": None if found is None else asdict(found)}


def _checks(job: Job) -> list[dict[str, Any]]:
    """Return how far expected times were off where that is known; [] where none is expected."""
    return [asdict(check) | {"off": check.off} for check in checks()] if job.slice.chip.kind == "gpu" else []


def _images(job: Job, chosen: Candidate) -> dict[str, Any]:
    """Return the entries for a call of the vision tower, by arithmetic; none if no images are planned."""
    if chosen.images is None:
        return {}
    return {"image_count": job.images, "image_tokens": job.image_tokens,
            "images": _program(chosen.images, None, job.slice.chip)}  # fmt: skip


def _memory(chosen: Candidate, answers: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return bytes of memory by content, with the compiler's own numbers where it accepted every program."""
    planned = chosen.memory
    figures = {
        "weights": planned.weights, "experts": planned.experts, "keys_and_values": planned.cache,
        "index_keys": planned.index_keys, "draft": planned.draft, "vision": planned.vision,
        "temporaries": planned.temporaries, "limit": planned.limit,
    }  # fmt: skip
    accepted = [answer for answer in answers.values() if "error" not in answer]
    if accepted and len(accepted) == len(answers):
        figures["temporaries"] = max(a["temporaries"] + a["fresh_outputs"] + a["code"] for a in accepted)
        figures["arguments"] = max(answer["arguments"] for answer in accepted)
    lasting = max(planned.weights + planned.cache + planned.index_keys, figures.get("arguments", 0.0))
    return figures | {"total": lasting + planned.vision + planned.draft + figures["temporaries"]}


def _program(least: Work, answer: dict[str, Any] | None, chip: Chip) -> dict[str, Any]:
    """Return the least work of one program, and the compiler's counts or error if it was asked."""
    figures = {"least": {"flops": least.flops, "traffic": least.traffic, "sent": least.sent,
                     "seconds": least.roofline(chip), "by": least.seconds(chip)}}  # fmt: skip
    if answer is None:
        return figures
    if "error" in answer:
        return figures | {"compiled": answer}
    counted = Work(answer["flops"], answer["traffic"], sum(answer["collective_bytes"].values()))
    return figures | {"compiled": answer | {"seconds": counted.roofline(chip), "by": counted.seconds(chip)}}


def as_text(plan: dict[str, Any]) -> str:
    """Return the report that the command line prints, for a plan as `as_dict` makes it."""
    is_compiled = plan["how"] == "compiled"
    weights = plan["dtype"] if plan["weights"] == "dequantize" else f"mxfp8 and {plan['dtype']}"
    how = "compiled by the TPU's compiler" if is_compiled else "by arithmetic: nothing was compiled"
    lines = [
        f"{plan['topology']}, {plan['devices']} devices, mesh {plan['mesh']} ({how})",
        f"context {plan['context']:,}, batch {plan['batch']}, weights {weights}, keys and values "
        f"{plan['kv_dtype']}, index keys {plan['index_dtype']}",
        "",
        *_memory_lines(plan["memory"], is_compiled),
        "fits" if plan["fits"] else "DOES NOT FIT",
        "",
        *_program_lines("decode step", f"{plan['batch']} tokens", plan["decode"]),
        *_program_lines(
            "prefill chunk", f"{plan['prefill_chunk']:,} tokens at the end of the context", plan["prefill"]
        ),
        *_image_lines(plan),
        *_check_lines(plan),
        *_mesh_lines(plan),
    ]
    if plan["draft"]:
        lines.append(f"The draft is arithmetic: its weights, keys and values, and a round of {DRAFT_TOKENS} proposals.")
    return "\n".join(lines)


def _image_lines(plan: dict[str, Any]) -> list[str]:
    """Return the lines on a call of the vision tower; none if no images are planned."""
    if "images" not in plan:
        return []
    extent = f"{plan['image_count']} of {plan['image_tokens']} tokens, by arithmetic"
    return _program_lines("images", extent, plan["images"])


def _memory_lines(memory: dict[str, float], is_compiled: bool) -> list[str]:
    """Return a line for each part of memory, in GiB, and one for their sum."""
    optional = [name for name in ("draft", "vision") if memory[name]]
    names = ["weights", "keys_and_values", "index_keys", *optional, "temporaries"]
    notes = {"weights": f"of it experts {memory['experts'] / GIB:.1f}"}
    if "arguments" not in memory:
        notes["temporaries"] = "a guess: the compiler refused" if is_compiled else "a guess"
    lines = ["HBM of one device              GiB"]
    for name in names:
        lines.append(f"  {name.replace('_', ' '):22s} {memory[name] / GIB:9.2f}  {notes.get(name, '')}".rstrip())
    share = memory["total"] / memory["limit"]
    return [*lines, f"  {'total':22s} {memory['total'] / GIB:9.2f}  of {memory['limit'] / GIB:.2f}: {share:.0%}"]


def _program_lines(name: str, extent: str, program: dict[str, Any]) -> list[str]:
    """Return lines on one program: its least work and, if it was compiled, the compiler's counts or refusal."""
    least, answer = program["least"], program.get("compiled")
    lines = [f"{name} ({extent}), one device", f"  {'':12s} {'TFLOP':>9s} {'GB':>9s} {'GB sent':>9s} {'ms':>9s}"]
    lines.append(_work_line("at least", least, least["sent"]))
    if program.get("expected"):
        lines.append(_expected_line(Expected(**program["expected"])))
    if answer and "error" in answer:
        reason = next((line.strip() for line in answer["error"].splitlines() if line.strip()), "no reason given")
        lines.append(f"  the compiler refused: {reason}")
    elif answer:
        lines.append(_work_line("compiled", answer, sum(answer["collective_bytes"].values())))
        for collective, count in sorted(answer["collectives"].items()):
            lines.append(
                f"  {collective:20s} {count:5d} x, {answer['collective_bytes'][collective] / 1e6:12,.2f} MB together, "
                f"{answer['hidden_collectives'].get(collective, 0):.0f} beside products"
            )
        for traffic, times, origin in answer["heaviest"][:_HEAVIEST]:
            origin_end = origin if len(origin) <= _WIDTH else f"...{origin[-_WIDTH:]}"
            lines.append(f"  {traffic / answer['traffic']:4.0%} of the traffic: {times:g} x {origin_end}")
        spent = f"lowered in {answer['lower_seconds']:.0f} s, compiled in {answer['compile_seconds']:.0f} s"
        lines.append(f"  {spent}; {answer['unknown_loops']} loops whose length is data count once")
    return [*lines, ""]


def _expected_line(found: Expected) -> str:
    """Return the line of the time that is expected, with what it rests on."""
    source = f"measured on one {found.card}, {found.date}"
    source += "" if found.is_measured_card else ": another card"
    return f"  {'expected':41s} {found.seconds * 1e3:10.2f}  at {found.share:.0%} of that rate ({source})"


def _check_lines(plan: dict[str, Any]) -> list[str]:
    """Return lines on how far expected times were off, from the least to the most; none where none is expected."""
    if not plan["checks"]:
        return []
    lines = ["how far such times were off where it could be checked (each: --json)"]
    for name, unit in (("times on one device", "ms"), ("speedups of two devices", "x")):
        off = [check["off"] for check in plan["checks"] if check["unit"] == unit]
        dates = ", ".join(dict.fromkeys(check["date"] for check in plan["checks"] if check["unit"] == unit))
        lines.append(f"  {len(off)} {name}: {min(off):+.0%} to {max(off):+.0%} ({dates})")
    return [*lines, ""]


def _work_line(name: str, work: dict[str, Any], sent: float | int) -> str:
    """Return a line of numbers that ends with the slowest resource."""
    slowest = max(work["by"], key=work["by"].get)
    rates = f"{work['flops'] / 1e12:9.3f} {work['traffic'] / 1e9:9.2f} {sent / 1e9:9.3f} {work['seconds'] * 1e3:9.2f}"
    return f"  {name:12s} {rates}  by {slowest}"


def _mesh_lines(plan: dict[str, Any]) -> list[str]:
    """Return a heading and a line for each of the best meshes by arithmetic."""
    head = f"best meshes by arithmetic{'':18s} {'GiB':>7s} {'decode ms':>10s} {'prefill ms':>11s}"
    lines = [
        f"  {mesh['mesh']:41s} {mesh['total'] / GIB:7.1f} {mesh['decode'] * 1e3:10.2f} {mesh['prefill'] * 1e3:11.1f}"
        f"{'' if mesh['fits'] else '  does not fit'}"
        for mesh in plan["meshes"]
    ]
    return [head, *lines]
