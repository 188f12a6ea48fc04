"""The backend "stagemesh" of torch.distributed: PyTorch programs over the mesh.

    import stagemesh.torch_backend
    torch.distributed.init_process_group("stagemesh")

The import registers it, as torch's own extensions do. CPU tensors only.
"""

from torch.distributed import Backend

from stagemesh.rpc.fork_guard import PROCESS_GUARD
from stagemesh.torch_backend.backend import (
    BACKEND_NAME,
    MeshBackend,
    MeshOptions,
)
from stagemesh.torch_backend.group import MeshProcessGroup
from stagemesh.torch_backend.work import MeshWork

__all__ = ["BACKEND_NAME", "MeshBackend", "MeshOptions", "MeshProcessGroup", "MeshWork"]

PROCESS_GUARD.warn_if_late()

Backend.register_backend(BACKEND_NAME, MeshBackend().create, extended_api=True, devices=["cpu"])
