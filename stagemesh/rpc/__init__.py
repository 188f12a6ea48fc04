"""The wire: stubs, codec, channels, servers. Importing it settles how gRPC waits for sockets."""

import os
import sys

from stagemesh.rpc.grpc_poller import prefer_older_poller

prefer_older_poller(os.environ, loaded=sys.modules)
