"""An environment for every release of vLLM on a CPU: what to install, and how to make it load."""
