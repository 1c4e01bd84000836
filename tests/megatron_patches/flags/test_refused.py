"""The table of Megatron-LM's flags: none is passed over in silence, in no version."""

from __future__ import annotations

import re
from argparse import Action, ArgumentParser, Namespace

import pytest

from megatron_patches.flags import refused
from megatron_patches.flags.distca import add_distca_arguments
from megatron_patches.flags.followed import all_names, what_becomes_of
from megatron_patches.flags.refused import Refused
from support.arguments import check, parse
from support.versions import MEGATRON

TABLES = (refused.REFUSED, refused.REFUSED_BY_OUR_ATTENTION, refused.REFUSED_WITH_DISTCA)


def options_of(parser: ArgumentParser) -> list[Action]:
    return [action for action in parser._actions if action.dest != "help"]


@pytest.fixture(scope="module")
def megatrons() -> ArgumentParser:
    """The parser of Megatron-LM's own loop."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


def test_a_flag_stands_in_one_table() -> None:
    assert [name for name, found in all_names().items() if len(found) > 1] == []


def test_every_flag_of_megatron_stands_in_a_table(megatrons: ArgumentParser) -> None:
    """A new one is read about, and put where it belongs: `flags/refused.py` or `followed.py`."""
    found = {
        option: what_becomes_of(option)
        for action in options_of(megatrons)
        for option in action.option_strings
    }
    assert len(found) > 700
    assert [option for option, group in found.items() if group is None] == []
    for action in options_of(megatrons):
        assert len({found[option] for option in action.option_strings}) == 1, action


def test_megatron_s_defaults_are_not_refused(megatrons: ArgumentParser) -> None:
    defaults = megatrons.parse_args([])
    # What Megatron-LM makes of `--eval-micro-batch-size`, where it has that.
    defaults.micro_batch_size = defaults.eval_micro_batch_size = 1
    for table in TABLES:
        refused.refuse(table, defaults)


@pytest.mark.skipif(MEGATRON < (0, 19), reason="some are newer than this version")
def test_what_to_do_instead_is_there(megatrons: ArgumentParser) -> None:
    """Flags that a refusal names are the parser's, or ours, and not refused themselves."""
    add_distca_arguments(megatrons)
    options = {option for action in options_of(megatrons) for option in action.option_strings}
    named = set()
    for group in (group for table in TABLES for group in table):
        found = set(re.findall(r"--[a-z][a-z0-9-]+", group.instead))
        own = {f"--{name}" for name, _ in group.flags()}
        assert found <= options, group
        for flag in found - own:
            assert what_becomes_of(flag) is None or what_becomes_of(flag)[0] == "passed on", group
        named |= found
    assert len(named) > 10


def test_refused_flags_are_attributes_of_megatron_s_arguments(megatrons: ArgumentParser) -> None:
    """Else they would be refused in name only."""
    by_option = {
        option: action.dest for action in options_of(megatrons) for option in action.option_strings
    }
    for table in TABLES:
        for name in (name for group in table for name, _ in group.flags()):
            if f"--{name}" in by_option and name not in refused._ATTRIBUTES:
                assert by_option[f"--{name}"] == name.replace("-", "_")


@pytest.mark.parametrize("table", TABLES, ids=["always", "by our attention", "with --distca"])
def test_refused_flags_are_refused_by_name(table: tuple[Refused, ...]) -> None:
    for group in table:
        for name, accepted in group.flags():
            attribute = refused._ATTRIBUTES.get(name, name.replace("-", "_"))
            with pytest.raises(ValueError, match=f"DistCA does not cover .*: remove --{name} 7"):
                refused.refuse(table, Namespace(**{attribute: 7}))
            with pytest.raises(ValueError, match=f": remove --{name} 1 2"):
                refused.refuse(table, Namespace(**{attribute: [1, 2]}))
            values = [value for value in accepted if not value.startswith("--")]
            for value in [None, False, 0, [], *values]:
                refused.refuse(table, Namespace(**{attribute: value}))
    with pytest.raises(ValueError, match="--eval-micro-batch-size 2"):
        refused.refuse(refused.REFUSED, Namespace(micro_batch_size=1, eval_micro_batch_size=2))


@pytest.mark.parametrize(
    ("attribute", "distca", "own", "plain"),
    [
        ("moe_use_upcycling", True, True, True),
        ("mock_data", True, True, True),
        ("log_max_attention_logit", True, True, False),
        ("optimizer_cuda_graph", True, False, False),
        ("gtp_weight_remat_size", True, False, False),
        ("eod_mask_loss", False, False, False),
    ],
)
def test_where_flags_are_refused(attribute: str, distca: bool, own: bool, plain: bool) -> None:
    """With `--distca`, in plain runs with our attention, and in plain runs with Megatron's."""
    for expected, flags, layers in (
        (distca, ["--distca"], "local"),
        (own, [], "local"),
        (plain, [], "transformer_engine"),
    ):
        args = parse(*flags)
        args.transformer_impl = layers
        setattr(args, attribute, 2)
        if expected:
            with pytest.raises(ValueError, match="DistCA does not cover"):
                check(args)
        else:
            check(args)


def test_a_single_pass_over_the_data_is_what_our_iterators_do() -> None:
    """Megatron-LM's loop would wrap them in a `DataLoader`, unless it is told they are external."""
    args = parse("--distca", "--dataloader-type", "single")
    assert args.dataloader_type == "external"
    args.dataloader_type = "cyclic"
    with pytest.raises(ValueError, match="remove --dataloader-type cyclic"):
        check(args)
