"""Factories: vLLM's own native objects, right for whichever release is installed. One file an object."""
