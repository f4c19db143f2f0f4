"""The tests with JAX and PyTorch run where both are installed: in the environment of `make recipes`."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("jax") and find_spec("torch") else ["test_jax_and_torch.py"]
