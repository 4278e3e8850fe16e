"""The output embedding gives float32 logits whatever type the model computes in."""

import pytest
import torch
from torch import nn

from rolecall.models.head import ROWS, logits


class Model(nn.Module):
    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def linear(vocabulary: int, dtype: torch.dtype, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, vocabulary, bias=bias).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [5, ROWS, ROWS + 3])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_the_product_of_what_is_given(dtype, vocabulary, bias):
    head = linear(vocabulary, dtype, bias)
    hidden = (10 * torch.randn(3, 8)).to(dtype)
    right = hidden.double() @ head.weight.double().t() + (head.bias.double() if bias else 0)
    got = logits(Model(head), hidden)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(got.double(), right, rtol=1e-5, atol=1e-5)


def test_sixteen_bit_logits_keep_differences_that_their_own_type_rounds_away():
    head = linear(2, torch.bfloat16)
    head.weight.data = torch.tensor([[1.0] * 8, [1.0] * 7 + [1.0078125]], dtype=torch.bfloat16)
    hidden = torch.full((1, 8), 2.5, dtype=torch.bfloat16)
    got = logits(Model(head), hidden)
    assert got.tolist() == [[20.0, 20.01953125]]  # in bfloat16 both are 20
    assert head(hidden).tolist() == [[20.0, 20.0]]
