"""Digests that tell when a page may be stale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import pages, sources
from distca import machine


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script that takes one of the two names that a package passes on."""
    files = {
        "benchmarks/script.py": "from distca import used\n\nprint(used(2))\n",
        "distca/__init__.py": "from distca.one import used\nfrom distca.two import other\n",
        "distca/one.py": 'def used(n):\n    """Adds."""\n    return n + 1\n',
        "distca/two.py": "def other(n):\n    return n\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """Forgets the code that was read."""
    for function in (sources.digest_of_script, sources._imports, sources._code):
        function.cache_clear()


def stale(repository: Path) -> tuple[list[str], dict[str, str | None]]:
    forget()
    return sources.stale_pages(repository / "results")


def test_a_page_is_stale_when_code_changes_that_its_script_uses(repository: Path) -> None:
    results = repository / "results"
    results.mkdir()
    pages.write(results / "page.md", "# Page\n", str(repository / "benchmarks" / "script.py"))
    (results / "older.md").write_text(
        "# Older\n\nMade by the code of commit 9236283, 2026-11-23.\n"
    )
    (results / "unknown.md").write_text("# Unknown\n")
    older: dict[str, str | None] = {"older.md": "9236283", "unknown.md": None}
    assert stale(repository) == ([], older)
    one = repository / "distca" / "one.py"
    # Neither texts and annotations, nor what a package has beside it, are any of its code.
    one.write_text('def used(n: int) -> int:\n    """Adds one."""\n    return n + 1  # More\n')
    (repository / "distca" / "two.py").write_text("def other(n):\n    return 7\n")
    assert stale(repository) == ([], older)
    one.write_text("def used(n):\n    return n + 2\n")
    assert stale(repository) == (["page.md"], older)
    (repository / "benchmarks" / "script.py").unlink()
    assert stale(repository) == (["page.md"], older)


def test_messages_of_errors_are_no_code_but_conditions_are(repository: Path) -> None:
    one, script = repository / "distca" / "one.py", "benchmarks/script.py"
    digests = []
    for limit, message in ((1, "too small"), (1, "give more"), (2, "give more")):
        check = f"    if n < {limit}:\n        raise ValueError('{message}')\n"
        one.write_text(f"def used(n):\n{check}    return n\n")
        forget()
        digests.append(sources.digest_of_script(script))
    assert digests[0] == digests[1] != digests[2]


def test_every_page_says_which_code_made_it() -> None:
    """By a digest, or by the commit where it is older."""
    _, unmarked = sources.stale_pages(pages.RESULTS)
    assert [name for name, commit in unmarked.items() if commit is None] == []


def test_pages_say_on_which_machine_they_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus, memory = tmp_path / "cpuinfo", tmp_path / "meminfo"
    cpus.write_text("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel\t\t: 18\n")
    memory.write_text("MemTotal:       24683652 kB\nMemFree:  1 kB\n")
    monkeypatch.setattr(machine, "_CPUS", cpus)
    monkeypatch.setattr(machine, "_MEMORY", memory)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    name = "AMD EPYC (family 25, model 17), 2 cores, 25 GB of memory"
    assert machine.machine_name() == name
    assert f" on {name}; " in sources.provenance()
    assert sources.seconds_of(sources.provenance()) is not None
    # Elsewhere than on Linux.
    for file in (cpus, memory):
        file.unlink()
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert machine.machine_name() == f"{machine.cpu_name()}, 1 core"


def test_one_round_is_no_median() -> None:
    assert pages.medians(3) == "medians of 3 rounds"
    assert pages.medians(1) == "one round, so without a spread"
    for page in pages.RESULTS.rglob("*.md"):
        assert "edians of 1 round" not in page.read_text(), page
