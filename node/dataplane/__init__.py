"""Data planes: where the sealed chunks of a move travel, if not in mTLS (``docs/adr/0012``).

``options`` names them, ``frames`` are the bytes, ``tickets`` let one stream in. On the target
``intake`` takes streams that ``socket_server`` and ``grpc_server`` let through; on the source
``lane`` chooses, and ``socket_call`` and ``grpc_call`` write.
"""
