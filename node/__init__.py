"""kvnode: everything that runs a model or a socket.

Sessions, the directory of who owns them, and their move from node to node. Builds on ``engine``
(rows) and ``kvpack`` (bytes); only the files named ``*_service`` translate to and from gRPC.
"""
