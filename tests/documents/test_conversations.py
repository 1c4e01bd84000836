"""Conversations as documents: which tokens they have, which of these count, and bad lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from distca.documents.chat import ChatTokenizer
from distca.documents.conversations import Conversations, read_conversations
from support.chats import END, MARKED, message, save_tokenizer, write_lines

TALK = [message("system", "s"), message("user", " u "), message("assistant", " a1"), *()]
TALK += [message("user", "v/think"), message("assistant", "b")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def shown(folder: str, prompt_format: str, ends: bool = True) -> str:
    """The text of a conversation, in which what counts is between brackets."""
    tokenizer = ChatTokenizer(folder, prompt_format, ends)
    tokens, counts = tokenizer.tokenize(TALK)
    text, before = "", False
    for token, count in zip(tokens, counts, strict=True):
        text += "" if count == before else "[" if count else "]"
        text, before = text + tokenizer._tokenizer.decode([token]), count
    return text + "]" * before


def test_the_formats_write_and_count_as_megatron_lm_s(folder) -> None:
    assert shown(folder, "nemotron-h-aligned") == (
        "<SPECIAL_10>System\ns\n<SPECIAL_11>User\nu\n<SPECIAL_11>Assistant\n[a1\n]"
        f"<SPECIAL_11>User\nv/think\n<SPECIAL_11>Assistant\n[b\n{END}]"
    )
    # Of an answer three tokens don't count, here one special token and two bytes.
    assert shown(folder, "nemotron-nano-v2", ends=False) == (
        "<SPECIAL_10>System\ns\n<SPECIAL_11>User\nu\n<SPECIAL_11>As[sistant\na1\n<SPECIAL_12>\n]"
        "<SPECIAL_11>User\nv\n<SPECIAL_11>As[sistant\nb\n<SPECIAL_12>\n]"
    )
    assert shown(folder, "identity") == f"[s u  a1v/thinkb{END}]"
    # Without a token for padding the end token stands for it, and doesn't count.
    marked = "<system>s<user> u <assistant>[ a1]<user>v/think<assistant>[b]"
    assert shown(folder, "default") == marked + END


def test_a_template_without_marks_counts_all_and_says_so(tmp_path, caplog) -> None:
    folder = save_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    caplog.set_level(logging.WARNING)
    assert shown(folder, "default", ends=False) == "[s u  a1v/thinkb]"
    assert "does not mark answers ({% generation %}): all tokens count" in caplog.text


def test_a_system_message_begins_a_conversation(folder, tmp_path) -> None:
    path = write_lines(tmp_path / "talks.jsonl", [TALK, [*TALK, *TALK[:2]], TALK[1:]])
    # A blank line is passed over.
    Path(path).write_text(Path(path).read_text().replace("\n", "\n\n", 1))
    tokenizer = ChatTokenizer(folder, "nemotron-h-aligned", ends=True)
    found = read_conversations(path, tokenizer)
    assert found.lines.tolist() == [1, 3, 3, 4]
    for number, messages in enumerate((TALK, TALK, TALK[:2], TALK[1:])):
        tokens, counts = tokenizer.tokenize(messages)
        assert found.lengths[number] == len(tokens)
        assert found.read(number, 1, len(tokens) - 1).tolist() == tokens[1:-1]
        assert found.loss_weights(number, 1, len(tokens)).tolist() == counts[1:]
    # One without an answer: its end alone.
    assert found.loss_weights(2, 0, int(found.lengths[2])).sum() == 1
    assert found.place(2) == f"{path}, line 3: a conversation"


def test_completions_without_marked_answers_train_their_prompts_and_the_log_says_so(
    folder, tmp_path, caplog
) -> None:
    caplog.set_level(logging.WARNING)
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": "How far?", "completions": ["Very.", "Not at all."]}\n')
    talks = write_lines(tmp_path / "talks.jsonl", [TALK])
    said = "each of 2 completions trains its prompt, too"
    for prompt_format, warns in (("default", False), ("nemotron-nano-v2", False), ("identity", 1)):
        tokenizer = ChatTokenizer(folder, prompt_format, ends=True)
        found = read_conversations(str(path), tokenizer)
        first = found.loss_weights(0, 0, int(found.lengths[0]))
        assert bool(first[1]) == (said in caplog.text) == warns
        caplog.clear()
        read_conversations(talks, tokenizer)
        assert "completions" not in caplog.text
    plain = save_tokenizer(tmp_path / "plain", "{% for m in messages %}{{ m.content }}{% endfor %}")
    read_conversations(str(path), ChatTokenizer(plain, "default", ends=True))
    assert said in caplog.text


def test_completions_are_conversations_with_their_prompt(folder, tmp_path) -> None:
    path = tmp_path / "answers.jsonl"
    lines = [
        {
            "prompt": "How far?",
            "completions": ["Very.", "Not at all."],
            "weights": [0.5, 2],
            "prompt_id": 7,
        },
        {"prompt": TALK[:2], "completions": [[TALK[2]]]},
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    tokenizer = ChatTokenizer(folder, "nemotron-h-aligned", ends=True)
    found = read_conversations(str(path), tokenizer)
    assert found.lines.tolist() == [1, 1, 2]
    asked = message("user", "How far?")
    for number, (messages, weight) in enumerate(
        [
            ([asked, message("assistant", "Very.")], 0.5),
            ([asked, message("assistant", "Not at all.")], 2.0),
            (TALK[:3], 1.0),
        ]
    ):
        tokens, counts = tokenizer.tokenize(messages)
        assert found.read(number, 0, len(tokens)).tolist() == tokens
        weights = [weight * counted for counted in counts]
        assert found.loss_weights(number, 0, len(tokens)).tolist() == weights
        targets = [int(counted) for counted in counts]
        assert found.target_counts(number, 0, len(tokens)).tolist() == targets


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [', r"no JSON \(Expecting value"),
        ("[1]", "no JSON object with a list of 'messages'"),
        ('{"prompt": "a"}', "or 'prompt' and 'completions'"),
        ('{"completions": ["a"]}', "'prompt' is neither a text nor a list of messages"),
        ('{"prompt": "a", "completions": []}', "'completions' is not a list of texts"),
        ('{"prompt": "a", "completions": [1]}', "completion 1 is neither a text"),
        ('{"prompt": [{}], "completions": ["b"]}', "'prompt': message 1 has no text as its 'role'"),
        ('{"prompt": "a", "completions": ["b"], "weights": []}', "not a list of 1 numbers"),
        ('{"prompt": "a", "completions": ["b"], "weight": [2]}', "'weight', .* to 'weights'"),
        ('{"prompt": "a", "completions": ["b"], "Prompts": "c"}', "'Prompts', .* to 'prompt'"),
        ('{"prompt": "a", "completions": ["b"], "weights": [-1]}', "weight 1 is -1: give a number"),
        ('{"prompt": "a", "completions": ["b"], "weights": [NaN]}', "weight 1 is nan: give a"),
        ('{"prompt": "a", "completions": ["b"], "weights": [1e39]}', "from 0 to 1e\\+30"),
        (
            '{"prompt": "a", "completions": ["b"], "weights": [1' + "0" * 400 + "]}",
            "from 0 to 1e\\+30",
        ),
        ('{"prompt": "a", "completions": ["b"], "messages": []}', "both 'messages' and"),
        ('{"messages": []}', "no JSON object with a list of 'messages'"),
        ('{"messages": ["hi"]}', "message 1 has no text as its 'role'"),
        ('{"messages": [{"role": "user"}]}', "message 1 has no text as its 'content'"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "has no text as its 'content'"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "a lone surrogate"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "the role 'robot' is none of"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "does not follow a user's"),
        ('{"messages": [{"role": "assistant", "content": ""}]}', "an assistant's message is empty"),
        (b'{"messages": "\xff"}', "byte 14 is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(folder, tmp_path, line: Any, said: str) -> None:
    path = tmp_path / "talks.jsonl"
    good = Path(write_lines(path, [TALK])).read_bytes()
    path.write_bytes(good + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good)
    with pytest.raises(ValueError, match=f"talks.jsonl, line 2: .*{said}"):
        read(str(path), folder)


def read(path: str, folder: str, prompt_format: str = "nemotron-h-aligned") -> Conversations:
    return read_conversations(path, ChatTokenizer(folder, prompt_format, ends=True))


def test_files_without_conversations_are_refused(folder, tmp_path) -> None:
    with pytest.raises(ValueError, match="does not exist: with --sft data are files of JSON lines"):
        read(str(tmp_path / "none"), folder)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no conversation"):
        read(str(tmp_path / "empty.jsonl"), folder)


def test_what_a_template_refuses_is_named(tmp_path) -> None:
    folder = save_tokenizer(tmp_path, "{{ raise_exception('no such talk') }}" + MARKED)
    path = write_lines(tmp_path / "talks.jsonl", [TALK])
    with pytest.raises(ValueError, match="line 1: the chat template refuses it: no such talk"):
        read(path, folder, "default")


def test_tokenizers_that_cannot_write_are_refused(folder, tmp_path) -> None:
    with pytest.raises(ValueError, match="choose from nemotron-h-aligned, nemotron-nano-v2, "):
        ChatTokenizer(folder, "chatml", ends=True)
    with pytest.raises(ValueError, match="is not a folder of a tokenizer"):
        ChatTokenizer(f"{folder}/tokenizer.json", "default", ends=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty cannot be read"):
        ChatTokenizer(str(tmp_path / "empty"), "default", ends=True)
    without = save_tokenizer(tmp_path / "without", None)
    with pytest.raises(ValueError, match=r"has no chat template, which .* default needs"):
        ChatTokenizer(without, "default", ends=True)
