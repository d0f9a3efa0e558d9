"""The calls of a worker over the embedded model: what the protocol asks for is what the engine does."""

import asyncio
import hashlib
import io
import json
import time
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as protocol
from smg_grpc_proto.generated import common_pb2
from support.embedded import TOKENIZER
from support.workers import (
    PROMPT,
    answer,
    answers,
    collect,
    engine_alone,
    generate_request,
    new_worker,
    settled,
    shared_worker,
    until,
)

from m3jax.decoding.loop import LoopClosed, LoopFull
from m3jax.serve.worker import worker as worker_module
from m3jax.serve.worker.fields import REFUSED, check_fields
from m3jax.serve.worker.tokenizer_files import pieces, tokenizer_archive
from m3jax.version import VERSION


@pytest.fixture(scope="module")
def worker():
    return shared_worker()


# Generate


def test_an_answer_is_the_engines_streamed_or_not(worker):
    expected = engine_alone(worker, top_logprobs=3)
    whole = answer(worker, logprobs=3)
    assert list(whole.output_ids) == expected.tokens
    assert (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens) == ("length", len(PROMPT), 8)
    np.testing.assert_array_equal(whole.output_logprobs.token_logprobs, np.float32(expected.logprobs))
    tops = [list(top.token_ids) for top in whole.output_logprobs.top_logprobs]
    assert tops == [list(of_token)[:3] for of_token in expected.top_logprobs]

    *chunks, last = asyncio.run(collect(worker, generate_request(stream=True, logprobs=3)))
    assert len(chunks) > 1 and all(message.HasField("chunk") for message in chunks)
    assert [token for message in chunks for token in message.chunk.token_ids] == expected.tokens
    assert sum(message.chunk.completion_tokens for message in chunks) == 8
    streamed = [value for message in chunks for value in message.chunk.output_logprobs.token_logprobs]
    assert streamed == list(whole.output_logprobs.token_logprobs)
    assert list(last.complete.output_ids) == expected.tokens
    assert not last.complete.HasField("output_logprobs")


def test_cached_tokens_are_those_of_whole_pages_that_are_known(worker):
    prompt = (77, *PROMPT, *PROMPT)
    assert [answer(worker, prompt=prompt).cached_tokens for _ in range(2)] == [0, 32]
    streamed = asyncio.run(collect(worker, generate_request(prompt, stream=True)))
    assert [message.chunk.cached_tokens for message in streamed[:-1]] == [32] * (len(streamed) - 1)


def test_a_group_has_the_seeds_that_follow(worker):
    (group,) = answers(worker, generate_request(n=3, temperature=1.0, seed=5))
    assert [complete.index for complete in group] == [0, 1, 2]
    alone = [list(answer(worker, temperature=1.0, seed=5 + i).output_ids) for i in range(3)]
    assert [list(complete.output_ids) for complete in group] == alone
    assert len(set(map(tuple, alone))) > 1


def test_without_a_seed_two_requests_are_two_draws(worker):
    draws = answers(worker, *(generate_request(temperature=2.0, max_tokens=8) for _ in range(2)))
    assert draws[0][0].output_ids != draws[1][0].output_ids
    assert answer(worker, seed=-1, temperature=2.0) == answer(worker, seed=-1, temperature=2.0)


def test_stop_ids_and_eos(worker):
    tokens = engine_alone(worker).tokens
    stopped = answer(worker, stop_token_ids=[tokens[2]])
    assert list(stopped.output_ids) == tokens[:3]
    assert (stopped.finish_reason, stopped.matched_token_id) == ("stop", tokens[2])
    biased = dict(logit_bias={1: 100.0})
    assert (answer(worker, **biased).finish_reason, answer(worker, **biased).completion_tokens) == ("stop", 1)
    assert answer(worker, ignore_eos=True, **biased).completion_tokens == 8
    assert answer(worker, min_tokens=3, **biased).completion_tokens == 4


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(worker):
    tokens = engine_alone(worker, max_new_tokens=12).tokens
    text = TOKENIZER.decode(tokens)
    stop = text[5:9]
    ends = next(n for n in range(1, 13) if stop in TOKENIZER.decode(tokens[:n]))
    stopped = answer(worker, max_tokens=12, stop=["not in it", stop])
    assert list(stopped.output_ids) == tokens[:ends]
    assert (stopped.finish_reason, stopped.matched_stop_str) == ("stop", stop)
    assert answer(worker, max_tokens=12, stop=[stop], include_stop_str_in_output=True).output_ids == stopped.output_ids
    later = answer(worker, max_tokens=12, stop=[stop], min_tokens=ends)
    assert later.completion_tokens > ends
    *chunks, last = asyncio.run(collect(worker, generate_request(stream=True, max_tokens=12, stop=[stop])))
    assert [token for message in chunks for token in message.chunk.token_ids] == tokens[:ends]
    assert last.complete.matched_stop_str == stop


@pytest.mark.parametrize("special", [False, True])
def test_a_special_token_has_text_for_stop_strings_unless_it_is_skipped(worker, special):
    """The model is made to say ]~b]."""
    bias = {TOKENIZER.backend.token_to_id("]~b]"): 100.0}
    stopped = answer(worker, stop=["~b"], skip_special_tokens=special, logit_bias=bias)
    assert stopped.completion_tokens == (8 if special else 1)


def test_scores_of_the_prompt(worker):
    scored = answer(worker, prompt_logprobs=2, max_tokens=1).input_logprobs
    assert list(scored.token_ids) == list(PROMPT)
    assert not scored.token_logprobs[0].HasField("value")
    values = [entry.value for entry in scored.token_logprobs[1:]]
    of_engine = engine_alone(worker, prompt_logprobs=2, max_new_tokens=1).prompt_logprobs
    expected = [found[token] for found, token in zip(of_engine, PROMPT[1:], strict=True)]
    np.testing.assert_array_equal(values, np.float32(expected))
    assert [len(top.token_ids) for top in scored.top_logprobs] == [0] + [2] * (len(PROMPT) - 1)
    best = [max(top.values) for top in scored.top_logprobs[1:]]
    assert all(value <= most for value, most in zip(values, best, strict=True)) and min(values) < min(best)
    # In a stream the first chunk has them, and nothing else.
    first, *rest = asyncio.run(collect(worker, generate_request(stream=True, prompt_logprobs=2)))
    assert first.chunk.input_logprobs == scored and len(rest) > 1
    assert not any(message.chunk.HasField("input_logprobs") for message in rest)
    assert not rest[-1].complete.HasField("input_logprobs")


# Fields


# Fields that are carried out, or that change nothing here, by message; all others are refused.
READ = {
    "GenerateRequest": "request_id tokenized text sampling_params stream mm_inputs extra_mm_inputs data_parallel_rank",
    "TokenizedInput": "original_text input_ids",
    "SamplingParams": """
        temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty max_tokens min_tokens stop
        stop_token_ids skip_special_tokens spaces_between_special_tokens ignore_eos n logprobs prompt_logprobs seed
        include_stop_str_in_output logit_bias truncate_prompt_tokens grammar_from_first_token json_schema regex grammar
        structural_tag json_object choice
    """,
    "ChoiceConstraint": "choices",
    "MultimodalInputs": """
        pixel_values model_specific_tensors im_token_id mm_placeholders mm_hashes batched_keys flat_keys
        keep_on_cpu_keys modality encoder_input_key
    """,
    "PlaceholderRange": "offset length",
    "TensorData": "shape dtype inline",
}


def test_every_field_of_the_protocol_is_carried_out_or_refused():
    """Also a field that a later version adds: it has to be entered in one of the two tables."""
    messages, seen = [protocol.GenerateRequest.DESCRIPTOR], set()
    while messages:
        message = messages.pop()
        if message.name in seen or message.GetOptions().map_entry:
            continue
        seen.add(message.name)
        read, refused = READ.get(message.name, "").split(), REFUSED.get(message.name, {})
        names = {field.name for field in message.fields}
        assert names == {*read, *refused}, message.name
        assert not refused.keys() & {*read}
        for field in message.fields:
            inner = field.message_type
            if inner is not None and inner.GetOptions().map_entry:
                inner = inner.fields_by_name["value"].message_type
            if inner is not None and field.name not in refused:
                messages.append(inner)


def refusal(worker, request) -> str:
    with pytest.raises(ValueError) as caught:
        asyncio.run(collect(worker, request))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("temperature", -1.0, "at least 0"),
        ("top_p", 1.5, "at most 1"),
        ("top_k", 2**31, "from 0 to"),
        ("min_p", 2.0, "at most 1"),
        ("frequency_penalty", 3.0, "at most 2"),
        ("presence_penalty", -3.0, "at least -2"),
        ("repetition_penalty", -1.0, "above 0"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", 4000, "can have 512"),
        ("min_tokens", 9, "at most"),
        ("stop", [""], "empty"),
        ("stop_token_ids", [5000], "no token id"),
        ("stop_token_ids", [7, 8, 9, 10, 11], "takes 4"),
        ("logprobs", -1, "from 0 to 20"),
        ("logprobs", 21, "from 0 to 20"),
        ("prompt_logprobs", 21, "from 0 to 20"),
        ("logit_bias", {5000: 1.0}, "no token id"),
        ("logit_bias", {5: 101.0}, "100"),
        ("truncate_prompt_tokens", 0, "at least 1"),
        ("n", 5000, "max_requests"),
        ("json_schema", "{", "no JSON"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("regex", "((", "regex"),
        ("grammar", "start: other", "other"),
        ("structural_tag", '{"format": {"type": "tag"}}', "end"),
        ("choice", protocol.ChoiceConstraint(), "at least one"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(worker, name, value, reason):
    message = refusal(worker, generate_request(**{name: value}))
    assert name in message and reason in message and "\n" not in message


def test_what_this_worker_does_not_do_is_refused(worker):
    request = generate_request()
    request.kv_transfer_params_json = "{}"
    assert "kv_transfer_params_json" in refusal(worker, request)
    request = generate_request()
    request.media_refs.items.add(url="data:")
    assert "media_refs" in refusal(worker, request)
    request = generate_request()
    request.data_parallel_rank = 1
    assert "data_parallel_rank" in refusal(worker, request)
    assert "no prompt" in refusal(worker, protocol.GenerateRequest())
    assert "text: the prompt has" in refusal(worker, protocol.GenerateRequest(text="a" * (1 << 22)))
    assert "ignore_eos" in refusal(worker, generate_request(ignore_eos=True, regex="a"))
    assert "empty" in refusal(worker, generate_request(prompt=()))
    # A field of a later version: number 100, a varint.
    later = protocol.SamplingParams.FromString(generate_request().sampling_params.SerializeToString() + b"\xa0\x06\x01")
    request = generate_request()
    request.sampling_params.CopyFrom(later)
    assert "field 100" in refusal(worker, request)
    check_fields(generate_request())


# The ends of requests


def test_abort_ends_a_request_with_what_it_has(worker):
    async def run():
        messages = []
        async for message in worker.Generate(
            generate_request(stream=True, request_id="a", max_tokens=400, ignore_eos=True)
        ):
            messages.append(message)
            await worker.Abort(protocol.AbortRequest(request_ids=["a", "unknown"]))
        await settled(worker)
        return messages

    *_, last = asyncio.run(run())
    assert last.complete.finish_reason == "abort" and 0 < last.complete.completion_tokens < 400


def test_a_request_that_is_ended_while_it_is_read_is_ended_when_the_engine_has_it(worker):
    """All its continuations; a request of another name goes on."""

    async def run():
        ended = generate_request(n=2, request_id="ended", max_tokens=400, ignore_eos=True)
        tasks = [asyncio.create_task(collect(worker, each)) for each in (ended, generate_request(request_id="other"))]
        await asyncio.sleep(0)
        assert await worker.prompt_progress("ended") is None and await worker.prompt_progress("unknown") is None
        await worker.Abort(protocol.AbortRequest(request_ids=["ended"]))
        found = await asyncio.gather(*tasks)
        await settled(worker)
        return found

    ended, other = ([message.complete.finish_reason for message in messages] for messages in asyncio.run(run()))
    assert (ended, other) == (["abort"] * 2, ["length"])


def test_two_requests_of_one_name_are_refused(worker):
    async def run():
        first = worker.Generate(generate_request(stream=True, request_id="twice", max_tokens=400, ignore_eos=True))
        await anext(first)
        with pytest.raises(ValueError, match="request_id = 'twice'"):
            await collect(worker, generate_request(request_id="twice"))
        await first.aclose()
        await settled(worker)

    asyncio.run(run())


def test_clients_that_vanish_leave_no_page_behind(worker):
    """At any point of a request: before it is read, while it waits for a row, with tokens on the way."""

    async def vanish(delay):
        request = generate_request(
            prompt=PROMPT * 8, stream=True, max_tokens=300, n=2, ignore_eos=True, temperature=1.0
        )
        task = asyncio.create_task(collect(worker, request))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def run():
        await asyncio.gather(*(vanish(0.006 * number) for number in range(20)))
        await settled(worker)

    asyncio.run(run())
    assert len(answer(worker).output_ids) == 8


def test_a_full_worker_says_so_and_a_closed_one_too():
    async def run():
        worker = new_worker(max_requests=1)
        stream = worker.Generate(generate_request(stream=True, max_tokens=300, ignore_eos=True))
        await anext(stream)
        with pytest.raises(LoopFull):
            await collect(worker, generate_request())
        await stream.aclose()
        await settled(worker)
        assert (await worker.HealthCheck(protocol.HealthCheckRequest())).healthy
        await worker.close()
        assert not (await worker.HealthCheck(protocol.HealthCheckRequest())).healthy
        with pytest.raises(LoopClosed):
            await collect(worker, generate_request())

    asyncio.run(run())


def test_health_while_it_compiles_and_after_its_end(monkeypatch):
    """It is ready before too: only the caller knows that it will prepare. Nothing is asked of it once it is closed."""
    worker, seen, compiled = new_worker(), [], []

    async def health():
        found = await worker.HealthCheck(protocol.HealthCheckRequest())
        return found.healthy, found.message

    async def run():
        assert await health() == (True, "ready")
        loop = asyncio.get_running_loop()

        def warmup(programs):
            compiled.append(programs)
            seen.append(asyncio.run_coroutine_threadsafe(health(), loop).result(10))
            if len(seen) == 2:
                raise RuntimeError("no memory")

        monkeypatch.setattr(worker.engine, "warmup", warmup)
        await worker.prepare()
        assert await health() == (True, "ready")
        with pytest.raises(RuntimeError, match="no memory"):
            await worker.prepare(("tower",))
        assert seen == [(False, "compiling")] * 2 and await health() == (True, "ready")
        await worker.close()
        assert await health() == (False, "the engine has ended")
        with pytest.raises(LoopClosed, match="takes no more requests"):
            await worker.prepare()

    asyncio.run(run())
    assert compiled == [("prefill", "decode", "pages"), ("tower",)]  # the tower only where it is asked for


# The other calls


def test_the_model_and_the_server_are_described(worker):
    async def run():
        return (
            await worker.GetModelInfo(protocol.GetModelInfoRequest()),
            await worker.GetServerInfo(protocol.GetServerInfoRequest()),
        )

    model, server = asyncio.run(run())
    assert (model.vocab_size, model.max_context_length, model.max_req_input_len) == (2048, 512, 511)
    assert model.model_path == model.served_model_name == model.tokenizer_path == "tiny"
    assert model.is_generation and model.supports_vision and model.bos_token_id == (TOKENIZER.bos_id or 0)
    assert list(model.eos_token_ids) == [1] and model.model_type == "minimax_m3_vl" and list(model.architectures)
    assert json.loads(model.default_sampling_params_json) == {"temperature": 0.8, "top_p": 0.95}
    assert (server.block_size, server.max_num_seqs, server.data_parallel_size) == (16, 4, 1)
    assert (server.multimodal_encoder_dtype, server.mm_processor, server.shm_namespace_id) == ("float32", "", "")
    assert (server.constrained_decoding_start, server.model_dtype) == ("after_reasoning", "float32")
    assert (server.server_type, server.engine_reasoning_parser) == ("vllm-grpc", "minimax_m3")


def test_times_are_seconds(worker, monkeypatch):
    """When a request came last, since when the worker serves, and the new tokens a second of the last ten seconds."""
    clock = SimpleNamespace(unix=time.time() + 1000, monotonic=time.monotonic() + 1000)
    read = SimpleNamespace(time=lambda: clock.unix, monotonic=lambda: clock.monotonic)
    monkeypatch.setattr(worker_module, "time", read)

    async def asked():
        server = await worker.GetServerInfo(protocol.GetServerInfoRequest())
        return server, (await worker.GetLoads(protocol.GetLoadsRequest())).loads[0].gen_throughput

    came, began = clock.unix, clock.monotonic
    answer(worker)
    first, _ = asyncio.run(asked())
    for seconds, throughput in ((5, 0.8), (10, 0.8), (10.25, 0.0)):
        clock.unix, clock.monotonic = came + seconds, began + seconds
        server, found = asyncio.run(asked())
        assert found == pytest.approx(throughput), seconds
        assert server.last_receive_timestamp == came
        assert server.uptime_seconds - first.uptime_seconds == pytest.approx(seconds)


def test_loads_count_what_runs_and_what_waits(worker):
    async def run():
        streams = [worker.Generate(generate_request(stream=True, max_tokens=400, ignore_eos=True)) for _ in range(6)]
        reading = [asyncio.create_task(anext(stream)) for stream in streams]
        await until(lambda: sum(task.done() for task in reading) >= 4)
        loads = await worker.GetLoads(protocol.GetLoadsRequest(include=["core"]))
        assert (await worker.GetServerInfo(protocol.GetServerInfoRequest())).active_requests == 6
        with pytest.raises(ValueError, match="dp_rank = 1: this worker has rank 0 alone"):
            await worker.GetLoads(protocol.GetLoadsRequest(dp_rank=1))
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        await settled(worker)
        return loads, await worker.GetLoads(protocol.GetLoadsRequest())

    busy, idle = asyncio.run(run())
    (load,) = busy.loads
    assert (busy.version, busy.dp_rank_count, load.max_running_requests) == (VERSION, 1, 4)
    assert busy.timestamp.endswith("+00:00") and load.num_used_tokens % 16 == 0
    assert load.token_usage == pytest.approx(load.num_used_tokens / load.max_total_num_tokens)
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (4, 2, 6)
    assert load.utilization == 1.0 and load.num_used_tokens > 0 and load.max_total_num_tokens == 96 * 16
    assert load.num_waiting_uncached_tokens == 2 * len(PROMPT) and load.gen_throughput > 0
    assert (idle.loads[0].num_total_reqs, idle.loads[0].num_used_tokens) == (0, 0)
    assert 0 < idle.loads[0].cache_hit_rate < 1


def test_the_tokenizers_files_come_in_pieces(worker):
    async def run():
        return [piece async for piece in worker.GetTokenizer(common_pb2.GetTokenizerRequest())]

    found = asyncio.run(run())
    assert found == list(pieces(tokenizer_archive(worker.folder)))
    files = zipfile.ZipFile(io.BytesIO(b"".join(piece.data for piece in found)))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert files.read(name) == (worker.folder / name).read_bytes()


def test_a_tokenizers_archive_is_its_files(tmp_path):
    """Equal files give equal bytes; the preprocessor's numbers are M3's where the folder has none."""
    for name in ("tokenizer.json", "config.json", "other.json"):
        (tmp_path / name).write_text(name * 3)
    archive = tokenizer_archive(tmp_path)
    assert archive == tokenizer_archive(tmp_path)
    with zipfile.ZipFile(io.BytesIO(archive)) as found:
        contents = {name: found.read(name) for name in found.namelist()}
    preprocessor = json.loads(contents.pop("preprocessor_config.json"))
    assert contents == {name: (name * 3).encode() for name in ("tokenizer.json", "config.json")}
    assert (preprocessor["patch_size"], preprocessor["merge_size"], preprocessor["temporal_patch_size"]) == (14, 2, 2)
    assert (preprocessor["min_pixels"], preprocessor["max_pixels"], preprocessor["size"]) == (3136, 451584, [672, 672])
    assert preprocessor["rescale_factor"] == 1 / 255 and all(preprocessor[f"do_{x}"] for x in ("resize", "rescale"))
    assert preprocessor["do_normalize"] is preprocessor["do_convert_rgb"] is True
    (tmp_path / "preprocessor_config.json").write_text("own")
    with zipfile.ZipFile(io.BytesIO(tokenizer_archive(tmp_path))) as found:
        assert found.read("preprocessor_config.json") == b"own"
    for length in (1, 65535, 65536, 65537, 131072):
        data = bytes(i % 251 for i in range(length))
        sent = list(pieces(data))
        assert b"".join(piece.data for piece in sent) == data and len(sent) == -(-length // 65536)
        assert [piece.sha256 for piece in sent] == [""] * (len(sent) - 1) + [hashlib.sha256(data).hexdigest()]


def test_the_cache_is_flushed_when_nothing_goes_on(worker):
    flush = lambda seconds: worker.FlushCache(common_pb2.FlushCacheRequest(timeout_s=seconds))

    async def run():
        stream = worker.Generate(generate_request(stream=True, max_tokens=400, ignore_eos=True))
        await anext(stream)
        refused = await flush(0)
        waiting = asyncio.create_task(flush(20))
        await stream.aclose()
        return refused, await waiting

    refused, flushed = asyncio.run(run())
    assert (refused.success, refused.message) == (False, "1 requests go on: try again") and flushed.success
    assert worker.engine.pages["cached"] == 0
    assert answer(worker).cached_tokens == 0


# KV events


async def take(stream, count):
    return [await asyncio.wait_for(anext(stream), 20) for _ in range(count)]


def test_kv_events_say_what_the_engine_knows(worker):
    """Blocks by their tokens and parents; who joins later gets them as a snapshot; then all are cleared."""
    prompt = tuple(np.random.default_rng(3).integers(300, 2000, 40).tolist())
    subscribe = lambda start=0: worker.SubscribeKvEvents(
        common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
    )

    async def run():
        early = subscribe()
        reading = asyncio.create_task(anext(early))
        await asyncio.sleep(0)
        await collect(worker, generate_request(prompt=prompt, max_tokens=4))
        first = await asyncio.wait_for(reading, 20)
        late = subscribe()
        known = []
        while not any(list(e.stored.blocks[0].token_ids) == list(prompt[16:32]) for e in known if e.HasField("stored")):
            known += (await take(late, 1))[0].events
        await worker.FlushCache(common_pb2.FlushCacheRequest(timeout_s=20))
        (cleared,) = await take(late, 1)
        resumed = subscribe(cleared.sequence_number - 1)
        (again,) = await take(resumed, 1)
        for stream in (early, late, resumed):
            await stream.aclose()
        return first, known, cleared, again

    first, known, cleared, again = asyncio.run(run())
    assert first.sequence_number > 0
    stored = {tuple(e.stored.blocks[0].token_ids): e.stored for e in known if e.HasField("stored")}
    parent, child = stored[prompt[:16]], stored[prompt[16:32]]
    assert not parent.HasField("parent_block_hash") and parent.blocks[0].block_size == 16
    assert child.parent_block_hash == parent.blocks[0].block_hash
    assert cleared.events[-1].HasField("cleared")
    assert again == cleared
