"""A worker behind real gRPC: statuses, clients that go away, and bytes that are no message."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as protocol
from smg_grpc_proto import vllm_engine_pb2_grpc as services
from smg_grpc_proto.generated import common_pb2
from support.workers import answer, generate_request, new_worker, settled, shared_worker

from m3jax.serve.worker.server import start
from m3jax.transfer import TransferError

LONG = dict(max_tokens=400, ignore_eos=True)


@asynccontextmanager
async def connected(worker):
    server, port = await start(worker)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield services.VllmEngineStub(channel), channel
    await server.stop(0)


def test_calls_by_grpc_are_the_workers():
    worker = shared_worker()

    async def run():
        async with connected(worker) as (stub, _):
            messages = [message async for message in stub.Generate(generate_request(stream=True, temperature=0))]
            health = await stub.HealthCheck(protocol.HealthCheckRequest())
            model = await stub.GetModelInfo(protocol.GetModelInfoRequest())
            pieces = [piece async for piece in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        return messages, health, model, pieces

    messages, health, model, pieces = asyncio.run(run())
    assert messages[-1].complete.output_ids == answer(worker).output_ids
    assert health.healthy and model.vocab_size == 2048 and pieces[-1].sha256


def test_what_is_wrong_has_a_status():
    async def run():
        worker = new_worker(max_requests=1)
        statuses = []
        async with connected(worker) as (stub, channel):
            raw = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")

            async def status_of(call):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    if hasattr(call, "__aiter__"):
                        _ = [message async for message in call]
                    else:
                        await call
                statuses.append((caught.value.code().name, caught.value.details()))

            await status_of(stub.Generate(generate_request(temperature=-1.0)))
            for garbage in (b"\xff" * 40, b"\x12\x80\x80\x80\x80\x80\x01", bytes(range(256))):
                await status_of(raw(garbage))
            await status_of(stub.Embed(protocol.EmbedRequest()))
            going_on = stub.Generate(generate_request(stream=True, **LONG))
            await going_on.read()
            await status_of(stub.Generate(generate_request()))
            going_on.cancel()
            await settled(worker)
            await worker.close()
            await status_of(stub.Generate(generate_request()))
        return statuses

    (bad, *garbage, embed, full, closed) = asyncio.run(run())
    assert bad[0] == "INVALID_ARGUMENT" and "temperature" in bad[1]
    assert {code for code, _ in garbage} == {"INVALID_ARGUMENT"}
    assert embed[0] == "UNIMPLEMENTED"
    assert full[0] == "RESOURCE_EXHAUSTED" and closed[0] == "UNAVAILABLE"


def test_clients_that_go_away_free_their_pages():
    """A cancelled call, a call whose deadline passes, and a connection that is closed."""
    worker = shared_worker()

    async def run():
        async with connected(worker) as (stub, _):
            cancelled = stub.Generate(generate_request(stream=True, **LONG))
            await cancelled.read()
            cancelled.cancel()
            late = stub.Generate(generate_request(stream=True, **LONG), timeout=0.2)
            with pytest.raises(grpc.aio.AioRpcError):
                _ = [message async for message in late]
        async with connected(worker) as (stub, _):
            await stub.Generate(generate_request(stream=True, **LONG)).read()
        await settled(worker)

    asyncio.run(run())


def test_a_subscription_is_answered_before_there_is_news():
    worker = shared_worker()

    async def run():
        async with connected(worker) as (stub, _):
            call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=10**6))
            await asyncio.wait_for(call.initial_metadata(), 10)
            call.cancel()

    asyncio.run(run())


def test_a_taken_port_is_an_error_of_one_line():
    worker = shared_worker()

    async def run():
        server, port = await start(worker)
        with pytest.raises(ValueError, match="something else"):
            await start(worker, port=port)
        await server.stop(0)

    asyncio.run(run())


def test_a_prompt_that_did_not_come_from_elsewhere_is_a_worker_that_is_lost(unchecked):
    class Lost:
        async def Generate(self, request):
            raise TransferError("h:1 ended the transfer")
            yield

    async def run():
        async with connected(Lost()) as (stub, _):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(stub.Generate(generate_request())))
        return caught.value.code().name, caught.value.details()

    assert asyncio.run(run()) == ("UNAVAILABLE", "h:1 ended the transfer")
