"""`distca serve` with prefill and decode apart: its answers, its routes, its errors and its end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
import torch

from distca.commands.serve import main
from distca.inference.models import load_tokenizer, read_model
from distca.schedule.serving.cdsp import PrefillModel
from support.byte_tokenizer import save_chat_model
from support.served import Server, are_gone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("served"))


def test_a_server_with_roles(folder: Path, tmp_path: Path) -> None:
    """Measured times are kept, rates can be set, and a killed worker ends it with its message."""
    times = tmp_path / "times.json"
    flags = f"--prefill-ranks 2 --decode-ranks 1 --max-model-len 320 --prefill-times {times}"
    server = Server(folder, *flags.split(), "--smallest-chunk", "16")
    pids = server.pids()
    try:
        assert PrefillModel.load(times).degrees == (1, 2)
        model = read_model(str(folder), torch.float32)
        loaded, tokenizer = model.load(torch.device("cpu"), "eager"), load_tokenizer(str(folder))
        prompt = "The sky is " * 20
        ids = tokenizer.encode(prompt)
        while len(ids) < len(prompt) + 8:
            with torch.no_grad():
                ids.append(int(loaded(torch.tensor([ids])).logits[0, -1].argmax()))
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
        expected = tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
        assert found["choices"][0]["text"] == expected
        rates = f"{server.url}/improvement_rates"
        assert httpx.get(rates, timeout=60).json()["by_arrivals_per_second"] == {"0.0": 0.0}
        found = httpx.post(rates, json={"0.01": [0.25, 1], "9": 0.5}, timeout=60).json()
        assert (found["improvement_rate"], found["most_ranks"]) == (0.25, 1)
        assert found["arrivals_per_second"] == pytest.approx(1 / 30)
        answer = httpx.post(rates, json={"1": 1.5}, timeout=60)
        assert answer.status_code == 400
        assert "below 1" in answer.text
        # The same once more: all but the last block of the prompt is found, and its plan is shown.
        again = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
        assert again["choices"][0]["text"] == expected
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) // 16 * 16
        plan = httpx.get(f"{server.url}/debug/plan/{again['id']}", timeout=60).json()
        assert plan["documents"] == [len(prompt)]
        state = httpx.get(f"{server.url}/debug/state", timeout=60).json()
        assert [rank["referenced"] for rank in state["ranks"]] == [0, 0, 0]
        os.kill(pids[-1], signal.SIGKILL)
    finally:
        status = server.end(None, seconds=60)
    assert status == 1
    assert "rank 2 ended with exit code -9" in server.log
    assert are_gone(pids, 20)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--prefill-ranks 2", "--decode-ranks is missing"),
        ("--prefill-ranks 2 --decode-ranks 0", "--decode-ranks 0: give at least 1"),
        (
            "--prefill-ranks 2 --decode-ranks 1 --context-parallel-size 2",
            "has no meaning with --prefill-ranks",
        ),
        ("--prefill-ranks 4 --decode-ranks 1 --prefill-strategy fixed-3", "no power of two"),
        ("--prefill-strategy cdsp", "give --prefill-ranks and --decode-ranks"),
        (
            "--prefill-ranks 1 --decode-ranks 1 --decode-tensor-parallel-size 3",
            "--decode-tensor-parallel-size 3",
        ),
        ("--prefill-ranks 1 --decode-ranks 1 --improvement-rates nowhere", "there is no such file"),
        ("--prefill-ranks 1 --decode-ranks 1 --prefill-times {other}", "not of .* on "),
    ],
)
def test_bad_flags_are_told(folder: Path, tmp_path: Path, flags: str, why: str) -> None:
    other = tmp_path / "other.json"
    coefficients = {"1": {"a": 0.0, "b": 1.0, "c": 0.0, "d": 0.0}}
    other.write_text(
        json.dumps({"hardware": "a toaster", "model": "other", "coefficients": coefficients})
    )
    with pytest.raises(ValueError, match=why):
        main([str(folder), "--port", "0", *flags.format(other=other).split()])
