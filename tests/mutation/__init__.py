"""Mutation testing: launch/test.sh --mutants 50.

Sampling: a place is a piece of code that cosmic-ray's operators change. `--seed` (0) draws one
mutant of each place, those of the newest tenth of the files first (by `git blame`), or with
`--evenly` as many of each file. `--mutants 150` continues where `--mutants 50` ended; `--code
distca/plan` mutates that folder alone. Annotations, type aliases, protocols, `__all__`, messages,
`assert`, `strict=` and `frozen=` are left out.

Tests: each test file runs once under coverage, which records the lines of each test function;
fixtures, imports and other processes count for the file. The record is kept in `build/mutation`
until the file or its code changes (`--mutants 0` only makes it). `--near` asks only test files that
lie as the mutated code does and import it, `--tests FILE...` those that it names. A mutant runs
against the tests of its line, quick ones and those of the same folder first, for at most
`--seconds` (240). A test that hangs has noticed it; one that also fails without the mutant has not.
pytest runs in forks of a process that has imported torch and transformers, but nothing of the
project.

Results are kept in a session of cosmic-ray, whose path is printed last: an interrupted run
continues, `--again` repeats survivors, and `cr-report`, `cr-html` and `cr-rate` read it. `--jobs`
is the number of mutants at a time. Mutants run in scratch copies of the working tree.
"""
