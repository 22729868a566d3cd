"""Adapters: one file per surface of vLLM, newest class first; all that knows what a release looks like is here."""
