"""The simulator against real processes of this machine: predicted and measured seconds of a step.

    python benchmarks/cluster/validate_simulator.py --output results/
    python benchmarks/cluster/validate_simulator.py --throughput FILE --profile FILE ...

Without `--throughput` it runs `benchmarks/training/throughput.py` with the schedulers and mixes
below, whole micro-batches and two nano-batches, and no pipeline; without `--profile` it measures
the attention kernel by `distca profile`. The steps' JSON may come from any run of `throughput.py`
without stages and tensor parallelism, on the same machine.

The machine as the simulator knows it is measured apart from the steps that are predicted: kernel
times (forward by the profile, backward over forward here), the rate at which rows are copied, the
speed of an exchange between two processes, and one number from the steps of documents of one block
alone: the time of everything but core attention. Planning is timed, too, and added, since it shares
the core of its process in these runs. Predicted are then the steps of every mix, with every
scheduler and without `--distca`: plain Megatron by `simulate_baseline`, the reference of published
speed-ups, too. Context parallelism has groups of all ranks where this command runs the steps.

Reported: the error of each, the median of all, and whether a mix's schedulers, and plain Megatron
among them, rank as measured in each mode. Pairs whose measured times are closer than `TIE` are not
ranked, nor are pairs that make the same plans; all others must be predicted apart, by more than
`SAME`, and in the measured order.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks.cluster.this_machine import describe_machine
from benchmarks.training.run import parsed
from benchmarks.training.setting import (
    LONG_TAIL,
    MODES,
    PLAIN,
    SHORT,
    DistcaWay,
    Setting,
    document_lengths,
)
from distca.cost.kernel_time import AnalyticCost
from distca.cost.link import Links
from distca.cost.model_sizes import ModelSize
from distca.cost.profile import Profile
from distca.plan.span import Int64s
from distca.runtime.kernel_timing import cpu_name, fastest
from distca.schedule import ExecutionOptions, ScheduleConfig
from distca.simulate import (
    BaselineLayout,
    Cluster,
    ModelCosts,
    plan_global_batch,
    simulate_baseline,
    simulate_ticks,
)

SCHEDULERS = ("packed", "per-document-cp", "greedy", "tiles")
MIXES = (LONG_TAIL, "pretrain", "lognormal", "fixed")
TIE, SAME = 0.02, 0.005
"""Relative differences below which measured medians are not told apart, and below which predictions
are a tie."""


@dataclass(frozen=True)
class Prediction:
    """Measured and predicted seconds of a mix's steps, trained in one way.

    Attributes:
        mix: name of the mix of document lengths.
        way: name of the way to train; `PLAIN`: without `--distca`.
        mode: one of `MODES`; empty for `PLAIN`.
        measured: measured seconds of all batches.
        predicted: predicted seconds of all batches.
        plans: digest of all plans; `PLAIN` where there are none.
    """

    mix: str
    way: str
    mode: str
    measured: float
    predicted: float
    plans: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def batches_of(setting: Setting, mix: str) -> list[Int64s]:
    """Lengths of the documents in each batch."""
    lengths = np.array(document_lengths(setting, mix))
    number = (np.cumsum(lengths) - 1) // setting.tokens
    return [lengths[number == batch] for batch in range(setting.batches)]


def predict_plain(
    setting: Setting, model: ModelSize, mix: str, machine: Cluster, profile: Profile
) -> float:
    """Predicts seconds of all batches of a mix without `--distca`."""
    costs = ModelCosts(model, machine, dtype_bytes=4)
    layout = BaselineLayout(1, setting.processes, 1, 1)
    return sum(
        simulate_baseline("packed", mine, layout, costs, cost_model=profile).seconds
        for mine in batches_of(setting, mix)
    )


def predict(
    setting: Setting,
    model: ModelSize,
    mix: str,
    measured: DistcaWay,
    machine: Cluster,
    profile: Profile,
) -> tuple[float, str]:
    """Predicts seconds of all batches of a mix with `--distca`; returns a digest of plans, too."""
    costs = ModelCosts(model, machine, dtype_bytes=4)
    config = ScheduleConfig(
        tolerance=measured.tolerance,
        shape=costs.shape,
        # The measured runs have no --distca-profile either.
        cost_model=AnalyticCost.of_shape(costs.shape),
        links=Links(),
        context_parallel_size=parsed(setting, measured.flags()).distca_context_parallel_size,
    )
    options = ExecutionOptions(measured.scheduler, ping_pong=measured.mode == "ping-pong")
    seconds, digest = 0.0, hashlib.sha1()
    for mine in batches_of(setting, mix):
        make_plans = partial(plan_global_batch, [mine], 1, setting.processes, config, options)
        seconds += fastest(make_plans, lambda: None, 0.1)
        planned = make_plans()
        seconds += simulate_ticks(planned, costs, cost_model=profile).seconds
        for plan in planned.ticks[0].plans:
            for part in (plan.placement, plan.tasks):
                for column in fields(part):
                    digest.update(np.ascontiguousarray(getattr(part, column.name)).tobytes())
    return seconds, digest.hexdigest()


Pair = tuple[Prediction, Prediction]


def pairs_apart(predictions: list[Prediction]) -> list[Pair]:
    """Pairs that were measured apart, and have different plans."""
    return [
        (one, other)
        for one, other in itertools.combinations(predictions, 2)
        if abs(one.measured / other.measured - 1) > TIE and one.plans != other.plans
    ]


def is_misplaced(pair: Pair) -> bool:
    """Whether a pair is not predicted apart, or in the other order."""
    one, other = pair
    tie = abs(one.predicted / other.predicted - 1) <= SAME
    return tie or (one.measured < other.measured) != (one.predicted < other.predicted)


def ranking(predictions: list[Prediction]) -> str:
    """States in words whether the measured order is predicted."""
    wrong = [pair for pair in pairs_apart(predictions) if is_misplaced(pair)]
    if not wrong:
        return "ranked as measured"
    named = (
        f"{one.way} and {other.way} ({abs(one.measured / other.measured - 1):.1%} apart)"
        for one, other in wrong
    )
    return f"ranked as measured, but for {'; '.join(named)}"


def predictions_of(
    setting: Setting,
    model: ModelSize,
    seconds: dict[str, dict[str, list[float]]],
    machine: Cluster,
    profile: Profile,
) -> list[Prediction]:
    """Predicts every mix without `--distca`, and in each way with it.

    Args:
        setting: sizes of the measured steps.
        model: sizes of the trained model.
        seconds: measured seconds of each batch, by mix and way.
        machine: description of this machine.
        profile: kernel times.
    """
    found = []
    for mix in setting.mixes:
        plain = predict_plain(setting, model, mix, machine, profile)
        found.append(Prediction(mix, PLAIN, "", sum(seconds[mix][PLAIN]), plain, PLAIN))
        for name, way in setting.distca_ways().items():
            predicted, plans = predict(setting, model, mix, way, machine, profile)
            found.append(Prediction(mix, name, way.mode, sum(seconds[mix][name]), predicted, plans))
    return found


def report(
    setting: Setting,
    machine: Cluster,
    profile: Profile,
    found: list[Prediction],
    commands: list[str],
) -> str:
    """Formats predictions as a page of Markdown."""
    lines = [
        "# The simulator against real processes",
        "",
        *(f"    {command}" for command in commands),
        "",
        f"{setting.processes} processes on {cpu_name()}, torch {torch.__version__}; "
        f"{setting.layers} layers of width {setting.hidden_size}, {setting.seq_length:,} tokens a "
        f"rank, {setting.batches} batches of each mix, {', '.join(setting.modes)}; medians of "
        f"{setting.rounds} rounds. Kernels: {profile.description}.",
        "",
        f"The machine as measured: backward {machine.backward_over_forward:.2f} times forward, "
        f"rows copied at {machine.copy_gb_per_s:.1f} GB/s, exchanges at "
        f"{machine.network_gb_per_s:.2f} GB/s after {1e3 * machine.network_latency:.2f} ms, all "
        f"but core attention at {1e3 * machine.peak_tflops:.1f} GFLOP/s.",
        "",
        "| mix | way | measured s | predicted s | error |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {p.mix} | {p.way} | {p.measured:.3f} | {p.predicted:.3f} | {p.error:+.1%} |"
        for p in found
    ]
    errors = [abs(p.error) for p in found]
    lines += ["", f"Median error {statistics.median(errors):.1%}, largest {max(errors):.1%}.", ""]
    groups = {
        f"{mix}, {mode}": [p for p in found if p.mix == mix and p.mode in ("", mode)]
        for mix, mode in itertools.product(setting.mixes, setting.modes)
    }
    apart = [pair for mine in groups.values() for pair in pairs_apart(mine)]
    right = sum(not is_misplaced(pair) for pair in apart)
    lines += [
        f"Of {len(apart)} pairs of ways of a mix and mode that were measured more than {TIE:.0%} "
        f"apart {right} are predicted in that order, and more than {SAME:.1%} apart:",
        "",
        *(f"* {name}: {ranking(mine)}" for name, mine in groups.items()),
    ]
    return "\n".join(lines) + "\n"


def run(*arguments: str) -> str:
    """Runs a command of this repository; returns it as one would type it."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, *arguments], check=True, cwd=root)
    return " ".join(["python", *arguments])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--throughput", type=Path, metavar="FILE", help="steps of throughput.py")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="made by `distca profile`")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixes", nargs="+", default=list(MIXES))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    typed = " ".join(["python benchmarks/cluster/validate_simulator.py", *sys.argv[1:]])
    commands = [typed.replace(str(args.output), "DIR")]
    args.output = args.output.absolute()
    args.output.mkdir(parents=True, exist_ok=True)
    steps = args.throughput or args.output / "throughput.json"
    if args.throughput is None:
        run(
            *("benchmarks/training/throughput.py", "--modes", *args.modes),
            *("--schedulers", *SCHEDULERS, "--mixes", *args.mixes),
            *("--processes", str(args.processes)),
            *("--distca-context-parallel-size", str(args.processes)),
            *("--output", str(args.output)),
            *("--seq-length", str(args.seq_length), "--hidden-size", str(args.hidden_size)),
            *("--batches", str(args.batches), "--rounds", str(args.rounds)),
        )
    saved = json.loads(steps.read_text())
    if "model" not in saved:
        parser.error(f"{steps} is not a throughput.json that `throughput.py --output` wrote")
    commands.append(saved["command"])
    setting, model = Setting.of_json(saved["setting"]), ModelSize(**saved["model"])
    if max(setting.stages, setting.tensor_parallel, setting.micro_batches) > 1:
        parser.error(
            f"{steps}: measured with a pipeline, tensor parallelism or several micro-batches: "
            "measure without"
        )
    if args.profile is None:
        args.profile = args.output / "simulator_profile.json"
        profiled = run(
            *("-m", "distca", "profile", "--dtype", "fp32"),
            *("--head-dim", str(model.head_dim)),
            *("--heads", str(model.heads), "--kv-heads", str(model.kv_heads)),
            *("--max-length", str(setting.seq_length), "--output", str(args.profile)),
        )
        commands.append(profiled)
    profile = Profile.load(args.profile)
    torch.set_num_threads(1)
    seconds = {mix: saved["mixes"][mix]["seconds"] for mix in setting.mixes}
    rest = statistics.median(value for mix in seconds.values() for value in mix[SHORT])
    machine = describe_machine(setting, model, profile, rest)
    found = predictions_of(setting, model, seconds, machine, profile)
    commands = [command.replace(str(args.output), "DIR") for command in commands]
    text = report(setting, machine, profile, found, commands)
    (args.output / "simulator.md").write_text(text)
    rows = [asdict(p) | {"error": p.error} for p in found]
    figures = {"setting": saved["setting"], "machine": machine.__dict__, "predictions": rows}
    (args.output / "simulator.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
