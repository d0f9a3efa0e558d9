"""A plan as people read it, line by line."""

from m3jax.planning.report import as_text

LEAST = dict(flops=2.5e12, traffic=3.25e9, sent=4e6, seconds=0.0123, by=dict(compute=0.01, memory=0.0123, links=0.001))


ANSWER = dict(
    flops=3e12, traffic=4e9, collectives={"all-reduce": 7, "all-gather": 2}, seconds=0.02,
    by=dict(compute=0.001, memory=0.0123, links=0.02), collective_bytes={"all-reduce": 2.5e6, "all-gather": 1e6},
    hidden_collectives={"all-reduce": 3}, lower_seconds=1.6, compile_seconds=70.2, unknown_loops=2,
    heaviest=[(2e9, 60, "layer/attention"), (1e9, 1, "x" * 100), (1e8, 1, "c"), (1, 1, "d")],
)  # fmt: skip


PLAN = dict(
    topology="v5p:2x2x2", devices=8, context=8192, batch=4, dtype="bfloat16", weights="mxfp8", kv_dtype="float16",
    index_dtype="float32", prefill_chunk=2048, draft=True, mesh="data=1", how="compiled", fits=False,
    memory=dict(weights=2.0**31, experts=2.0**30, keys_and_values=2.0**29, index_keys=2.0**28, draft=0.0,
                vision=2.0**30, temporaries=2.0**30, limit=2.0**33, total=2.0**32, arguments=1.0),
    decode=dict(least=LEAST, compiled=ANSWER, expected=dict(
        seconds=0.025, share=0.5, card="H200", date="1 May", is_measured_card=False)),
    prefill=dict(least=LEAST, compiled={"error": "\n  too much memory \nat"}, expected=None),
    images=dict(least=LEAST), image_count=3, image_tokens=576,
    checks=[dict(off=0.1, unit="ms", date="1 May"), dict(off=-0.2, unit="ms", date="2 May"),
            dict(off=0.05, unit="x", date="3 May"), dict(off=0.3, unit="ms", date="1 May")],
    meshes=[dict(mesh="data=1", total=2**32, decode=0.0123, prefill=0.4567, fits=True),
            dict(mesh="data=2", total=2**36, decode=0.5, prefill=1.5, fits=False)],
)  # fmt: skip


TEXT = """\
v5p:2x2x2, 8 devices, mesh data=1 (compiled by the TPU's compiler)
context 8,192, batch 4, weights mxfp8 and bfloat16, keys and values float16, index keys float32

HBM of one device              GiB
  weights                     2.00  of it experts 1.0
  keys and values             0.50
  index keys                  0.25
  vision                      1.00
  temporaries                 1.00
  total                       4.00  of 8.00: 50%
DOES NOT FIT

decode step (4 tokens), one device
                   TFLOP        GB   GB sent        ms
  at least         2.500      3.25     0.004     12.30  by memory
  expected                                       25.00  at 50% of that rate (measured on one H200, 1 May: another card)
  compiled         3.000      4.00     0.004     20.00  by links
  all-gather               2 x,         1.00 MB together, 0 beside products
  all-reduce               7 x,         2.50 MB together, 3 beside products
   50% of the traffic: 60 x layer/attention
   25% of the traffic: 1 x ...{}
    2% of the traffic: 1 x c
  lowered in 2 s, compiled in 70 s; 2 loops whose length is data count once

prefill chunk (2,048 tokens at the end of the context), one device
                   TFLOP        GB   GB sent        ms
  at least         2.500      3.25     0.004     12.30  by memory
  the compiler refused: too much memory

images (3 of 576 tokens, by arithmetic), one device
                   TFLOP        GB   GB sent        ms
  at least         2.500      3.25     0.004     12.30  by memory

how far such times were off where it could be checked (each: --json)
  3 times on one device: -20% to +30% (1 May, 2 May)
  1 speedups of two devices: +5% to +5% (3 May)

best meshes by arithmetic                       GiB  decode ms  prefill ms
  data=1                                        4.0      12.30       456.7
  data=2                                       64.0     500.00      1500.0  does not fit
The draft is arithmetic: its weights, keys and values, and a round of 3 proposals.""".format("x" * 80)


def test_the_report_line_by_line():
    assert as_text(PLAN).splitlines() == TEXT.splitlines()
    parts = {name: value for name, value in PLAN.items() if name not in ("images", "image_count", "image_tokens")}
    memory = {name: size for name, size in PLAN["memory"].items() if name != "arguments"} | {"draft": 2.0**30}
    planned = parts | dict(
        how="arithmetic", weights="dequantize", draft=False, fits=True, checks=[], memory=memory,
        decode=dict(least=LEAST), prefill=dict(least=LEAST),
    )  # fmt: skip
    text = as_text(planned)
    assert "(by arithmetic: nothing was compiled)" in text and "weights bfloat16, keys" in text and "\nfits\n" in text
    assert (
        "  draft                       1.00\n  vision" in text
        and "  temporaries                 1.00  a guess\n" in text
    )
    assert not any(line in text for line in ("images", "how far", "The draft is", "expected", "compiler"))
    refused = as_text(PLAN | dict(memory=planned["memory"]))
    assert "  a guess: the compiler refused\n" in refused


def test_what_was_measured_on_a_card_is_said_of_that_card():
    answer = PLAN["decode"]["expected"] | dict(is_measured_card=True, share=1.0)
    text = as_text(PLAN | dict(decode=dict(least=LEAST, expected=answer)))
    assert "25.00  at 100% of that rate (measured on one H200, 1 May)\n" in text
