"""The first line of `distca simulate`, and the flags that it prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from distca.commands.simulate_report import FROM_PARTS, assumptions, format_choices
from distca.commands.verdict import Verdict
from distca.cost.model_sizes import Experts, ModelSize
from distca.simulate import CLUSTERS, PUBLISHED, Candidate, Choice, Workload
from distca.simulate.workload import experts_of_a_node

CLUSTER = replace(CLUSTERS["dgx-h100"], charges=PUBLISHED)
JOB = Workload(ModelSize(4, 512, 8, 4, 64, 1024, 1000), CLUSTER, 8, 8192, 4)
EXPERTS = Experts(64, 2, 256)
CANDIDATES = {
    "plain": Candidate("plain", 2, 1, 4, 1, 1),
    "cp-a2a": Candidate("cp-a2a", 2, 1, 2, 2, 2, all_to_all=2),
    "wlb-llm": Candidate("wlb-llm", 2, 1, 4, 1, 2),
    "tiles": Candidate("tiles", 2, 1, 4, 1, 1),
}


def choice(system: str, seconds: Sequence[float], candidate: Candidate | None = None) -> Choice:
    mean = sum(seconds) / len(seconds)
    candidate = candidate or CANDIDATES[system]
    figures = 4 * 8192 / mean, 80.3, 0.0, 0.0, 9, 9, 0
    return Choice(system, candidate, mean, *figures, tuple(seconds))


def nothing(system: str, tried: int = 9) -> Choice:
    """A system without a configuration that fits, or, where none was tried, that divides."""
    none = float("nan")
    return Choice(system, None, none, none, none, none, none, tried, tried, tried)


FLAT = choice("tiles", [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("choices", "line", "flags"),
    [
        (
            [choice("plain", [1.5, 1.5, 1.5]), choice("cp-a2a", [1.11, 1.1, 1.09]), FLAT],
            "Use DistCA: 1.100 (1.075 to 1.125) times as fast as Megatron's best (context "
            "parallel, all-to-all).",
            ["pretrain_gpt.py"],
        ),
        (
            [choice("plain", [0.9] * 3), choice("cp-a2a", [0.89999] * 3), FLAT],
            "Don't use DistCA: plain Megatron is 1.111 (1.111 to 1.111) times as fast as it.",
            ["Megatron-LM"],
        ),
        (
            [choice("plain", [0.9, 1.2, 1.0]), FLAT],
            "No clear difference: DistCA is 1.033 (0.654 to 1.413) times as fast as Megatron's "
            "best (plain Megatron).",
            ["Megatron-LM", "pretrain_gpt.py"],
        ),
        (
            [choice("plain", [1.5]), choice("tiles", [1.0])],
            "No clear difference: DistCA is 1.500 times as fast as Megatron's best (plain "
            "Megatron): one batch has no range.",
            ["Megatron-LM", "pretrain_gpt.py"],
        ),
        (
            [choice("plain", [1.01, 1.01, 1.01]), FLAT],
            "No clear difference: DistCA is 1.010 (1.010 to 1.010) times as fast as Megatron's "
            "best (plain Megatron). The difference is within the simulator's error: 1.8% of a step "
            "in the median, against runs on CPUs.",
            ["Megatron-LM", "pretrain_gpt.py"],
        ),
        (
            [choice("plain", [1.0, 1.0, 1.0]), FLAT],
            "Don't use DistCA: it is 1.000 (1.000 to 1.000) times as fast as plain Megatron, which "
            "is simpler.",
            ["Megatron-LM"],
        ),
        (
            [choice("plain", [0.99, 0.99, 0.99]), FLAT],
            "Don't use DistCA: plain Megatron is 1.010 (1.010 to 1.010) times as fast as it. "
            "The difference is within the simulator's error: 1.8% of a step in the median, against "
            "runs on CPUs.",
            ["Megatron-LM"],
        ),
        # What is not Megatron's is not what one has.
        (
            [choice("wlb-llm", [0.5] * 3), FLAT],
            "No verdict: --systems has nothing that every user of Megatron has. WLB-LLM, ideal, "
            "which no release of Megatron has, would be 2.000 (2.000 to 2.000) times as fast as "
            "DistCA.",
            ["pretrain_gpt.py"],
        ),
        (
            [choice("plain", [1.5] * 3), choice("wlb-llm", [0.997] * 3), FLAT],
            "Use DistCA: 1.500 (1.500 to 1.500) times as fast as Megatron's best (plain Megatron).",
            ["pretrain_gpt.py"],
        ),
        (
            [nothing("plain"), choice("wlb-llm", [0.5] * 3), FLAT],
            "Use DistCA: nothing of Megatron's that was simulated fits in memory. WLB-LLM, ideal, "
            "which no release of Megatron has, would be 2.000 (2.000 to 2.000) times as fast as "
            "DistCA.",
            ["pretrain_gpt.py"],
        ),
        (
            [nothing("plain", 0), FLAT],
            "No verdict: nothing of Megatron's in --systems can run this job; the table says why.",
            ["pretrain_gpt.py"],
        ),
        (
            [choice("plain", [1.0] * 3), nothing("tiles", 0)],
            "Don't use DistCA: no layout of it divides this job. Use plain Megatron.",
            ["Megatron-LM"],
        ),
        (
            [nothing("plain", 0), nothing("tiles", 0)],
            "No verdict: nothing that was simulated can run this job; the table says why.",
            [],
        ),
        (
            [choice("plain", [0.5, 0.5]), nothing("tiles")],
            "Don't use DistCA: it does not fit in memory. Use plain Megatron.",
            ["Megatron-LM"],
        ),
        (
            [nothing("plain"), nothing("tiles")],
            "Nothing fits in memory: use more GPUs, or a smaller model or vocabulary.",
            [],
        ),
        ([choice("plain", [0.5, 0.5])], "Fastest of Megatron's: plain Megatron.", ["Megatron-LM"]),
    ],
)
def test_the_answer(choices: list[Choice], line: str, flags: list[str]) -> None:
    verdict = Verdict.of(choices)
    assert str(verdict) == line
    use = {"Use DistCA": True, "Don't use": False}
    assert verdict.use_distca is next((use[n] for n in use if line.startswith(n)), None)
    lines = verdict.how_to_train(JOB)
    notes = ("    ", "In these flags ", "--distca-node-gb-per-s and", "With --hidden-dropout")
    titles = [each for each in lines if not each.startswith(notes)]
    assert ("pretrain_gpt.py" in flags) == any(each.startswith("In these flags ") for each in lines)
    assert [title.split(" for ")[0] for title in titles] == [f"Flags of {each}" for each in flags]


@pytest.mark.parametrize(
    ("candidate", "error"),
    [
        ({}, "1.8%"),
        ({"pool_size": 2}, "3.8%"),
        ({"head_parallel": 2}, "3.8%"),
    ],
)
def test_the_simulators_error_is_that_of_the_layout(candidate: dict[str, int], error: str) -> None:
    """2.5% are clear without pools and shared heads, and within the error with them."""
    ours = choice("tiles", [1.0] * 3, replace(CANDIDATES["tiles"], **candidate))
    verdict = Verdict.of([choice("plain", [1.025] * 3), ours])
    assert str(verdict).startswith("Use DistCA" if error == "1.8%" else "No clear difference")
    assert str(verdict).count(f"error: {error}") == (error == "3.8%")
    assert f"own error. That error was {error} in the median" in "\n".join(
        assumptions(JOB, 3, verdict)
    )


def test_the_printed_speeds_of_links_are_explained() -> None:
    slower = choice("tiles", [1.0] * 3, replace(CANDIDATES["tiles"], network_divisor=4))
    theirs = choice("plain", [1.5] * 3)
    flat, planned = (Verdict.of([theirs, each]).how_to_train(JOB)[-2] for each in (FLAT, slower))
    said = "--distca-network-gb-per-s are 86% of the links' speeds (--link-efficiency)"
    assert flat.endswith(f"{said}.")
    assert f"{said}, the network's divided by 4: " in planned


def test_what_megatron_refuses_has_no_flags_but_a_line() -> None:
    hybrid = choice("hybrid-cp", [0.9, 0.9], Candidate("hybrid-cp", 1, 1, 2, 4, 1))
    verdict = Verdict.of([hybrid, choice("tiles", [1.0, 1.0])])
    assert str(verdict).startswith("Don't use DistCA: hybrid context parallel is")
    (line,) = verdict.how_to_train(JOB)
    assert line.startswith("No flags of Megatron-LM for hybrid context parallel: Megatron-LM gives")


def test_what_was_tried_is_not_advised() -> None:
    verdict = Verdict.of([nothing("plain"), nothing("tiles")])
    assert verdict.first_line(JOB).endswith(" vocabulary. --recompute full may help.")
    assert verdict.first_line(replace(JOB, recompute="full")).endswith(" vocabulary.")
    experts = replace(JOB, model=replace(JOB.model, experts=EXPERTS), expert_parallel=4)
    more = "an --expert-model-parallel-size above 4 may help."
    assert verdict.first_line(experts).endswith(f" --recompute full or {more}")
    assert verdict.first_line(replace(experts, recompute="full")).endswith(
        more[0].upper() + more[1:]
    )
    assert verdict.first_line(replace(experts, expert_parallel=8)).endswith("full may help.")


def test_gpus_of_a_node_share_experts_unless_asked() -> None:
    model = replace(JOB.model, experts=EXPERTS)
    assert experts_of_a_node(JOB.model, CLUSTER, 64) == 1
    assert [experts_of_a_node(model, CLUSTER, gpus) for gpus in (2, 8, 12, 64)] == [2, 8, 4, 8]
    odd = replace(model, experts=replace(EXPERTS, number=60))
    assert experts_of_a_node(odd, CLUSTER, 64) == 4


def test_what_cannot_run_as_asked_is_told_in_the_first_line() -> None:
    """A sequence is not a multiple of what the runtime cuts documents at."""
    job = replace(JOB, context=8191)
    choices = [choice("plain", [1.5, 1.5]), choice("tiles", [1.0, 1.0])]
    verdict = Verdict.of(choices)
    first, *_ = format_choices(choices, job, 2).splitlines()
    (*_, last) = verdict.how_to_train(job)
    assert first.endswith(
        "(plain Megatron). It cannot run with these sizes, though: the last line says why."
    )
    assert last.startswith("No flags of pretrain_gpt.py for DistCA, tiles, on 8 GPUs: ")
    assert format_choices(choices, JOB, 2).splitlines()[0].endswith("(plain Megatron).")


def test_the_table_explains_itself() -> None:
    alone = Candidate("cp-a2a", 8, 1, 1, 1, 4)
    choices = [choice("cp-a2a", [1.1, 1.1], alone), choice("tiles", [1.0, 1.0])]
    verdict, *lines = format_choices(choices, JOB, 2).splitlines()
    # An all-to-all that cannot be had, and "80.3 GB" of an H100.
    assert verdict.endswith("times as fast as Megatron's best (plain Megatron).")
    assert lines[2].endswith("TP8 PP1 DP1, 4 micro-batch(es): no groups, so plain Megatron")
    assert " 80.3 " in lines[2]
    assert "1.100 (1.100 to 1.100)" in lines[2]
    assert "1.0" not in lines[3].split("0.0%")[-1]
    assert "A GPU has 85 GB (79 GiB). Training may fill 81 GB." in lines
    assert "2 batch(es); simulated" in lines[0]
    rates = "core attention 340 TFLOP/s forward, linear layers 50% of 990 TFLOP/s"
    assert f"Assumed rates: {rates}" in lines


def test_one_is_no_plural() -> None:
    job = replace(JOB, gpus=1, context=1, sequences=1)
    lines = format_choices([choice("plain", [1.0])], job, 1).splitlines()
    assert lines[1].startswith(f"1 GPU of {job.cluster.name}, 1 sequence of 1 token, ")


def test_batches_that_parts_stand_for_are_named() -> None:
    ours, theirs = choice("tiles", [1.0, 1.1]), choice("plain", [2.0, 2.1])
    assert not any("parts" in each for each in assumptions(JOB, 2, Verdict.of([theirs, ours])))
    told = assumptions(JOB, 2, Verdict.of([theirs, replace(ours, from_parts=1)]))
    assert FROM_PARTS.format(parts=1, batches=2) in told
