"""The backend "stagemesh" of torch.distributed: PyTorch programs over the mesh.

    import stagemesh.torch_backend
    torch.distributed.init_process_group("stagemesh")

The import registers it, as torch's own extensions do. CPU tensors only.
"""

import logging
import os
import sys

# Training programs fork: a DataLoader with workers does. The children use no gRPC, but its fork
# handlers crash them, as our threads are inside gRPC at that moment. gRPC reads this as it loads,
# so it stands before the imports.
if "GRPC_ENABLE_FORK_SUPPORT" not in os.environ and "grpc" in sys.modules:
    logging.getLogger(__name__).warning(
        "gRPC was loaded before stagemesh.torch_backend: DataLoader workers may crash. Import "
        "stagemesh.torch_backend first, or set GRPC_ENABLE_FORK_SUPPORT=0 in the environment"
    )

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from torch.distributed import Backend

from stagemesh.torch_backend.backend import (
    BACKEND_NAME,
    MeshBackend,
    MeshOptions,
)
from stagemesh.torch_backend.group import MeshProcessGroup
from stagemesh.torch_backend.work import MeshWork

__all__ = ["BACKEND_NAME", "MeshBackend", "MeshOptions", "MeshProcessGroup", "MeshWork"]

Backend.register_backend(BACKEND_NAME, MeshBackend().create, extended_api=True, devices=["cpu"])
