"""The API of a server over HTTP, with a real engine whose workers compute nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.browser import PROGRAM, Browser
from support.token_engine import api_here


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with api_here() as url:
        yield url


def test_no_request_makes_the_server_fail(url: str, full: bool) -> None:
    """Requests that are drawn from the server's own description, good ones and bad ones."""
    schemathesis = pytest.importorskip("schemathesis")
    good, bad = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    description = schemathesis.openapi.from_url(f"{url}/openapi.json")
    answered: dict[tuple[str, int], int] = {}

    def ask(case: Any) -> None:
        answer = case.call()
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        if answer.status_code >= 400:
            assert {*answer.json()["error"]} == {"message", "type", "param", "code"}
        key = case.operation.path, answer.status_code
        answered[key] = answered.get(key, 0) + 1

    for operation in (each.ok() for each in description.get_all_operations()):
        modes = (good, bad) if operation.method == "post" else (good,)
        cases = st.one_of(operation.as_strategy(generation_mode=mode) for mode in modes)
        how = settings(
            max_examples=500 if full else 25 * len(modes) - 20,
            derandomize=not full,
            suppress_health_check=list(HealthCheck),
        )
        how(given(case=cases)(ask))()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        # Most of the good ones name a model that there is not.
        assert answered.get((path, 200), 0) + answered.get((path, 404), 0), answered
        assert answered.get((path, 400)), answered


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("completions", '{"prompt": "a", "top_k": 1' + "0" * 30 + "}", 200),
        ("completions", '{"prompt": "a", "max_tokens": 1' + "0" * 30 + "}", 400),
        ("completions", '{"prompt": "a", "\\ud800": 1}', 400),
        ("completions", '{"prompt": "\\ud800"}', 400),
        ("completions", '{"prompt": "a", "model": "\\ud800"}', 404),
        ("completions", '{"prompt": "a", "logit_bias": {"\\ud800": 1}}', 400),
        ("completions", '{"prompt": "a", "temperature": 1' + "0" * 400 + "}", 400),
        ("chat/completions", '{"messages": [{"role": "tool", "content": "a"}]}', 400),
        ("chat/completions", "[" * 100_000, 400),
    ],
)
def test_values_that_few_programs_expect(url: str, path: str, body: str, status: int) -> None:
    answer = httpx.post(
        f"{url}/v1/{path}", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    assert ("error" in answer.json()) == (status >= 400)


def test_a_chat_without_a_template_is_refused() -> None:
    with api_here(chat_template=None) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="start the server with --chat-template"):
            client.chat.completions.create(
                model="small", messages=[{"role": "user", "content": "a"}]
            )
        assert client.completions.create(model="small", prompt="a", max_tokens=2).choices


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """A chat as the API answers it, ranks and iterations as they go, and an answer that is left."""
    key = "a key"
    with api_here(keys=(key,), positions=2000, seconds=0.02) as url:
        browser = Browser(url)
        try:
            browser.type("#text", "Hello", enter=True)
            browser.until("document.querySelector('.wrong')")
            assert "API key is missing" in browser.evaluate("by('talk').lastChild.textContent")
            for field, value in (("#key", key), ("#most", "6"), ("#temperature", "0")):
                browser.type(field, value)
            browser.until("by('model').textContent == 'small'")
            browser.errors.clear()
            browser.type("#text", "Hello", enter=True)
            browser.until("!by('send').disabled && by('talk').children.length == 4")
            shown = browser.evaluate("by('talk').lastChild.lastChild.data")
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json={**body, "max_tokens": 6, "temperature": 0},
                headers={"Authorization": f"Bearer {key}"},
            ).json()
            assert shown == answer["choices"][0]["message"]["content"] != ""
            browser.until("by('ranks').rows.length == 3 && by('engine').rows.length == 6")
            running = "by('engine').rows[0].cells[1].textContent"
            browser.type("#most", "1500")
            browser.type("#text", "More", enter=True)
            browser.until(f"{running} == '1 / 0'")
            browser.until("by('ranks').querySelector('.bar i').offsetWidth > 0")
            browser.picture(tmp_path / "page.png")
            browser.evaluate("by('stop').click()")
            browser.until(f"{running} == '0 / 0' && !by('send').disabled")
            assert browser.evaluate("by('talk').lastChild.lastChild.data.length") > 0
            assert browser.errors == []
        finally:
            browser.close()
