"""Stable factories for vLLM's internals."""
