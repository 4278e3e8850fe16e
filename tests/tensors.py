"""Small tensors for the tests of the algorithms."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

# The time of an example depends on what else the machine does.
settings.register_profile("untimed", deadline=None, max_examples=50)
settings.load_profile("untimed")


def t(*rows, dtype=torch.float64):
    """A tensor out of its rows."""
    return torch.tensor(rows, dtype=dtype)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance)


@st.composite
def batches(draw, columns):
    """``columns`` random (B, T) float64 tensors and a mask with holes, empty rows and left padding among its rows."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors = torch.randn(columns, rows, width, generator=generator, dtype=torch.float64)
    return (*tensors, mask.view(rows, width))
