"""A collector in a process of its own, which stops itself right before its first deletion is sent.

Ends with 7 where it found out, awake again, that another had taken over.
"""

from __future__ import annotations

import os
import signal
import sys

from store_kit import NOW

from kvpack.store import Budget, GcPolicy, StoreBusyError, apply_gc, plan_gc
from node.s3.lease import CollectorLease, LeaseTimes
from tests.s3_server import store_at

_require = CollectorLease.require


def _frozen(self: CollectorLease) -> None:
    CollectorLease.require = _require
    os.kill(os.getpid(), signal.SIGSTOP)
    _require(self)


def main(endpoint: str, url: str, lease_s: str, takeover_s: str) -> int:
    store = store_at(endpoint, url, times=LeaseTimes(float(lease_s), float(takeover_s)))
    store.require_proved()
    policy = GcPolicy(Budget(1 << 40, 0))
    CollectorLease.require = _frozen
    try:
        apply_gc(store, plan_gc(store, NOW, policy), NOW, os.urandom(16), lambda: None)
    except StoreBusyError:
        return 7
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
