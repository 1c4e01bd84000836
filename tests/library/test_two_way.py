"""Trees with two-way nodes on live ranks, and gradients of losses that ranks have apart."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from distca.library import Mask, Tree
from distca.library.nodes import Nodes
from distca.library.plans import PlanDocuments
from distca.schedule import ScheduleConfig
from support.two_way import attend_densely, attend_on_ranks, losses_of_own_rollouts, trees


@pytest.mark.parametrize("world_size", [1, 3])
def test_tokens_of_two_way_nodes_see_all_of_their_node(ranks: Any, world_size: int) -> None:
    expected = attend_densely()
    for found in ranks.run(attend_on_ranks, world_size=world_size):
        torch.testing.assert_close(found.out, expected.out, atol=3e-6, rtol=0)
        for mine, other in zip(found.gradients, expected.gradients, strict=True):
            torch.testing.assert_close(mine, other, atol=3e-6, rtol=3e-6)
        assert found.counted == (world_size > 1)


def test_gradients_of_losses_that_ranks_have_apart(ranks: Any) -> None:
    for apart, together in ranks.run(losses_of_own_rollouts, 3, world_size=3):
        assert together.norm() > 1
        torch.testing.assert_close(apart, together, atol=1e-5, rtol=1e-5)


def test_trees_with_two_way_nodes_are_sent_between_processes() -> None:
    for each in trees():
        assert pickle.loads(pickle.dumps(each)).two_way == each.two_way


def test_what_two_way_nodes_cannot_do_is_refused() -> None:
    tokens = torch.arange(8), torch.arange(4)
    one = torch.ones(5)
    # All of the second node, and the last token of the first, which sees the others.
    with pytest.raises(ValueError, match="rollout 3 trains tokens of node 0, which see each other"):
        Tree(tokens, (-1, 0), (3,), (1,), (one,), (0,))
    with pytest.raises(ValueError, match="rollout 3 trains tokens of node 1"):
        Tree(tokens, (-1, 0), (3,), (1,), (one[:4],), (1,))
    # The first token of a node is seen by none that predicts it.
    first = torch.tensor([1.0, 0, 0, 0])
    Tree(tokens, (-1, 0), (3,), (1,), (first,), (1,))
    Tree(tokens, (-1, 0), (3,), (1,), (one[:4],), (0,))
    with pytest.raises(ValueError, match="node 2 is two-way, but is not there"):
        Tree(tokens, (-1, 0), (), (), (), (2,))
    config = ScheduleConfig(block=16)
    with pytest.raises(ValueError, match="two-way nodes do not go together with Mask"):
        PlanDocuments("tiles", config, (Mask(), Mask(window_left=9)), 2)(trees())
    assert Nodes(tuple(trees())).two_way.sum() == 5
