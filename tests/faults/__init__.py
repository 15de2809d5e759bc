"""The fault campaign: real ``kvnode serve`` processes, ended, paused, cut off in mid-protocol."""
