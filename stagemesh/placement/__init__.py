"""How a model's heads, columns and layers are cut, as numbers: no weights, no torch.

`TensorParallel` cuts a layer over ranks, `PipelineParallel` the layers over stages, and
`LayerPartitioner` assigns each layer's parts to nodes. The coordinator's planner
(`coordinator.planner`) decides with measured nodes and links; these are the rules it shares with
those who run a fixed layout.
"""
