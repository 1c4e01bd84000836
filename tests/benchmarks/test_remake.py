"""Pages of results that are made anew by the command that stands on them."""

from __future__ import annotations

from pathlib import Path
from subprocess import CalledProcessError

import pytest

from benchmarks import remake, sources

SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {roots!r}
from benchmarks import pages, sources
sources.ROOT = Path({root!r})
folder = Path(sys.argv[sys.argv.index("--output") + 1])
command = pages.typed("benchmarks/script.py")
pages.save(folder, "page", f"# Page\\n\\n`{{command}}`: {figure}.", __file__, [{figure}])
(folder / "runs.jsonl").write_text("")
{end}
"""


class Repository:
    """A repository with one script, whose page is stored."""

    def __init__(self, root: Path) -> None:
        self.root, self.results = root, root / "benchmarks" / "results"
        self.results.mkdir(parents=True)

    def write_script(self, figure: int, end: str = "") -> None:
        roots = [str(Path(__file__).parents[2])]
        text = SCRIPT.format(roots=roots, root=str(self.root), figure=figure, end=end)
        (self.root / "benchmarks" / "script.py").write_text(text)
        for function in (sources.digest_of_script, sources._imports, sources._code):
            function.cache_clear()

    def page(self) -> remake.Page:
        (page,) = remake.stored(self.results)
        return page


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    found = Repository(tmp_path)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(remake, "RESULTS", found.results)
    found.write_script(1)
    (found.results / "page.md").write_text(
        "# Page\n\n`python benchmarks/script.py --published DIR --output DIR`: 0.\n\n"
        "Made by the code of commit 9236283, 2026-11-23.\n"
    )
    return found


def test_a_page_is_made_by_its_command(repository: Repository, tmp_path: Path) -> None:
    older = repository.page()
    assert (older.state, older.seconds, older.needs) == ("older", None, ("published",))
    differ = remake.remake(older, tmp_path / "lengths")
    assert [path.name for path in differ] == ["page.json", "page.md"]
    fresh = repository.page()
    # The page names no folder of this machine.
    assert fresh.command == older.command
    assert fresh.state == "fresh"
    assert fresh.seconds is not None
    text = (repository.results / "page.md").read_text()
    assert "from files that are in no repository with Python 3." in text
    assert sorted(path.name for path in repository.results.iterdir()) == ["page.json", "page.md"]
    # The same figures are the same whenever they were made.
    (repository.results / "page.md").write_text(text.replace("*Made on 2", "*Made on 1"))
    assert remake.remake(fresh, tmp_path / "lengths") == []
    older_page = text[: text.index("*Made on ")] + "*Stored on 2026-11-22 in commit 0123abcd.*\n"
    (repository.results / "page.md").write_text(older_page)
    assert remake.remake(fresh, tmp_path / "lengths") == []
    repository.write_script(2)
    assert repository.page().state == "stale"
    assert len(remake.remake(repository.page(), tmp_path / "lengths")) == 2


def test_what_is_stored_stays_where_a_command_fails(
    repository: Repository, capsys: pytest.CaptureFixture
) -> None:
    before = (repository.results / "page.md").read_bytes()
    repository.write_script(3, "sys.exit(1)")
    with pytest.raises(CalledProcessError):
        remake.remake(repository.page(), Path("lengths"))
    assert remake.main(["page", "--published", "lengths"]) == 1
    assert "page: its command failed with status 1" in capsys.readouterr().out
    assert (repository.results / "page.md").read_bytes() == before
    assert not (repository.results / "page.json").exists()


def test_the_list_and_what_is_refused(
    repository: Repository, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remake.main([]) == 0
    *lines, meaning, last = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["older", "page", "published"]]
    assert all(f"{state}: " in meaning for state in ("fresh", "stale", "older"))
    assert last == "0 fresh, 0 stale, 1 older"
    refused = {
        ("nosuch",): "no page 'nosuch': choose from page",
        ("page",): "page needs --published DIR",
    }
    for words, why in refused.items():
        with pytest.raises(SystemExit):
            remake.main([*words])
        assert why in capsys.readouterr().err
    monkeypatch.setitem(remake.BY_HAND, "page", "two commands make it")
    with pytest.raises(SystemExit):
        remake.main(["page", "--published", "lengths"])
    assert "page: two commands make it" in capsys.readouterr().err


def test_stale_pages_are_made_where_nothing_else_is_needed(
    repository: Repository, capsys: pytest.CaptureFixture
) -> None:
    remake.remake(repository.page(), Path("lengths"))
    repository.write_script(2)
    assert remake.main(["--stale"]) == 0
    # It needs published lengths, which were not given.
    assert "1 stale" in capsys.readouterr().out
    assert remake.main(["--stale", "--published", "lengths"]) == 0
    assert "page: other figures in page.json, page.md" in capsys.readouterr().out


def test_every_stored_page_has_a_command_that_is_there() -> None:
    pages = remake.stored(remake.RESULTS)
    assert len(pages) > 40
    assert [page.name for page in pages if not (sources.ROOT / page.command[0]).is_file()] == []
    assert {*remake.BY_HAND} <= {page.name for page in pages}


def test_every_flag_of_a_stored_page_is_one_of_its_script() -> None:
    unknown = []
    for page in remake.stored(remake.RESULTS):
        script, *words = page.command
        code = "".join(path.read_text() for path in sources.imported_files(script))
        flags = (word.partition("=")[0] for word in words if word.startswith("--"))
        # A word with a space is a value of one argument.
        unknown += [
            (page.name, flag) for flag in flags if " " not in flag and f'"{flag}"' not in code
        ]
    assert unknown == []
