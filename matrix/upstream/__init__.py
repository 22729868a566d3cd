"""vLLM's own scheduler tests as judge of the factories: run as they are, and with their constructions replaced."""
