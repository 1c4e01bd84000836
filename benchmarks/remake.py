"""Lists the pages of results, with their state, and makes them anew.

    python benchmarks/remake.py                    # which are stale, what each takes and needs
    python benchmarks/remake.py cluster/fig3       # makes this one anew
    python benchmarks/remake.py --stale            # all whose code has changed, that need nothing

A page is made by the command that stands on it, in a folder of its own, and replaces the stored one
when that has ended well. The digest of a page's code says that the code has changed, not that a
figure has (`benchmarks/sources.py`).
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as benchmarks/__init__.py says

from benchmarks import sources
from benchmarks.pages import RESULTS

NEEDS = {
    "root": r"links/slow_link|sparse_prefill\.py|--mbit|--busy",
    "vllm": r"serving/(short_prompts|vllm_prefill|connector_cost)\.py",
    "published": r"--published",
    "quiet": r"training/|kernels/host_cost|links/|plans/schedulers|validate_simulator|serving/"
    r"(layouts|decode_step|prefill_ranks|prefill_trace|short_prompts|vllm_prefill|sparse_prefill|chain_prefill"
    r"|connector_cost|ring_prefill|cache_balancing|balanced_prompts)\.py",
    "history": r"kernels/launches",
}
"""What commands need beside time, by their words: root's rights, vLLM's environment, published
lengths, two cores that nothing else uses, and the repository's history."""
BY_HAND = {
    "serving/chain_prefill": "two commands make it",
    "shared_prompts": "two commands make it",
    "simulator": "three commands make it",
    "slow_link": "two commands make it",
    "tolerance": "its text is written by hand",
}
"""Pages that no single command makes."""
_STATES = ("fresh", "stale", "older")
_MEANING = (
    "fresh: no file that the page's command imports has changed since it was made; stale: one has, "
    "which need not change a figure; older: made before pages noted that"
)
_COMMAND = re.compile(r"python (benchmarks/[^`\n]+)")


@dataclass(frozen=True)
class Page:
    """A stored page.

    Attributes:
        name: path in the folder of results, without its ending.
        command: words of the command that made it, after `python`.
        state: "fresh", "stale", or "older" than digests.
        seconds: CPU seconds in which it was made; None: it does not say.
        needs: keys of `NEEDS`.
    """

    name: str
    command: tuple[str, ...]
    state: str
    seconds: int | None
    needs: tuple[str, ...]

    def __str__(self) -> str:
        time = "" if self.seconds is None else f"{self.seconds:,} CPU s"
        needs = BY_HAND.get(self.name) or ", ".join(self.needs)
        return f"{self.state:6} {time:>14}  {self.name:56} {needs}".rstrip()


def stored(folder: Path) -> list[Page]:
    """Returns all pages of a folder, in the order of their names."""
    changed, unmarked = sources.stale_pages(folder)
    pages = []
    for path in sorted(folder.rglob("*.md")):
        file = path.relative_to(folder)
        text = path.read_text(encoding="utf-8")
        found = _COMMAND.search(text.replace("\\\n", " "))
        assert found is not None, f"{file} has no command"
        words = shlex.split(found.group(1))
        state = "stale" if str(file) in changed else "older" if str(file) in unmarked else "fresh"
        needs = tuple(need for need, of in NEEDS.items() if re.search(of, found.group(1)))
        name = file.with_suffix("").as_posix()
        pages.append(Page(name, tuple(words), state, sources.seconds_of(text), needs))
    return pages


def remake(page: Page, published: Path | None) -> list[Path]:
    """Runs the command of a page, and stores the files that it writes.

    Args:
        page: a page that a single command makes.
        published: folder of published lengths.

    Returns:
        Stored files that differ, but for when and how they were made.

    Raises:
        CalledProcessError: the command failed; what is stored stays as it is.
    """
    target = (RESULTS / page.name).parent
    with tempfile.TemporaryDirectory() as folder:
        words = list(page.command)
        for flag, value in (("--output", folder), ("--published", str(published))):
            if flag in words:
                words[words.index(flag) + 1] = value
        if "--output" not in words:
            words += ["--output", folder]
        subprocess.run([sys.executable, *words], cwd=sources.ROOT, check=True)
        made = sorted(each for each in Path(folder).iterdir() if each.name != "runs.jsonl")
        assert any(each.stem == Path(page.name).name for each in made), (page.name, made)
        differ = []
        for each in made:
            old = target / each.name
            if not old.is_file() or _figures(old) != _figures(each):
                differ.append(old)
            shutil.copyfile(each, old)
    return differ


def _figures(path: Path) -> bytes:
    """What a file says, but for how a page was made."""
    data = path.read_bytes()
    made = rb"\n\*(Made|Stored) on .*\n(\n<!-- made by .*\n)?|\n<!-- made by .*\n"
    return re.sub(made, b"\n", data)


def main(argv: Sequence[str] | None = None) -> int:
    """Lists pages, or makes some anew; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as cluster/fig3")
    parser.add_argument("--stale", action="store_true", help="pages whose code has changed")
    parser.add_argument(
        "--with",
        dest="having",
        nargs="+",
        default=[],
        choices=NEEDS,
        help="with --stale: also pages that need these",
    )
    parser.add_argument("--published", type=Path, metavar="DIR", help="published lengths")
    args = parser.parse_args(argv)
    known = {page.name: page for page in stored(RESULTS)}
    unknown = [name for name in args.pages if name not in known]
    if unknown:
        parser.error(f"no page {unknown[0]!r}: choose from {', '.join(known)}")
    if args.having and not args.stale:
        parser.error("--with is for --stale: named pages are made whatever they need")
    having = {*args.having, *(["published"] if args.published else [])}
    chosen = [known[name] for name in args.pages]
    if args.stale:
        chosen += [
            page
            for page in known.values()
            if page.state == "stale" and page.name not in BY_HAND and having.issuperset(page.needs)
        ]
    for page in chosen:
        if page.name in BY_HAND:
            parser.error(f"{page.name}: {BY_HAND[page.name]}; the page has them")
        if "published" in page.needs and args.published is None:
            parser.error(f"{page.name} needs --published DIR")
    if not chosen:
        print("\n".join(map(str, known.values())))
        counts = [sum(page.state == state for page in known.values()) for state in _STATES]
        print(_MEANING)
        print(", ".join(f"{n} {state}" for n, state in zip(counts, _STATES, strict=True)))
    failed = 0
    for page in chosen:
        try:
            differ = remake(page, args.published)
        except subprocess.CalledProcessError as error:
            print(f"{page.name}: its command failed with status {error.returncode}, see above")
            failed += 1
            continue
        names = ", ".join(each.name for each in differ)
        print(f"{page.name}: {f'other figures in {names}' if differ else 'the same figures'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
