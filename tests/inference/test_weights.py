"""Checkpoints are loaded as transformers does, or refused in one line that says what is wrong."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from distca.checkpoints.problems import Source, find_problems
from distca.checkpoints.weights import MULTIMODAL
from distca.inference.models import read_model
from distca.inference.tensor_parallel import TensorRanks
from support.broken_checkpoints import INDEX, WEIGHTS, break_checkpoint
from support.commands import Command
from support.small_models import MULTIMODAL as KINDS
from support.small_models import VOCABULARY, save_multimodal_model, save_small_model

pytestmark = pytest.mark.usefixtures("forked_ranks")

CPU = torch.device("cpu")
# The first and last tokens of two ranks' slices of the vocabulary, and others.
PROMPT = [0, 129, 130, 259, *np.random.default_rng(0).integers(3, VOCABULARY, 36).tolist()]
MODELS = (
    "llama",
    "tied llama",
    "qwen2",
    "qwen3_moe",
    "phi3",
    "gemma3",
    "mistral3",
    "llava",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of small models, some of them multimodal."""
    made = {}
    for name in {*MODELS, *KINDS}:
        folder = tmp_path_factory.mktemp("model")
        if name in KINDS:
            made[name] = save_multimodal_model(name, folder)
        else:
            tied = {"tie_word_embeddings": True} if name.startswith("tied") else {}
            made[name] = save_small_model(name.removeprefix("tied "), folder, **tied)
    return made


class Together:
    """Values that two threads give each other."""

    def __init__(self) -> None:
        self._values: list[Any] = [None, None]
        self._barrier = threading.Barrier(2)

    def exchange(self, rank: int, values: torch.Tensor) -> list[torch.Tensor]:
        self._barrier.wait(60)
        self._values[rank] = values
        self._barrier.wait(60)
        return list(self._values)


@dataclass(frozen=True)
class ThreadRanks(TensorRanks):
    """Two ranks that are threads of this process."""

    together: Together = field(default_factory=Together)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        first, second = self.together.exchange(self.rank, values)
        return first + second

    def beside(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.together.exchange(self.rank, values), -1)


@torch.no_grad()
def logits_of(folder: Path, tensor_parallel_size: int = 1) -> torch.Tensor:
    """Logits of a prompt by the model that commands load, float32 `[tokens, vocabulary]`."""
    model = read_model(str(folder), torch.float32, tensor_parallel_size)
    if tensor_parallel_size == 1:
        found: torch.Tensor = model.load(CPU, "eager")(torch.tensor([PROMPT])).logits[0]
        return found
    together = Together()
    ranks = [ThreadRanks(rank, 2, together=together) for rank in (0, 1)]
    slices = [model.load(CPU, "eager", each) for each in ranks]

    @torch.no_grad()
    def run(part: Any) -> Any:
        return part(torch.tensor([PROMPT])).logits[0]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, slices)
    assert torch.equal(first, second)
    return first  # type: ignore[no-any-return]


@torch.no_grad()
def reference(folder: Path) -> torch.Tensor:
    """Logits of transformers' own model of the whole checkpoint, as it loads it."""
    import transformers

    kind = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type in MULTIMODAL:
        kind = transformers.AutoModelForImageTextToText
    # What is not loaded may be of another shape.
    how = {"ignore_mismatched_sizes": config.model_type in MULTIMODAL}
    model = kind.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", **how
    )
    logits: torch.Tensor = model.eval()(torch.tensor([PROMPT])).logits[0]
    return logits


def assert_near(found: torch.Tensor, wanted: torch.Tensor, told: str = "") -> None:
    """Holds logits against transformers'."""
    torch.testing.assert_close(
        found, wanted, rtol=1e-4, atol=1e-5, msg=lambda message: f"{told}: {message}"
    )


def outcome(folder: Path, tensor_parallel_size: int = 1) -> torch.Tensor | str:
    """Logits of a prompt, or the error that refuses a checkpoint."""
    try:
        return logits_of(folder, tensor_parallel_size)
    except ValueError as error:
        return str(error)


def refusal(folder: Path, tensor_parallel_size: int = 1) -> str:
    """The one line that refuses a checkpoint."""
    message = outcome(folder, tensor_parallel_size)
    assert isinstance(message, str), "it is answered"
    assert len(message.splitlines()) == 1
    assert len(message) < 1200
    return message


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_a_hundred_broken_checkpoints(
    models, tmp_path: Path, full: bool, tensor_parallel_size: int
) -> None:
    outcomes = set()
    for seed in range(400 if full else 50):
        name = MODELS[seed % len(MODELS)]
        folder = tmp_path / str(seed)
        way, refused = break_checkpoint(models[name], folder, seed)
        told = f"{seed}: {way} of {name}"
        found = outcome(folder, tensor_parallel_size)
        if isinstance(found, str):
            assert refused, f"{told}: {found}"
            assert len(found.splitlines()) == 1, f"{told}: {found}"
        else:
            assert not refused, told
            assert_near(found, reference(folder), told)
        outcomes.add(refused)
    assert outcomes == {True, False}


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_language_part_of_multimodal_models(
    models, caplog, kind: str, tensor_parallel_size: int
) -> None:
    found, wanted = logits_of(models[kind], tensor_parallel_size), reference(models[kind])
    assert wanted.std() > 0.1
    assert_near(found, wanted)
    assert "model.multi_modal_projector, model.vision_tower left out" in caplog.text


def test_all_multimodal_models_are_tested() -> None:
    assert {*KINDS} == {*MULTIMODAL}


def test_other_multimodal_models_are_refused(models, tmp_path: Path) -> None:
    config = json.loads((models["llava"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "vipllava"}))
    assert "Multimodal models whose language part can be loaded: gemma3, " in refusal(tmp_path)


def change(
    model: Path, folder: Path, tensors: dict[str, torch.Tensor | None], **config: Any
) -> Path:
    """Writes a copy of a model with other tensors (None: without one) and configuration."""
    stored = load_file(model / WEIGHTS) | tensors
    kept = {name: each for name, each in stored.items() if each is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    values = json.loads((model / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_what_a_refusal_says(models, tmp_path: Path, tensor_parallel_size: int) -> None:
    llama, number = models["llama"], iter(range(100))

    def told(tensors: dict[str, torch.Tensor | None], name: str = "llama", **config: Any) -> str:
        folder = tmp_path / str(next(number))
        folder.mkdir()
        return refusal(change(models[name], folder, tensors, **config), tensor_parallel_size)

    down = "model.layers.{}.mlp.down_proj.weight"
    assert f"1 missing: {down.format(1)}:" in told({down.format(1): None})
    assert "1 missing: lm_head.weight:" in told({"lm_head.weight": None})
    fewer = told({}, num_hidden_layers=2)
    assert "9 not part of the model: model.layers.2.input_layernorm.weight, " in fewer
    assert " and 6 more" in fewer
    more = told({}, num_hidden_layers=4)
    assert "9 missing: model.layers.3." in more
    rows = torch.zeros(3, 96)
    assert f"1 of another shape: {down.format(0)} is [3, 96], not [64, 96]" in told(
        {down.format(0): rows}
    )
    whole = torch.zeros(64, 96, dtype=torch.int32)
    assert f"1 not floating point: {down.format(0)} (I32)" in told({down.format(0): whole})
    both = told({down.format(0): None, "more": torch.zeros(1)})
    assert "1 missing: " in both
    assert "1 not part of the model: more: " in both
    stored = load_file(llama / WEIGHTS)
    other = {f"transformer.{name}": each for name, each in stored.items()}
    prefixed = told(dict.fromkeys(stored) | other)
    assert "30 missing: model.embed_tokens.weight, " in prefixed
    assert "30 not part of the model: transformer.lm_head.weight, " in prefixed
    # One row fewer of the vocabulary makes slices of the same size.
    short = told({"model.embed_tokens.weight": torch.zeros(VOCABULARY - 1, 64)})
    assert f"is [{VOCABULARY - 1}, 64], not [{VOCABULARY}, 64]" in short
    one = "model.layers.0.mlp.experts.1.down_proj.weight"
    moe = told({one: None}, "qwen3_moe")
    assert "1 of another shape: model.layers.0.mlp.experts.0.down_proj.weight to " in moe
    assert "3.down_proj.weight do not make model.layers.0.mlp.experts.down_proj" in moe
    transposed = told({one: torch.zeros(32, 64)}, "qwen3_moe")
    assert "experts.down_proj [4, 64, 32]" in transposed
    experts = [f"model.layers.0.mlp.experts.{each}.down_proj.weight" for each in range(4)]
    transposed = told({name: torch.zeros(32, 64) for name in experts}, "qwen3_moe")
    assert "experts.down_proj [4, 64, 32]" in transposed
    deep = told({"language_model.model.norm.weight": None}, "gemma3")
    assert "1 missing: model.norm.weight:" in deep


def test_damaged_files(models, tmp_path: Path) -> None:
    llama = models["llama"]
    files = {
        "truncated": {WEIGHTS: (llama / WEIGHTS).read_bytes()[:-5]},
        "empty": {WEIGHTS: b""},
        "index": {INDEX: b"{"},
        "outside": {INDEX: b'{"weight_map": {"a": "../a.safetensors"}}'},
        "shard": {INDEX: b'{"weight_map": {"a": "a.safetensors"}}'},
        "pickle": {"pytorch_model.bin": b"\x80\x02}q\x00."[:-2]},
        "list": {},
        "none": {},
        "adapter": {WEIGHTS: b"", "adapter_config.json": b"{}"},
    }
    expected = {
        "truncated": "is damaged and cannot be read",
        "empty": "is damaged and cannot be read",
        "index": f"{INDEX} is damaged",
        "outside": f"{INDEX} is damaged",
        "shard": f"lacks files that {INDEX} names: a.safetensors",
        "pickle": "pytorch_model.bin is damaged and cannot be read",
        "list": "is no dictionary of tensors",
        "none": "has no weights",
        "adapter": "has an adapter, which is not applied",
    }
    for case, contents in files.items():
        folder = tmp_path / case
        folder.mkdir()
        (folder / "config.json").write_bytes((llama / "config.json").read_bytes())
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        if case == "list":
            torch.save([torch.zeros(2)], folder / "pytorch_model.bin")
        assert expected[case] in refusal(folder)


def test_a_model_of_torch_save_is_shared_by_ranks(models, tmp_path: Path) -> None:
    """Also one in the format before torch 1.6, which cannot be mapped into memory."""
    folder = change(models["qwen2"], tmp_path, {})
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    for new in (True, False):
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new)
        wanted = reference(folder)
        for size in (1, 2):
            assert_near(logits_of(folder, size), wanted)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_a_head_of_its_own_beside_a_config_that_ties(
    models, tmp_path: Path, tensor_parallel_size: int
) -> None:
    """The configuration is wrong, and transformers goes by the tensors."""
    folder = change(models["llama"], tmp_path, {}, tie_word_embeddings=True)
    wanted = reference(models["llama"])
    found = logits_of(folder, tensor_parallel_size)
    assert_near(found, wanted)


def test_problems_are_those_of_names_shapes_and_types() -> None:
    expected = {"a": (2, 3), "b": (3,), "c": (4, 3)}

    def source(name: str, shape: tuple[int, ...], target: str = "", pattern: Any = None) -> Source:
        return Source(name, target or name, pattern, shape, "BF16")

    good = [source("a", (2, 3)), source("b", (3,)), source("c", (4, 3))]
    assert find_problems(expected, good, {}) == []
    assert find_problems(expected, good[:2], {}) == ["1 missing: c"]
    assert find_problems(expected, good[:2], {"c": "a"}) == []
    assert find_problems(expected, good[1:], {"c": "a"}) == []
    assert find_problems(expected, good[1:2], {"c": "a"}) == ["2 missing: a, c"]
    twice = [*good, source("x.b", (3,), "b")]
    assert find_problems(expected, twice, {}) == ["1 given twice: b and x.b"]
    # Of three names for one parameter any is enough.
    alike = {"c": "a", "d": "a"}
    same = {"a": (2, 3), "c": (2, 3), "d": (2, 3)}
    for name in same:
        assert find_problems(same, [source(name, (2, 3))], alike) == []
    assert find_problems(same, [], alike) == ["3 missing: a, c, d"]


def test_tensors_of_experts_are_joined_as_transformers_does() -> None:
    expected = {"m.down": (3, 8, 4), "m.gate_up": (3, 12, 8)}

    def problems(
        experts: tuple[int, ...] = (0, 1, 2),
        down: tuple[int, ...] = (8, 4),
        gate: tuple[int, ...] = (6, 8),
        up: tuple[int, ...] = (6, 8),
    ) -> list[str]:
        parts = {"down": ("m.down", down), "gate": ("m.gate_up", gate), "up": ("m.gate_up", up)}
        return find_problems(
            expected,
            [
                Source(f"m.{expert}.{part}", target, f"*.{part}", shape, "F32")
                for part, (target, shape) in parts.items()
                for expert in experts
            ],
            {},
        )

    assert problems() == []
    assert problems((2, 0, 1)) == []
    both = [
        "2 of another shape: m.0.down to m.7.down do not make m.down [3, 8, 4], "
        "m.0.gate to m.7.up do not make m.gate_up [3, 12, 8]"
    ]
    assert problems((0, 1, 7)) == both
    assert len(problems((0, 1))) == len(problems((0, 1, 2, 3))) == len(problems((0, 1, 1))) == 1
    for wrong in (
        {"gate": (4, 8), "up": (8, 8)},
        {"gate": (6, 8), "up": (8, 6)},
        {"gate": (12, 4), "up": (12, 4)},
        {"gate": (), "up": ()},
        {"down": (4, 8)},
        {"down": (32,)},
        {"down": (1, 8, 4)},
    ):
        assert problems(**wrong), wrong


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_weights_that_are_not_finite(models, tmp_path: Path, tensor_parallel_size: int) -> None:
    """NaN in weights of keys and queries does not always reach the logits."""
    number = iter(range(100))

    def told(name: str, value: float, row: int = -1, dtype: Any = None, of: str = "llama") -> str:
        folder = tmp_path / str(next(number))
        folder.mkdir()
        weights = load_file(models[of] / WEIGHTS)[name].to(dtype)
        weights[row] = value
        return refusal(change(models[of], folder, {name: weights}), tensor_parallel_size)

    keys = "model.layers.1.self_attn.k_proj.weight"
    nan, infinite = float("nan"), float("inf")
    for value in (nan, infinite, -infinite):
        for row in (0, -1):
            line = told(keys, value, row)
            assert f"has weights that are not finite in float32, 1 tensors: {keys}: " in line
    assert "not finite in float32, 1 tensors: lm_head.weight" in told("lm_head.weight", nan, 5)
    assert keys in told(keys, 1e300, 0, torch.float64)
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert f"1 tensors: {expert}" in told(expert, nan, 0, of="qwen3_moe")
    norm = "model.layers.2.self_attn.q_norm.weight"
    assert f"1 tensors: {norm}" in told(norm, nan, 0, of="qwen3_moe")
    head = "language_model.model.layers.0.self_attn.q_proj.weight"
    assert "1 tensors: model.layers.0.self_attn.q_proj.weight" in told(head, nan, 0, of="mistral3")


def test_weights_must_be_finite_in_the_type_that_is_asked_for(models, tmp_path: Path) -> None:
    name = "model.norm.weight"
    largest = torch.full((64,), torch.finfo(torch.float32).max)
    folder = str(change(models["llama"], tmp_path, {name: largest}))
    read_model(folder, torch.float32).load(CPU, "eager")
    with pytest.raises(ValueError, match=f"not finite in bfloat16, 1 tensors: {name}"):
        read_model(folder, torch.bfloat16).load(CPU, "eager")


def test_commands_answer_as_transformers_or_say_what_is_missing(
    models, tmp_path: Path, capsys, caplog, full: bool
) -> None:
    import transformers

    generate, ids = Command("generate", capsys), tmp_path / "ids.json"
    ids.write_text(json.dumps([PROMPT]))
    for kind in KINDS if full else ("gemma3",):
        whole = transformers.AutoModelForImageTextToText.from_pretrained(
            models[kind], dtype=torch.float32
        )
        prompt = torch.tensor([PROMPT])
        wanted = whole.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        for size in ("1", "2"):
            caplog.clear()
            flags = ["--prompt-ids", str(ids), "--max-tokens", "4", "--ignore-eos", "--json"]
            flags += ["--dtype", "float32", "--tensor-parallel-size", size]
            answers = json.loads(generate.run(str(models[kind]), *flags))
            assert answers[0]["token_ids"] == wanted[0, len(PROMPT) :].tolist()
            assert "model.vision_tower left out" in caplog.text
    broken = change(models["llama"], tmp_path, {"lm_head.weight": None})
    for size in ("1", "2"):
        flags = ["--prompt-ids", str(ids), "--tensor-parallel-size", size]
        message = generate.refused(str(broken), *flags)
        assert len(message.splitlines()) <= 10
        assert "1 missing: lm_head.weight" in message
    rows = torch.zeros(32, 64)
    rows[-1] = float("nan")
    nan = change(models["llama"], tmp_path, {"model.layers.0.self_attn.k_proj.weight": rows})
    for flag in ("--context-parallel-size", "--tensor-parallel-size"):
        message = generate.failed(str(nan), "--prompt-ids", str(ids), flag, "2")
        assert len(message.splitlines()) == 1
        assert "not finite in float32, 1 tensors: model.layers.0.self_attn.k_proj" in message


def test_values_that_make_no_model(models, tmp_path: Path) -> None:
    number = iter(range(100))

    def told(of: str = "llama", **config: Any) -> str:
        folder = tmp_path / str(next(number))
        folder.mkdir()
        values = json.loads((models[of] / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(values))
        with pytest.raises(ValueError, match=r"\S") as error:
            read_model(str(folder), torch.float32, checks_weights=False)
        line = str(error.value)
        assert len(line.splitlines()) == 1
        return line

    nan, infinite = float("nan"), float("inf")
    for theta in (0.0, -5.0, nan, infinite):
        rotary = {"rope_type": "default", "rope_theta": theta}
        assert "rope_theta in config.json is" in told(rope_parameters=rotary)
    for epsilon in (nan, -1e-6, infinite):
        assert "rms_norm_eps in config.json is" in told(rms_norm_eps=epsilon)
    assert "num_experts_per_tok in config.json is 5, but there are 4" in told(
        "qwen3_moe", num_experts_per_tok=5
    )
    unused = "config.json of a llama has sliding_window, which its layers do not use"
    assert unused in told(sliding_window=4)
    # Values that are harmless are taken.
    folder = change(models["llama"], tmp_path, {}, attn_logit_softcapping=0.1)
    assert read_model(str(folder), torch.float32).softcap is None
    assert_near(logits_of(folder), reference(folder))


def test_paths_that_are_no_folders(models, tmp_path: Path) -> None:
    # A word alone is no name of the hub, and a folder that is there no owner.
    for path in (f"{tmp_path}/nosuch", "./nosuch", "../nosuch", "nosuch", "tests/nosuch", "a/b/c"):
        with pytest.raises(ValueError, match=f"{path}: no such folder"):
            read_model(path, torch.float32)
    with pytest.raises(ValueError, match="is a file, not a folder"):
        read_model(str(models["llama"] / WEIGHTS), torch.float32)


def test_the_generation_config(models, tmp_path: Path, caplog) -> None:
    """What is not applied is named; what cannot be read is refused."""
    folder, file = change(models["llama"], tmp_path, {}), tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [2, 3], "repetition_penalty": 1.0}))
    assert read_model(str(folder), torch.float32).stops == {2, 3}
    assert caplog.text == ""
    file.write_text(json.dumps({"repetition_penalty": 1.3, "suppress_tokens": [4]}))
    read_model(str(folder), torch.float32)
    assert "not applied: repetition_penalty, suppress_tokens\n" in caplog.text
    for text in ("[1]", "{", '{"eos_token_id": "2"}', '{"eos_token_id": [2, "3"]}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"generation_config\.json") as error:
            read_model(str(folder), torch.float32)
        assert len(str(error.value).splitlines()) == 1
