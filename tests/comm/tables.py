"""What the tables of the collectives' tests share."""

import pytest

from tests.comm.groups import TRANSPORTS

SIZES = {
    "direct": {"direct_bytes": 2**30, "chunk_bytes": 8},
    "chunked": {"direct_bytes": 0, "chunk_bytes": 8},
}
each_algorithm = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def lists(tensors):
    return [tensor.tolist() for tensor in tensors]
