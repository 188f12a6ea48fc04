"""Weights between processes: content hashes, a model without its data, the service. Torch-free.

coordinator                                    node without files
ModelSpec ---------- model_parts ------------> ModelAssembler -> ModelSpec
HashBook  ---------- content hashes ---------> what is missing in its cache
BlobStore <--------- (hash, offset) ---------- resumed where it broke
          ---------- chunks -----------------> cache, checked against the hash
"""
