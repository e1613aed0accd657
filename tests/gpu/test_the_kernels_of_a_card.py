"""Every case of the interpreter's, by kernels that were compiled for the card; skipped where there is none."""

import pytest
import torch
from test_triton_interpreted import HERE, SESSIONS, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("file", SESSIONS)
def test_kernels_have_the_bits_of_native_code(file):
    which, counted, least = SESSIONS[file]
    code, output, counts = run(str(HERE / file), "-k", which, interpreted=False)
    assert code == 0, output[-3000:]
    assert counts[counted] > least
