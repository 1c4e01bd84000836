"""The simulator against real processes of this machine: predicted and measured seconds of a step.

    python benchmarks/validate_simulator.py --output results/
    python benchmarks/validate_simulator.py --throughput throughput.json --profile profile.json ...

Without `--throughput` it runs `benchmarks/throughput.py` with the schedulers and mixes below, whole
micro-batches and two nano-batches, and no pipeline; without `--profile` it measures the attention
kernel by `distca profile`. The steps' JSON may come from any run of `throughput.py` without stages
and tensor parallelism, on the same machine.

What the simulator is told of the machine is measured apart from the steps that it predicts: kernel
times (forward by the profile, backward over forward here), the rate at which rows are copied, the
speed of an exchange between two processes, and one number from the steps of documents of one block
alone: what everything but core attention takes. Planning is timed, too, and added: in these runs it
shares the core of its process. Predicted are then the steps of every mix, with every scheduler and
without `--distca`: plain Megatron by `simulate_baseline`, which published speed-ups are over, too.
Context parallelism has groups of all ranks where it runs the steps itself.

Reported: the error of each, the median of all, and whether a mix's schedulers, and plain Megatron
among them, rank as measured in each mode. Two whose measured times are closer than `TIE` are not
ranked, nor are two that make the same plans; all others must be predicted apart, by more than
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
from this_machine import describe_machine
from throughput_run import parsed
from throughput_setting import (
    LONG_TAIL,
    MODES,
    PLAIN,
    SHORT,
    DistcaWay,
    Setting,
    document_lengths,
)

from distca.cost.link import Links
from distca.cost.model import AnalyticCost
from distca.cost.models import ModelSize
from distca.cost.profile import Profile, cpu_name, fastest
from distca.plan.span import Int64s
from distca.schedule import ScheduleConfig
from distca.simulate import (
    BaselineLayout,
    Cluster,
    ModelCosts,
    Way,
    plan_batch,
    simulate_baseline,
    simulate_ticks,
)

SCHEDULERS = ("packed", "per-document-cp", "greedy", "tiles")
MIXES = (LONG_TAIL, "pretrain", "lognormal", "fixed")
TIE, SAME = 0.02, 0.005
"""Of the time: measured medians that are closer are not told apart; predictions that are closer are
a tie."""


@dataclass(frozen=True)
class Prediction:
    """Steps of a mix.

    Attributes:
        mix: of document lengths.
        way: its name; `PLAIN`: without `--distca`.
        mode: one of `MODES`; of `PLAIN` none.
        measured: seconds.
        predicted: seconds.
        plans: a digest of all plans; of `PLAIN`, which has none, its name.
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
    """The documents of each batch."""
    lengths = np.array(document_lengths(setting, mix))
    number = (np.cumsum(lengths) - 1) // setting.tokens
    return [lengths[number == batch] for batch in range(setting.batches)]


def predict_plain(
    setting: Setting, model: ModelSize, mix: str, machine: Cluster, profile: Profile
) -> float:
    """Seconds of all batches of a mix without `--distca`."""
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
    """Seconds of all batches of a mix, and a digest of their plans."""
    costs = ModelCosts(model, machine, dtype_bytes=4)
    config = ScheduleConfig(
        tolerance=measured.tolerance,
        shape=costs.shape,
        # As the runs have no --distca-profile.
        cost_model=AnalyticCost.of_shape(costs.shape),
        links=Links(),
        context_parallel_size=parsed(setting, measured.flags()).distca_context_parallel_size,
    )
    way = Way(measured.scheduler, ping_pong=measured.mode == "ping-pong")
    seconds, digest = 0.0, hashlib.sha1()
    for mine in batches_of(setting, mix):
        plan = partial(plan_batch, [mine], 1, setting.processes, config, way)
        seconds += fastest(plan, lambda: None, 0.1)
        planned = plan()
        seconds += simulate_ticks(planned, costs, cost_model=profile).seconds
        for made in planned.plans[0]:
            for part in (made.placement, made.tasks):
                for column in fields(part):
                    digest.update(np.ascontiguousarray(getattr(part, column.name)).tobytes())
    return seconds, digest.hexdigest()


Pair = tuple[Prediction, Prediction]


def pairs_apart(predictions: list[Prediction]) -> list[Pair]:
    """Those that were measured apart, and are of different plans."""
    return [
        (one, other)
        for one, other in itertools.combinations(predictions, 2)
        if abs(one.measured / other.measured - 1) > TIE and one.plans != other.plans
    ]


def is_misplaced(pair: Pair) -> bool:
    """Whether they are not predicted apart, or in the other order."""
    one, other = pair
    tie = abs(one.predicted / other.predicted - 1) <= SAME
    return tie or (one.measured < other.measured) != (one.predicted < other.predicted)


def ranking(predictions: list[Prediction]) -> str:
    """Whose order is predicted, in words."""
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
    """Of every mix: without `--distca`, and each way with it.

    Args:
        setting: what was measured.
        model: what was trained.
        seconds: measured, of each mix and way, of each batch.
        machine: see `describe_machine`.
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
    """As Markdown."""
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
    root = Path(__file__).parent.parent
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
    typed = " ".join(["python benchmarks/validate_simulator.py", *sys.argv[1:]])
    commands = [typed.replace(str(args.output), "DIR")]
    args.output = args.output.absolute()
    args.output.mkdir(parents=True, exist_ok=True)
    steps = args.throughput or args.output / "throughput.json"
    if args.throughput is None:
        run(
            *("benchmarks/throughput.py", "--modes", *args.modes),
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
            *("-m", "distca.cost.profile", "--dtype", "fp32"),
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
