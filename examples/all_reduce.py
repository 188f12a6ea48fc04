"""All-reduce between two machines. On each, with the same list of addresses and its own rank:

python examples/all_reduce.py RANK HOST_A:PORT HOST_B:PORT

Both must reach each other at these addresses. Off 127.0.0.1, set a token in STAGEMESH_TOKEN.
"""

import os
import sys

import torch

from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.rendezvous import AddressList

rank, addresses = int(sys.argv[1]), sys.argv[2:]
meeting = AddressList(addresses=addresses)
token = os.environ.get("STAGEMESH_TOKEN")

config = GroupConfig(rendezvous=meeting, rank=rank, token=token, timeout_seconds=60)
with init_process_group(config) as group:
    tensor = torch.full((4,), float(group.rank + 1))
    group.all_reduce(tensor)
    print(f"rank {group.rank} of {group.size}: {tensor.tolist()}")
