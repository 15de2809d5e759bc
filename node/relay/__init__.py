"""Any node answers for any session: requests over HTTP go on to the owner, over pinned gRPC."""
