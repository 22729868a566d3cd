"""The recorded API: what vLLM's symbols take and return in a release, read from its source without running it."""
