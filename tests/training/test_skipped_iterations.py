"""`--iterations-to-skip`: an iteration's documents are passed over, with `--distca` as without."""

from __future__ import annotations

from pathlib import Path

from support.models import command_line
from support.pretraining import LOSS, run_command
from support.whole_runs import RunSeen, whole_run, write_documents

RUN = "--train-iters 5 --split 100,0,0 --log-interval 1 --distca-max-document-length 256".split()
# Windows are as long.
WHOLE = "--seq-length 256 --global-batch-size 2".split()
HALVES = "--seq-length 128 --global-batch-size 4".split()
SKIPPED = ["--iterations-to-skip", "2", "3"]


def check(found: RunSeen, plain: RunSeen) -> None:
    assert [*found.losses] == [*plain.losses]
    for iteration, loss in plain.losses.items():
        assert abs(found.losses[iteration] / loss - 1) < 1e-5


def test_losses_are_those_of_plain_megatron(ranks, tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "corpus", [100, 300, 20, 500, 7, 90] * 12)

    def run(flags: list[str], world_size: int) -> RunSeen:
        given = [*RUN, "--data-path", corpus, *flags]
        return ranks.run(whole_run, given, world_size=world_size)[0]

    plain = run([*WHOLE, *SKIPPED], 1)
    assert [*plain.losses] == [1, 4, 5]
    assert abs(plain.losses[4] / run(WHOLE, 1).losses[4] - 1) > 1e-4
    check(run([*HALVES, *SKIPPED, "--distca"], 2), plain)
    # Weights of stages are initialised otherwise.
    stages = [*WHOLE, *SKIPPED, "--pipeline-model-parallel-size", "2"]
    check(run([*stages, "--distca"], 2), run(stages, 2))
    # A server that holds no model is not told about skipped iterations.
    served = [*HALVES, *SKIPPED, "--distca", "--distca-servers", "dedicated:1"]
    output = run_command(3, command_line([*RUN, "--data-path", corpus, *served]))
    (*_, (last, loss)) = LOSS.findall(output)
    assert last == "5"
    assert abs(float(loss) / plain.losses[5] - 1) < 1e-4
