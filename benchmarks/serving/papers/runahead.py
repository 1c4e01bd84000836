"""Claims of KV-Runahead: Scalable Causal LLM Inference by Parallel Key-Value Cache Generation."""

from __future__ import annotations

import math
import re

import numpy as np

from benchmarks.claims import Claim, number, one, span, stored_page, stored_table
from benchmarks.serving.papers.published_figures import (
    PUBLISHED,
    RIGHT,
    stored_comparisons,
    stored_number,
)
from benchmarks.serving.papers.verdicts import (
    EXACTLY,
    NO_CLAIM,
    REPRODUCED,
    WITHIN,
    differs,
    holds,
    judged,
    made_by,
    missing,
    not_possible,
    page,
    tests,
)
from benchmarks.serving.published_times import NUMBERS, Run, speed_up
from benchmarks.serving.published_times import runahead as run_of
from benchmarks.serving.runahead import FINEST, K, llama, searched
from distca.cost.volume import AttentionShape
from distca.plan import Mask, SteppedPlan
from distca.plan.span import Floats, Int64s
from distca.schedule.serving import nobody_holds, shard_evenly, step_plan
from distca.schedule.serving.partitions import (
    Chain,
    cut_prompt,
    even_shares,
    search_partition,
    shares_behind,
)
from distca.simulate.serving.prefill_chain import ChainCosts

PAGE = made_by("runahead")
MEASURED = made_by("chain_prefill", "--ranks 2 --rounds 2 --output DIR")
ON_SLOW_LINKS = made_by("chain_slow_link", "--ranks 2 --mbit 40 200 --output DIR", "chain_prefill")
SPEED_UPS = "Table 1", "Table 2"
SHAPE = AttentionShape(1, 1, 8, 2)
NO_CALLS = "the older model of this page has neither launches nor calls"


def claims() -> list[Claim]:
    """All rows, in the order of the paper."""
    return [*counts(), *balancing(), *speeds(), *networks(), *appendices()]


def chain_plan(parts: list[int]) -> SteppedPlan:
    """The plan of a chain with these parts of a prompt."""
    tokens = sum(parts)
    new = Chain(len(parts), tuple(part / tokens for part in parts))(
        np.array([0]), np.array([tokens])
    )
    return step_plan(nobody_holds(len(parts)), new, "pass-kv", Mask(), block=1, in_steps=True)


def products(plan: SteppedPlan) -> list[int]:
    """Products of a query and a key that each rank computes, visible or not, the chain's first
    first."""
    tasks = plan.plan.tasks
    found = np.zeros(plan.plan.world_size, dtype=np.int64)
    whole = (tasks.q_end - tasks.q_start) * (tasks.kv_end - tasks.kv_start)
    np.add.at(found, tasks.server, whole)
    return found[::-1].tolist()


def rows_sent(plan: SteppedPlan) -> int:
    """Rows of keys and rows of values that travel, as the paper counts them."""
    return 2 * sum(int(each.kv.moved()[2].sum()) for each in plan.step_segments)


def gathered(tokens: int, ranks: int) -> int:
    """Rows of keys and of values that an all-gather sends."""
    new = shard_evenly(np.array([0]), np.array([tokens]), ranks)
    return rows_sent(step_plan(nobody_holds(ranks), new, "all-gather", Mask(), block=1))


def speed_ups(model: str, thousands: int | None = None) -> list[tuple[float, float]]:
    """Speed-ups over all-gathers of a model at 300 GB/s, here and published.

    Args:
        model: name of the model.
        thousands: tokens of the prompts; None: all from 4K on.
    """
    chains = [each.run for each in NUMBERS if each.place in SPEED_UPS]
    found = []
    for run in chains:
        tokens = run.new // K
        wanted = tokens >= 4 if thousands is None else tokens == thousands
        if run.model == model and run.kind == "chain" and wanted:
            both = [stored_number(each) for each in speed_up(model, tokens, run.ranks)]
            ours, theirs = ([each[name] for each in both] for name in ("ours", "published"))
            found.append((ours[0] / ours[1], theirs[0] / theirs[1]))
    return found


def models() -> list[str]:
    """Models of Tables 1 and 2."""
    return [*dict.fromkeys(each.run.model for each in NUMBERS if each.place in SPEED_UPS)]


def both_seconds(run: Run) -> tuple[float, float]:
    """Seconds of a run, here and published."""
    found = stored_number(run)
    return found["ours"], found["published"]


def counts() -> list[Claim]:
    """Sections 3 and 4.1: products and rows."""
    alone = [ChainCosts(0.0, 1.0, 1, 1.0, (1.0,) * (ranks - 1)) for ranks in (2, 4, 8)]
    tokens = 2**14
    bounds = [each.alone(tokens) / each.lower_bound(tokens) for each in alone]
    formula = [2 / (1 / ranks + 1 / ranks**2) for ranks in (2, 4, 8)]
    even, uneven = chain_plan([3, 3, 3]), chain_plan([4, 3, 2])
    gather, chain = gathered(9, 3), rows_sent(uneven)
    traffic = [gathered(80 * n, n) / rows_sent(chain_plan([80] * n)) for n in (2, 4, 8)]
    busiest, whole = max(products(uneven)), 3 * 9
    return [
        Claim(
            "Figure 1: prompt and extension phases, causal attention of one process",
            "keys and values of the prompt are cached; half of the scores are masked",
            "paged keys and values; causal kernels leave out blocks that nobody sees",
            NO_CLAIM,
            tests("attention/test_paged"),
        ),
        Claim(
            "Eqs. 1 to 3: bound on the speed-up of products over one process, 2, 4 and 8 processes",
            ", ".join(f"{each:.2f}" for each in formula),
            ", ".join(f"{each:.2f}" for each in bounds) + ", more than the number of processes",
            judged(bounds, formula, "the bound is another one", EXACTLY),
            tests("simulate/test_chain"),
        ),
        Claim(
            "Figures 2 and 3: a chain instead of an all-gather",
            "each process has a contiguous part and hands keys and values to the next",
            "`--prefill-strategy runahead`; answers equal those of one process within rounding",
            REPRODUCED,
            tests("inference/test_exactness", "schedule/test_partitions"),
        ),
        Claim(
            "Figure 4: all-gather of 9 tokens on 3 processes",
            "27 products each, 36 rows",
            f"{whole} products each, {gather} rows",
            judged([whole, gather], [27, 36], "the plan sends other rows", EXACTLY),
            tests("schedule/test_serving_steps"),
        ),
        Claim(
            "Figure 5: a chain of 4, 3 and 2 tokens",
            "16, 21 and 18 products, 22 rows",
            f"{', '.join(map(str, products(uneven)))} products, {chain} rows; in equal parts "
            f"{rows_sent(even)} rows",
            judged(
                [*products(uneven), chain], [16, 21, 18, 22], "the plan has other parts", EXACTLY
            ),
            tests("schedule/test_partitions"),
        ),
        Claim(
            "Section 4.1: most products of a process",
            "21 instead of 27",
            f"{busiest} instead of {whole}; causal kernels compute fewer in both",
            judged([busiest / whole], [21 / 27], "the plan has other parts", EXACTLY),
            tests("schedule/test_partitions"),
        ),
        Claim(
            "Eqs. 4 to 7: traffic of an all-gather over that of a chain in equal parts",
            "2",
            span(traffic),
            judged(traffic, [2.0] * len(traffic), "the plan sends other rows", EXACTLY),
            tests("schedule/test_partitions"),
        ),
    ]


def balancing() -> list[Claim]:
    """Section 4.2, Figures 6, 7 and 10: partitions."""
    first = int(searched(llama(2), 16 * K)[0])
    text = stored_page("serving/runahead")
    ((found, apart),) = re.findall(r"over 4 ranks: \[(.*?)\], published .*: at most ([\d.]+)", text)
    interpolated = [
        abs(number(row["interpolated"]))
        for row in stored_table("serving/runahead", "GPUs", "tokens", "searched, s", "interpolated")
    ]
    behind = shares_behind((0.4, 0.3, 0.2, 0.1), 96_000, 128_000)
    return [
        Claim(
            "Figure 6(a): first part of 16K tokens on two GPUs",
            "9,728 tokens",
            f"{first:,} tokens, by costs that are fitted to the paper's single GPU",
            judged([first], [9728.0], "the fitted costs differ"),
            tests("simulate/test_chain"),
        ),
        Claim(
            "Figure 6(b) to (d): hierarchical grid search",
            "strides are halved around the best cuts",
            "the same search; for few tokens it finds what trying all partitions finds",
            REPRODUCED,
            tests("schedule/test_partitions"),
        ),
        Claim(
            "Figure 7 and Table 5: keys and values are received and sent inside attention",
            "`net_recv` before, `net_send` after concatenation",
            "steps of a plan: rows of a step travel while kernels compute the step before",
            REPRODUCED,
            tests("runtime/serving/test_stepped_call"),
        ),
        Claim(
            "Figure 10(a): partition of 10K tokens on 4 GPUs",
            "0.350, 0.255, 0.210, 0.185",
            f"{found}: at most {apart} apart",
            holds(float(apart) < 0.01, f"up to {apart}", "the fitted costs differ"),
            PAGE,
        ),
        Claim(
            "Figure 10(b) and (c): time with interpolated partitions over searched ones",
            "at most 1.3% longer",
            f"at most {max(interpolated):.2%} from the searched ones' time",
            holds(max(interpolated) <= 0.013, "more", "the search ends at other cuts"),
            PAGE,
        ),
        Claim(
            "Section 4.2: partitions behind cached tokens",
            "not in the paper",
            "a table's partitions are cut anew into equal work: 32,000 tokens behind 96,000, by "
            f"the shares 0.4, 0.3, 0.2 and 0.1, get {', '.join(f'{x:.3f}' for x in behind)}",
            NO_CLAIM,
            tests("schedule/test_partitions"),
        ),
    ]


def speeds() -> list[Claim]:
    """Section 5, Figures 8 and 9, Tables 1 and 2: speed-ups at 300 GB/s."""
    rows = stored_table("serving/runahead", "model", "GPUs", "tokens")
    bound = [number(row["searched chain, s"]) / number(row["bound, s"]) for row in rows]
    of = {name: pairs for name in models() if (pairs := speed_ups(name))}
    best = {name: [max(pair[n] for pair in pairs) for n in (0, 1)] for name, pairs in of.items()}
    both = [pair for pairs in of.values() for pair in pairs]
    short = [pair for name in models() for each in (1, 2) for pair in speed_ups(name, each)]
    errors, of_short = (
        np.array([abs(ours / theirs - 1) for ours, theirs in pairs]) for pairs in (both, short)
    )
    agree = sum((ours > 1) == (theirs > 1) for ours, theirs in both)
    cpu = stored_table("serving/chain_prefill", "ranks", "way")
    over = []
    for ranks in ("2", "4"):
        mine = [row for row in cpu if row["ranks"] == ranks]
        gather = one(mine, way="all-gather, all products")["over the even chain"]
        (balanced,) = (row for row in mine if row["way"].startswith("balanced chain"))
        over.append(number(gather) / number(balanced["over the even chain"]))
    causal = []
    for ranks in ("2", "4"):
        mine = [row for row in cpu if row["ranks"] == ranks]
        gather = one(mine, way="all-gather")["over the even chain"]
        (balanced,) = (row for row in mine if row["way"].startswith("balanced chain"))
        causal.append(number(gather) / number(balanced["over the even chain"]))
    fewer = [stored_comparisons("KV-Runahead, Appendix A", words)[0] for words in ("MQA", "GQA8")]
    (one_head, all_heads), (eight, _) = (
        [number(part) for part in each["ours"].split(" and ")] for each in fewer
    )
    return [
        Claim(
            "Abstract, Figures 8 and 9: highest speed-ups over all-gathers, Llama 7B and Falcon 7B",
            "over 1.4 and 1.6",
            f"{best['Llama 7B'][0]:.2f} and {best['Falcon 7B'][0]:.2f}, simulated",
            judged(
                [best["Llama 7B"][0], best["Falcon 7B"][0]],
                [best["Llama 7B"][1], best["Falcon 7B"][1]],
                "Falcon's one key-value head leaves an all-gather few bytes, and products alone "
                "gain no more here",
            ),
            PUBLISHED,
        ),
        Claim(
            f"Tables 1 and 2: {len(both)} speed-ups from 4K tokens on",
            "1.09 to 1.63",
            f"{span([ours for ours, _ in both])}; faster than all-gathers in {agree} of "
            f"{len(both)}, as published; {np.median(errors):.0%} off in the median, "
            f"{errors.max():.0%} at most",
            holds(
                bool(errors.max() <= WITHIN),
                f"more than {WITHIN:.0%} in {int((errors > WITHIN).sum())} of {len(both)}",
                "one share of the peak stands for all models",
            ),
            PUBLISHED,
        ),
        Claim(
            "Tables 1 and 2: prompts of 1K and 2K tokens",
            span([theirs for _, theirs in short]),
            f"{span([ours for ours, _ in short])}; {np.median(of_short):.0%} off in the median, "
            f"{of_short.max():.0%} at most",
            holds(
                bool(of_short.max() <= WITHIN),
                f"more than {WITHIN:.0%} in {int((of_short > WITHIN).sum())} of {len(short)}",
                "their times are overheads, and one number of each stands for all models",
            ),
            PUBLISHED,
        ),
        Claim(
            "Figure 8(a): all-gathers run out of memory at 16K tokens on 2 GPUs",
            "out of memory",
            "kernels never keep whole matrices of scores",
            not_possible("the paper doesn't say which scores its kernels keep"),
            tests("attention/test_attention"),
        ),
        Claim(
            "Figure 8(d): searched chains over the bound",
            "at most 17% above",
            f"{span([each - 1 for each in bound], '.0%')} above, simulated",
            holds(max(bound) <= 1.17, "more", NO_CALLS),
            PAGE,
        ),
        Claim(
            "Figure 8 on processes: all-gathers with all products over a searched chain",
            "1.09 to 1.42 on 4 and 8 GPUs",
            f"{' and '.join(f'{each:.2f}' for each in over)} times the CPU seconds of the busiest "
            f"of 2 and of 4; with causal kernels {' and '.join(f'{each:.2f}' for each in causal)}",
            differs(
                "the kernels",
                "causal kernels of zigzag parts leave a chain nothing to gain in products",
            ),
            MEASURED,
        ),
        Claim(
            "Appendix A, Table 2: speed-up of 16K tokens on 8 GPUs with 32, 1 and 8 kv heads",
            "1.41, 1.48, 1.46: fewer heads gain marginally more",
            f"{all_heads:.3f}, {one_head:.3f}, {eight:.3f}",
            holds(
                all(each["sign"] == RIGHT for each in fewer),
                "the sign",
                "fewer heads make all-gathers cheaper, and so leave a chain less to gain",
            ),
            PUBLISHED,
        ),
    ]


def networks() -> list[Claim]:
    """Figure 11 and Table 3: noisy and slow links."""
    title = "chain, mean over links"
    noisy = stored_table("serving/runahead", "network", "GPUs", title)
    fast = [row for row in noisy if row["network"] == "300 GB/s"]
    chain = [number(row[title]) for row in fast]
    gather = [number(row["all-gather"]) for row in fast]
    slow = [row for row in noisy if row["network"] != "300 GB/s"]
    changed = stored_table("serving/chain_slow_link", "ranks", "Mbit/s")
    longer = {
        way: span([number(row["longer by"]) for row in changed if row["way"] == way], ".0%")
        for way in ("even chain", "balanced chain", "all-gather")
    }
    chains = [
        each.run
        for each in NUMBERS
        if each.place == "Table 3" and each.run.ranks > 1 and each.run.kind == "chain"
    ]
    rows = []
    for each in chains:
        alone = both_seconds(run_of("Llama 7B", "chain", each.new // K, 1))
        rows.append((both_seconds(each), alone))
    answers = [[together[at] < one[at] for together, one in rows] for at in (0, 1)]
    same = sum(a == b for a, b in zip(*answers, strict=True))
    errors = [together[0] / together[1] - 1 for together, _ in rows]
    (gains,) = stored_comparisons("KV-Runahead, Section 5")
    (short,) = stored_comparisons("KV-Runahead, Appendix B")
    return [
        Claim(
            "Figure 11: noise on a fast network, longer TTFT of chains and of all-gathers",
            "up to 3.7%; over 10% on average, up to 11.8%",
            f"one link at half its speed: {span(chain, '.1%')}, {span(gather, '.1%')}, simulated",
            differs(
                "the noise",
                "a link is slower for a whole prefill here, and a random pair of GPUs sends other "
                "data there; in both, chains suffer less",
            ),
            PAGE,
        ),
        Claim(
            "Figure 11: noise on a slow network",
            "not in the paper",
            "one of the links at half of 10 GB/s, simulated: chains take "
            f"{span([number(row[title]) for row in slow], '.0%')} longer, all-gathers "
            f"{span([number(row['all-gather']) for row in slow], '.0%')}",
            NO_CLAIM,
            PAGE,
        ),
        Claim(
            "Figure 11 on processes: a link at half its speed",
            "chains suffer less",
            f"at 40 and 200 Mbit/s even chains take {longer['even chain']} longer, balanced ones "
            f"{longer['balanced chain']}, all-gathers {longer['all-gather']}",
            differs(
                "the sign for balanced chains",
                "these links are the limit, and the last link of a balanced chain carries most; "
                "noise that comes and goes has not been measured",
            ),
            ON_SLOW_LINKS,
        ),
        Claim(
            "Table 3: when several GPUs are faster than one, at 10 and 1 GB/s",
            f"in {sum(answers[1])} of {len(rows)} cases",
            f"the same answer in {same} of {len(rows)}; times {span(errors, '+.0%')} off",
            holds(
                same == len(rows),
                f"{len(rows) - same} of {len(rows)} answers",
                "published times at 1 GB/s contradict each other; the page says which",
            ),
            PUBLISHED,
        ),
        Claim(
            "Section 5: 8K tokens on 4 GPUs gain more at 10 GB/s than at 300",
            "chains gain more over all-gathers on the slow network",
            gains["ours"],
            holds(gains["sign"] == RIGHT, f"the sign, {gains['sign']}", "both gains are close"),
            PUBLISHED,
        ),
        Claim(
            "Appendix B: 2K tokens at 10 GB/s on 4 GPUs and on 2",
            "4 GPUs take longer",
            short["ours"],
            holds(
                short["sign"] == RIGHT,
                f"the sign, {short['sign']}",
                "each link has its speed alone here, and all share the host's memory there",
            ),
            PUBLISHED,
        ),
        Claim(
            "Section 5: all experiments on one node",
            "8 A100s of a node",
            "chains over several nodes: links of each pair of neighbours have their own speeds in "
            "the search; torchrun starts the ranks",
            missing("a chain that was run on several machines, and a measurement of one"),
            f"{tests('simulate/test_chain')}; [vLLM](../../../docs/vllm.md)",
        ),
        Claim(
            "Appendix B: a system chooses by prompt and bandwidth",
            "a request goes to the right number of GPUs",
            "`--partition searched` may leave ranks out, down to one; `auto` chooses pass-KV or "
            "pass-Q only",
            missing("runahead among the choices of `auto`"),
            tests("schedule/test_partitions", "inference/test_strategy_choice"),
        ),
    ]


def appendices() -> list[Claim]:
    """Tables 4 and 5, Appendix D."""
    even = cut_prompt(11, even_shares(4)).tolist()
    uneven = cut_prompt(11, (5 / 11, 3 / 11, 2 / 11, 1 / 11)).tolist()
    tried = 0

    def seconds(parts: Int64s) -> Floats:
        nonlocal tried
        tried += len(parts)
        return llama(8).chain_seconds(parts)

    search_partition(16 * K, 8, seconds, FINEST, few=True)
    published = 7**5 * math.log(16 * K, 4) / 3600
    return [
        Claim(
            "Table 4: partitions of 11 tokens",
            "3, 3, 3, 2 and 5, 3, 2, 1",
            f"{', '.join(map(str, even))} and {', '.join(map(str, uneven))}",
            holds(
                (even, uneven) == ([3, 3, 3, 2], [5, 3, 2, 1]),
                "the order of equal parts",
                "a part that is one token shorter may come anywhere",
            ),
            tests("schedule/test_partitions"),
        ),
        Claim(
            "Appendix D: hours to search 16K tokens on 8 GPUs, at 1 s a prefill",
            f"about 33, by (N - 1)^5 log₄ C = {published:.1f}",
            f"{tried / 3600:.2f}: {tried:,} partitions, where each prefill is run",
            differs(
                f"a factor of {published * 3600 / tried:.0f}",
                "5 values of 7 cuts are 5^7 partitions, not 7^5; our search lets parts give to "
                "each other instead of trying a grid",
            ),
            f"{tests('commands/test_tune')}; {page('runahead')}",
        ),
    ]
