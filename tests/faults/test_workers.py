"""What happens to requests and jobs when workers are stopped, killed, full, or told to stop a job."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from inferbus.workers.jobs.quarantine import LAST_ATTEMPTS
from inferbus.workers.stack.errors import ProcessExited
from inferbus.workers.stack.server import NatsServer
from tests.support.asking import Answer, result
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet, stop

pytestmark = pytest.mark.faults

REQUEST = "infer.request.scripted"
JOBS = "infer.jobs.scripted.batch.acme"
SLOW = "[[rules]]\nlength = 40\ndelay = 0.02\n"
ENDLESS = "[[rules]]\nlength = 30000\ndelay = 0.01\n"
BODY = b'{"token_ids":[1,2]}'


@pytest.fixture
async def nc(server: NatsServer) -> AsyncIterator[Client]:
    client = await nats.connect(server.url)
    yield client
    await client.close()


async def request(nc: Client, *, job: str | None = None) -> Answer:
    answer = await Answer.on(nc, nc.new_inbox())
    headers = {"Infer-Job-Id": job} if job else None
    await nc.publish(f"{REQUEST}.tokens", BODY, reply=answer.subject, headers=headers)
    return answer


async def submit(nc: Client, job: str, **headers: str) -> int:
    ack = await nc.jetstream().publish(f"{JOBS}.tokens", BODY, headers={"Nats-Msg-Id": job, **headers})
    sequence: int = ack.seq
    return sequence


async def empty_queue(nc: Client) -> bool:
    return bool((await nc.jetstream().stream_info("INFER_JOBS")).state.messages == 0)


async def test_sigterm_lets_a_running_job_finish_then_exits_0(nc: Client, workers: Fleet) -> None:
    worker = await workers.start("both", SLOW)
    stream = await Answer.on(nc, "infer.stream.acme.j1")
    await submit(nc, "j1")
    await eventually(lambda: len(stream.chunks) >= 2)
    assert await stop(worker) == 0
    assert stream.status == "ok"
    assert len(stream.chunks) == 40
    assert await empty_queue(nc)


async def test_sigterm_while_idle_with_an_open_pull_exits_at_once_and_hands_nothing_out(
    nc: Client, workers: Fleet
) -> None:
    worker = await workers.start("both", SLOW)
    assert await stop(worker) == 0
    await submit(nc, "j1")

    async def waits() -> bool:
        # The server counts a job for its consumer a moment after it has acknowledged it.
        info = await nc.jetstream().consumer_info("INFER_JOBS", "scripted-batch")
        return (info.num_pending, info.num_ack_pending) == (1, 0)

    # Sooner than a job that was handed out would come back.
    await eventually(waits, within=1.0)


async def test_a_worker_that_cannot_be_told_of_has_taken_nothing_when_it_gives_up(tmp_path: Path) -> None:
    users = """
    no_auth_user: anybody
    authorization { users: [
      {user: anybody, password: any}
      {user: worker, password: any, permissions: {publish: ">", subscribe: {allow: ">", deny: "$SRV.>"}}}
    ] }
    """
    async with (
        NatsServer(tmp_path / "nats", sync_interval=None, extra=users) as server,
        fleet(server, tmp_path) as workers,
    ):
        nc = await nats.connect(server.url)
        await submit(nc, "j1")
        worker = await workers.start("both", SLOW, ready=False, nats_user="worker", nats_password="any")
        assert await worker.wait() == 3
        info = await nc.jetstream().consumer_info("INFER_JOBS", "scripted-batch")
        assert (info.num_pending, info.num_ack_pending) == (1, 0)
        await nc.close()


async def test_a_second_sigterm_hands_running_work_back_at_once(nc: Client, workers: Fleet) -> None:
    worker = await workers.start("both", ENDLESS, grace=300)
    stream, live = await Answer.on(nc, "infer.stream.acme.j1"), await request(nc)
    await submit(nc, "j1")
    await eventually(lambda: len(stream.chunks) > 2 and len(live.chunks) > 2)
    worker.send_signal(signal.SIGTERM)
    await eventually(lambda: workers.events(worker, "worker.draining"))
    assert await stop(worker) == 0
    assert live.chunks[-1]["error"]["code"] == "draining"
    assert live.status == "error"
    assert stream.chunks[-1]["retrying"]["code"] == "draining"
    assert stream.status is None
    other = await workers.start("both", "[[rules]]\nlength = 3\n")
    assert (await result(nc, "j1")).headers["Infer-Attempt"] == "2"
    assert await stop(other) == 0


async def test_sigterm_while_nats_is_away_ends_in_time_and_the_job_goes_on_elsewhere(
    nc: Client, workers: Fleet, server: NatsServer
) -> None:
    worker = await workers.start("both", SLOW, grace=2)
    await submit(nc, "j1")
    await eventually(lambda: workers.events(worker, "job.started"))
    await server.kill()
    assert await asyncio.wait_for(stop(worker), 30) == 0
    await server.restart()
    await workers.start("both", SLOW)
    assert (await result(nc, "j1", within=30)).headers["Infer-Status"] == "ok"


async def test_a_job_goes_on_elsewhere_when_the_grace_period_is_over(nc: Client, workers: Fleet) -> None:
    worker = await workers.start("both", ENDLESS, grace=0.2)
    stream = await Answer.on(nc, "infer.stream.acme.j1")
    await submit(nc, "j1")
    await eventually(lambda: len(stream.chunks) > 2)
    assert await stop(worker) == 0
    await workers.start("both", "[[rules]]\nlength = 3\n")
    assert (await result(nc, "j1")).headers["Infer-Status"] == "ok"


async def test_all_jobs_in_flight_finish_on_another_worker_after_sigkill(nc: Client, workers: Fleet) -> None:
    worker = await workers.start("both", ENDLESS)
    streams = [await Answer.on(nc, f"infer.stream.acme.j{i}") for i in range(5)]
    for i in range(5):
        await submit(nc, f"j{i}")
    await eventually(lambda: all(stream.chunks for stream in streams))
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await workers.start("both", "[[rules]]\nlength = 3\n")
    results = [await result(nc, f"j{i}") for i in range(5)]
    assert {found.headers["Infer-Status"] for found in results} == {"ok"}
    assert {found.headers["Infer-Attempt"] for found in results} == {"2"}
    await eventually(lambda: empty_queue(nc))


async def test_a_job_that_kills_every_worker_becomes_a_dead_letter(nc: Client, workers: Fleet) -> None:
    killer = '[[rules]]\n[rules.fault]\ndo = "kill"\nat = 1\n'
    await submit(nc, "poison")
    # The first one killed its worker before it sent anything, so nobody knows that it began.
    for _ in range(2 + LAST_ATTEMPTS):
        worker = await workers.start("both", killer, ready=False, max_attempts=2, ack_wait=1)
        assert await worker.wait() == -signal.SIGKILL
    await workers.start("both", killer, max_attempts=2, ack_wait=1)
    found = await result(nc, "poison")
    assert json.loads(found.data)["error"]["code"] == "attempts_exhausted"
    letter = await nc.jetstream().get_last_msg("INFER_DEAD", "infer.dead.scripted.tokens")
    assert letter.data == BODY
    assert letter.headers is not None
    assert letter.headers["Infer-Subject"] == f"{JOBS}.tokens"
    await eventually(lambda: empty_queue(nc))


async def test_what_ran_beside_a_job_that_kills_every_worker_is_answered_all_the_same(
    nc: Client, workers: Fleet
) -> None:
    killer = '[[rules]]\nuser = "killer"\ndelay = 0.02\n[rules.fault]\ndo = "kill"\nat = 10\n'
    poison = json.dumps({"token_ids": [1, 2], "user": "killer", "max_tokens": 40}).encode()
    await nc.jetstream().publish(f"{JOBS}.tokens", poison, headers={"Nats-Msg-Id": "poison"})
    for job in ("a", "b", "c"):
        await submit(nc, job)

    async def buried() -> bool:
        with suppress(NotFoundError):
            return bool(await nc.jetstream().get_last_msg("INFER_RESULTS", "infer.results.acme.poison"))
        return False

    while not await buried():
        worker = await workers.start(
            "both", f"{killer}{SLOW}", ready=False, max_attempts=2, ack_wait=1, slots=8
        )
        with suppress(ProcessExited):
            await worker.until(buried, timeout=60)
    found = {job: await result(nc, job, within=30) for job in ("poison", "a", "b", "c")}
    status = {job: message.headers["Infer-Status"] for job, message in found.items()}
    assert status == {"poison": "error", "a": "ok", "b": "ok", "c": "ok"}


async def test_a_running_request_stops_when_it_is_cancelled_by_subject(nc: Client, workers: Fleet) -> None:
    await workers.start("both", ENDLESS)
    answer = await request(nc, job="mine")
    await eventually(lambda: len(answer.chunks) > 2)
    await nc.jetstream().publish("infer.cancel.live.mine", b"")
    assert await answer.ended(within=1.0) == "cancelled"
    await workers.idle()


@pytest.mark.parametrize("layout", [("both",), ("prefill", "decode")], ids=["both", "pair"])
async def test_a_request_stops_on_both_sides_when_its_caller_is_gone(
    nc: Client, workers: Fleet, layout: tuple[Any, ...]
) -> None:
    for role in layout:
        await workers.start(role, ENDLESS)
    answer = await request(nc)
    await eventually(lambda: len(answer.chunks) > 2)
    await answer.subscription.unsubscribe()
    await workers.idle(within=3.0)


async def test_a_cancel_before_the_first_token_stops_both_legs(nc: Client, workers: Fleet) -> None:
    await workers.start("prefill", "[[rules]]\nfirst_delay = 60\n", prefill_timeout=100)
    await workers.start("decode", "[[rules]]\nfirst_delay = 60\n", prefill_timeout=100)
    answer = await request(nc, job="mine")
    await eventually(lambda: all(worker.load.running for worker in workers.roster.workers()))
    await nc.jetstream().publish("infer.cancel.live.mine", b"")
    assert await answer.ended(within=1.0) == "cancelled"
    await workers.idle(within=2.0)


async def test_a_full_worker_leaves_the_queue_group_and_comes_back(nc: Client, workers: Fleet) -> None:
    await workers.start("both", ENDLESS, slots=1)
    answer = await request(nc, job="mine")
    await eventually(lambda: answer.chunks)

    async def nobody() -> bool:
        try:
            reply = await nc.request(f"{REQUEST}.tokens", BODY, timeout=5)
        except nats.errors.NoRespondersError:
            return True
        # It was under way when the worker left.
        assert json.loads(reply.data)["error"]["retryable"] is True
        return False

    await eventually(nobody)
    await nc.jetstream().publish("infer.cancel.live.mine", b"")
    await answer.ended()

    async def somebody() -> bool:
        try:
            await nc.request(f"{REQUEST}.tokens", b"{}", timeout=5)
        except nats.errors.NoRespondersError:
            return False
        return True

    await eventually(somebody)


async def test_jobs_beyond_the_slots_stay_queued_and_none_fails(nc: Client, workers: Fleet) -> None:
    await workers.start("both", "[[rules]]\nlength = 3\ndelay = 0.01\n", slots=2)
    for i in range(50):
        await submit(nc, f"j{i}")
    results = [await result(nc, f"j{i}") for i in range(50)]
    assert {found.headers["Infer-Status"] for found in results} == {"ok"}
    assert {found.headers["Infer-Attempt"] for found in results} == {"1"}


async def test_a_job_longer_than_the_ack_wait_runs_once(nc: Client, workers: Fleet) -> None:
    await workers.start("both", "[[rules]]\nlength = 4\ndelay = 1.0\n", ack_wait=1)
    await submit(nc, "long")
    assert (await result(nc, "long")).headers["Infer-Attempt"] == "1"


async def test_prefill_that_dies_is_replaced_before_the_first_token(nc: Client, workers: Fleet) -> None:
    first = await workers.start("prefill", "[[rules]]\nfirst_delay = 60\n")
    await workers.start("decode", "[[rules]]\nlength = 3\nfirst_delay = 0.5\n", prefill_timeout=8)
    answer = await request(nc)
    await eventually(lambda: workers.roster.workers(role="prefill")[0].load.running)
    await workers.start("prefill", "")
    first.send_signal(signal.SIGKILL)
    assert await answer.ended() == "ok"
    assert answer.chunks[-1]["usage"]["completion_tokens"] == 3


async def test_without_prefill_a_live_request_gets_a_retryable_error_and_a_job_waits(
    nc: Client, workers: Fleet
) -> None:
    await workers.start("decode", "[[rules]]\nlength = 3\n")
    answer = await request(nc)
    assert await answer.ended() == "error"
    assert answer.chunks[0]["error"]["code"] == "prefill_unavailable"
    assert answer.chunks[0]["error"]["retryable"] is True
    await submit(nc, "j1")
    await workers.start("prefill")
    assert (await result(nc, "j1")).headers["Infer-Status"] == "ok"


async def test_a_job_waits_in_its_queue_while_no_prefill_worker_is_there(nc: Client, workers: Fleet) -> None:
    # With one attempt only: a failed one would be the end of it.
    decode = await workers.start("decode", "[[rules]]\nlength = 3\n", max_attempts=1)
    await submit(nc, "early")
    prefill = await workers.start("prefill")
    assert (await result(nc, "early")).headers["Infer-Status"] == "ok"
    prefill.send_signal(signal.SIGKILL)
    await prefill.wait()
    # Nobody has noticed yet; the first to find out is a live request.
    assert await (await request(nc)).ended() == "error"
    await eventually(lambda: len(workers.events(decode, "jobs.waiting_for_prefill")) == 2)
    await submit(nc, "late")
    await workers.start("prefill")
    assert (await result(nc, "late")).headers["Infer-Status"] == "ok"


async def test_a_prefill_worker_that_stood_still_forgets_what_was_aborted_meanwhile(
    nc: Client, workers: Fleet
) -> None:
    prefill = await workers.start("prefill", slots=3)
    decode = await workers.start("decode", "[[rules]]\nlength = 3\n")
    prefill.send_signal(signal.SIGSTOP)
    answers = [await request(nc, job=f"r{i}") for i in range(3)]
    await eventually(lambda: len(workers.events(decode, "job.started")) == 3)
    for i in range(3):
        await nc.jetstream().publish(f"infer.cancel.live.r{i}", b"")
    assert [await answer.ended() for answer in answers] == ["cancelled"] * 3
    # It finds every hand-off and its abort side by side.
    prefill.send_signal(signal.SIGCONT)

    async def served() -> bool:
        # If it stood still for long it was forgotten, and a request hears to try again until it is back.
        return await (await request(nc)).ended() == "ok"

    await eventually(served)
    assert await stop(prefill) == 0


async def test_logs_never_hold_what_was_asked_or_answered(nc: Client, workers: Fleet) -> None:
    worker = await workers.start("both", 'tokenizer = true\n[[rules]]\ntext = "topsecretanswer"\n')
    for kind, body in (
        ("chat", {"messages": [{"role": "user", "content": "topsecretprompt"}]}),
        ("chat", {"messages": [{"role": "topsecretrole"}]}),
        ("completions", {"prompt": "topsecretprompt", "top_p": 7}),
    ):
        await nc.request(f"{REQUEST}.{kind}", json.dumps(body).encode(), timeout=10)
    assert await stop(worker) == 0
    log = worker.log.read_text()
    assert "job.started" in log
    assert "topsecret" not in log


@pytest.mark.timeout(180)
async def test_five_hundred_random_cancels_leave_nothing_behind(nc: Client, workers: Fleet) -> None:
    await workers.start("prefill", "[[rules]]\nfirst_delay = 0.02\n", slots=64)
    await workers.start("decode", "[[rules]]\nlength = 20\ndelay = 0.005\n", slots=64)
    chance = random.Random(10)
    at_once = asyncio.Semaphore(40)

    async def cancelled(number: int) -> str:
        """How a request or job ended that was cancelled before, in, or after its prefill, stream or end."""
        job, durable = f"r{number}", number % 3 == 0
        async with at_once:
            answer = None
            if durable:
                await submit(nc, job)
            else:
                answer = await request(nc, job=job)
            await asyncio.sleep(chance.uniform(0, 0.25))
            await nc.jetstream().publish(f"infer.cancel.{'acme' if durable else 'live'}.{job}", b"")
            if answer is None:
                return str((await result(nc, job)).headers["Infer-Status"])
            status = await answer.ended()
            await answer.subscription.unsubscribe()
            return status

    statuses = await asyncio.gather(*map(cancelled, range(500)))
    assert set(statuses) == {"ok", "cancelled"}
    await workers.idle()
    await eventually(lambda: empty_queue(nc))


ENDING = "[[rules]]\ncount = [100, 200]\nlength = 5000\nend = 160\ndelay = {delay}\n"


@pytest.mark.parametrize("layout", [("both",), ("prefill", "decode")], ids=["both", "pair"])
async def test_a_job_goes_on_after_the_last_chunk_when_its_worker_is_killed(
    nc: Client, workers: Fleet, layout: tuple[Any, ...]
) -> None:
    *others, answering = layout
    for role in others:
        await workers.start(role)
    worker = await workers.start(answering, ENDING.format(delay=0.02))
    stream = await Answer.on(nc, "infer.stream.acme.j1")
    await submit(nc, "j1")
    await eventually(lambda: len(stream.chunks) >= 10)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await workers.start(answering, ENDING.format(delay=0))
    assert await stream.ended() == "ok"
    first = [chunk for chunk in stream.chunks if chunk["attempt"] == 1]
    second = [chunk for chunk in stream.chunks if chunk["attempt"] == 2]
    tokens = [token for chunk in (*first, *second) for token in chunk["token_ids"]]
    assert tokens == list(range(100, 161))
    begins = next(m for m in stream.messages if m.data and json.loads(m.data)["attempt"] == 2)
    assert begins.headers is not None
    assert begins.headers["Infer-Continues"] == f"1:{len(first)}"
    found = json.loads((await result(nc, "j1")).data)
    assert found["choices"][0]["token_ids"] == list(range(100, 161))
    assert found["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 61,
        "total_tokens": 63,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert found["warnings"] == [f"continued after {len(first)} tokens by another worker"]


async def test_a_chat_job_goes_on_in_mid_sentence(nc: Client, workers: Fleet) -> None:
    sentence = "Ein Satz über ďábelské ódy 🏳️‍🌈 world, der lange genug ist, um unterbrochen zu werden."
    script = f'tokenizer = true\n[[rules]]\ntext = "{sentence}"\ncontinues = true\ndelay = '
    worker = await workers.start("both", script + "0.02\n")
    stream = await Answer.on(nc, "infer.stream.acme.j1")
    body = b'{"messages":[{"role":"user","content":"Hi"}]}'
    await nc.jetstream().publish(f"{JOBS}.chat", body, headers={"Nats-Msg-Id": "j1"})
    await eventually(lambda: len(stream.chunks) >= 30)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await workers.start("both", script + "0\n")
    assert await stream.ended() == "ok"
    assert {chunk["attempt"] for chunk in stream.chunks} == {1, 2}
    continues = next(
        m.headers["Infer-Continues"] for m in stream.messages if m.headers and "Infer-Continues" in m.headers
    )
    kept = int(continues.split(":")[1])
    said = [chunk for chunk in stream.chunks if chunk["attempt"] == 2 or chunk["seq"] < kept]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in said) == sentence
    assert sum("role" in chunk["choices"][0]["delta"] for chunk in said) == 1
    found = json.loads((await result(nc, "j1")).data)
    assert found["choices"][0]["message"]["content"] == sentence


async def test_a_stalled_owner_says_nothing_more_once_its_job_is_anothers(nc: Client, workers: Fleet) -> None:
    stalled = await workers.start("both", ENDING.format(delay=0.05), ack_wait=1)
    stream = await Answer.on(nc, "infer.stream.acme.j1")
    await submit(nc, "j1")
    await eventually(lambda: len(stream.chunks) >= 3)
    stalled.send_signal(signal.SIGSTOP)
    await workers.start("both", ENDING.format(delay=0.02), ack_wait=1)
    await eventually(lambda: any(chunk["attempt"] > 1 for chunk in stream.chunks), within=20)
    stalled.send_signal(signal.SIGCONT)
    assert await stream.ended() == "ok"
    await eventually(lambda: workers.events(stalled, "job.left"))
    attempts = [chunk["attempt"] for chunk in stream.chunks]
    assert attempts == sorted(attempts)
    assert (await result(nc, "j1")).headers["Infer-Worker"] == "w2"


async def test_streams_that_live_in_memory_are_made_again_when_their_server_restarts(
    nc: Client, workers: Fleet, server: NatsServer
) -> None:
    await workers.start("both", "[[rules]]\nlength = 3\n")
    await server.kill()
    await server.restart()

    async def chunks_are_kept() -> bool:
        try:
            await nc.jetstream().stream_info("INFER_STREAM")
        except (NotFoundError, nats.errors.Error):
            return False
        return True

    await eventually(chunks_are_kept, within=20)
    await eventually(lambda: workers.info("w1"), within=20)
    await submit(nc, "j1")
    assert (await result(nc, "j1")).headers["Infer-Status"] == "ok"


@pytest.mark.parametrize(
    "stream",
    ["INFER_JOBS", "INFER_RESULTS", "INFER_STREAM", "INFER_CANCEL", "INFER_DEAD", "KV_INFER_WORKERS"],
)
async def test_a_stream_that_somebody_removed_is_made_again_and_jobs_go_on(
    nc: Client, workers: Fleet, stream: str
) -> None:
    await workers.start("both", "[[rules]]\nlength = 3\n")
    first = await submit(nc, "j1")
    assert (await result(nc, "j1")).headers["Infer-Submission"] == str(first)
    await nc.jetstream().delete_stream(stream)

    async def there() -> bool:
        try:
            subjects = (await nc.jetstream().stream_info(stream)).config.subjects or []
        except NotFoundError:
            return False
        return subjects != ["infer.jobs"]

    await eventually(there, within=15)
    again = await submit(nc, "j1", **{"Nats-Msg-Id": "again", "Infer-Job-Id": "j1"})
    assert again > first

    async def answered() -> bool:
        with suppress(NotFoundError, nats.errors.Error):
            return bool((await result(nc, "j1")).headers["Infer-Submission"] == str(again))
        return False

    await eventually(answered, within=20)


async def test_a_pair_with_an_inbox_prefix_of_its_own_needs_no_other_setting(
    nc: Client, workers: Fleet
) -> None:
    for role in ("prefill", "decode"):
        await workers.start(role, nats_inbox_prefix="_INBOX_fleet")
    answer = await request(nc)
    assert await answer.ended() == "ok"


async def test_a_caller_with_another_inbox_prefix_gets_answers_from_the_services_api_too(
    server: NatsServer, workers: Fleet
) -> None:
    worker = await workers.start("both", reply_prefix="_INBOX.,_REPLY.")
    nc = await nats.connect(server.url, inbox_prefix=b"_REPLY")
    try:
        told = json.loads((await nc.request("$SRV.PING", timeout=10)).data)
        assert told["id"] == worker.name
    finally:
        await nc.close()


_EMBEDDED = """
import os, signal, sys
from pathlib import Path
from inferbus.workers.config import resolve
from inferbus.workers.roles import run
def own(number, frame): pass
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, own)
code = run("both", resolve({}, os.environ), scripted=Path(sys.argv[1]))
assert code == 0
assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is own
sys.exit(7)
"""


async def test_a_program_that_ran_a_worker_has_its_own_signal_handlers_back(
    workers: Fleet, tmp_path: Path
) -> None:
    script = tmp_path / "script.toml"
    script.write_text("")
    worker = await workers.spawn("embedded", [sys.executable, "-c", _EMBEDDED, str(script)])
    await workers.ready(worker, within=30)
    assert await stop(worker) == 7
