"""Process groups: sends, receives and collectives between ranks on one machine or many.

Programs with groups fork: a DataLoader with workers does. Importing anything from here therefore
turns gRPC's fork handlers off, if gRPC is not loaded yet (see stagemesh.rpc.fork_guard).
"""

from stagemesh.rpc.fork_guard import PROCESS_GUARD

PROCESS_GUARD.turn_off_handlers()
