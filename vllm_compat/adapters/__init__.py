"""Adapters: one file per surface of vLLM, newest class first; everything that knows what a release looks like is here."""
