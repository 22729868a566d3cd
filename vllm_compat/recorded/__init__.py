"""The recorded API of vLLM's releases: what its symbols took and returned, without any vLLM installed."""
