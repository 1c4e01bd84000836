"""How launch/setup.sh makes, adds to, keeps and replaces environments; what launch/test.sh runs.

A stand-in for Python notes what it is called with: nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.launches import ROOT

# `python -m venv FOLDER` copies this script; `-c` prints a version; pip notes its arguments.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    -c*) echo 3.13 ;;
    launch/*.py*) exec python3 "$@" ;;
    *freeze*) printf '%s\\n' torch==2.13.0 numpy==2.3.4 'distca @ file:///here' ;;
    --version) echo Python 3.13.0 ;;
    *"venv --clear"*)
        rm -rf "${!#}"
        mkdir -p "${!#}/bin" "${!#}/lib"
        cp "$0" "${!#}/bin/python"
        ;;
    *pip*install*)
        [ ! -e slow ] || sleep "$(cat slow)"
        echo "Collecting packages"
        [ ! -e broken ] || { echo "no such package"; exit 1; }
        echo "$*" >>"$(dirname "$0")/../installed"
        ;;
esac
"""


class Checkout:
    """A checkout with the launch scripts alone, and a Python that pretends.

    Attributes:
        folder: its root.
        env: the environment variables of its scripts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "launch", folder / "launch")
        shutil.copy(ROOT / "pyproject.toml", folder)
        (folder / "tools").mkdir()
        self.python = folder / "tools" / "python3.13"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        path = f"{self.python.parent}:{os.environ['PATH']}"
        self.env = os.environ | {"PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
        self.env.pop("PYTHON", None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "launch/setup.sh", *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def set_up(self, *arguments: str) -> str:
        """Runs the script to its good end, and returns what it printed."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        return output

    def installed(self) -> list[str]:
        """What pip was called with in the environment, without what comes first."""
        lines = (self.folder / ".venv" / "installed").read_text().splitlines()
        return [line.rpartition("--progress-bar off ")[2] for line in lines]

    def change_dependencies(self) -> None:
        path = self.folder / "pyproject.toml"
        path.write_text(path.read_text().replace('"tqdm"', '"tqdm>=4"'))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_one_environment_for_all_and_extras_on_top(checkout: Checkout) -> None:
    output = checkout.set_up()
    assert "setting up .venv-" in output
    assert ".venv is ready" in output
    first = checkout.installed()
    assert first[1].startswith("torch==")
    assert first[2:] == ["--editable .[megatron,plot,inference,convert]"]
    assert checkout.set_up() == ""
    folder = (checkout.folder / ".venv").resolve()
    assert "adding what is missing" in checkout.set_up("checks")
    *before, added = checkout.installed()
    assert before == first
    # Nothing that is there may change under a process that runs from it.
    constraints, *packages = added.removeprefix("--constraint ").split()
    constrained = (checkout.folder / constraints).read_text().splitlines()
    assert "numpy==2.3.4" in constrained
    assert not [line for line in constrained if "distca" in line]
    assert {"pytest", "msgspec", "matplotlib", "einops"} < {*packages}
    assert not [each for each in packages if each.startswith((".", "distca", "--editable"))]
    assert checkout.set_up("checks") == ""
    assert checkout.set_up() == ""
    assert (checkout.folder / ".venv").resolve() == folder


def test_other_dependencies_make_it_anew_beside_the_old_one(checkout: Checkout) -> None:
    checkout.set_up()
    old = (checkout.folder / ".venv").resolve()
    # Options of tools are no dependencies.
    with (checkout.folder / "pyproject.toml").open("a") as file:
        file.write("\n# more\n")
    assert checkout.set_up() == ""
    checkout.change_dependencies()
    (checkout.folder / "broken").touch()
    failed = checkout.start()
    output, _ = failed.communicate(timeout=60)
    assert failed.returncode == 2
    assert "no such package" in output
    assert (checkout.folder / ".venv").resolve() == old
    (checkout.folder / "broken").unlink()
    checkout.set_up()
    assert (checkout.folder / ".venv").resolve() != old
    assert not old.exists()


def test_a_folder_of_before_gives_way(checkout: Checkout) -> None:
    (checkout.folder / ".venv" / "bin").mkdir(parents=True)
    checkout.set_up()
    assert (checkout.folder / ".venv").is_symlink()
    assert not (checkout.folder / ".venv-old").exists()


def test_an_environment_in_use_is_kept(checkout: Checkout) -> None:
    checkout.set_up()
    old = (checkout.folder / ".venv").resolve()
    shutil.copy("/bin/sleep", checkout.folder / ".venv" / "bin" / "sleep")
    # Several: only the first one is named.
    users = [subprocess.Popen([".venv/bin/sleep", "60"], cwd=checkout.folder) for _ in range(5)]
    try:
        # More beside what is there disturbs nobody.
        assert "what is there stays as it is" in checkout.set_up("checks")
        assert (checkout.folder / ".venv").resolve() == old
        checkout.change_dependencies()
        refused = checkout.start()
        output, _ = refused.communicate(timeout=60)
        assert refused.returncode == 2
        assert output == (
            "error: .venv has to be made anew, and is in use "
            f"(process {min(user.pid for user in users)}, .venv/bin/sleep 60 ): end that first\n"
        )
        assert (checkout.folder / ".venv").resolve() == old
    finally:
        for user in users:
            user.kill()
            user.wait()
    checkout.set_up()
    assert (checkout.folder / ".venv").resolve() != old


def test_two_at_a_time_make_one(checkout: Checkout) -> None:
    (checkout.folder / "slow").write_text("1")
    first = checkout.start()
    while not (checkout.folder / ".venv.lock").exists():
        time.sleep(0.02)
    time.sleep(0.2)
    second = checkout.start()
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert ".venv is ready" in outputs[0]
    assert outputs[1] == "waiting for another set-up of .venv\n"
    assert len(checkout.installed()) == 3


def test_long_steps_say_what_they_do(checkout: Checkout) -> None:
    (checkout.folder / "slow").write_text("10.5")
    process = checkout.start()
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[1:] == ["installing pip\n", lines[2]]
        assert lines[2].startswith("  0:")
        assert ", 0 packages found, " in lines[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert not (checkout.folder / ".venv").exists()


def test_another_python_makes_it_anew_and_none_keeps_it(checkout: Checkout) -> None:
    checkout.set_up()
    old = (checkout.folder / ".venv").resolve()
    other = shutil.copy(checkout.python, checkout.folder / "other-python")
    checkout.env["PYTHON"] = str(other)
    checkout.set_up()
    new = (checkout.folder / ".venv").resolve()
    assert new != old
    del checkout.env["PYTHON"]
    assert checkout.set_up() == ""
    assert (checkout.folder / ".venv").resolve() == new


def test_pythons_of_version_managers_are_found(checkout: Checkout) -> None:
    folder = checkout.folder / "home" / ".local" / "share" / "uv" / "python"
    managed = folder / "cpython-3.13.7-linux-x86_64-gnu" / "bin" / "python"
    managed.parent.mkdir(parents=True)
    managed.write_text(PYTHON)
    managed.chmod(0o755)
    checkout.env |= {"HOME": str(checkout.folder / "home"), "PATH": "/usr/bin:/bin"}
    for name in ("PYENV_ROOT", "UV_PYTHON_INSTALL_DIR", "CONDA_PREFIX"):
        checkout.env.pop(name, None)
    assert f"with Python 3.13.0, {managed} " in checkout.set_up()


def pretend(checkout: Checkout, program: str) -> None:
    """Makes the environments of tests, all of whose programs are a line of a shell."""
    (checkout.folder / "launch" / "setup.sh").write_text("")
    for name in (
        ".venv",
        ".venv-python-3.11",
        ".venv-megatron-0.18.2",
        ".venv-vllm",
        ".venv-trainers",
    ):
        for each in ("ruff", "mypy", "shellcheck", "python"):
            path = checkout.folder / name / "bin" / each
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/usr/bin/env bash\n{program}\n")
            path.chmod(0o755)


@pytest.mark.parametrize("failing", ["", "ruff", "with_vllm"])
def test_full_alone_runs_all_environments_and_sums_up(checkout: Checkout, failing: str) -> None:
    pretend(
        checkout,
        f'echo "$(basename "$0") $*" | tee -a called; failing="{failing}"\n'
        '[ -z "$failing" ] || [[ "$0 $*" != *"$failing"* ]] || bad=1\n'
        '[[ $0 != */python ]] || echo "${bad:-3 passed}${bad:+ failed}, 1 skipped in 4.56s"\n'
        "exit ${bad:-0}",
    )
    checkout.python.rename(checkout.python.with_name("python3.11"))
    checkout.python.with_name("python3.11").write_text(PYTHON.replace("3.13", "3.11"))
    done = subprocess.run(
        ["bash", "launch/test.sh", "--full"],
        cwd=checkout.folder,
        env=checkout.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == bool(failing), done.stderr
    called = (checkout.folder / "called").read_text().splitlines()
    tests = [line for line in called if line.startswith("python -m pytest")]
    assert [" --full -rs" in line for line in tests] == [True] * 4
    assert "tests/examples/test_verl_adapter.py" in tests[3]
    assert "tests/with_vllm" in tests[2]
    assert "tests/plan" in tests[1]
    summary = done.stdout.splitlines()[-6:]
    assert summary[0].startswith("summary of ")
    assert summary[1] == f"ruff, mypy and shellcheck: {'failed' if failing == 'ruff' else 'passed'}"
    with_vllm = "1 failed" if failing == "with_vllm" else "3 passed"
    counts = ["3 passed", "3 passed", with_vllm, "3 passed"]
    assert summary[2:] == [
        f"launch/test.sh {flags}--full: {count}, 1 skipped in 4.56s"
        for flags, count in zip(
            ("", "--python 3.11 ", "--vllm ", "--trainers "), counts, strict=True
        )
    ]


def test_packages_of_pip_s_cache_are_counted(checkout: Checkout) -> None:
    """Those are neither downloaded nor unpacked for minutes."""
    (checkout.folder / "lib").mkdir()
    found = [
        "Collecting a",
        "  Downloading a-1.whl (9 MB)",
        "Collecting b",
        "  Using cached b-1.whl",
    ]
    (checkout.folder / "pip.log").write_text("\n".join(found))
    script = ". launch/environment.sh; doing_of_pip ."
    done = subprocess.run(
        ["bash", "-euc", script], cwd=checkout.folder, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 packages found, 1 MB unpacked: Using cached b-1.whl\n"


@pytest.mark.parametrize(
    ("arguments", "programs"),
    [
        ([], ["ruff", "ruff", "mypy", "shellcheck", "python"]),
        (["-k", "plan"], ["python"]),
        (["--python", "3.11"], ["python"]),
        (["--trainers", "-k", "verl"], ["python"]),
        (["--megatron", "0.18.2", "-n", "0"], ["python"]),
        (["-k", "plan", "--maxfail=2", "--", "--nosuch", "a b"], ["python"]),
        (["--", "--vllm", "--help"], ["python"]),
    ],
)
def test_with_arguments_pytest_alone_runs(
    checkout: Checkout, arguments: list[str], programs: list[str]
) -> None:
    pretend(checkout, 'echo "$(basename "$0") $*"')
    command = ["bash", "launch/test.sh", *arguments]
    done = subprocess.run(
        command, cwd=checkout.folder, capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == programs
    given = " ".join(
        arg for arg in arguments if arg not in ("--python", "--megatron", "--trainers", "--")
    )
    assert lines[-1].endswith(given.removeprefix("3.11").removeprefix("0.18.2 "))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--nosuch"], "unknown flag --nosuch: launch/test.sh --help lists its own."),
        (["--vllm", "-k", "plan", "--ful"], "unknown flag --ful"),
        (["-k", "plan", "--megatron", "0.18.2"], "--megatron must come first"),
        (["-x", "tests/nosuch.py::test_it"], "there is no tests/nosuch.py"),
        (["--mutants", "abc"], "--mutants takes a number of mutants, not 'abc'"),
        (["--recording", "nosuch"], "--recording: there is no commit nosuch"),
    ],
)
def test_unknown_flags_are_refused_before_set_up(
    checkout: Checkout, arguments: list[str], why: str
) -> None:
    (checkout.folder / "launch" / "setup.sh").write_text("echo set-up\n")
    done = subprocess.run(
        ["bash", "launch/test.sh", *arguments],
        cwd=checkout.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {why}")


def test_environments_of_versions_are_kept_for_all_checkouts(checkout: Checkout) -> None:
    checkout.set_up("megatron", "0.18.2")
    link = checkout.folder / ".venv-megatron-0.18.2"
    assert link.resolve().parent == checkout.folder / "cache" / "distca"
    assert "megatron-core==0.18.2 .[megatron,convert,dev]" in (link / "installed").read_text()
    checkout.env["PYTHON"] = str(checkout.python)
    refused = checkout.start("python", "3.11")
    output, _ = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert output == f"error: {checkout.python} is no Python of 3.11 that runs, with venv and pip\n"
