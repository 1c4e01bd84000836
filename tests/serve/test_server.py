"""`distca serve` over HTTP, with OpenAI's own client: answers are those of `distca generate`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from distca.plan.saved import load_stepped_plan
from support.byte_tokenizer import save_chat_model
from support.one_rank import OneRank, one_rank
from support.served import Server, are_gone

KEY = "a key"
FLAGS = (
    "--context-parallel-size 2 --context-parallel-threshold 40 --max-num-batched-tokens 64 "
    "--max-num-seqs 32 --max-model-len 1152 --max-queued-requests 60 --served-model-name small"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    # 12,288 bytes a block: pools for the longest sequence together.
    pools = ["--kv-cache-memory-bytes", str(36 * 12288)]
    started = Server(folder, *FLAGS, *pools, "--api-key", KEY)
    pids = started.pids()
    yield started
    assert started.end(signal.SIGTERM) == 0, started.log
    assert are_gone(pids, 5)
    assert KEY not in started.log


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def generated(folder: Path) -> Iterator[OneRank]:
    """Answers of `distca generate`."""
    with one_rank(folder) as rank:
        yield rank


def number(server: Server, name: str) -> float:
    """A number of `/metrics`, all labels together."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"distca:{name}")]
    assert found, name
    return sum(float(line.split()[-1]) for line in found)


def state(server: Server) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.get(f"{server.url}/debug/state", headers=headers).json()


def test_completions(client: openai.OpenAI, generated: OneRank) -> None:
    """A short prompt, and one on both ranks in chunks."""
    for prompt in ("Hello there", "The sky is " * 20):
        answer = client.completions.create(
            model="small", prompt=prompt, max_tokens=8, temperature=0, logprobs=3
        )
        (choice,) = answer.choices
        assert choice.text == generated.text(prompt, 8)
        assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == 8
        assert answer.usage.prompt_tokens == len(prompt)
        assert len(choice.logprobs.tokens) == 8
        for value, top in zip(
            choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
        ):
            assert value == max(top.values()) < 0
    several = client.completions.create(
        model="small", prompt=["a", "bc"], max_tokens=3, temperature=0.9, seed=4, n=2, echo=True
    )
    assert [each.text for each in several.choices] == [
        prompt + generated.text(prompt, 3, choice, temperature=0.9, seed=4)
        for prompt in ("a", "bc")
        for choice in range(2)
    ]


def test_logprobs_of_a_prompt(client: openai.OpenAI) -> None:
    """With echo they are told of all tokens but the first, for each answer, whole and streamed."""
    options: Any = {"prompt": "Hello", "max_tokens": 2, "temperature": 0, "logprobs": 1, "n": 2}
    whole = client.completions.create(model="small", echo=True, **options).choices
    plain = client.completions.create(model="small", **options).choices
    for choice, alone in zip(whole, plain, strict=True):
        assert choice.text == "Hello" + alone.text
        found = choice.logprobs
        assert found.tokens == [*"Hello", *alone.logprobs.tokens]
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert all(value < 0 for value in found.token_logprobs[1:])
        assert found.token_logprobs[5:] == pytest.approx(alone.logprobs.token_logprobs)
        assert found.text_offset[:5] == [0, 1, 2, 3, 4]
    parts = client.completions.create(model="small", echo=True, stream=True, **options)
    texts = ["", ""]
    for part in parts:
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == [choice.text for choice in whole]


def test_chat_streams(client: openai.OpenAI, generated: OneRank) -> None:
    """The same text as a whole, with a character of several tokens."""
    messages: Any = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Who are you? \N{SNOWMAN}"}]},
    ]
    text = "<system>Be short.\n<user>Who are you? \N{SNOWMAN}\n<assistant>"
    answers = {seed: generated.text(text, 24, temperature=1.0, seed=seed) for seed in range(9)}
    seed = next(seed for seed, each in answers.items() if re.search("[\x80-\ufffc]", each))
    expected = answers[seed]
    options: Any = {"model": "small", "messages": messages, "max_completion_tokens": 24}
    options["seed"] = seed
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected
    parts = list(
        client.chat.completions.create(
            **options,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
        )
    )
    assert parts[-1].usage.total_tokens == whole.usage.total_tokens
    pieces = [part.choices[0] for part in parts[:-1]]
    assert "".join(piece.delta.content or "" for piece in pieces) == expected
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    told = [each for piece in pieces if piece.logprobs for each in piece.logprobs.content]
    assert len(told) == whole.usage.completion_tokens
    assert all(len(each.top_logprobs) == 2 for each in told)


def test_stop_strings_across_tokens(client: openai.OpenAI, generated: OneRank) -> None:
    """The answer ends before the string, of which no part was streamed."""
    prompt = "Once upon a time"
    whole = generated.text(prompt, 20)
    at = next(n for n in range(4, 18) if whole[n : n + 3].isascii())
    stop = whole[at : at + 3]
    end = whole.find(stop)
    for stream in (False, True):
        answer = client.completions.create(
            model="small", prompt=prompt, max_tokens=20, temperature=0, stop=[stop], stream=stream
        )
        pieces = [each.choices[0] for each in answer] if stream else [answer.choices[0]]
        assert "".join(piece.text for piece in pieces) == whole[:end]
        assert pieces[-1].finish_reason == "stop"


def test_values_that_change_the_choice(client: openai.OpenAI) -> None:
    """Each does what its name says; a seed repeats, and no seed does not."""

    def answer(**values: Any) -> str:
        made = client.completions.create(model="small", prompt="Well, ", max_tokens=12, **values)
        return made.choices[0].text

    greedy = answer(temperature=0)
    assert answer(temperature=1.0, extra_body={"top_k": 1}) == greedy
    assert answer(temperature=1.0, top_p=1e-9) == greedy
    assert answer(temperature=1.0, extra_body={"min_p": 1.0}) == greedy
    assert answer(temperature=0, logit_bias={"65": 100}) == chr(65 + 33) * 12
    assert len({*answer(temperature=0, frequency_penalty=2, presence_penalty=2)}) > 6
    assert answer(temperature=0, extra_body={"repetition_penalty": 5.0}) != greedy
    drawn = [answer(seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert answer() != answer()


def test_many_at_once_with_too_few_blocks(
    server: Server, client: openai.OpenAI, generated: OneRank
) -> None:
    """64 requests that take several times the blocks there are: answers are the same."""
    prompts = [f"{n} and so on " * (1 + n % 16) for n in range(64)]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=300
        ) as parallel:
            answers = await asyncio.gather(
                *(
                    parallel.completions.create(
                        model="small", prompt=prompt, max_tokens=32, temperature=0
                    )
                    for prompt in prompts
                )
            )
        return [each.choices[0].text for each in answers]

    texts = asyncio.run(all_of_them())
    assert texts == generated.texts(prompts, 32)
    alone = client.completions.create(
        model="small", prompt=prompts[9], max_tokens=32, temperature=0
    )
    assert alone.choices[0].text == texts[9] == generated.text(prompts[9], 32)
    assert number(server, "num_preemptions_total") > 0
    headers = {"Authorization": f"Bearer {KEY}"}
    # More than can wait are refused, and told to come back.
    body = {"prompt": ["a"] * 60, "n": 1, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=300
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="small", prompt=["a"] * 40)
        assert refused.value.response.headers["retry-after"] == "1"
    # The reader has left: all are aborted.
    end = time.monotonic() + 60
    while state(server)["running"] or state(server)["waiting"]:
        assert time.monotonic() < end
        time.sleep(0.1)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(
            model="small", prompt="a", max_tokens=1000, extra_body={"ignore_eos": True}
        )
    assert httpx.post(f"{server.url}/reset_prefix_cache", headers=headers).status_code == 200
    while number(server, "kv_blocks") != sum(each["free"] for each in state(server)["ranks"]):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_second_turn_computes_its_new_tokens_alone(server: Server, client: openai.OpenAI) -> None:
    """Over 1,024 tokens that both begin with, at most a block more."""
    chance, block = random.Random(0), state(server)["block_size"]
    shared, new = chance.choices(range(250), k=1024), [1, 2, 3, 4, 5]
    for prompt, most in ((shared, len(shared)), (shared + new, len(new) + block)):
        before = number(server, "computed_tokens_total")
        client.completions.create(model="small", prompt=prompt, max_tokens=1)
        assert 0 < number(server, "computed_tokens_total") - before <= most
    assert number(server, "time_to_first_token_seconds_count") > 0


def test_a_short_prompt_moves_nothing(server: Server, client: openai.OpenAI) -> None:
    before = number(server, "bytes_moved_total")
    client.completions.create(model="small", prompt="short", max_tokens=4, temperature=0)
    assert number(server, "bytes_moved_total") == before
    # The last iteration's tokens, by rank.
    assert sorted(each["tokens"] for each in state(server)["ranks"]) == [0, 1]


def test_other_routes(server: Server, client: openai.OpenAI, tmp_path: Path) -> None:
    http = httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"})
    assert [each.id for each in client.models.list()] == ["small"]
    made = http.post("/tokenize", json={"prompt": "abc"}).json()
    assert made["count"] == 3
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "abc"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert chat["count"] == len("<user>a\n<assistant>")
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert "<title>distca serve</title>" in httpx.get(server.url).text
    answer = client.completions.create(model="small", prompt="x" * 100, max_tokens=1)
    (tmp_path / "plan.json").write_text(http.get(f"/debug/plan/{answer.id}").text)
    plan, _ = load_stepped_plan(tmp_path / "plan.json")
    assert plan.plan.world_size == 2
    assert http.get("/debug/plan/cmpl-none").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("completions", {"prompt": "a", "model": "other"}, 404, "is not served here"),
        ("completions", {"prompt": ""}, 400, "the prompt is empty"),
        ("completions", {"prompt": []}, 400, "there are no prompts"),
        ("completions", {"prompt": [260]}, 400, "there is no token 260"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("completions", '{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        ("completions", '{"prompt": "a",', 400, "the body is no JSON"),
        ("completions", {"prompt": "a" * 1152}, 400, "at most 1,152"),
        ("completions", {"prompt": "a", "max_tokens": 1152}, 400, "ask for fewer"),
        ("completions", {"prompt": "a", "unheard_of": 1}, 400, "unheard_of is not known"),
        ("completions", {"prompt": "a", "stop": [""]}, 400, "a stop string is empty"),
        ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "there is no token 'x'"),
        ("completions", {"prompt": ["a"] * 90, "n": 2}, 400, "at most 92 can"),
        ("completions", {"prompt": "a" * (2 << 20)}, 413, "more than 1,048,576 bytes"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "x", "content": "a"}]}, 400, "role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
            400,
            "tools: not covered",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "x"}},
            400,
            "response_format: not covered",
        ),
    ],
)
def test_bad_requests_are_told_why(
    server: Server, path: str, body: Any, status: int, why: str
) -> None:
    answer = httpx.post(
        f"{server.url}/v1/{path}",
        content=body if isinstance(body, str) else json.dumps(body),
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert why in error["message"]
    assert {*error} == {"message", "type", "param", "code"}


def test_a_wrong_key_is_refused(server: Server) -> None:
    for key in ("another key", KEY + "x", ""):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_a_signal_lets_requests_finish(server: Server) -> None:
    """The last that the server is asked: it ends with 0, as its fixture sees."""
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


class Kill:
    """A moment at which a worker is killed.

    Args:
        seed: seed of the draw.

    Attributes:
        victim: rank that is killed.
        moment: what the server is doing.
        delay: seconds after that began.
        lines: lines of the answer that were read before.
    """

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.victim = chance.randrange(2)
        self.moment = ("decode", "prefill", "idle", "start")[seed % 4]
        self.delay = chance.uniform(0, {"start": 3.0}.get(self.moment, 0.1))
        self.lines = 2 * chance.randint(1, 20)


def end_of(folder: Path, kill: Kill) -> float:
    """Kills a worker; returns the seconds until the server had ended, and every process of it."""
    flags = ("--context-parallel-size", "2", "--context-parallel-threshold", "1")
    server = Server(folder, *flags, waits=kill.moment != "start")
    pids = server.pids()
    while len(pids) < 3:
        time.sleep(0.01)
        pids = server.pids()
    body = {"prompt": "a" * 2000, "max_tokens": 500, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"

    def strike() -> float:
        time.sleep(kill.delay)
        os.kill(pids[1 + kill.victim], signal.SIGKILL)
        return time.monotonic()

    if kill.moment in ("start", "idle"):
        begin = strike()
    else:
        with (
            ThreadPoolExecutor() as beside,
            httpx.stream("POST", url, json=body, timeout=60) as stream,
        ):
            lines = stream.iter_lines()
            if kill.moment == "decode":
                assert not any("error" in next(lines) for _ in range(kill.lines))
            struck = beside.submit(strike)
            assert any("error" in line for line in lines)
        begin = struck.result()
    assert server.end() == 1
    seconds = time.monotonic() - begin
    assert f"rank {kill.victim} ended with exit code -9" in server.log.splitlines()[-1]
    assert are_gone(pids, 5)
    return seconds


def test_a_killed_worker_ends_the_server(folder: Path, full: bool) -> None:
    """With its message, within 5 seconds; and no process is left."""
    ends = {seed: end_of(folder, Kill(seed)) for seed in range(50 if full else 1)}
    # By itself it takes 2 seconds; other tests may run beside it.
    assert max(ends.values()) < (5 if full else 15), ends
