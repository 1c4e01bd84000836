"""`distca generate` as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from distca.commands.main import main
from distca.inference.messages import Completion, OnToken
from distca.inference.rank_processes import RankProcesses
from distca.inference.sampling import SamplingParams
from support.byte_tokenizer import save_chat_model
from support.commands import Command
from support.small_models import save_small_model

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture
def command(capsys) -> Command:
    return Command("generate", capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Llama with a tokenizer of bytes and a chat template."""
    return str(save_chat_model(tmp_path_factory.mktemp("served")))


def test_conversations_on_two_ranks(command, model: str, tmp_path: Path) -> None:
    """Two turns, and one whose first answer is given: all are one process's."""
    chats = tmp_path / "chats.jsonl"
    lines = [
        [{"role": "user", "content": "Hello, who"}, {"role": "user", "content": "are you?"}],
        [
            {"role": "user", "content": "1 + 1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "and 1 more"},
        ],
    ]
    chats.write_text("\n".join(json.dumps(line) for line in lines))
    flags = "--context-parallel-size 2 --max-tokens 6 --block-size 2".split()
    trace = tmp_path / "trace.json"
    flags += ["--trace", str(trace), "--tensor-parallel-size", "2"]
    out = command.run(model, "--conversations", str(chats), *flags, "--check", "--json")
    assert "tokens the same: equal" in command.errors
    answers = json.loads(out)
    assert [(each["conversation"], each["turn"]) for each in answers] == [(0, 0), (0, 1), (1, 0)]
    assert all(each["bytes_moved"] > 0 for each in answers)
    assert {each["finish_reason"] for each in answers} == {"length"}
    assert all(len(each["token_ids"]) == 6 and each["ttft_seconds"] > 0 for each in answers)
    events = json.loads(trace.read_text())["traceEvents"]
    ranks = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert ranks == [f"rank {n}: context {n // 2}, tensor {n % 2}" for n in range(4)]
    for n in range(4):
        mine = [each for each in events if each["pid"] == n]
        names = [each["name"].split(":")[0] for each in mine if each.get("cat") == "ticks"]
        # A turn of both conversations, and one more of the first.
        assert names == (["prefill"] + ["decode"] * 5) * 2
        assert {each["args"]["layer"] for each in mine if each.get("cat") == "exchange"} == {
            0,
            1,
            2,
        }


@pytest.mark.parametrize(
    ("chars", "flags", "why"),
    [
        (400, ["--kv-cache-memory-bytes", str(20 * 12288)], "the ranks have room for 320 with an"),
        # With an answer of no tokens it would have had room.
        (4015, [], "which with 40 new ones are more than the model's 4,096 positions"),
    ],
)
def test_a_turn_without_room_ends_its_conversation_alone(
    command, capsys, model: str, tmp_path: Path, chars: int, flags: list[str], why: str
) -> None:
    """Earlier answers and other conversations are printed; a line names the turn that failed."""
    chats, user = tmp_path / "chats.jsonl", {"role": "user"}
    grows = [user | {"content": "Hi"}, user | {"content": "a" * chars}]
    short = [user | {"content": "Hi"}, user | {"content": "again"}]
    chats.write_text(f"{json.dumps(grows)}\n{json.dumps(short)}\n")
    flags = [*flags, "--max-tokens", "40", "--json", "--ignore-eos"]
    assert main(["generate", model, "--conversations", str(chats), *flags]) == 2
    told = capsys.readouterr()
    line = f"distca generate: turn 1 of conversation 0 is not answered: .*{why}.*\n"
    assert re.search(line, told.err), told.err
    answers = json.loads(told.out)
    assert [(each["conversation"], each["turn"]) for each in answers] == [(0, 0), (1, 0), (1, 1)]
    assert {len(each["token_ids"]) for each in answers} == {40}
    # Before the conversation that grows had its second turn, both were asked the same.
    assert answers[0]["token_ids"] == answers[1]["token_ids"]


def test_blocks_move_through_memory_that_ranks_share(command, model: str, tmp_path: Path) -> None:
    """Not all ranks have as many to send, and some have none."""
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([[n % 97 for n in range(length)] for length in (17, 300, 129)]))
    flags = "--context-parallel-size 3 --block-size 7 --transport shm --even-out --max-tokens 4"
    chain = "--prefill-strategy runahead --partition 0.5,0.3,0.2 --check".split()
    out = command.run(model, "--prompt-ids", str(ids), *flags.split(), *chain)
    assert "12 of 12 tokens the same: equal" in out


@pytest.mark.parametrize("size", [2, 3])
def test_tiles_of_many_prompts(command, model: str, tmp_path: Path, size: int) -> None:
    """Long and short ones, which no rank shares; the attention of the long one moves."""
    ids, lengths = tmp_path / "ids.json", (2000, 1, 40, 333, 17)
    prompts = [[(n * n + length) % 97 for n in range(length)] for length in lengths]
    ids.write_text(json.dumps(prompts))
    flags = f"--context-parallel-size {size} --prefill-strategy tiles --max-tokens 4".split()
    flags += ["--node-gb-per-s", "50"]
    out = command.run(model, "--prompt-ids", str(ids), *flags, "--check")
    assert f"20 tokens on {size} ranks, " in out
    assert "20 of 20 tokens the same: equal" in out
    answers = json.loads(command.run(model, "--prompt-ids", str(ids), *flags, "--json"))
    assert [each["bytes_moved"] > 0 for each in answers] == [True, *[False] * 4]
    ids.write_text(json.dumps([[7] * 30, [8] * 50]))
    answers = json.loads(command.run(model, "--prompt-ids", str(ids), *flags, "--json"))
    assert [each["bytes_moved"] for each in answers] == [0, 0]


def test_attention_servers_have_room_for_prompts(command, model: str, tmp_path: Path) -> None:
    """That the ranks with weights have not."""
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([[n % 97 for n in range(200)]]))
    flags = "--context-parallel-size 1 --attention-servers 2 --max-tokens 4 --check".split()
    # 8 blocks of 16 tokens on each of three ranks.
    flags += ["--kv-cache-memory-bytes", str(8 * 12_288), "--max-num-batched-tokens", "64"]
    out = command.run(model, "--prompt-ids", str(ids), *flags)
    assert "4 tokens on 3 ranks, " in out
    assert "4 of 4 tokens the same: equal" in out


def test_bad_input_ends_in_a_line(command, model: str, tmp_path: Path) -> None:
    """Before any rank starts."""
    files = {
        "word.json": "[[1, 2], 3]",
        "big.json": "[[1, 260]]",
        "empty.json": "[[]]",
        "none.json": "[]",
        "long.json": json.dumps([[1] * 4090]),
        "broken.json": "[[1,",
        "chats.jsonl": '{"role": "user"}',
        "answered.jsonl": '[{"role": "assistant", "content": "Hi"}]',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    bare = save_small_model("llama", tmp_path / "bare")
    light = tmp_path / "light"
    light.mkdir()
    (light / "config.json").write_text((bare / "config.json").read_text())
    turns = [{"role": "user", "content": "a" * 2050}, {"role": "user", "content": "a" * 2050}]
    (tmp_path / "grows.jsonl").write_text(json.dumps(turns))
    (tmp_path / "role.jsonl").write_text(
        '[{"role": "tool", "content": ""}, {"role": "user", "content": "a"}]'
    )

    def ids(name: str) -> list[str]:
        return ["--prompt-ids", str(tmp_path / name)]

    for flags, why in (
        ([model], "nothing is given: give one of"),
        ([model, "--prompt", "a", *ids("big.json")], "--prompt and --prompt-ids"),
        ([model, "--prompt", ""], "prompt 0 is empty"),
        ([model, *ids("word.json")], "not a list of lists"),
        ([model, *ids("broken.json")], "not JSON"),
        ([model, *ids("big.json")], "token 260, but the vocabulary has 260"),
        ([model, *ids("empty.json")], "prompt 0 is empty"),
        ([model, *ids("none.json")], "there are no prompts"),
        ([model, *ids("long.json")], "more than the model's 4,096 positions"),
        ([model, "--conversations", str(tmp_path / "chats.jsonl")], "chats.jsonl:1 is not a list"),
        ([model, "--conversations", str(tmp_path / "answered.jsonl")], "nothing to answer"),
        ([str(bare), "--prompt", "a"], "no tokenizer that can be read"),
        ([model, "--conversations", str(tmp_path / "grows.jsonl")], "conversation 0 has 4,1"),
        ([model, "--conversations", str(tmp_path / "role.jsonl")], "conversation 0: no tools"),
        ([str(light), "--prompt", "a"], "has no weights"),
        ([model, "--prompt", "a", "--tensor-parallel-size", "3"], "neither divides the model's 2"),
        ([model, "--prompt", "a", "--tensor-parallel-size", "8"], "num_attention_heads 4"),
        ([model, "--prompt", "a", "--tensor-parallel-size", "0"], "give at least 1"),
        ([model, "--prompt", "a", "--trace", str(tmp_path / "no" / "t")], "a folder that there is"),
        ([str(tmp_path), "--prompt", "a"], "has no config.json"),
        ([model, "--prompt", "a", "--context-parallel-size", "0"], "give at least 1"),
        (
            [model, "--prompt", "a", "--context-parallel-size", "5000"],
            "5000 processes of ranks: give at most 64 on CPUs",
        ),
        (
            [model, "--prompt", "a", *"--context-parallel-size 2 --prefill-strategy sp-tp".split()],
            "give --tensor-parallel-size 2 and --context-parallel-size 1",
        ),
        ([model, "--prompt", "a", "--node-gb-per-s", "0"], "give a speed above 0"),
        ([model, "--prompt", "a", "--temperature", "nan"], "give 0 or more"),
        ([model, "--prompt", "a", "--step-timeout", "0"], "--step-timeout 0.0: give seconds"),
        ([model, "--prompt", "a", "--top-k", "-1"], "--top-k -1: give at least 1"),
        ([model, "--prompt", "a", "--top-p", "0"], "--top-p 0.0: give a number above 0"),
        ([model, "--prompt", "a", "--block-size", "0"], "--block-size 0: give at least 1"),
        (
            [model, "--prompt", "a", "--cp-kv-cache-interleave-size", "40"],
            "--cp-kv-cache-interleave-size 40 is not a multiple of --block-size 16",
        ),
        (
            [model, "--prompt", "a", "--kv-cache-memory-bytes", "1000"],
            "1,000 is less than a block of 16 tokens, which takes 12,288",
        ),
        (
            [model, "--prompt", "a" * 500, "--kv-cache-memory-bytes", "200000"],
            "500 tokens, with an answer of up to 64, need 442,368 bytes of keys and values, and 1 "
            "ranks have 200,000 each",
        ),
    ):
        assert why in command.refused(*flags), flags


@pytest.mark.parametrize(
    ("sent", "victim", "line"),
    [
        # Its peer may notice first.
        (signal.SIGKILL, 0, "rank 0 ended with exit code -9, killed: |rank 1: "),
        (signal.SIGKILL, 1, "rank 1 ended with exit code -9, killed: |rank 0: "),
        (signal.SIGSTOP, 1, "rank 0: "),
    ],
)
def test_a_rank_that_dies_or_stops_ends_the_command_in_a_line(
    command,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    sent: signal.Signals,
    victim: int,
    line: str,
) -> None:
    """While it answers, within the time that a step may take."""
    pids: list[int] = []
    since: list[float] = []

    class Struck(RankProcesses):
        def answer(
            self, prompts: Mapping[int, Sequence[int]], sampling: SamplingParams, on_token: OnToken
        ) -> dict[int, Completion]:
            pids.extend(self.pids)

            def strike(number: int, token: int) -> None:
                if not since:
                    since.append(time.monotonic())
                    os.kill(pids[victim], sent)

            return super().answer(prompts, sampling, strike)

    monkeypatch.setattr("distca.inference.rank_processes.RankProcesses", Struck)
    flags = "--context-parallel-size 2 --max-tokens 4000 --ignore-eos --step-timeout 15".split()
    said = command.failed(model, "--prompt", "Hello", *flags)
    seconds = time.monotonic() - since[0]
    assert re.fullmatch(rf"distca generate: (?:{line}).*\n", said), said
    assert (10 if sent == signal.SIGSTOP else 0) < seconds < 120
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_likeliest_token_alone_is_drawn(command, model: str) -> None:
    """Of one token, or of those that have nearly no probability, nothing is left to chance."""
    flags = [model, "--prompt", "Hello", "--max-tokens", "5", "--json"]
    (greedy,) = json.loads(command.run(*flags))
    for how in (["--top-k", "1"], ["--top-p", "1e-9"]):
        (drawn,) = json.loads(command.run(*flags, "--temperature", "2", "--seed", "4", *how))
        assert drawn["token_ids"] == greedy["token_ids"]
    (free,) = json.loads(command.run(*flags, "--temperature", "2", "--seed", "4"))
    assert free["token_ids"] != greedy["token_ids"]


def test_a_tokenizer_without_tokens_is_named(command, model: str, monkeypatch) -> None:
    class Empty:
        @staticmethod
        def encode(text: str) -> list[int]:
            return []

    monkeypatch.setattr("distca.inference.models.load_tokenizer", lambda path: Empty())
    assert "prompt 0 becomes no token, so the tokenizer of" in command.refused(
        model, "--prompt", "a"
    )


_DIFFERS = """
import sys
from distca.commands.main import main
from distca.inference import verify


class Differs:
    line, holds = "tokens the same: 0 of 4", False


verify.compare = lambda *_: Differs()
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("flags", [["--prompt", "Hello"], ["--prompt", "a", "--json"]])
def test_a_difference_counts_though_nobody_reads_the_answers(model: str, flags: list[str]) -> None:
    command = [sys.executable, "-c", _DIFFERS, "generate", model, *flags, "--check"]
    command += ["--max-tokens", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.close()
        assert started.wait(120) == 1, started.stderr.read() if started.stderr else ""
