"""A daemon with a comm service in a process of its own: prints its address, ends with its input."""

import asyncio
import sys

from tests.comm.daemons import start_daemon


async def main(node_id: str) -> None:
    daemon = await start_daemon(node_id)
    sys.stdout.write(daemon.server.address + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await daemon.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
