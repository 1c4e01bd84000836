"""The flags that `distca simulate` prints: training with them is what was simulated."""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from distca.commands.simulate_report import charged_line
from distca.commands.verdict import format_flags, what_a_sample_is
from distca.cost.model_sizes import MODELS, ModelSize
from distca.cost.training_memory import Recompute
from distca.simulate import (
    CLUSTERS,
    DISTCA_SYSTEMS,
    PUBLISHED,
    Candidate,
    Workload,
    divisions,
    training_flags,
)
from distca.simulate.baselines import MEGATRON
from distca.simulate.flags import megatron_flags, sequences_of_a_window
from distca.simulate.hybrid import HYBRID
from distca.simulate.variants import (
    with_chains,
    with_kept_inputs,
    with_or_without_ping_pong,
    with_other_micro_batches,
    with_pools,
    with_shared_heads,
    with_slower_links,
    with_uneven_micro_batches,
)
from distca.simulate.workload import options_of, token_pairs
from megatron_patches.batches.layouts import WindowLayout
from megatron_patches.batches.resuming import documents_cross_windows
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.parallel import ParallelSizes
from megatron_patches.flags.planning import schedule_config
from megatron_patches.parts import parse_args
from support.commands import Command

MODEL = ModelSize(4, 512, 8, 4, 64, 1024, 1000)
WORKLOAD = Workload(MODEL, CLUSTERS["dgx-a100"], gpus=8, context=8192, sequences=4, tolerance=0.05)
COMMAND = """
    --distribution pretrain --context 8192 --sequences 4 --layers 4 --hidden-size 512 --heads 8
    --kv-heads 4 --head-dim 64 --ffn-hidden-size 1024 --vocab-size 1000 --cluster dgx-a100 --gpus 8
    --batches 1 --tensor-model-parallel-sizes 2 4 --pipeline-model-parallel-sizes 1 2
    --finalists 1 --systems plain tiles
""".split()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command("simulate", capsys)


def parsed(flags: Sequence[str], workload: Workload) -> Namespace:
    """The arguments of a run with a job's model and so many GPUs, which training accepts."""
    m = workload.model
    given = f"""
        --num-layers {m.layers} --hidden-size {m.hidden_size} --kv-channels {m.head_dim}
        --ffn-hidden-size {m.ffn_hidden_size} --num-attention-heads {m.heads}
        --group-query-attention --num-query-groups {m.kv_heads}
        --train-iters 1 --lr 1 --data-path none --split 100,0,0
        --position-embedding-type rope --max-position-embeddings 1048576
        --tokenizer-type NullTokenizer --vocab-size 999
    """
    return parse_args([*given.split(), *flags], world_size=workload.gpus)


def check(args: Namespace, candidate: Candidate, workload: Workload) -> None:
    """Sizes, tokens, micro-batches, documents, and what plans are judged by."""
    c = candidate
    sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    assert (*sizes, args.data_parallel_size) == (c.tensor, c.stages, c.data)
    assert args.world_size == workload.gpus
    assert args.sequence_parallel == (c.tensor > 1)
    assert args.global_batch_size * args.seq_length == workload.sequences * workload.context
    layout = WindowLayout(0, c.data, args.seq_length, args.micro_batch_size)
    assert args.global_batch_size == c.micro_batches * layout.samples_per_micro_batch
    # Documents are cut at the ends of sequences, or of as few of them as blocks allow.
    edges = [
        stop
        for number in range(0, c.micro_batches, c.chain)
        for _, stop in layout.windows(number * layout.samples_per_micro_batch, c.chain)
    ]
    of_window = c.chain * layout.window_tokens // workload.context
    assert edges == [
        n * of_window * workload.context for n in range(1, workload.sequences // of_window + 1)
    ]
    # A part of such a window would not give ranks whole blocks.
    for fewer in range(1, of_window):
        divides = workload.sequences * c.chain // c.micro_batches % fewer == 0
        assert not divides or fewer * workload.context % (128 * c.data * c.chain)
    assert args.max_position_embeddings >= workload.context
    flags = DistcaConfig.from_args(args)
    assert flags.documents.max_length == workload.context
    pairs = None if c.pool_size is None else token_pairs(workload.costs_of(c))
    assert flags.execution_options(ParallelSizes.from_args(args).chunks) == options_of(c, pairs)
    assert flags.backward == ("keep" if c.keeps_inputs else "resend")
    assert flags.head_parallel == c.head_parallel
    config = schedule_config(flags, args, c.servers_of_stage * c.stages)
    assert config.tolerance == workload.tolerance
    assert config.links == workload.planned_links(c)
    assert config.shape == workload.costs_of(c).shape
    assert args.use_distributed_optimizer
    if workload.recompute == "none":
        assert args.recompute_granularity is None
    elif workload.recompute == "mlp":
        assert (args.recompute_granularity, args.recompute_modules) == ("selective", ["mlp"])
    else:
        assert (args.recompute_granularity, args.recompute_num_layers) == ("full", 1)


@pytest.mark.parametrize(
    ("candidate", "workload", "keeps"),
    [
        ({}, {}, True),
        ({"system": "greedy"}, {"recompute": "mlp"}, True),
        ({"system": "plain"}, {}, False),
        ({"stages": 2}, {}, False),
        ({"chain": 2}, {}, False),
        # The same number twice, but more than one.
        ({"stages": 2, "chain": 2}, {}, False),
        ({}, {"recompute": "full"}, False),
    ],
)
def test_servers_keep_inputs_where_training_can(
    candidate: dict[str, Any], workload: dict[str, Any], keeps: bool
) -> None:
    given = replace(Candidate("tiles", 1, 1, 8, 1, 2), **candidate)
    expected = [replace(given, keeps_inputs=True)] if keeps else []
    assert with_kept_inputs(given, replace(WORKLOAD, **workload)) == expected


def test_server_pools_where_training_has_them() -> None:
    """Of a node's ranks, of two nodes' and of four's; what is printed trains with them."""
    job = replace(WORKLOAD, gpus=64, sequences=8)
    given = Candidate("tiles", 2, 1, 32, 1, 2)
    pooled = with_pools(given, job)
    assert [each.pool_size for each in pooled] == [4, 8, 16, 1]
    (whole,) = with_or_without_ping_pong(pooled[0], job)
    assert with_slower_links(whole, job) == []
    for each in (pooled[0], whole, *with_slower_links(pooled[2], job)):
        flags = training_flags(each, job)
        assert f"--distca-pool-size {each.pool_size} " in " ".join(flags)
        check(parsed(shlex.split(" ".join(flags)), job), each, job)
    for other in ({"chain": 2}, {"system": "greedy"}, {"data": 1}):
        assert with_pools(replace(given, **other), job) == []
    assert with_pools(pooled[0], job) == []
    stages = with_pools(replace(given, stages=2, data=16), job)
    assert [each.pool_size for each in stages] == [4, 8, 1]


def test_exchanges_by_copy_engines_are_trained_so(command: Command) -> None:
    charges = replace(PUBLISHED, copy_engines=True)
    job = replace(WORKLOAD, cluster=replace(WORKLOAD.cluster, charges=charges))
    flag = "--distca-transport nvshmem --distca-nvshmem-mode copy-engine"
    for workload, printed in ((job, True), (WORKLOAD, False)):
        flags = training_flags(Candidate("tiles", 1, 1, 8, 1, 2), workload)
        assert (flag in flags) == printed
    assert "(--exchanges copy-engines): measured nowhere" in charged_line(charges)
    assert "copy-engines" not in charged_line(PUBLISHED)
    given = [*COMMAND, "--exchanges", "copy-engines"]
    assert "--baseline-ideal charges nothing" in command.refused(*given, "--baseline-ideal")
    alone = [*given[: given.index("--finalists")], "--exchanges", "copy-engines"]
    assert "--exchanges is for DistCA" in command.refused(*alone, "--systems", "plain")


def test_no_ping_pong_where_training_can() -> None:
    job = replace(WORKLOAD, gpus=8)
    given = Candidate("tiles", 1, 1, 8, 1, 2)
    (alone,) = with_or_without_ping_pong(given, job)
    assert not alone.ping_pong
    assert with_or_without_ping_pong(alone, job) == [given]
    check(parsed(shlex.split(" ".join(training_flags(alone, job))), job), alone, job)
    assert with_or_without_ping_pong(replace(given, stages=2, data=4), job) == []


def test_micro_batches_smaller_than_a_sequence() -> None:
    """Server pools have any number of them; what is printed trains with them."""
    job = replace(WORKLOAD, gpus=64, sequences=8, context=65536)
    given = Candidate("tiles", 2, 1, 32, 1, 8)
    uneven = with_uneven_micro_batches(given, job)
    numbers = [each.micro_batches for each in uneven]
    assert numbers[0] == 10
    assert numbers == sorted(set(numbers))
    assert numbers[-1] <= 16
    assert with_uneven_micro_batches(replace(given, micro_batches=4), job) == []
    assert with_uneven_micro_batches(replace(given, stages=2, data=16), job) == []
    others = with_other_micro_batches(uneven[1], job)
    for each in (uneven[0], replace(uneven[0], pool_size=4), *others):
        flags = training_flags(each, job)
        args = parsed(shlex.split(" ".join(flags)), job)
        assert args.global_batch_size == each.micro_batches * each.data
        wanted = job.sequences * job.context
        tokens = args.global_batch_size * args.seq_length
        assert wanted <= tokens < wanted + 128 * args.global_batch_size
        crosses = documents_cross_windows(DistcaConfig.from_args(args), args)
        assert crosses == (each.micro_batches > job.sequences)


def test_shared_heads_where_training_has_them() -> None:
    """Ranks of a node, in all sizes that divide heads; what is printed trains with them."""
    job = replace(WORKLOAD, gpus=64, sequences=8)
    given = Candidate("tiles", 1, 1, 64, 1, 2)
    heads = job.model.kv_heads
    shared = with_shared_heads(given, job)
    assert [each.head_parallel for each in shared] == [n for n in (2, 4, 8) if heads % n == 0]
    pooled = with_shared_heads(replace(given, pool_size=2), job)
    assert [each.head_parallel for each in pooled] == [2]
    for each in (*shared, *pooled):
        flags = training_flags(each, job)
        assert f"--distca-head-parallel-size {each.head_parallel}" in flags
        check(parsed(shlex.split(" ".join(flags)), job), each, job)
        assert given in [replace(o, pool_size=None) for o in with_shared_heads(each, job)]
    assert with_shared_heads(replace(given, system="greedy"), job) == []
    assert with_shared_heads(replace(given, tensor=4, data=16), job) == []


@pytest.mark.parametrize("system", DISTCA_SYSTEMS)
@pytest.mark.parametrize(
    "workload",
    [
        WORKLOAD,
        replace(WORKLOAD, tolerance=0.1),
        # A sequence is less than a block of each rank, and an odd number of blocks.
        replace(WORKLOAD, context=512, sequences=24),
        replace(WORKLOAD, context=640, sequences=16),
        replace(WORKLOAD, context=960, sequences=32),
        replace(WORKLOAD, gpus=6, cluster=replace(WORKLOAD.cluster, gpus_per_node=6), context=1536),
    ],
    ids=["even", "tolerance", "short", "odd", "no blocks", "six"],
)
def test_every_configuration_is_trained_as_it_is_simulated(system: str, workload: Workload) -> None:
    found = divisions(system, workload, [1, 2, 4], [1, 2, 4])
    trained = refused = 0
    found += [replace(c, max_in_flight=2) for c in found if c.stages == 2]
    found += [other for c in found[::3] for other in with_chains(c, workload)]
    found += [other for c in found[::3] for other in with_kept_inputs(c, workload)]
    for candidate in found:
        try:
            flags = training_flags(candidate, workload)
        except ValueError as error:
            # What it says to give instead can be trained.
            refused += 1
            for context in str(error).split("--context ")[1].split(" or "):
                other = replace(workload, context=int(context))
                flags = shlex.split(" ".join(training_flags(candidate, other)))
                check(parsed(flags, other), candidate, other)
            continue
        check(parsed(shlex.split(" ".join(flags)), workload), candidate, workload)
        trained += 1
    assert trained
    assert (refused > 0) == (workload.context in (512, 640, 960))


@pytest.mark.parametrize("recompute", get_args(Recompute))
def test_a_sequence_is_a_window_on_a_real_job(recompute: Recompute) -> None:
    workload = Workload(MODELS["llama-8b"], CLUSTERS["dgx-h200"], 64, 131_072, 32, 0.05, recompute)
    candidate = Candidate("tiles", tensor=2, stages=1, data=32, context=1, micro_batches=4)
    args = parsed(shlex.split(" ".join(training_flags(candidate, workload))), workload)
    check(args, candidate, workload)
    assert (args.seq_length, args.micro_batch_size, args.global_batch_size) == (4096, 8, 1024)


@pytest.mark.parametrize(
    ("candidate", "fewer", "ranks"),
    [
        (Candidate("tiles", 1, 1, 2, 1, 1), 896, "2 data-parallel ranks"),
        (Candidate("tiles", 2, 1, 1, 1, 1), 960, "1 data-parallel rank"),
    ],
)
def test_the_nearest_contexts_are_advised(candidate: Candidate, fewer: int, ranks: str) -> None:
    job = replace(WORKLOAD, gpus=2, context=1000, sequences=2)
    with pytest.raises(ValueError, match=f"{ranks}: simulate with --context {fewer} or 1024$"):
        sequences_of_a_window(candidate, job)
    for context in range(fewer, 1025):
        near = replace(job, context=context)
        if context in (fewer, 1024):
            assert sequences_of_a_window(candidate, near) in (1, 2)
        else:
            with pytest.raises(ValueError, match="simulate with"):
                sequences_of_a_window(candidate, near)


@pytest.mark.parametrize("system", MEGATRON)
def test_megatrons_parser_takes_its_flags(system: str) -> None:
    """As printed; `hybrid-cp` divides each document as the simulation does."""
    found = divisions(system, WORKLOAD, [1, 2], [1, 2])
    for candidate in found[:: max(len(found) // 4, 1)]:
        flags = megatron_flags(candidate, WORKLOAD)
        # Of four ranks each has one of the four sequences, of eight not.
        assert (system, candidate.tensor) != (HYBRID, 1)
        args = parsed(shlex.split(" ".join(flags)), WORKLOAD)
        c = candidate
        assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (
            c.tensor,
            c.stages,
        )
        assert args.global_batch_size * args.seq_length == WORKLOAD.sequences * WORKLOAD.context
        if system == HYBRID:
            assert args.hybrid_context_parallel
            assert args.max_seqlen_per_dp_cp_rank * c.context >= WORKLOAD.context
            continue
        assert (args.context_parallel_size, args.data_parallel_size) == (c.context, c.data)
        assert args.micro_batch_size * c.data * c.micro_batches == WORKLOAD.sequences
        if c.context > 1:
            way = {"per-document-cp": "all_gather"}.get(system, system.removeprefix("cp-"))
            assert args.cp_comm_type == [way]
    with pytest.raises(ValueError, match="wlb-llm is not Megatron's"):
        megatron_flags(replace(found[0], system="wlb-llm"), WORKLOAD)


def test_megatron_refuses_some_of_hybrid_context_parallelism() -> None:
    candidate = Candidate(HYBRID, tensor=1, stages=1, data=2, context=4, micro_batches=1)
    with pytest.raises(ValueError, match=r"each of 8 ranks .* which 4 do not .* --sequences 8, or"):
        megatron_flags(candidate, WORKLOAD)
    # What it says to give instead is taken.
    more = replace(WORKLOAD, sequences=8)
    args = parsed(shlex.split(" ".join(megatron_flags(candidate, more))), more)
    assert (args.global_batch_size, args.data_parallel_size) == (8, 8)
    latents = replace(more, model=MODELS["deepseek-v3-like"])
    with pytest.raises(ValueError, match=r"with latents \(MLA\)"):
        megatron_flags(candidate, latents)


def printed_flags(text: str) -> list[str]:
    """What a shell makes of the lines below the table, which a sentence ends."""
    title = next(line for line in text.splitlines() if line.startswith("Flags of pretrain_gpt.py"))
    flags, _, sentence = text[text.index(title) + len(title) :].partition("\nIn these flags ")
    assert sentence.splitlines()[0].endswith(" tokens.")
    return shlex.split(flags.replace("\\\n", " "))


SLOW_LINKS = """
    --context 65536 --sequences 1 --tolerance 0.1 --node-gb-per-s 5 --network-gb-per-s 5
""".split()


@pytest.mark.parametrize("more", [[], SLOW_LINKS])
def test_what_is_printed(command: Command, more: list[str]) -> None:
    text = command.run(*COMMAND, *more)
    cluster = replace(WORKLOAD.cluster, node_gb_per_s=5.0, network_gb_per_s=5.0)
    long = replace(WORKLOAD, context=65536, sequences=1, tolerance=0.1, cluster=cluster)
    workload = long if more else WORKLOAD
    workload = replace(workload, cluster=replace(workload.cluster, charges=PUBLISHED))
    found = json.loads(command.run(*COMMAND, *more, "--json"))
    assert found["verdict"] == text.splitlines()[0]
    assert (found["context"], found["sequences"]) == (workload.context, workload.sequences)
    rows = found["systems"]
    (row,) = [r for r in rows if r["system"] == "tiles"]
    candidate = Candidate(**row["candidate"])
    assert str(candidate) in text
    flags = printed_flags(text)
    assert flags == row["flags"]
    args = parsed(flags, workload)
    check(args, candidate, workload)
    # The last line counts the tokens of a window as the flags do.
    (ranks, sequences, tokens) = re.findall(r"([\d,]+) (?:data-|sequences? of|tokens)", text)[-3:]
    held = int(sequences) * int(tokens.replace(",", ""))
    assert int(ranks) * args.seq_length == held == args.data_parallel_size * args.seq_length


def test_what_a_sample_is_in_a_chain() -> None:
    candidate = Candidate("tiles", tensor=2, stages=1, data=4, context=1, micro_batches=8, chain=2)
    args = parsed(shlex.split(" ".join(training_flags(candidate, WORKLOAD))), WORKLOAD)
    assert 2 * 4 * args.seq_length == WORKLOAD.context
    assert what_a_sample_is(candidate, WORKLOAD) == (
        "In these flags a sample is --seq-length tokens of one rank. One sample of each of the 4 "
        "data-parallel ranks makes a window. The 2 windows of a chain "
        "hold 1 sequence of 8,192 tokens."
    )


def test_without_distca_there_is_nothing_to_print(command: Command) -> None:
    given = COMMAND[: COMMAND.index("--finalists")]
    assert "--distca" not in command.run(*given, "--systems", "plain")


def test_what_training_cannot_cut(command: Command, tmp_path: Path) -> None:
    """The table stands, and says what to change."""
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps([1000, 8, 992]))
    given = [*COMMAND[2:], "--lengths", str(lengths), "--context", "1000", "--sequences", "2"]
    text = command.run(*given)
    assert "No flags of pretrain_gpt.py for DistCA, tiles, on 8 GPUs: " in text
    rows = json.loads(command.run(*given, "--json"))["systems"]
    assert rows[0]["flags"] is not None
    assert rows[1]["flags"] is None


def test_flags_stand_in_full_lines_of_at_most_a_width() -> None:
    flags = ["--a 1", "--long-one 22", "--b 3", "--c"]
    assert format_flags(flags, width=19) == "    --a 1 --long-one 22 \\\n    --b 3 --c"
    assert format_flags(flags, width=18) == "    --a 1 \\\n    --long-one 22 \\\n    --b 3 --c"
    assert format_flags(["--longer-than-the-width 5"], width=4) == "    --longer-than-the-width 5"
