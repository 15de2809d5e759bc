"""Stores in S3 buckets, through ``obstore`` (extra ``s3``). docs/spec/store-v1.md, section 11.

Reached from ``kvpack`` by the entry point group ``kvpack.stores``, so the format itself imports no
HTTP. Nothing here imports gRPC or an engine: ``pip install 'kvpack[s3]'`` is enough. Whoever only
compares places imports :mod:`node.s3.place` and needs no extra.
"""
