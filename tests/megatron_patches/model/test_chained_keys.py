"""Keys that later micro-batches borrow get all gradients, summed in float32 and rounded once."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.model.chained_keys import ChainedKeys, ChainPart

LAYER, TOKENS = 3, 4


def parts(borrowers: int, lent_rows: list[int]) -> tuple[ChainPart, list[ChainPart]]:
    """A micro-batch that lends some of its rows, and those after it that borrow them."""
    keys, rows = ChainedKeys(), torch.tensor(lent_rows)
    lender = ChainPart(keys, (0, 0), (), borrowers, rows)
    later = [ChainPart(keys, (n, 0), ((0, 0),), 0, None) for n in range(1, borrowers + 1)]
    return lender, later


def gradients_of_own_keys(
    dtype: torch.dtype, own: float, of_borrowers: list[float], lent_rows: list[int]
) -> list[torch.Tensor]:
    """Gradients of a micro-batch's keys and values; those of values are twice as large."""
    lender, borrowers = parts(len(of_borrowers), lent_rows)
    given = tuple(torch.randn(TOKENS, 2, 3).to(dtype).requires_grad_() for _ in range(2))
    lent = lender.lend(LAYER, given)
    for mine, each in zip(lent, given, strict=True):
        assert torch.equal(mine, each)
    backward = []
    for number, part in enumerate(borrowers):
        rows = tuple(torch.full((1 + number, 2, 3), 0.5, dtype=dtype) for _ in range(2))
        for each in rows:
            each.requires_grad_()
        extended = part.extend(LAYER, rows)
        for whole, mine, theirs in zip(extended, rows, given, strict=True):
            assert torch.equal(whole, torch.cat([mine, theirs[lent_rows]]))
        backward.append((rows, extended))
    # Backward passes come in the opposite order.
    given_back = []
    for (rows, extended), gradient in zip(reversed(backward), reversed(of_borrowers), strict=True):
        told = [torch.full_like(each, scale * gradient) for scale, each in enumerate(extended, 1)]
        given_back += [(each, each.clone()) for each in told]
        torch.autograd.backward(extended, told)
        for scale, each in enumerate(rows, 1):
            assert each.grad is not None
            assert (each.grad == scale * gradient).all()
    for each, before in given_back:
        assert torch.equal(each, before), "somebody else's gradient was changed"
    torch.autograd.backward(lent, [torch.full_like(e, n * own) for n, e in enumerate(lent, 1)])
    assert not lender.keys.lent
    assert not lender.keys.gradients
    assert not lender.keys.returned
    return [each.grad for each in given if each.grad is not None]


@pytest.mark.parametrize("lent_rows", [[0, 1, 2, 3], [3, 1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_gradients_of_many_borrowers_are_not_lost(
    dtype: torch.dtype, lent_rows: list[int]
) -> None:
    """Each alone is less than half of what the sum is rounded to."""
    spacing = 256 * torch.finfo(dtype).eps if dtype != torch.float32 else 1.0
    # The last micro-batch's backward pass comes first, so that the large gradient is there.
    small, own = [0.25 * spacing] * 7, 0.6875 * spacing
    found = gradients_of_own_keys(dtype, own, [*small, 256.0], lent_rows)
    for scale, each in enumerate(found, 1):
        expected = torch.full((TOKENS, 2, 3), scale * own)
        expected[lent_rows] = scale * (256.0 + sum(small) + own)
        assert torch.equal(each, expected.to(dtype))


def test_rows_that_nobody_borrows_or_lends_stay_as_they_are() -> None:
    part = ChainPart(ChainedKeys(), (0, 0), (), 0, None)
    rows = (torch.ones(2, 1, 1),)
    assert part.lend(LAYER, rows) is rows
    assert part.extend(LAYER, rows) is rows
    assert not part.keys.lent


@pytest.mark.parametrize("came", [1, 3])
def test_a_missing_or_surplus_borrower_is_an_error(came: int) -> None:
    keys = ChainedKeys(lent={(LAYER, (0, 0)): (torch.ones(1),)})
    for _ in range(came):
        keys.add((LAYER, (0, 0)), (torch.ones(1),))
    with pytest.raises(AssertionError, match=f"went back before {2 - came} borrowers"):
        keys.take((LAYER, (0, 0)), 2)
