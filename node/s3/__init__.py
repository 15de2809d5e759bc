"""Stores in S3 buckets, through ``obstore`` (extra ``s3``). docs/spec/store-v1.md, section 11.

Reached from ``kvpack`` by the entry point group ``kvpack.stores``, so the format itself imports no
HTTP. Nothing here imports gRPC or an engine: ``pip install 'kvpack[s3]'`` is enough.
"""

from node.s3.opening import open_s3

__all__ = ["open_s3"]
