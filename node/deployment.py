"""What a node runs of one deployment, until it is unloaded."""

import asyncio

from node.executor import ComputeThread
from node.stage_group import StageGroup
from node.stage_loader import StageRequest
from node.stage_runner import StageRunner
from stagemesh.inference.stage_engine import StageEngine


class Deployment:
    """A stage at work, alone or with other ranks.

    Args:
        request: what was loaded.
        engine: the loaded stage.
        node_id: this node.
        compute: the device's thread, for a stage without other ranks.
        group: the ranks that run the stage together.
    """

    def __init__(
        self,
        request: StageRequest,
        engine: StageEngine,
        *,
        node_id: str,
        compute: ComputeThread,
        group: StageGroup | None,
    ) -> None:
        self.request = request
        self.group = group
        self.runner = StageRunner(
            engine,
            stage=request.stage,
            tensor_rank=self.tensor_rank,
            node_id=node_id,
            compute=compute if group is None else group.compute,
            is_over=lambda: group is not None and group.is_over,
        )
        self._task = asyncio.create_task(self.runner.run(), name=f"stage-{request.stage}")

    @property
    def tensor_rank(self) -> int:
        """Which of the stage's ranks this node is."""
        return 0 if self.group is None else self.group.tensor_group.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the stage."""
        return 1 if self.group is None else self.group.tensor_group.shares.num_ranks

    async def close(self) -> None:
        """Stop the stage and free what it holds."""
        if self.group is not None:
            # First: its thread may wait there for a rank that is gone.
            await self.group.close()
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=5.0)
        await self.runner.close()
