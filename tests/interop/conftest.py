"""The tests with other packages run where these are installed: in the environment of `make recipes`."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("jax") and find_spec("torch") else ["test_jax_and_torch.py"]
if not find_spec("umbridge"):
    collect_ignore.append("test_model_servers.py")
