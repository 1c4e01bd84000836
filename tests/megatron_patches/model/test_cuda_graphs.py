"""Graphs around core attention against the same without: losses, weights and gradients.

On CPUs an engine that calls the captured functions again, into the same tensors, stands in for
CUDA's. Everything else is what runs on a GPU: who may use which tensors when.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.model.cuda_graphs import CudaGraphEngine, GraphedPiece, SharedTensors
from megatron_patches.pipeline.data_iterators import DataIterators
from support.arguments import check
from support.arguments import parse as arguments_of
from support.models import make_run, memory_stream, named_parameters, parse
from support.pipelines import documents, flags_of
from support.pretraining import run
from support.ranks import forget_megatron

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZE = 16


@contextlib.contextmanager
def no_hooks() -> Iterator[None]:
    """Modules call none of their hooks, as in a replay."""
    with mock.patch.object(
        torch.nn.Module, "__call__", lambda self, *a, **k: self.forward(*a, **k)
    ):
        yield


@dataclass
class RepeatingEngine:
    """Calls functions again, and spoils what nobody may look at any more.

    Attributes:
        captured: how many functions were captured.
        replayed: how often one was called again.
    """

    captured: int = 0
    replayed: int = 0
    _outputs: tuple[torch.Tensor, ...] = field(default=())

    def warm_up(self, function: Callable[[], Any]) -> None:
        function()

    def capture(
        self, function: Callable[[], tuple[torch.Tensor, ...]], *, outlasts: bool
    ) -> tuple[tuple[torch.Tensor, ...], Callable[[], None]]:
        self.captured += 1
        tensors = tuple(torch.full_like(made.detach(), torch.nan) for made in function())
        # A backward graph is captured right after its forward graph.
        over, self._outputs = self._outputs, tensors if outlasts else ()

        def replay() -> None:
            self.replayed += 1
            with no_hooks():
                made = function()
            with torch.no_grad():
                for to, each in zip(tensors, made, strict=True):
                    to.copy_(each)
                for each in over:
                    each.fill_(torch.nan)

        return tensors, replay


class Layers:
    """Layers of a piece before and a piece after something that keeps what it is given.

    Args:
        engine: for graphs; None: without.
    """

    def __init__(self, engine: Any, device: str = "cpu", number: int = 3) -> None:
        torch.manual_seed(0)
        shared = SharedTensors()
        self.modules, self._pieces = [], []
        for _ in range(number):
            before = torch.nn.Linear(SIZE, 2 * SIZE).to(device)
            after = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.LayerNorm(SIZE))
            after.to(device)
            pieces = [
                lambda x, module=before: tuple(y.contiguous() for y in module(x).chunk(2, dim=-1)),
                lambda y, x, module=after: (x + module(y),),
            ]
            if engine is not None:
                pieces = [
                    GraphedPiece(piece, [module], engine, shared)
                    for piece, module in zip(pieces, (before, after), strict=True)
                ]
            self._pieces.append(pieces)
            self.modules += [before, after]
        self.parameters = [p for module in self.modules for p in module.parameters()]
        for parameter in self.parameters:
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(self._take)

    @staticmethod
    def _take(parameter: torch.nn.Parameter) -> None:
        parameter.main_grad += parameter.grad
        parameter.grad = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        for before, after in self._pieces:
            a, b = before(hidden)
            (hidden,) = after(a * b.sigmoid(), hidden)
        return hidden

    @torch.no_grad()
    def update(self) -> None:
        for parameter in self.parameters:
            parameter -= 0.01 * parameter.main_grad
            parameter.main_grad.zero_()


# Of each step a number: it begins a micro-batch, evaluates, ends two together like nano-batches,
# updates weights if none is under way, or ends one of those that are.
BEGIN, EVALUATE, END_TWO, UPDATE = range(4)


def go_through(layers: Layers, steps: list[int], device: str = "cpu") -> list[torch.Tensor]:
    """Everything that comes out: outputs, gradients of inputs, and weights at the end."""
    generator = torch.Generator().manual_seed(1)
    under_way: list[tuple[torch.Tensor, torch.Tensor]] = []
    seen: list[torch.Tensor] = []

    def inputs() -> torch.Tensor:
        return torch.randn(5, SIZE, generator=generator).to(device)

    def end(*numbers: int) -> None:
        ended = [under_way.pop(number) for number in numbers]
        seen.extend(output.detach().clone() for _, output in ended)
        sum(output.square().sum() for _, output in ended).backward()
        seen.extend(hidden.grad for hidden, _ in ended)

    for step in steps:
        if step == BEGIN:
            hidden = inputs().requires_grad_()
            under_way.append((hidden, layers(hidden)))
        elif step == EVALUATE:
            with torch.no_grad():
                first, second = inputs(), inputs()
                seen.extend([layers(first), layers(second), layers(first)])
        elif step == END_TWO and len(under_way) > 1:
            end(-1, -1)
        elif under_way:
            end(step % len(under_way))
        elif step == UPDATE:
            layers.update()
    while under_way:
        end(0)
    return [
        *seen,
        *(p.detach() for p in layers.parameters),
        *(p.main_grad for p in layers.parameters),
    ]


@settings(max_examples=30)
@given(st.lists(st.sampled_from([BEGIN, BEGIN, EVALUATE, END_TWO, UPDATE, 4, 5]), max_size=25))
@example([BEGIN, BEGIN, BEGIN, EVALUATE, END_TWO, BEGIN, 4, UPDATE, UPDATE, BEGIN, BEGIN, END_TWO])
def test_micro_batches_in_any_order(steps: list[int]) -> None:
    engine = RepeatingEngine()
    found, expected = go_through(Layers(engine), steps), go_through(Layers(None), steps)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    most = now = 0
    for step in steps:
        ended = min(now, 1 + (step == END_TWO)) if step >= END_TWO else 0
        now += (step == BEGIN) - ended
        most = max(most, now)
    # Two graphs for each under way, and one for evaluations, of six pieces.
    assert engine.captured == 6 * (2 * most + (EVALUATE in steps))


def test_a_graph_goes_back_once() -> None:
    output = Layers(RepeatingEngine())(torch.ones(5, SIZE))
    output.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="goes back once"):
        output.sum().backward()


def test_gradients_of_a_capture_go_to_no_parameter() -> None:
    """Autograd would take them to the parameter's own stream, which is not captured."""
    leaves: set[int] = set()

    class Looking(RepeatingEngine):
        def capture(self, function, *, outlasts):
            found = list(function()) if outlasts else []
            nodes = [each.grad_fn for each in found]
            while nodes:
                node = nodes.pop()
                nodes += [following for following, _ in node.next_functions if following]
                if hasattr(node, "variable"):
                    leaves.add(id(node.variable))
            return super().capture(function, outlasts=outlasts)

    layers = Layers(Looking())
    layers(torch.ones(5, SIZE))
    assert leaves
    assert not leaves & {id(parameter) for parameter in layers.parameters}


def test_weights_that_have_moved_are_noticed() -> None:
    layers = Layers(RepeatingEngine())
    layers(torch.ones(5, SIZE))
    layers.parameters[0].data = layers.parameters[0].data.clone()
    with pytest.raises(AssertionError, match=r"0\.weight has moved"):
        layers(torch.ones(5, SIZE))


def test_an_output_is_no_view() -> None:
    """Megatron frees the memory of what a stage has sent, which views do not allow."""
    assert Layers(RepeatingEngine())(torch.ones(5, SIZE))._base is None


def train_and_evaluate(flags: list[str], lengths: list[int], graphs: bool) -> tuple[Any, Any]:
    """Two steps with an evaluation after each: what was seen, and what the engines did."""
    import torch.distributed as dist

    from megatron_patches.batches.ticks import PlannedIterator
    from megatron_patches.flags import validation
    from megatron_patches.loop.data import window_layout
    from megatron_patches.model import gpt
    from megatron_patches.pipeline.planned_data import PlannedData
    from support import training

    engines: list[RepeatingEngine] = []

    def make_engine() -> RepeatingEngine:
        engines.append(RepeatingEngine())
        return engines[-1]

    with (
        mock.patch.object(validation, "_validate_cuda_graphs"),
        mock.patch.object(gpt, "CudaGraphEngine", make_engine),
    ):
        args = parse([*flags, *(["--distca-cuda-graphs"] if graphs else [])])
        args.eval_iters = 1
        training.initialize(args)
        stream, device = memory_stream(lengths), torch.device("cpu")
        job, _ = make_run(args, stream)
    planned = PlannedData.start(DistcaConfig.from_args(args), args, window_layout(args), device)
    maker = planned.maker(stream, forward_only=True)
    valid = PlannedIterator(maker, 0, planned.micro_batches_at, device)
    given = job.data
    job.data = DataIterators(given.train, valid, None, end=given.end)
    seen, captured = [], []
    for _ in range(2):
        losses, _, grad_norm = training.train_step(job)
        seen += [losses["lm loss"], float(grad_norm), training.evaluate(job, "valid")["lm loss"]]
        captured.append(sum(engine.captured for engine in engines))
    weights = {
        name: parameter.detach().clone()
        for chunk in job.model
        for name, parameter in named_parameters(chunk)
    }
    job.data.close()
    planned.close()
    dist.barrier()
    forget_megatron()
    return (seen, weights), (captured, sum(engine.replayed for engine in engines))


CASES = {
    "PP2-VPP2": "--no-distca-ping-pong --qk-layernorm --add-qkv-bias",
    "PP2-DP2": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16",
}


@pytest.mark.parametrize("layout", CASES)
def test_training_with_evaluations(ranks, layout: str) -> None:
    world_size, flags = flags_of(layout, 3)
    # torch takes RMSNorm apart, and then gradients are added up in another order.
    flags += [*CASES[layout].split(), "--normalization", "LayerNorm"]
    lengths = documents(3, 2)
    plain, graphed = (
        ranks.run(train_and_evaluate, flags, lengths, graphs, world_size=world_size)
        for graphs in (False, True)
    )
    for (expected, (none, _)), (found, (captured, replayed)) in zip(plain, graphed, strict=True):
        assert found[0] == expected[0]
        assert all(torch.equal(found[1][name], each) for name, each in expected[1].items())
        assert none == [0, 0]
        # All graphs are made in the first step and its evaluation.
        assert captured[0] == captured[1] > 0
        assert replayed > captured[0]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("tensor_model_parallel_size", 2, "remove --tensor-model-parallel-size 2"),
        ("hidden_dropout", 0.1, "set --hidden-dropout 0"),
        ("recompute_granularity", "full", "remove --recompute-granularity full"),
        ("gradient_accumulation_fusion", True, "add --no-gradient-accumulation-fusion"),
        ("fp8", "hybrid", "remove --fp8 hybrid"),
        ("use_megatron_fsdp", True, "remove --use-megatron-fsdp"),
        ("distca_scheduler", "wlb-llm", "add --distca-placement sequential"),
    ],
)
def test_what_is_refused(monkeypatch, flag: str, value: Any, message: str) -> None:
    args = arguments_of("--distca", "--hidden-dropout", "0", "--no-distca-ping-pong")
    args.distca_cuda_graphs = True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs GPUs"):
        check(args)
    args.params_dtype = torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check(args)
    setattr(args, flag, value)
    with pytest.raises(ValueError, match=message):
        check(args)


@pytest.mark.gpu
@needs_gpu
def test_cuda_graphs() -> None:
    """Not run on any GPU yet. Also that nothing new is allocated."""
    steps = [0, 0, 2, 0, 0, 4, 3, 1, 5, 3, 0, 0, 0, 4, 2, 1, 3] * 3
    found = go_through(Layers(CudaGraphEngine(), "cuda"), steps, "cuda")
    expected = go_through(Layers(None, "cuda"), steps, "cuda")
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    layers = Layers(CudaGraphEngine(), "cuda")
    reserved = []
    for _ in range(5):
        go_through(layers, steps, "cuda")
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] == reserved[-1]


@pytest.mark.gpu
@needs_gpu
def test_a_run_with_cuda_graphs(corpus) -> None:
    """Not run on any GPU yet."""
    flags = ["--distca", "--bf16", "--hidden-dropout", "0", "--no-gradient-accumulation-fusion"]
    flags += ["--train-iters", "8", "--eval-interval", "3", "--eval-iters", "1"]
    plain, graphed = (run(1, corpus, *flags, *more)[0] for more in ([], ["--distca-cuda-graphs"]))
    assert graphed.keys() == plain.keys()
    for iteration, loss in plain.items():
        assert abs(float(graphed[iteration]) / float(loss) - 1) < 1e-3
