"""Figures of measurements on the pages: those that benchmarks/results keeps."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import mean, median

from benchmarks.cluster.validate_simulator import Prediction, of_ratios, ratio_errors
from benchmarks.training.setting import MODES
from distca.simulate.speed_up import POOLS_ERROR, SIMULATORS_ERROR

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
HELPS = "docs/when_it_helps.md"
INDEX = ROOT / "benchmarks" / "README.md"
Rows = list[list[str]]
FRONT = "16 ranks, documents of at most a rank's tokens"
"""What the front page shows of the page of more ranks."""
PEERS = ("per-document CP", "hybrid CP", "WLB-LLM")
DEFAULT = ("DistCA, whole, tolerance 0.1", "DistCA, ping-pong, tolerance 0.1")
"""Ways with the default tolerance, on the page of more ranks."""


def section(path: Path, heading: str) -> str:
    """The text under a heading of the second level."""
    (found,) = [each for each in path.read_text().split("\n## ") if each.startswith(heading + "\n")]
    return found


def table(path: Path, first: str, under: str = "") -> Rows:
    """The cells of the table that begins so; the one under a heading, if it is given."""
    text = section(path, under) if under else path.read_text()
    assert text.count(f"\n| {first}") == 1, f"{path} has not one table of {first}"
    lines = text[text.index(f"\n| {first}") + 1 :].splitlines()
    end = next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:end]]


def throughput(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The columns of a throughput.md, by mix and way."""
    heading = re.findall(r"^\| (mix \| way \| .*) \|$", path.read_text(), re.MULTILINE)
    names = heading[0].split(" | ")
    rows = [dict(zip(names, row, strict=True)) for row in table(path, "mix | way")]
    return {(row["mix"], row["way"]): row for row in rows}


def compare(found: Rows, expected: Rows) -> None:
    assert found
    assert found == expected


def test_speeds_in_the_index() -> None:
    stored = throughput(RESULTS / "throughput.md")
    saved = json.loads((RESULTS / "throughput.json").read_text())["mixes"]
    mixes = list(dict.fromkeys(mix for mix, _ in stored))

    names = ("per-document-cp", "wlb-llm", "greedy", "tiles")
    ways = [*(f"{name}, whole" for name in names), "tiles, ping-pong"]
    expected = []
    for mix in mixes:
        ranges = saved[mix]["max_over_mean_pairs"]
        plain = stored[mix, "plain"]
        ratios = [stored[mix, way]["ratio"] for way in ways]
        span = f"{min(ranges):.2f} to {max(ranges):.2f}"
        expected.append([f"{mix} ({span})", plain["tokens/s"], *ratios, plain["ideal"]])
    compare(table(INDEX, "mix of documents"), expected)


def speeds_over_peers(ranks: int, longest: int) -> dict[str, dict[str, list[float]]]:
    """How many times as fast each way is as each batch's fastest peer, by mix and way."""
    cases = json.loads((RESULTS / "more_ranks.json").read_text())["cases"]
    steps: dict[str, dict[str, list[float]]] = {}
    for case in cases:
        if (case["ranks"], case["longest"]) == (ranks, longest):
            steps.setdefault(case["mix"], {}).setdefault(case["way"], []).append(case["step"])
    found = {}
    for mix, ways in steps.items():
        peers = [each for way, each in ways.items() if way.startswith(PEERS)]
        fastest = [min(of_batch) for of_batch in zip(*peers, strict=True)]
        found[mix] = {
            way: [best / own for best, own in zip(fastest, each, strict=True)]
            for way, each in ways.items()
        }
    return found


def test_speeds_on_the_front_page() -> None:
    """Each peer in its fastest size, DistCA with the default tolerance, over the fastest peer."""
    plain = {
        row[0]: row[3].split()[0]
        for row in table(RESULTS / "more_ranks.md", "documents | way", FRONT)
        if row[1] == "plain Megatron"
    }
    expected = []
    for mix, ways in speeds_over_peers(16, 1).items():
        row = [mix, plain[mix]]
        for name in ("plain Megatron", *PEERS):
            sizes = [mean(each) for way, each in ways.items() if way.startswith(name)]
            row.append(f"{max(sizes):.2f}")
        for name in DEFAULT:
            ours = ways[name]
            row.append(f"{mean(ours):.2f} ({min(ours):.2f} to {max(ours):.2f})")
        expected.append(row)
    compare(table(ROOT / "README.md", "documents | imbalance"), expected)


def span(means: Sequence[float]) -> str:
    return f"{min(means):.2f} to {max(means):.2f}"


def test_more_ranks_in_sentences() -> None:
    """DistCA over each batch's fastest peer, in whole micro-batches and with ping-pong."""
    front, index = words_of("README.md"), words_of("benchmarks/README.md")
    every = {
        (ranks, longest): speeds_over_peers(ranks, longest)
        for ranks in (8, 16)
        for longest in (1, 4)
    }
    whole, ping_pong = (
        {sizes: [mean(ways[name]) for ways in found.values()] for sizes, found in every.items()}
        for name in DEFAULT
    )
    others = [each for sizes, means in whole.items() if sizes != (16, 1) for each in means]
    assert f"DistCA without ping-pong is {span(others)} times as fast as the fastest" in front
    both = [span([each for means in of.values() for each in means]) for of in (whole, ping_pong)]
    assert f"DistCA is {both[0]} times as fast as each batch's fastest peer" in index
    assert f"with whole micro-batches, and {both[1]} times with ping-pong" in index
    tight = [name.replace("0.1", "0.02") for name in DEFAULT]
    least = min(mean(ways[name]) for of in every.values() for ways in of.values() for name in tight)
    assert f"default tolerance, 0.1; with 0.02 the lowest figure is {least:.2f}." in index
    # Equal documents show the noise.
    fixed = [each for found in every.values() for each in found["fixed"][DEFAULT[0]]]
    noise = max(abs(each - 1) for each in fixed)
    assert f"up to {100 * noise:.0f}%" in front
    assert f"up to {100 * noise:.0f}%" in index
    # Two layers' core attention in plain Megatron's step.
    rows = table(RESULTS / "more_ranks.md", "documents | way", FRONT)
    shares = [
        100 * 2 * float(row[2].split()[0]) / float(row[4]) for row in rows if "plain" in row[1]
    ]
    assert f"is {min(shares):.0f}% to {max(shares):.0f}% of plain Megatron's step" in front


def test_mixes_that_gain_nothing_leave_little_to_gain() -> None:
    stored = throughput(RESULTS / "throughput.md")
    not_faster = [
        mix
        for (mix, way), row in stored.items()
        if way == "tiles, whole" and float(row["ratio"]) < 1.02
    ]
    assert not_faster == ["prolong", "fixed"]
    assert all(float(stored[mix, "plain"]["ideal"]) < 1.03 for mix in not_faster)
    saved = json.loads((RESULTS / "throughput.json").read_text())["mixes"]
    assert max(saved["fixed"]["max_over_mean_pairs"]) < 1.005


def test_the_simulated_job_of_the_front_page_is_what_the_command_says() -> None:
    """The front page against the output on the page, which test_commands.py holds to a run."""
    page = (ROOT / "docs" / "when_it_helps.md").read_text()
    shown = page[page.index("--cluster dgx-h200 --gpus 64 --plot advice.png\n") :]
    (verdict,) = re.findall(
        r"^    Use DistCA: (\S+) \((\S+ to \S+)\) times as fast as Megatron's best "
        r"\(context parallel, a2a\+p2p\)\.$",
        shown,
        re.MULTILINE,
    )
    (batches,) = re.findall(r"of 131,072 tokens, (\d+) batch\(es\)", shown)
    over = {
        line[4:34].strip(): re.findall(r"(\d\.\d{3}) \((\d\.\d{3} to \d\.\d{3})\)", line)
        for line in shown.splitlines()
        if re.search(r" TP\d+ PP\d+ DP\d+", line)
    }
    (peer,) = over["WLB-LLM, ideal"]
    text = " ".join((ROOT / "README.md").read_text().split())
    best = "Megatron's best, a2a+p2p context parallelism"
    assert f"use DistCA. It is {verdict[0]} times as fast as {best}." in text
    assert f"confidence interval of the mean over {batches} batches is {verdict[1]}." in text
    assert "in pools of" in re.findall(r"^    DistCA, tiles .*$", shown, re.MULTILINE)[0]
    within = "" if abs(float(peer[0]) - 1) > POOLS_ERROR else ", within the simulator's error"
    over_peer = (
        f"DistCA is {peer[0]} ({peer[1]}) times as fast as WLB-LLM, which Megatron doesn't have"
        f"{within}."
    )
    assert over_peer in text
    # The best peer is the one over which DistCA gains least.
    assert peer == min(each[0] for each in over.values() if each)
    assert f"DistCA is {peer[0]} ({peer[1]}) times as fast as the fastest peer{within}" in text


def words_of(page: str) -> str:
    """A page's text in one line."""
    return " ".join((ROOT / page).read_text().split())


def test_pipelines() -> None:
    """Speeds of pipelines of two and of four stages, with servers shared between them and apart."""
    apart, shared = [], []
    for stages in (2, 4):
        stored = throughput(RESULTS / "pipelines" / f"pp{stages}.md")
        _, own, all_of_them = (row["replayed ratio"] for row in stored.values())
        apart.append(own)
        shared.append(all_of_them)
    assert (
        "When stages computed each other's tasks, a job of two stages was {} times as fast as "
        "plain Megatron, and one of four stages {} times. With `--no-distca-pool-stages` they were "
        "{} and {} times"
    ).format(*shared, *apart) in words_of("docs/pipelines.md")


def test_slow_links() -> None:
    """How far steps with ping-pong are above those with messages of a byte."""
    rows = table(RESULTS / "slow_link.md", "width | layers")
    links = [(int(row[7].rstrip("%")), int(row[3]), float(row[-1])) for row in rows]
    moderate = max(above for busy, _, above in links if busy <= 75)
    busiest = [
        {busy: above for busy, documents, above in links if busy >= 100 and documents == number}
        for number in (2, 1)
    ]
    above = [above for busy, documents, above in links if busy >= 100 and documents == 2]
    longer = [
        f"{100 * (min(each) - 1):.0f}% to {100 * (max(each) - 1):.0f}% longer"
        for each in (above, busiest[1].values())
    ]
    alone = [float(row[-2]) for row in rows]
    said = words_of("docs/pipelines.md")
    assert f"steps with ping-pong were at most {100 * (moderate - 1):.0f}% longer" in said
    shares = [*busiest[0], *busiest[1]]
    assert (
        f"At {min(shares)}% to {max(shares)}%, they were {longer[0]} for batches of two "
        f"documents, and {longer[1]} for one document across both ranks"
    ) in said
    assert f"took {min(alone):.2f} to {max(alone):.2f} times" in said


def test_plans_of_tiles_beside_the_papers_scheduler() -> None:
    """Balance and bytes with documents of up to 128K."""
    rows = {tuple(row[:4]): row[4:] for row in table(RESULTS / "plans.md", "documents | longest")}
    shares = []
    for (documents, longest, servers, way), tiles in rows.items():
        if way == "tiles" and longest == "128K" and servers in ("64", "512"):
            greedy = rows[documents, longest, servers, "greedy"]
            assert float(tiles[0]) <= 1.1
            shares.append(float(tiles[1]) / float(greedy[1]))
    said = f"{min(shares):.2f} to {max(shares):.2f} times the bytes of `greedy`"
    assert said in words_of("docs/planning.md")


def test_mirrored_pieces_beside_contiguous_ones() -> None:
    text = (RESULTS / "mirrored_placement.md").read_text()
    (found,) = re.findall(r"move (.*) times the bytes .* and (.*) times as many", text)
    total, busiest = (each.partition(" (")[0] for each in found)
    said = f"move {total} times the bytes of contiguous ones, and {busiest} times on the busiest"
    assert said in " ".join(INDEX.read_text().split())
    # The page of planning says that this baseline is not weakened.
    assert float(total) >= 1
    assert float(busiest) > 0.99


def test_plans_of_tiles_beside_what_megatron_has() -> None:
    """Ranges of layer times in the index."""
    stored = {tuple(row[:3]): row for row in table(RESULTS / "hybrid_cp.md", "documents | sch")}
    names = {
        "WLB-LLM's, long ones upsampled": "wlbllm, upsampled",
        "ProLong's, long ones upsampled": "prolong, upsampled",
        "ProLong's": "prolong, as is",
        "WLB-LLM's": "wlbllm, as is",
    }

    def best(documents: str, way: str) -> list[str]:
        rows = [row for key, row in stored.items() if key[:2] == (documents, way)]
        return min(rows, key=lambda row: float(row[3]))

    chosen = [
        [
            stored[key, "per-document-cp", "default"],
            best(key, "per-document-cp"),
            stored[key, "hybrid-cp", "default"],
            best(key, "hybrid-cp"),
            best(key, "wlb-llm"),
            stored[key, "tiles", "-"],
            best(key, "dynamic-cp"),
        ]
        for key in names.values()
    ]
    ranges = [
        (min(times), max(times)) for times in zip(*([r[3] for r in c] for c in chosen), strict=True)
    ]
    said = (
        "{} to {} times as long as an equal share with hybrid CP, {} to {} times with hybrid CP's"
    )
    (least, most), (low, high), tiles = (ranges[n] for n in (2, 3, 5))
    index = INDEX.read_text()
    assert f"takes {said.format(least, most, low, high)} best limit, " in index
    assert f"and {tiles[0]} to {tiles[1]} times with `tiles`. `tiles` sends fewer bytes" in index
    # Fewer than with its best limit, and where documents are least shared, more.
    assert all(float(c[5][8]) < float(c[3][8]) for c in chosen)
    more = [float(c[6][8]) / float(c[5][8]) for c in chosen]
    assert (
        f"{ranges[6][0]} to {ranges[6][1]} times with dynamic CP (Megatron's branch dev), and"
    ) in index
    assert f"CP sends {min(more):.1f} to {max(more):.1f} times the bytes of `tiles`:" in index


def gain(one: str, other: str, rows: Sequence[Mapping[str, str]]) -> str:
    """The least and the greatest gain of a system over another in jobs that both fit in."""
    # One that is out of memory has no throughput, or no column.
    both = [(r.get(f"{one} tokens/s"), r.get(f"{other} tokens/s")) for r in rows]
    ratios = [float(a or "nan") / float(b or "nan") for a, b in both]
    ratios = [ratio for ratio in ratios if ratio == ratio]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"


def simulated(page: str) -> list[dict[str, str]]:
    """Rows of a simulated table."""
    with (RESULTS / "cluster" / f"{page}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_simulated_gains() -> None:
    """Over each baseline, and in the paper's way."""
    pages = {
        "Table 3, TP 8, PP 1": "table3",
        "Table 4, TP 8, PP 2 to 8": "table4",
    }
    found = table(INDEX, "jobs | documents")
    expected = []
    for title, documents, *_ in found:
        rows = [r for r in simulated(pages[title]) if r["documents"] == documents.lower()]
        over = ("per-document-cp", "cp-p2p", "cp-a2a+p2p", "hybrid-cp", "wlb-llm")
        paper = gain("greedy, MLPs again", "wlb-llm-paper, MLPs again", rows)
        expected.append([title, documents, *(gain("tiles", other, rows) for other in over), paper])
    compare([row[:8] for row in found], expected)


def test_simulated_gains_beyond_the_paper() -> None:
    models = {
        "8B": "llama-8b",
        "34B": "llama-34b",
        "70B": "llama-70b",
        "Qwen3 30B": "qwen3-30b-a3b",
        "Qwen3 235B": "qwen3-235b-a22b",
        "like Gemma": "gemma3-27b-like",
        "like GPT-OSS": "gpt-oss-120b-like",
        "like Llama 4": "llama4-scout-like",
    }
    rows = simulated("beyond")
    found = table(INDEX, "jobs | per-document CP")
    expected = []
    for cells, (title, model) in zip(found, models.items(), strict=True):
        assert cells[0].startswith(title)
        of_model = [row for row in rows if row["model"] == model]
        over = ("per-document-cp", "cp-p2p", "cp-a2a+p2p", "hybrid-cp", "wlb-llm")
        gains = [gain("tiles", other, of_model) for other in over]
        # Megatron-LM has rings and hybrid CP for layers that see all, hybrid CP for some jobs.
        why = "no windows" if gains[1] == "-" else "refused"
        expected.append([cells[0], *(each.replace("-", why) for each in gains)])
    compare(found, expected)


def test_figures_in_sentences() -> None:
    """Extremes of stored tables, and what the simulator's report says of itself."""
    performance, index = words_of("docs/performance.md"), words_of("benchmarks/README.md")
    ratios = [float(row[-1]) for row in table(RESULTS / "transports.md", "processes | bytes")]
    both = f"{min(ratios):.1f} to {max(ratios):.1f} times"
    assert f"| {both} as fast as gloo: [transports.md]" in index

    simulator = (RESULTS / "simulator.md").read_text()
    errors = re.findall(r"^Median error (\S+), largest (\S+)\.$", simulator, re.MULTILINE)
    by_stages = [
        [
            abs(float(each))
            for each in re.findall(
                rf"^\| {stages} \| .* ([+-][\d.]+)% \|$", simulator, re.MULTILINE
            )
        ]
        for stages in (1, 2)
    ]
    medians, most = ([f(each) for each in by_stages] for f in (median, max))
    assert f"{medians[0]:.1f}%" == f"{SIMULATORS_ERROR:.1%}"
    assert medians[0] > medians[1], "SIMULATORS_ERROR is the larger one"
    assert (
        f"two processes: {medians[0]:.1f}% in the median, {most[0]:.1f}% at most; with two "
        f"pipeline stages {medians[1]:.1f}% and {most[1]:.1f}%"
    ) in words_of("docs/when_it_helps.md")
    file = json.loads((RESULTS / "simulator.json").read_text())
    names = [each.name for each in fields(Prediction)]
    found = [Prediction(**{name: p[name] for name in names}) for p in file["predictions"]]
    assert f"* {of_ratios(found, 1, MODES[1])}" in simulator.splitlines()
    one_stage = [p for p in found if p.stages == 1 and p.mode in ("", MODES[1])]
    of_ways = ratio_errors(one_stage)
    flattered = f"{min(of_ways):.1%} to {max(of_ways):.1%} too high, in the median"
    flattered = f"{flattered} {median(of_ways):.1%}"
    stage = "With one stage and no ping-pong,"
    ratios_are = "ratios of DistCA's speed to other systems' are predicted"
    assert f"{stage} {ratios_are} {flattered}" in words_of(HELPS)
    ratio_is = "the predicted ratio of DistCA's speed to another system's speed is"
    assert f"{stage} {ratio_is} {flattered}" in words_of("README.md")
    pairs = re.findall(r"^Of (\d+) pairs .* more than 2% apart (\d+) are", simulator, re.MULTILINE)
    assert (
        f"the median error is {errors[0][0]} and the largest {errors[0][1]}. It puts "
        f"{pairs[0][1]} of {pairs[0][0]} pairs of systems that were measured more than 2% apart in"
    ) in index

    rows = table(RESULTS / "tolerance.md", "tolerance | greedy")
    moderate = [row for row in rows if 0.05 <= float(row[0]) <= 0.4]
    seconds = [float(row[column]) for row in moderate for column in (1, 3)]
    tiles = [float(row[4]) for row in moderate]
    assert (
        "From 0.05 to 0.4, two `tiles` steps on two CPU processes moved "
        f"{max(tiles):.0f} down to {min(tiles):.0f} MB in total, and took {min(seconds):.1f} to "
        f"{max(seconds):.1f} s (plain Megatron 5.0 s;"
    ) in performance


def test_loads_that_cdsp_bears() -> None:
    ratios = [
        row[-2] for row in table(RESULTS / "serving" / "cdsp_capacity.md", "trace | limit, s")
    ]
    assert "simulated, {}, {} and {} times the load".format(*ratios) in INDEX.read_text()


def test_loads_that_groups_of_ranks_bear_in_the_engine() -> None:
    rows = table(RESULTS / "serving" / "rank_groups.md", "trace | fixed-8")
    ratios = [float(row[4].split()[0]) / float(row[1].split()[0]) for row in rows]
    each = "CDSP sustains {:.2f}, {:.2f} and {:.2f} times".format(*ratios)
    assert f"{each} the load of fixed groups of 8 ranks" in INDEX.read_text()


def test_balance_of_prompts_of_unequal_lengths() -> None:
    rows = table(RESULTS / "serving" / "balanced_prompts.md", "mix | GPUs | plain")
    assert all(row[-2] == "0" for row in rows), "slower than plain"
    long = [row for row in rows if row[0] == "chat and long"]
    # How much of the ideal each way reaches: plain, whole requests, tiles.
    said = [" / ".join(f"{float(row[column]):.2f}" for row in long) for column in (6, 7, 8)]
    told = "share of the ideal speed: plain {}, whole requests {}, tiles {}:".format(*said)
    assert f"{' / '.join(row[1] for row in long)} GPUs, {told}" in INDEX.read_text()
    docs = (ROOT / "docs" / "inference_strategies.md").read_text().replace("\n", " ")
    tiles, plain = said[2].split(" / "), said[0].split(" / ")
    told = f"reach {tiles[0]} of the ideal on {long[0][1]} H100s and {tiles[-1]} on {long[-1][1]}"
    assert f"{told} (without `tiles`, {plain[0]} and {plain[-1]}; " in docs


def test_exposed_transfers_of_prefills() -> None:
    page = RESULTS / "serving" / "prefill_trace.md"
    limited = table(page, "MB/s of each rank's link")[1:]
    hidden = [row for row in limited if float(row[1]) < 1]
    busy = [float(row[1]) for row in hidden]
    exposed = [float(row[-1].rstrip("%")) for row in hidden]
    full = next(row for row in limited if float(row[1]) >= 1)
    (simulated,) = (row for row in table(page, "GB/s of each rank's link") if row[0] == "12.5")
    assert (
        f"If links are busy for {min(busy):.2f} to {max(busy):.2f} times as long as ranks compute, "
        f"{min(exposed):.2f}% to {max(exposed):.2f}% of the prefill is transfer alone; if for "
        f"{full[1]} times as long, {float(full[-1].rstrip('%')):.0f}%. Simulated, Llama 8B on 4 "
        f"H100s at 12.5 GB/s per rank: {simulated[3]} with 8K tokens, {simulated[6]} with 32K:"
    ) in INDEX.read_text()
    shown = " ".join((ROOT / "docs" / "vllm.md").read_text().split())
    assert (
        f"links were busy for up to {100 * max(busy):.0f}% of the computing time, but transfers "
        f"added at most {max(exposed):.1f}% to the prefill's time"
    ) in shown
    assert max(exposed) <= 5


def test_pools_on_real_processes() -> None:
    """What two pools send and compute beside one, and the simulator's error."""
    rows = json.loads((RESULTS / "pools.json").read_text())["rows"]
    ours = {(row["mix"], row["way"]): row for row in rows if row["way"] != "plain"}
    whole = {mix: row for (mix, way), row in ours.items() if way == "tiles"}
    (sent, took), (more, longer) = (
        [
            [ours[mix, f"tiles --distca-{flag}-size 2"][name] / whole[mix][name] for mix in whole]
            for name in ("sent", "measured")
        ]
        for flag in ("pool", "head-parallel")
    )
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in ours.values()]
    error = median(errors)
    assert f"{error:.1%}" == f"{POOLS_ERROR:.1%}"
    assert "four processes, some with [server pools]" in words_of(HELPS)
    assert f": {error:.1%} and {max(errors):.1%} ([pools]" in words_of(HELPS)
    assert (
        "With four processes, in some runs with server pools or split heads, it is "
        f"{error:.1%} and {max(errors):.1%} ([pools]"
    ) in words_of("README.md")
    clear = f"by more than {SIMULATORS_ERROR:.1%} ({POOLS_ERROR:.1%} if DistCA's layout has pools"
    assert clear in words_of(HELPS)
    assert all(row["sent"] == row["simulated"] for row in ours.values())
    assert (
        f"Two pools of 2 send {min(sent):.2f} to {max(sent):.2f} times the bytes of one pool, and "
        f"need {min(took):.2f} to {max(took):.2f} times its CPU seconds. Pairs of ranks that share "
        f"heads send {min(more):.1f} to {max(more):.1f} times its bytes, and need "
        f"{min(longer):.2f} to {max(longer):.2f} times its CPU seconds. Simulated bytes equal "
        f"those sent. Simulated seconds are {error:.1%} off in the median: [pools.md]"
    ) in INDEX.read_text()
